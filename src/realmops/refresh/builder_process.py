"""The index builder's process: the builder loop with REALM's retriever, or a helper for the shards of a stage."""

import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from realmops.corpus.snapshot_reader import Snapshot
from realmops.devices import resolve_device, resolve_precision
from realmops.memory_map import Content, map_file, open_scratch
from realmops.process import configure_process
from realmops.refresh.builder import DONE, FAULT, MISCONFIGURED, BuilderWork, Parts, run_builder
from realmops.refresh.child_processes import end_with, process_name
from realmops.refresh.exchange import IDENTITY_VERSION, Exchange
from realmops.refresh.follower import is_exchange, print_status
from realmops.refresh.shards import Work, corpus_identity, help_make_shards
from realmops.refresh.versions import CorruptVersionError, Version
from realmops.search.embed import no_progress
from realmops.search.embeddings import EMBEDDINGS, index_header, make_shard_embedder, view_embeddings

REMOVAL_SECONDS = 1.0  # in which a stage removes its exchange, file by file

log = logging.getLogger(__name__)


def run_index_builder(
    root: Path, folder: Path, *, watch_parent: int | None, works: Mapping[str, Work], name: str | None = None
) -> int:
    """Serve the exchange ``root`` with the snapshot in ``folder`` until its trainer has finished; return the exit code.

    The process ends with the process ``watch_parent``. ``works`` are the sharded computations that a stage may offer
    on the exchange, by name. ``name`` is unique on the exchange and kept by restarts, by default that of this process.
    """
    if watch_parent is not None:
        end_with(watch_parent)
    snapshot, name = Snapshot.open(folder), name or process_name()
    exchange = Exchange(root, None, "builder-new")
    while IDENTITY_VERSION not in exchange.identity.names():
        print_status(f"waiting for a trainer at {root}")
        exchange.clock.sleep(1.0)
    try:
        run = exchange.identity.manifest(IDENTITY_VERSION).run
        if "work" in run:
            return _run_shard_helper(root, run, snapshot, works, name)
        device = resolve_device("auto")
        dtype = resolve_precision(run["precision"], device)
        configure_process(run["threads"])
    except (CorruptVersionError, KeyError, ValueError) as error:
        print_status(f"the exchange {root} cannot be served on this machine: {error}")
        return MISCONFIGURED

    def embedder(weights: Version) -> Callable[[int, int], dict[str, bytes]]:
        embed = make_shard_embedder(snapshot, weights.files, device, dtype)
        return lambda first, end: embed(first, end, no_progress)

    work = BuilderWork(len(snapshot), run["part_rows"], embedder, merge)
    expected = {**run, **corpus_identity(snapshot)}
    grace = 120.0 if watch_parent is None else 0.0
    return run_builder(root, expected, work, name=name, poll=0.1, grace=grace, on_status=print_status)


def _run_shard_helper(root: Path, run: dict[str, Any], snapshot: Snapshot, works: Mapping[str, Work], name: str) -> int:
    """Compute shards for a stage, which may end at any time and remove its exchange."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(DONE))
    configure_process(run["threads"])
    try:
        exchange = Exchange.open(root, {**run, **corpus_identity(snapshot)}, f"builder-{name}")
        help_make_shards(exchange, snapshot, works, print_status)
    except ValueError as error:
        print_status(str(error))
        return MISCONFIGURED
    except Exception:
        time.sleep(REMOVAL_SECONDS)
        if is_exchange(root):
            log.exception("the index builder failed")
            return FAULT
    print_status(f"{root}: no shards are left to compute")
    return DONE


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
    return {**weights.files, EMBEDDINGS: matrix}, {"published": weights.meta["trainer"]["published"]}
