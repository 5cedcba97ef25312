"""Feedback on answers as MLflow traces, sent by a separate process, so that serving does not import mlflow."""

import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from realmops.answering.feedback import Feedback, feedback_file
from realmops.artifacts import read_json, wait_for_lock, write_json
from realmops.credentials import error_line
from realmops.tracking.client import (
    experiment_id,
    is_local,
    mlflow_client,
    python_process,
    resolve_tracking_uri,
    uri_digest,
)
from realmops.tracking.runs import tracking_folder

SEND_TIMEOUT_SECONDS = 300.0  # of one process that sends feedback
_LOG = logging.getLogger(__name__)


def is_tracked(root: Path) -> bool:
    folder = tracking_folder(root)
    return not is_local(folder) or (folder / "mlflow.db").is_file()


def send_feedback(root: Path) -> int:
    """Send the feedback of a run that was not sent yet, without damaged lines; return the number of records."""
    folder, path = tracking_folder(root), feedback_file(root)
    folder.mkdir(parents=True, exist_ok=True)
    state, sent = folder / f"feedback-{uri_digest(folder)[:12]}.json", 0  # the bytes sent to this destination
    with open(folder / "feedback.lock", "w") as lock, open(path, "rb") as file:
        wait_for_lock(lock)
        position = read_json(state)["bytes"] if state.is_file() else 0
        file.seek(position if position <= path.stat().st_size else 0)  # else the file was replaced
        client = mlflow_client(resolve_tracking_uri(folder))
        experiment = experiment_id(client, os.environ.get("MLFLOW_EXPERIMENT_NAME") or "realmops", folder)
        while (line := file.readline()).endswith(b"\n"):
            try:
                feedback = Feedback(**json.loads(line))
            except (TypeError, ValueError):
                continue
            _send_trace(client, experiment, feedback, resolve_tracking_uri(folder))
            sent += 1
            write_json(state, {"bytes": file.tell()})
    return sent


def _send_trace(client: Any, experiment: str, feedback: Feedback, uri: str) -> None:
    import mlflow
    from mlflow.entities import AssessmentSource

    mlflow.set_tracking_uri(uri)
    time_ns = int(feedback.time * 1e9)
    root = client.start_trace(
        "answer",
        inputs={"question": feedback.question},
        tags={"realmops.passage_id": feedback.passage_id} if feedback.passage_id else None,
        experiment_id=experiment,
        start_time_ns=time_ns,
    )
    client.end_trace(root.trace_id, outputs={"answer": feedback.answer}, end_time_ns=time_ns)
    mlflow.flush_trace_async_logging()
    source = AssessmentSource("HUMAN", "realmops serve")
    mlflow.log_feedback(trace_id=root.trace_id, name="right", value=feedback.right, source=source)
    if feedback.known:
        mlflow.log_expectation(trace_id=root.trace_id, name="expected_response", value=feedback.known, source=source)


class FeedbackSender:
    """Background sender that starts one process at a time whenever there is new feedback."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._new = threading.Event()
        threading.Thread(target=self._send, name="feedback", daemon=True).start()

    def notify(self) -> None:
        if is_tracked(self._root):
            self._new.set()

    def _send(self) -> None:
        command, environment = python_process(__name__, str(self._root))
        while self._new.wait():
            self._new.clear()
            try:
                result = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                    timeout=SEND_TIMEOUT_SECONDS,
                    env=environment,
                )
            except (OSError, subprocess.SubprocessError) as error:
                _LOG.warning("feedback waits to be sent to MLflow: %s", error_line(error))
                continue
            if result.returncode:
                last = (result.stderr.strip().splitlines() or ["no message"])[-1]
                _LOG.warning("feedback waits to be sent to MLflow: %s", last)


if __name__ == "__main__":
    os.nice(10)
    try:
        send_feedback(Path(sys.argv[1]))
    except Exception as error:  # unsent feedback is sent with the next
        sys.exit(error_line(error))
