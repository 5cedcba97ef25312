"""The MLflow client: tracking URI and experiment."""

import hashlib
import logging
import os
import sys
from pathlib import Path
from typing import Any

from realmops.credentials import WEB, redact, refuse_credentials
from realmops.tracking.mlflow_views import experiment_tags


def local_tracking_uri(folder: Path) -> str:
    return f"sqlite:///{(folder / 'mlflow.db').absolute()}"


def resolve_tracking_uri(folder: Path) -> str:
    """Return the address of MLflow's server or database; ValueError if it has credentials."""
    uri = os.environ.get("MLFLOW_TRACKING_URI") or local_tracking_uri(folder)
    is_web = uri.partition("://")[0] in WEB
    refuse_credentials(uri, "MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD" * is_web)
    return uri


def is_local(folder: Path) -> bool:
    return resolve_tracking_uri(folder) == local_tracking_uri(folder)


def uri_digest(folder: Path) -> str:
    """Return the sha256 of the tracking URI, as the name of a destination in files."""
    return hashlib.sha256(resolve_tracking_uri(folder).encode()).hexdigest()


def experiment_id(client: Any, name: str, folder: Path) -> str:
    """Return the id of an experiment, created if missing; ValueError if it was deleted, as MLflow keeps its name."""
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        artifacts = (folder / "mlartifacts").absolute().as_uri() if is_local(folder) else None
        return str(client.create_experiment(name, artifact_location=artifacts, tags=experiment_tags()))
    if experiment.lifecycle_stage == "deleted":
        server = f"MLFLOW_TRACKING_URI={local_tracking_uri(folder)} " if is_local(folder) else ""
        raise ValueError(
            f"the experiment {name!r} was deleted in MLflow; restore it: "
            f"{server}mlflow experiments restore --experiment-id {experiment.experiment_id}"
        )
    for tag in experiment_tags().keys() - experiment.tags.keys():
        client.set_experiment_tag(experiment.experiment_id, tag, experiment_tags()[tag])
    return str(experiment.experiment_id)


def mlflow_client(uri: str) -> Any:
    """Return an MLflow client with short timeouts and redacted logs; creating an empty database takes 10 to 20 s."""
    for name, value in {
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_LOGGING_LEVEL": "ERROR",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    }.items():
        os.environ.setdefault(name, value)
    for name in ("alembic", "urllib3.connectionpool"):  # they log a line for each table and each retry
        logging.getLogger(name).setLevel(logging.ERROR)
    from mlflow import MlflowClient

    for handler in logging.getLogger("mlflow").handlers:  # MLflow's own warnings contain the URI, too
        handler.addFilter(_redact_record)
    return MlflowClient(tracking_uri=uri)


def _redact_record(record: logging.LogRecord) -> bool:
    record.msg, record.args = redact(record.getMessage()), None
    if record.exc_info:
        record.exc_text = redact(logging.Formatter().formatException(record.exc_info))
    return True


def python_process(module: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """Return command and environment of a process that runs a module of this package, from where it was imported."""
    search_path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-P", "-W", "ignore", "-m", module, *arguments]
    return command, {**os.environ, "PYTHONPATH": search_path}
