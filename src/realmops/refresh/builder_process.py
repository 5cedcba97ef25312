"""The index builder's process: REALM's retriever behind the exchange's builder loop, or help with a stage's shards."""

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
from realmops.devices import resolve_device, resolve_precision, tune_process
from realmops.model.checkpoint_files import MODEL, RETRIEVER
from realmops.refresh.builder import DONE, FAULT, MISCONFIGURED, BuilderWork, Parts, run_builder
from realmops.refresh.child_processes import Child, end_with
from realmops.refresh.exchange import CARD, Exchange
from realmops.refresh.heartbeat import Sign
from realmops.refresh.shards import Work, facts_of, help_with
from realmops.refresh.shared_files import Files
from realmops.refresh.versions import HOLDER, MANIFEST_LIMIT, Damaged, Version
from realmops.search.embed import no_progress
from realmops.search.embeddings import EMBEDDINGS, embedding, embeddings_in, index_header
from realmops.search.mapped import Content, mapped, scratch

SIGNS, SIGN_SECONDS = "alive", 5.0
GOING_SECONDS = 3.0

log = logging.getLogger(__name__)


def identity(
    snapshot: Snapshot, *, run_key: str, embedding_width: int, precision: str, threads: int, part_rows: int
) -> dict[str, Any]:
    """What trainer and builder must agree on: another corpus, vocabulary, width or precision is refused."""
    return {
        "run_key": run_key,
        **facts_of(snapshot),
        "embedding_width": embedding_width,
        "precision": precision,
        "threads": threads,
        "part_rows": part_rows,
    }


def run_index_builder(root: Path, folder: Path, *, watch_parent: int | None, works: Mapping[str, Work]) -> int:
    """Serve one exchange until its trainer has finished; returns the exit code (builder.run_builder).

    Where a stage offers shards there, ``works`` says by name how they are made.
    """
    if watch_parent is not None:
        end_with(watch_parent)
    snapshot = Snapshot.open(folder)
    exchange = Exchange(root, None, "builder-new")
    while CARD not in exchange.card.names():
        _say(f"waiting for a trainer to begin at {root}")
        exchange.clock.sleep(1.0)
    try:
        card = exchange.card.manifest(CARD).run
        if "work" in card:
            return _help(root, card, snapshot, works)
        agreed = {key: card[key] for key in ("run_key", "embedding_width", "precision", "threads", "part_rows")}
        device = resolve_device("auto")
        dtype = resolve_precision(card["precision"], device)
    except (Damaged, KeyError, ValueError) as error:
        _say(f"the exchange {root} cannot be served here: {error}")
        return MISCONFIGURED
    tune_process(card["threads"])

    def embedder(weights: Version) -> Callable[[int, int], dict[str, bytes]]:
        make = embedding(snapshot, weights.files, device, dtype)
        return lambda first, end: make(first, end, no_progress)

    work = BuilderWork(len(snapshot), card["part_rows"], embedder, merge)
    ours, name = identity(snapshot, **agreed), builder_name(os.environ.get("HOSTNAME", "0"))
    grace = 120.0 if watch_parent is None else 0.0
    return run_builder(root, ours, work, name=name, poll=0.1, grace=grace, on_status=_say)


def _help(root: Path, card: dict[str, Any], snapshot: Snapshot, works: Mapping[str, Work]) -> int:
    """Make shards for a stage; it may end at any time, and its exchange with it."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(DONE))
    tune_process(card["threads"])
    name = builder_name(f"{os.environ.get('HOSTNAME', '0')}-{os.getpid()}")  # several may run on one machine
    try:
        opened = Exchange.open(root, {**card, **facts_of(snapshot)}, f"builder-{name}")
        help_with(opened, snapshot, works, _say)
    except ValueError as error:
        _say(str(error))
        return MISCONFIGURED
    except Exception:
        until = time.monotonic() + GOING_SECONDS  # the stage may be removing its exchange, file by file
        while (root / "run" / CARD).is_dir():
            if time.monotonic() > until:
                log.exception("the index builder failed")
                return FAULT
            time.sleep(0.1)
    _say(f"{root} needs no more help")
    return DONE


def builder_name(host: str) -> str:
    """The name of a host's builder on the exchange: the host's own where the exchange takes it; no two share one."""
    if HOLDER.fullmatch(f"builder-{host}"):
        return host
    return f"{re.sub(r'[^a-z0-9-]+', '-', host.lower())[:31]}-{digest_of(host)[:8]}"


def builder_command(exchange: Path | str, snapshot: Path | str, *more: str) -> list[str]:
    """The words that start an index builder as a process."""
    options = ["--exchange", str(exchange), "--snapshot", str(snapshot), *more]
    return [sys.executable, "-P", "-m", "realmops", "index-builder", *options]


def assign(path: Path, exchange: Path, snapshot: Path, owner: str) -> None:
    """Tell the builders that follow a file which exchange to serve; the same one again after its trainer has ended.

    ``owner`` is the id of the pipeline's run that wants them: nobody else gives them back.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"exchange": str(exchange), "snapshot": str(snapshot), "owner": owner, "time": time.time()})


