"""The process that serves one exchange after another, each by an index builder in a child process; no torch."""

import json
import signal
import sys
import time
from pathlib import Path

from realmops.artifacts import write_json
from realmops.files import Files
from realmops.refresh.builder import DONE, MISCONFIGURED
from realmops.refresh.child_processes import SupervisedProcess, process_name
from realmops.refresh.exchange import IDENTITY_VERSION
from realmops.refresh.heartbeat import Heartbeat
from realmops.refresh.versions import MANIFEST_LIMIT

HEARTBEATS_FOLDER, HEARTBEAT_SECONDS = "alive", 5.0


def builder_command(exchange: Path | str, snapshot: Path | str, name: str, *arguments: str) -> list[str]:
    """Return the command line of an index builder process, whose restarts keep its name."""
    options = ["--exchange", str(exchange), "--snapshot", str(snapshot), "--name", name, *arguments]
    return [sys.executable, "-P", "-m", "realmops", "index-builder", *options]


def assign_exchange(path: Path, exchange: Path, snapshot: Path, owner: str) -> None:
    """Write the assignment file that builders follow; an exchange whose trainer has ended can be assigned again.

    ``owner`` is the id of the pipeline run that uses the builders; no other run releases them.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"exchange": str(exchange), "snapshot": str(snapshot), "owner": owner, "time": time.time()})


class Follower:
    """A process that serves the exchanges of an assignment file, one after another, each by a child process.

    A builder that has finished, or does not fit its exchange, is not restarted until the file changes; one that failed
    is restarted with back-off. A builder is stopped when both its assignment and its exchange are removed. The
    heartbeat is in the folder ``alive`` next to the file; ``alive`` is a file that is touched for a liveness probe.
    """

    def __init__(self, path: Path, alive: Path | None, poll: float = 1.0) -> None:
        self.path, self.alive, self.poll = path, alive, poll
        self.name = process_name()
        self._heartbeat = Heartbeat(path.parent / HEARTBEATS_FOLDER / f"{self.name}.json", HEARTBEAT_SECONDS)
        self._served: bytes | None = None  # the content of the assignment file
        self._builder: SupervisedProcess | None = None  # also None after the assignment is done
        self._exchange = self._last_status = ""

    def run(self) -> None:
        """Follow the file until SIGTERM, which is passed on to the builder."""
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(DONE))
        self._heartbeat.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            while True:
                if self.alive is not None:
                    self.alive.touch()
                self._heartbeat.beat()
                self.poll_once()
                time.sleep(self.poll)
        finally:
            self._end()

    def poll_once(self) -> None:
        """Check the assignment file and the builder once."""
        content = self._read()
        if content is not None and content != self._served:
            self._end()
            assignment, self._served = json.loads(content), content
            self._exchange = assignment["exchange"]
            command = builder_command(self._exchange, assignment["snapshot"], self.name)
            self._builder = SupervisedProcess(command, pause=self.poll)
        elif content is None and self._builder is not None and not is_exchange(Path(self._exchange)):
            self._end()  # a stage has ended and removed its exchange
            self._builder = self._served = None
        if self._builder is None:
            self._report(f"waiting for work: {self.path} {'names none' if content is None else 'is done'}")
            return
        code = self._builder.poll()
        if code in (DONE, MISCONFIGURED):
            self._builder = None
        elif code is not None:
            pause = self._builder.pause
            self._report(f"the builder ended with exit code {code}; restarting it in {pause:.0f} s")
        elif self._builder.is_running:
            self._report(f"serving {self._exchange}")

    def _read(self) -> bytes | None:
        try:
            content = Files().read(self.path, MANIFEST_LIMIT)
            assignment = json.loads(content)
            paths = (assignment["exchange"], assignment["snapshot"])
            return content if all(isinstance(path, str) and path and "\0" not in path for path in paths) else None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def _end(self) -> None:
        if self._builder is not None:
            self._builder.end()

    def _report(self, message: str) -> None:
        if message != self._last_status:
            self._last_status = message
            print_status(message)


def is_exchange(root: Path) -> bool:
    """Return whether a folder is an exchange whose trainer has published its identity."""
    return (root / "run" / IDENTITY_VERSION).is_dir()


def print_status(message: str) -> None:
    print(f"index builder: {message}", file=sys.stderr, flush=True)
