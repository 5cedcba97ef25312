"""Changes since the last successful run of a training pipeline, and the steps that run again for them."""

from collections.abc import Mapping
from typing import Any

from realmops.cluster.kfp_client import KfpClient
from realmops.cluster.packed_options import packed_versions, unpack_options
from realmops.cluster.submit import Submission, describe_run
from realmops.config import Values, cache_key_options
from realmops.inputs.addresses import is_address, listed_inputs, parse, replace_inputs
from realmops.stages import CLOZE_STEP, STAGES, fingerprint_options, planned_steps

DOCUMENTS = "snapshot.documents"


def describe_changes(submission: Submission, server: KfpClient) -> str:
    """Return one line on the changes since the newest successful run of a training pipeline, for people.

    It is empty without such a run, for a run with the same key or of another version of the options, and for a pipeline
    that does not train.
    """
    pipeline = submission.pipeline
    run = server.newest_success(pipeline.name) if {*STAGES} <= pipeline.tasks else None
    earlier = (run.runtime_config.parameters if run and run.runtime_config else None) or {}
    if not earlier or earlier.get("key") == submission.key:
        return ""
    try:
        before, now = (_content(str(arguments.get("options"))) for arguments in (earlier, submission.arguments))
    except ValueError:
        return ""
    changed, steps = _compare(before, now)
    default = pipeline.parameters.get("image", {}).get("defaultValue")
    if earlier.get("image", default) != submission.arguments.get("image", default):
        changed, steps = [*changed, "the image"], [*planned_steps(now)]
    if not steps:
        return ""
    line = (
        f"changed since {describe_run(run)}: {', '.join(changed)}; these steps read it or each other's output and run "
        f"again: {', '.join(steps)}"
    )
    if changed == [DOCUMENTS]:
        line += (
            "; to keep its model and embed only the changed passages instead, use the pipeline refresh (in a folder: "
            f"'realmops update'): 'realmops submit --pipeline refresh --argument run={earlier.get('run')}'"
        )
    return line


def _content(options: str) -> dict[str, dict[str, Any]]:
    """Return packed options with the versions of inputs instead of their addresses."""
    values, versions = unpack_options(options), packed_versions(options)
    parsed = {key: parse(value) for key, value in listed_inputs(values).items() if is_address(value)}
    known = {key: f"{address.digest or versions.get(key, '')}#{address.name}" for key, address in parsed.items()}
    return replace_inputs(values, known)


def _compare(before: Values, now: Values) -> tuple[list[str], list[str]]:
    """Return the changed options that a step reads, and the steps whose options or inputs changed."""
    changed: dict[str, None] = {}
    steps: list[str] = []
    for step in planned_steps(now):
        if step == CLOZE_STEP:
            steps += [step] if {"snapshot", "tag"} & {*steps} else []
            continue
        old, new = (_flatten(fingerprint_options(STAGES[step], values)) for values in (before, now))
        different = [key for key in old | new if old.get(key) != new.get(key)]
        changed |= dict.fromkeys(different)
        if different or {*STAGES[step].needs} & {*steps}:
            steps.append(step)
    return [*changed], steps


def _flatten(values: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        f"{section}.{key}": value for section, keys in cache_key_options(values).items() for key, value in keys.items()
    }
