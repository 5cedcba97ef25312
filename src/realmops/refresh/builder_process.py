"""The index builder's process: the builder loop with REALM's retriever, or a helper for the shards of a stage."""

import json
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from realmops.artifacts import digest_of, write_json
from realmops.corpus.snapshot_reader import Snapshot
from realmops.devices import configure_process, resolve_device, resolve_precision
from realmops.model.checkpoint_files import MODEL, RETRIEVER
from realmops.refresh.builder import DONE, FAULT, MISCONFIGURED, BuilderWork, Parts, run_builder
from realmops.refresh.child_processes import SupervisedProcess, end_with
from realmops.refresh.exchange import IDENTITY_VERSION, Exchange
from realmops.refresh.heartbeat import Heartbeat
from realmops.refresh.shards import Work, corpus_identity, help_make_shards
from realmops.refresh.shared_files import Files
from realmops.refresh.versions import HOLDER, MANIFEST_LIMIT, CorruptVersionError, Version
from realmops.search.embed import no_progress
from realmops.search.embeddings import EMBEDDINGS, index_header, make_shard_embedder, view_embeddings
from realmops.search.memory_map import Content, map_file, open_scratch

HEARTBEATS_FOLDER, HEARTBEAT_SECONDS = "alive", 5.0
REMOVAL_SECONDS = 3.0  # a stage removes its exchange file by file

log = logging.getLogger(__name__)


def exchange_identity(
    snapshot: Snapshot, *, run_key: str, embedding_width: int, precision: str, threads: int, part_rows: int
) -> dict[str, Any]:
    """Return the identity of a run, on which trainer and builders must agree; a process with another one is refused."""
    return {
        "run_key": run_key,
        **corpus_identity(snapshot),
        "embedding_width": embedding_width,
        "precision": precision,
        "threads": threads,
        "part_rows": part_rows,
    }


def run_index_builder(root: Path, folder: Path, *, watch_parent: int | None, works: Mapping[str, Work]) -> int:
    """Serve one exchange until its trainer has finished.

    Args:
        root: the exchange folder.
        folder: the snapshot.
        watch_parent: the id of the parent process, with which this process ends.
        works: the sharded computations that a stage may offer on the exchange, by name.

    Returns:
        The exit code of the process, as :func:`run_builder`.
    """
    if watch_parent is not None:
        end_with(watch_parent)
    snapshot = Snapshot.open(folder)
    exchange = Exchange(root, None, "builder-new")
    while IDENTITY_VERSION not in exchange.identity_store.names():
        _print_status(f"waiting for a trainer at {root}")
        exchange.clock.sleep(1.0)
    try:
        run = exchange.identity_store.manifest(IDENTITY_VERSION).run
        if "work" in run:
            return _run_shard_helper(root, run, snapshot, works)
        shared = {key: run[key] for key in ("run_key", "embedding_width", "precision", "threads", "part_rows")}
        device = resolve_device("auto")
        precision = "auto" if run["precision"] == "int8" else run["precision"]  # new weights would calibrate it again
        dtype = resolve_precision(precision, device)
    except (CorruptVersionError, KeyError, ValueError) as error:
        _print_status(f"the exchange {root} cannot be served on this machine: {error}")
        return MISCONFIGURED
    configure_process(run["threads"])

    def embedder(weights: Version) -> Callable[[int, int], dict[str, bytes]]:
        embed = make_shard_embedder(snapshot, weights.files, device, dtype)
        return lambda first, end: embed(first, end, no_progress)

    work = BuilderWork(len(snapshot), run["part_rows"], embedder, merge)
    expected, name = exchange_identity(snapshot, **shared), builder_name(os.environ.get("HOSTNAME", "0"))
    grace = 120.0 if watch_parent is None else 0.0
    return run_builder(root, expected, work, name=name, poll=0.1, grace=grace, on_status=_print_status)


