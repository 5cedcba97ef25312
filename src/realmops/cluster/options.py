"""Params as the text that a pipeline's parameter ``options`` takes: what differs from the defaults, and from which.

Argo keeps some forty copies of it in the state of a run, compresses that state from 1 MiB on, and Kubeflow Pipelines
then shows the last tasks of a run no more (2.17.0, seen 2026-11-25): all options, 6 kB, were too many.
"""

import hashlib
import json
from typing import Any

from realmops import config
from realmops.artifacts import canonical_json
from realmops.config import Values

OF = "defaults"  # the key that says which defaults the differences are of


def packed(values: Values) -> str:
    """JSON of what differs from the defaults of this version."""
    found: dict[str, Any] = {OF: _digest()}
    for section, keys in config.defaults().items():
        if changed := {key: values[section][key] for key, value in keys.items() if values[section][key] != value}:
            found[section] = changed
    return canonical_json(found).decode()


def unpacked(text: str) -> dict[str, dict[str, Any]]:
    """All sections; ValueError for what is no such JSON, or differs from other defaults than this version's."""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ValueError(f"options is no JSON ({error}); 'realmops params --json' prints what is wanted") from None
    of = values.pop(OF, None) if isinstance(values, dict) else None
    if not isinstance(values, dict) or not all(isinstance(keys, dict) for keys in values.values()):
        raise ValueError(f"options is {text[:60]!r}; sections with keys are wanted: see 'realmops params --json'")
    if of not in (None, _digest()):
        raise ValueError(
            f"options differ from the defaults {of}, and those of this image are {_digest()}: submit with the version "
            "of realmops that the image has, or name an image of this version"
        )
    return config.checked(values, "options")


def _digest() -> str:
    return hashlib.sha256(canonical_json(config.defaults())).hexdigest()[:8]
