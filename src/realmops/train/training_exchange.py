"""Index refresh during training: the trainer's side of the exchange, and the index builder as a child process.

Shape suffixes: P passages, E embedding width.
"""

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from realmops.corpus.snapshot_reader import Snapshot
from realmops.devices import PRECISIONS
from realmops.model.retriever import Retriever
from realmops.model.retriever_files import TextFormat
from realmops.refresh.builder import MISCONFIGURED
from realmops.refresh.builder_process import exchange_identity
from realmops.refresh.child_processes import SupervisedProcess
from realmops.refresh.exchange import Exchange, FencedError
from realmops.refresh.follower import builder_command
from realmops.refresh.trainer import TrainerSide
from realmops.search.embeddings import EMBEDDINGS
from realmops.search.exact import PassageIndex
from realmops.train.index_source import ExchangeSource, Index, IndexGeneration, RefreshSchedule
from realmops.train.loop import TrainingContext
from realmops.train.parallel import ProcessGroup

BUILDER_LOG = "index-builder.log"
MOST_STARTS = 20  # before a builder that keeps exiting fails the training
QUIET_SECONDS = 5.0  # shorter waits are not logged

Build = Callable[[Tensor, Retriever], PassageIndex]
"""(embeddings P x E, their retriever) -> index."""


@dataclass(frozen=True)
class BuilderSettings:
    """Settings of the index builder of one training."""

    work: Path  # outlives a killed process
    threads: int
    log: Callable[[str], None]  # receives log lines


@dataclass(frozen=True)
class SharedIndexSource:
    """Index source of all processes: the first one reads the exchange and broadcasts generations to the others.

    Embeddings are broadcast in host memory, because those of an approximate index may not fit on a GPU.
    """

    processes: ProcessGroup
    own: ExchangeSource | None  # None in the other processes
    device: torch.device
    build: Build

    def at_step(self, step: int, retriever: Retriever) -> Index | None:
        """Return the index to use from this step on, or None to keep the current one."""
        generation = self.own.at_step(step, retriever) if self.own else None
        if self.processes.size > 1:
            generation = self._broadcast(generation, retriever)
        if generation is None:
            return None
        passages = self.build(generation.embedding_PE, generation.retriever)
        return Index(generation.step, passages, generation.retriever, generation.published, generation.new)

    def _broadcast(self, own: IndexGeneration | None, retriever: Retriever) -> IndexGeneration | None:
        """Return the first process's generation in all processes, None if it has no new one."""
        embedding_PE = own.embedding_PE.cpu() if own else torch.empty(0, 0)
        header = [1, own.step, *embedding_PE.shape, own.published, own.new] if own else [0] * 6
        exists, weights_step, passages, width, published, new = self.processes.broadcast_numbers(header, self.device)
        if not exists:
            return None
        if own is None:
            embedding_PE = torch.empty(int(passages), int(width))
        searcher = own.retriever if own else copy.deepcopy(retriever).eval()
        self.processes.broadcast([embedding_PE, *searcher.parameters()])
        return own or IndexGeneration(int(weights_step), embedding_PE, searcher, published, bool(new))


@contextmanager
def open_exchange(
    context: TrainingContext,
    settings: BuilderSettings,
    refresh: RefreshSchedule,
    snapshot: Snapshot,
    retriever: Retriever,
    build: Build,
) -> Iterator[tuple[TrainingContext, SharedIndexSource]]:
    """Open the exchange of a training and, with ``builder: child``, run its index builder as a child process.

    Only the first of several processes opens the exchange; on exit it publishes whether training finished or failed.

    Yields:
        The context with the exchange as its checkpoint store, and the source of indexes.

    Raises:
        ChildProcessError: the child builder is misconfigured or exited ``MOST_STARTS`` times.
    """
    processes, device = context.processes, context.device
    if not processes.is_main_process:
        yield context, SharedIndexSource(processes, None, device, build)
        return
    root = settings.work / "exchange" if refresh.exchange == "auto" else Path(refresh.exchange)
    run_identity = exchange_identity(
        snapshot,
        run_key=settings.work.name,
        embedding_width=retriever.width,
        precision=PRECISIONS[context.dtype],
        threads=settings.threads,
        part_rows=refresh.shard_rows,
    )
    child = None
    if refresh.builder == "child":
        command = builder_command(root, snapshot.folder, "--watch-parent", str(os.getpid()))
        child = SupervisedProcess(
            command, pause=0.0, log=settings.work / BUILDER_LOG, environment={**os.environ, "HOSTNAME": "child"}
        )

    def on_wait(message: str, seconds: float) -> None:
        if child is not None and (code := child.poll()) is not None:
            if code == MISCONFIGURED or child.starts >= MOST_STARTS:
                raise ChildProcessError(
                    f"index builder failed: exit code {code} after {child.starts} starts:\n{child.last_lines()}"
                )
            child.poll()  # restarts it
        if seconds >= QUIET_SECONDS:
            settings.log(message)

    opened_exchange = Exchange.open(root, run_identity, grace=0.0 if child else 120.0)
    trainer = TrainerSide(opened_exchange, refresh.policy, (EMBEDDINGS,), on_wait)
    own = ExchangeSource(trainer, refresh, TextFormat.of(snapshot), device)
    try:
        with child or nullcontext():
            yield replace(context, checkpoints=own), SharedIndexSource(processes, own, device, build)
            trainer.finish("done")
    except (ValueError, TimeoutError, ChildProcessError, RuntimeError) as error:
        with suppress(FencedError):  # a newer trainer publishes the final state
            trainer.finish("failed", str(error))
        raise
