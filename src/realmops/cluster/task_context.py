"""Shared parts of all components' tasks: outputs, settings, options and the folder of a run."""

import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from realmops import artifacts
from realmops.cluster.packed_options import unpack_options
from realmops.console import end_on_sigterm, exit_on_user_error
from realmops.options import Options
from realmops.stages.run_inputs import recorded_inputs
from realmops.tracking.sender import PARENT_RUN_VARIABLE, finite_metrics

MARK = "realmops-run.json"  # in the folder of a run, with its name and its parent's; "realmops clean" deletes no other
SETTINGS_PREFIXES = "REALMOPS_MLFLOW_TRACKING_", "REALMOPS_MLFLOW_EXPERIMENT_"


class Output(Protocol):
    """An output artifact of KFP: the file to write, and ``metadata`` shown in the UI."""

    path: str
    metadata: dict[str, Any]


class Metrics(Output, Protocol):
    """An output artifact for metrics: a file, which KFP's cache needs, and values shown in the UI."""

    def log_metric(self, metric: str, value: float) -> None:
        """Show a metric in the UI."""


def take_settings(environment: MutableMapping[str, str]) -> None:
    """Copy ``REALMOPS_MLFLOW_*`` to MLflow's variables, unless KFP's MLflow plugin has set a server.

    The plugin's run of this task becomes the parent of ours, because our run spans all tasks.
    """
    if "MLFLOW_TRACKING_URI" not in environment:
        settings = {name: value for name, value in environment.items() if name.startswith(SETTINGS_PREFIXES)}
        environment.update({name.removeprefix("REALMOPS_"): value for name, value in settings.items()})
    if run := environment.pop("MLFLOW_RUN_ID", ""):
        environment[PARENT_RUN_VARIABLE] = run


@contextmanager
def task() -> Iterator[None]:
    """Context manager of every task: settings, one-line errors, and SIGTERM as an exception."""
    take_settings(os.environ)
    end_on_sigterm()
    with exit_on_user_error():
        yield


def load_options(options: str, root: str) -> Options:
    return recorded_inputs(unpack_options(options), Path(root))


def make_run_folder(root: Path) -> None:
    """Create the run's folder, and mark it unless it has files of others; ValueError if it cannot be written to."""
    folder = next(path for path in (root, *root.parents) if path.exists())
    if not os.access(folder, os.W_OK):
        status = folder.stat()
        raise ValueError(
            f"{folder} belongs to user {status.st_uid} and group {status.st_gid} (mode {status.st_mode & 0o7777:o}), "
            f"and user {os.getuid()} of this pod may not write there: start one index builder, which sets the group of "
            "the volume ('kubectl scale deployment/realmops-index-builder --replicas=1', then 0 once it is ready), or "
            "change the folder's owner"
        )
    artifacts.make_folder(root)
    if not any(root.iterdir()):
        artifacts.write_json(root / MARK, {"run": "/".join(root.resolve().parts[-2:])})


def write_metrics(results: Mapping[str, Any], metrics: Metrics) -> None:
    numbers = finite_metrics(results)
    artifacts.write_json(Path(metrics.path), numbers)
    for name, value in numbers.items():
        metrics.log_metric(name, value)
