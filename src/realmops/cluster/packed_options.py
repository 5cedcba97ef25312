"""Params for the pipeline parameter ``options``: the differences from the defaults, as JSON.

Argo stores about forty copies; above 1 MiB of workflow state Kubeflow Pipelines 2.17.0 omits the run's last tasks.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from realmops import config
from realmops.artifacts import canonical_json, digest_of
from realmops.credentials import refuse_credentials
from realmops.inputs.resolve import PinnedInput
from realmops.options import Options

OF = "defaults"  # key of the digest of the defaults that the differences refer to
PINS = "inputs"  # key of the inputs that pods fetch


def pack_options(options: Options, pins: Mapping[str, PinnedInput] = MappingProxyType({})) -> str:
    """Return the differences from the defaults of this version as JSON, with the inputs that pods fetch, by option."""
    packed = {key: {name: field for name, field in asdict(pin).items() if field} for key, pin in pins.items()}
    changes: dict[str, Any] = {OF: _digest()} | ({PINS: packed} if packed else {})
    return canonical_json(changes | options.model_dump(exclude_defaults=True)).decode()


def unpack_options(text: str) -> Options:
    """Return all sections from the JSON of ``pack_options``; ValueError if it refers to another version's defaults."""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ValueError(f"options is not valid JSON ({error}); 'realmops params --json' prints it") from None
    refuse_credentials(values, "options")
    digest = values.pop(OF, None) if isinstance(values, dict) else None
    if not isinstance(values, dict) or not all(isinstance(keys, dict) for keys in values.values()):
        raise ValueError(f"options is {text[:60]!r}; expected sections with keys, as 'realmops params --json' prints")
    if digest not in (None, _digest()):
        raise ValueError(
            f"options refer to the defaults {digest}, and this image has {_digest()}: submit with the image's version "
            "of realmops, or set an image of the submitting version"
        )
    values.pop(PINS, None)
    return config.parse_options(("options", values))


def packed_pins(text: str) -> dict[str, PinnedInput]:
    return {key: PinnedInput(**fields) for key, fields in json.loads(text).get(PINS, {}).items()}


def _digest() -> str:
    return digest_of(Options().model_dump())[:8]
