"""The MLflow server or database that is spoken to, and the experiment there."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import Any

from realmops.tracking.mlflow_views import experiment_tags


def chosen_uri(folder: Path) -> str:
    """Where MLflow's data goes: MLFLOW_TRACKING_URI, or else the database in the tracking folder."""
    return os.environ.get("MLFLOW_TRACKING_URI") or default_uri(folder)


def digest_of_address(uri: str) -> str:
    """What is kept of an address, which may hold a password."""
    return hashlib.sha256(uri.encode()).hexdigest()


def default_uri(folder: Path) -> str:
    """The local database that is used when MLFLOW_TRACKING_URI is not set."""
    return f"sqlite:///{(folder / 'mlflow.db').absolute()}"


def experiment_id(client: Any, name: str, uri: str, folder: Path) -> str:
    """The experiment of that name, made when there is none; of the local database with its artifacts beside it."""
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        artifacts = (folder / "mlartifacts").absolute().as_uri() if uri == default_uri(folder) else None
        return str(client.create_experiment(name, artifact_location=artifacts, tags=experiment_tags()))
    for tag, value in experiment_tags().items():
        if tag not in experiment.tags:
            client.set_experiment_tag(experiment.experiment_id, tag, value)
    return str(experiment.experiment_id)


def mlflow_client(uri: str) -> Any:
    """An MLflow client whose requests give up soon; the first use of an empty database takes 10 to 20 s."""
    for name, value in {
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_LOGGING_LEVEL": "ERROR",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    }.items():
        os.environ.setdefault(name, value)
    for name in ("alembic", "urllib3.connectionpool"):  # a line for each table, a line for each retry
        logging.getLogger(name).setLevel(logging.ERROR)
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0][:300]}"