class Follower:
    """Serves the exchanges that a file names, one after another, each by a process of its own.

    The file is written by :func:`assign`. A builder that has done its work, or does not fit its exchange, is not
    started again before the file changes; one that failed is, as a pod would be, each time after a longer pause. One
    whose file and exchange are both gone is ended. A sign of life lies in the folder ``alive`` beside the file.
    """

    def __init__(self, path: Path, alive: Path | None, poll: float = 1.0) -> None:
        self.path, self.alive, self.poll = path, alive, poll
        self._sign = Sign(path.parent / SIGNS / f"{os.environ.get('HOSTNAME', '0')}.json", SIGN_SECONDS)
        self._served: bytes | None = None  # the file's content
        self._builder: Child | None = None  # None when the work of that is done, too
        self._exchange = self._said = ""

    def run(self) -> None:
        """Until SIGTERM, which the builder is handed on."""
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(DONE))
        try:
            while True:
                if self.alive is not None:
                    self.alive.touch()
                self._live()
                self.look()
                time.sleep(self.poll)
        finally:
            self._end()

    def look(self) -> None:
        """Look at the file and at the builder once."""
        content = self._read()
        if content is not None and content != self._served:
            self._end()
            named, self._served = json.loads(content), content
            self._exchange = named["exchange"]
            self._builder = Child(builder_command(named["exchange"], named["snapshot"]), pause=self.poll)
        elif content is None and self._builder is not None and not (Path(self._exchange) / "run" / CARD).is_dir():
            self._end()  # a stage has ended, and its exchange with it
            self._builder = self._served = None
        if self._builder is None:
            self._tell(f"waiting for work: {self.path} {'names none' if content is None else 'is done'}")
            return
        code = self._builder.look()
        if code in (DONE, MISCONFIGURED):
            self._builder = None
        elif code is not None:
            pause = self._builder.pause
            self._tell(f"the builder ended with exit code {code}; the next is started in {pause:.0f} s")
        elif self._builder.runs:
            self._tell(f"serving {self._exchange}")

    def _live(self) -> None:
        try:
            if not self._sign.path.parent.is_dir():
                self._sign.path.parent.mkdir(parents=True, exist_ok=True)
            self._sign.give()
        except OSError as error:
            self._tell(f"the shared volume cannot be written: {error}")

    def _read(self) -> bytes | None:
        try:
            content = Files().read(self.path, MANIFEST_LIMIT)
            named = json.loads(content)
            paths = (named["exchange"], named["snapshot"])
            return content if all(isinstance(path, str) and path and "\0" not in path for path in paths) else None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def _end(self) -> None:
        if self._builder is not None:
            self._builder.end()

    def _tell(self, message: str) -> None:
        if message != self._said:
            self._said = message
            _say(message)


def merge(weights: Version, parts: Parts) -> tuple[dict[str, Content], dict[str, Any]]:
    """All parts as one matrix, mapped where it is large, beside the retriever that made it; one part is in memory."""
    passages, width = weights.run["passages"], weights.run["embedding_width"]
    header = index_header(passages, width)
    size = len(header) + 4 * passages * width
    with scratch(size) or BytesIO(bytes(size)) as file:  # at once: growing would copy
        file.write(header)
        for part in parts:
            file.write(embeddings_in(part.pop(EMBEDDINGS)).numpy().data)
        assert file.tell() == size
        matrix = file.getvalue() if isinstance(file, BytesIO) else mapped(file)
    files = {EMBEDDINGS: matrix, MODEL: weights.files[MODEL], RETRIEVER: weights.files[RETRIEVER]}
    return files, {"published": weights.meta["trainer"]["published"]}


def _say(message: str) -> None:
    print(f"index builder: {message}", file=sys.stderr, flush=True)
