"""The MLflow server or database that is spoken to, and the experiment there."""

import hashlib
import logging
import os
import re
import sys
from pathlib import Path
from typing import Any

from realmops.tracking.mlflow_views import experiment_tags

_QUERY = re.compile(r"\?[^'\")]+")


def redacted(text: str) -> str:
    """An address, or a text with addresses such as an error's, without names, passwords and queries.

    All that people may see or keep of an address goes through here: messages, logs, tags. From // to the last @ before
    a blank nothing is left, so that a password with characters that belong into no address is not left in part.
    """
    return re.sub(r"\S+", lambda word: _bare(word[0]), text)


def _bare(word: str) -> str:
    """A run without blanks, read a bounded number of times: errors may hold whole pages of a server."""
    before, at, host = word.rpartition("@")
    start = before.find("//")
    if at and start >= 0:
        word = before[: start + 2] + host
    elif at:  # an address without //: name:password@host, perhaps behind a bracket or a quotation mark
        name, colon, password = before.partition(":")
        first = max(map(name.rfind, "'\"(=")) + 1
        if name[first:] and "/" not in name[first:] and colon and password[:1] not in ("", "/"):
            word = name[:first] + host
    path = word.find("/")
    return word if path < 0 else word[:path] + _QUERY.sub("", word[path:])


def default_uri(folder: Path) -> str:
    """The local database that is used when MLFLOW_TRACKING_URI is not set."""
    return f"sqlite:///{(folder / 'mlflow.db').absolute()}"


def chosen_uri(folder: Path) -> str:
    """Where MLflow's data goes: MLFLOW_TRACKING_URI, or else the database in the tracking folder."""
    return os.environ.get("MLFLOW_TRACKING_URI") or default_uri(folder)


def uri_digest(folder: Path) -> str:
    """What is kept of that address, which may hold a password."""
    return hashlib.sha256(chosen_uri(folder).encode()).hexdigest()


def experiment_id(client: Any, name: str, folder: Path) -> str:
    """The experiment of that name, made when there is none; of the local database with its artifacts beside it."""
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        is_local = chosen_uri(folder) == default_uri(folder)
        artifacts = (folder / "mlartifacts").absolute().as_uri() if is_local else None
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

    for handler in logging.getLogger("mlflow").handlers:  # its own warnings name the address, too
        handler.addFilter(_redact_record)
    return MlflowClient(tracking_uri=uri)


def _redact_record(record: logging.LogRecord) -> bool:
    record.msg, record.args = redacted(record.getMessage()), None
    if record.exc_info:
        record.exc_text = redacted(logging.Formatter().formatException(record.exc_info))
    return True


def python_process(module: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """Command and environment of a process that runs a module of this package, wherever the package was found."""
    search_path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-P", "-W", "ignore", "-m", module, *arguments]
    return command, {**os.environ, "PYTHONPATH": search_path}


def error_summary(error: BaseException) -> str:
    """An error's kind and the first line of its text, without what is secret in addresses."""
    lines = redacted(str(error)).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0][:300]}"