def _run_shard_helper(root: Path, run: dict[str, Any], snapshot: Snapshot, works: Mapping[str, Work]) -> int:
    """Compute shards for a stage, which may end at any time and remove its exchange."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(DONE))
    configure_process(run["threads"])
    name = builder_name(f"{os.environ.get('HOSTNAME', '0')}-{os.getpid()}")  # several may run on one machine
    try:
        exchange = Exchange.open(root, {**run, **corpus_identity(snapshot)}, f"builder-{name}")
        help_make_shards(exchange, snapshot, works, _print_status)
    except ValueError as error:
        _print_status(str(error))
        return MISCONFIGURED
    except Exception:
        deadline = time.monotonic() + REMOVAL_SECONDS
        while _is_exchange(root):
            if time.monotonic() > deadline:
                log.exception("the index builder failed")
                return FAULT
            time.sleep(0.1)
    _print_status(f"{root}: no shards are left to compute")
    return DONE


def _is_exchange(root: Path) -> bool:
    return (root / "run" / IDENTITY_VERSION).is_dir()


def builder_name(host: str) -> str:
    """Return a unique builder name for a host: the host name itself if the exchange allows it, else with a digest."""
    if HOLDER.fullmatch(f"builder-{host}"):
        return host
    return f"{re.sub(r'[^a-z0-9-]+', '-', host.lower())[:31]}-{digest_of(host)[:8]}"


def builder_command(exchange: Path | str, snapshot: Path | str, *arguments: str) -> list[str]:
    """Return the command line of an index builder process."""
    options = ["--exchange", str(exchange), "--snapshot", str(snapshot), *arguments]
    return [sys.executable, "-P", "-m", "realmops", "index-builder", *options]


def assign_exchange(path: Path, exchange: Path, snapshot: Path, owner: str) -> None:
    """Write the assignment file that builders follow; an exchange whose trainer has ended can be assigned again.

    ``owner`` is the id of the pipeline run that uses the builders; no other run releases them.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"exchange": str(exchange), "snapshot": str(snapshot), "owner": owner, "time": time.time()})


class Follower:
    """A process that serves the exchanges of an assignment file, one after another, each by a child process.

    The file is written by :func:`assign_exchange`. A builder that has finished, or does not fit its exchange, is not
    restarted until the file changes; one that failed is restarted with back-off, as a pod would be. A builder is
    stopped when both its assignment and its exchange are removed. The follower's heartbeat is in the folder ``alive``
    next to the file; ``alive`` is a file that it touches for a liveness probe.
    """

    def __init__(self, path: Path, alive: Path | None, poll: float = 1.0) -> None:
        self.path, self.alive, self.poll = path, alive, poll
        self._heartbeat = Heartbeat(
            path.parent / HEARTBEATS_FOLDER / f"{os.environ.get('HOSTNAME', '0')}.json", HEARTBEAT_SECONDS
        )
        self._served: bytes | None = None  # the content of the assignment file
        self._builder: SupervisedProcess | None = None  # also None after the assignment is done
        self._exchange = self._last_status = ""

    def run(self) -> None:
        """Follow the file until SIGTERM, which is passed on to the builder."""
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(DONE))
        try:
            while True:
                if self.alive is not None:
                    self.alive.touch()
                self._beat()
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
            self._builder = SupervisedProcess(builder_command(self._exchange, assignment["snapshot"]), pause=self.poll)
        elif content is None and self._builder is not None and not _is_exchange(Path(self._exchange)):
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

    def _beat(self) -> None:
        try:
            if not self._heartbeat.path.parent.is_dir():
                self._heartbeat.path.parent.mkdir(parents=True, exist_ok=True)
            self._heartbeat.beat()
        except OSError as error:
            self._report(f"the shared volume cannot be written: {error}")

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
            _print_status(message)


def merge(weights: Version, parts: Parts) -> tuple[dict[str, Content], dict[str, Any]]:
    """Merge all parts into one embedding matrix, memory-mapped if large; add the retriever that embedded them."""
    passages, width = weights.run["passages"], weights.run["embedding_width"]
    header = index_header(passages, width)
    size = len(header) + 4 * passages * width
    with open_scratch(size) or BytesIO(bytes(size)) as file:  # allocated at once: growing would copy it
        file.write(header)
        for part in parts:
            file.write(view_embeddings(part.pop(EMBEDDINGS)).numpy().data)
        assert file.tell() == size
        matrix = file.getvalue() if isinstance(file, BytesIO) else map_file(file)
    files = {EMBEDDINGS: matrix, MODEL: weights.files[MODEL], RETRIEVER: weights.files[RETRIEVER]}
    return files, {"published": weights.meta["trainer"]["published"]}


def _print_status(message: str) -> None:
    print(f"index builder: {message}", file=sys.stderr, flush=True)
