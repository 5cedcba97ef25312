"""What a stage does for MLflow: it has a process send its journal, and leaves to that process all waiting.

Each stage appends to its journal, which is the truth. A server that is away costs one warning; what was not sent
stays in the spool, from where ``sync`` sends it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from realmops.artifacts import write_bytes
from realmops.tracking.client import first_line
from realmops.tracking.run import TrackedRun
from realmops.tracking.spool import Ticket, warn

PATIENCE_SECONDS = 60.0  # the longest that a stage's end waits


class Tracker:
    """Has a journal sent to MLflow by a child process for as long as a stage runs.

    A process and not a thread: importing mlflow and creating its database are many seconds of Python, in
    which a trainer of the same process would wait for the interpreter's lock at every tensor operation. The
    child sees the end of its parent as the end of its standard input, also when the parent was killed.

    ``folder`` holds the spool and, unless MLFLOW_TRACKING_URI is set, ``mlflow.db`` and its artifacts.
    MLFLOW_RUN_ID makes the stage use a run that somebody else made and ends. DVC_EXP_NAME names a run without a name.
    Nothing here raises because of tracking: trouble is one warning, and the points stay in the journal.
    ``interval`` is the seconds between two batches.

    Usage::

        with Journal(path, "pretrain") as journal, Tracker(journal.path, "pretrain", run, folder) as tracker:
            metrics = train(journal)
            tracker.finish({"em": metrics["em"]}, {"report.html": Path("report.html")})
    """

    def __init__(self, journal: Path, stage: str, run: TrackedRun, folder: Path, *, interval: float = 5.0) -> None:
        self._ticket = Ticket.of(folder, run.key, stage)
        self._interval = interval
        self._metrics: dict[str, Any] = {}
        self._files: dict[str, Path | bytes] = {}
        self._warned = False
        self._sender: subprocess.Popen[bytes] | None = None
        self._content: dict[str, Any] = {"journal": str(journal.absolute()), "stage": stage, **run.description()}

    def __enter__(self) -> Self:
        self._guarded(self._start)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._guarded(lambda: self._close("FAILED" if kind else "FINISHED"))

    def finish(self, metrics: Mapping[str, Any], files: Mapping[str, Path | bytes] | None = None) -> None:
        """Final figures (em, recall_at_5, index_staleness_steps), logged without the stage's prefix.

        What is no finite number is left out. ``files`` are artifacts by name: where one is, or what is in it.
        """
        self._metrics |= metrics
        self._files |= files or {}

    def _start(self) -> None:
        self._ticket.write(self._content)
        package_root = str(Path(__file__).parents[2])
        search_path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
        program = [sys.executable, "-W", "ignore", "-m", "realmops.tracking.sender"]
        self._sender = subprocess.Popen(
            [*program, str(self._ticket.path), str(self._interval)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C stops the stage; the sender still sends what the stage wrote
            env={**os.environ, "PYTHONPATH": search_path},
        )

    def _close(self, status: str) -> None:
        """Let the sender send what is left, one try when the server is away; keep what it could not send."""
        self._content["final"] = self._ticket.ended(status, time.time(), self._metrics, self._files)
        self._ticket.write(self._content)
        if self._sender is not None and self._sender.stdin is not None:
            self._sender.stdin.close()
            try:
                self._sender.wait(PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                self._sender.kill()
                self._sender.wait()
                warn(f"no answer within {PATIENCE_SECONDS:.0f} s", self._content["journal"])
        if self._ticket.is_sent:
            self._ticket.forget()
        else:
            _keep(self._ticket, [Path(self._content["journal"])], self._content)

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # whatever goes wrong here, training goes on
            if not self._warned:
                warn(first_line(error), self._content["journal"])
            self._warned = True


def keep_finished(
    run: TrackedRun,
    journals: Sequence[Path],
    metrics: Mapping[str, Any],
    files: Mapping[str, Path | bytes],
    ended: float,
    folder: Path,
) -> None:
    """Put a run that is over into the spool, from where ``sync`` sends it: journals, final figures, artifacts.

    ``ended`` is when the run ended, in seconds; ``files`` are as in ``Tracker.finish``.
    """
    ticket = Ticket.of(folder, run.key, "whole")
    final = ticket.ended("FINISHED", ended, metrics, files)
    _keep(ticket, journals, {"stage": "whole", **run.description(), "final": final})


def _keep(ticket: Ticket, journals: Sequence[Path], content: Mapping[str, Any]) -> None:
    """Copy journals into the spool beside their ticket: their own folders may be moved or removed after the stage."""
    ticket.path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(ticket.journal, b"".join(path.read_bytes() for path in journals))
    ticket.write({**content, "journal": str(ticket.journal.absolute())})
