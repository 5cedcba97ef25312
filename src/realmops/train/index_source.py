"""Sources of the training loop's indexes: the trainer's side of the exchange, and its index builder.

Shape suffixes: P passages, E embedding width.
"""

import copy
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from realmops.corpus.snapshot_reader import Snapshot
from realmops.devices import PRECISIONS
from realmops.model.retriever import Retriever
from realmops.model.retriever_files import TextFormat, retriever_files, retriever_from_files
from realmops.refresh.builder import MISCONFIGURED
from realmops.refresh.child_processes import SupervisedProcess
from realmops.refresh.exchange import Exchange, FencedError
from realmops.refresh.follower import builder_command
from realmops.refresh.shards import corpus_identity
from realmops.refresh.trainer import RefreshPolicy, TrainerSide
from realmops.search.embeddings import EMBEDDINGS, view_embeddings
from realmops.search.exact import PassageIndex
from realmops.train.loop import TrainingContext
from realmops.train.parallel import ProcessGroup

BUILDER_LOG = "index-builder.log"
MOST_STARTS = 20  # before a builder that keeps exiting fails the training
QUIET_SECONDS = 5.0  # shorter waits are not logged

Build = Callable[[Tensor, Retriever], PassageIndex]
"""(embeddings P x E, their retriever) -> index."""


@dataclass
class Index:
    """A searchable index generation: all passages by one published version of the retriever."""

    step: int  # of the published weights
    passages: PassageIndex
    retriever: Retriever
    published: float  # seconds since 1970
    new: bool  # False if a resumed run had already adopted it


class IndexSource(Protocol):
    """Protocol of what provides the index of each training step."""

    def at_step(self, step: int, retriever: Retriever) -> Index | None:
        """Return the index to use from this step on, or None to keep the current one."""


class _Generation(NamedTuple):
    step: int
    embedding_PE: Tensor
    retriever: Retriever
    published: float
    new: bool


@dataclass(frozen=True)
class RefreshSchedule:
    """Index refresh schedule: when weights are published, which builder indexes them and how the trainer waits."""

    steps: int  # of the training
    every: int  # steps between two publications
    lag: int  # steps from a publication to the adoption of its index
    delay: int  # first steps, in which the retriever is frozen
    builder: str  # child or external
    exchange: str  # a folder, or auto
    shard_rows: int  # passages per shard
    policy: RefreshPolicy

    def generation(self, step: int) -> int:
        """Return the step whose weights built the index of training step ``step`` under a fixed lag."""
        published = (step - self.lag) // self.every * self.every
        return published if published > self.delay else 0

    def publishes(self, step: int) -> bool:
        """Return whether weights are due: not those of a frozen retriever, nor those that no step adopts."""
        is_adopted = self.policy.adopt != "fixed_lag" or step + self.lag < self.steps
        return step == 0 or (step % self.every == 0 and step > self.delay and is_adopted)


@dataclass(eq=False)
class ExchangeSource:
    """The trainer's side of the exchange: checkpoint store, and source of the indexes of all processes.

    The first process reads the exchange and broadcasts generations to the others, in host memory, because embeddings
    of an approximate index may not fit on a GPU.
    """

    trainer: TrainerSide | None  # None in the other processes
    refresh: RefreshSchedule
    text: TextFormat
    device: torch.device
    processes: ProcessGroup
    build: Build
    waited: float = 0.0  # seconds, including those before a resume
    refreshes: int = 0
    _step: int | None = None  # of the current index

    def restore(self) -> dict[str, bytes] | None:
        assert self.trainer
        version = self.trainer.restore()
        if version is None:
            return None
        self.refreshes, self.waited = (version.meta["trainer"][name] for name in ("refreshes", "waited"))
        return version.files

    def save(self, step: int, files: Mapping[str, bytes]) -> None:
        assert self.trainer
        self.trainer.save_checkpoint(step, files, {"refreshes": self.refreshes, "waited": self.waited})

    def at_step(self, step: int, retriever: Retriever) -> Index | None:
        """Publish the weights if they are due, and return the index to adopt, or None to keep the current one."""
        generation = self._next_generation(self.trainer, step, retriever) if self.trainer else None
        if self.processes.size > 1:
            generation = self._broadcast(generation, retriever)
        if generation is None:
            return None
        weights_step, embedding_PE, searcher, published, new = generation
        return Index(weights_step, self.build(embedding_PE, searcher), searcher, published, new)

    def _next_generation(self, trainer: TrainerSide, step: int, retriever: Retriever) -> _Generation | None:
        trainer.beat(step)
        if trainer.lacks_index or self.refresh.publishes(step):
            trainer.publish_weights(step, retriever_files(retriever, self.text), {"published": time.time()})
        started, previous = time.perf_counter(), trainer.index_step
        if self.refresh.policy.adopt == "as_soon_as_ready":
            version = trainer.newest_index(step)
            new = step == 0 or (version is not None and version.step != previous)
        else:
            due = self.refresh.generation(step)
            version = None if due == self._step else trainer.index_for(due)
            new = step == 0 or due != self.refresh.generation(step - 1)
        self.waited += time.perf_counter() - started
        if version is None:
            return None
        self._step = version.step
        self.refreshes += int(new and step > 0)
        searcher = retriever_from_files(version.files).to(self.device).eval()
        embedding_PE = view_embeddings(version.files[EMBEDDINGS])
        return _Generation(version.step, embedding_PE, searcher, float(version.meta["published"]), new)

    def _broadcast(self, own: _Generation | None, retriever: Retriever) -> _Generation | None:
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
        return own or _Generation(int(weights_step), embedding_PE, searcher, published, bool(new))


@contextmanager
def open_exchange(
    context: TrainingContext,
    refresh: RefreshSchedule,
    snapshot: Snapshot,
    retriever: Retriever,
    build: Build,
    work: Path,
    log: Callable[[str], None],
) -> Iterator[tuple[TrainingContext, ExchangeSource]]:
    """Open the exchange of a training and, with ``builder: child``, run its index builder as a child process.

    Only the first of several processes opens the exchange; on exit it publishes whether training finished or failed.
    ``work`` is a folder that outlives a killed process.

    Yields:
        The context with the exchange as its checkpoint store, and the source of indexes.

    Raises:
        ChildProcessError: the child builder is misconfigured or exited ``MOST_STARTS`` times.
    """
    processes, text = context.processes, TextFormat.of(snapshot)
    if not processes.is_main_process:
        yield context, ExchangeSource(None, refresh, text, context.device, processes, build)
        return
    root = work / "exchange" if refresh.exchange == "auto" else Path(refresh.exchange)
    run_identity = {
        "run_key": work.name,
        **corpus_identity(snapshot),
        "embedding_width": retriever.width,
        "precision": PRECISIONS[context.dtype],
        "threads": torch.get_num_threads(),
        "part_rows": refresh.shard_rows,
    }
    child = None
    if refresh.builder == "child":
        command = builder_command(root, snapshot.folder, "child", "--watch-parent", str(os.getpid()))
        child = SupervisedProcess(command, pause=0.0, log=work / BUILDER_LOG)

    def on_wait(message: str, seconds: float) -> None:
        if child is not None and (code := child.poll()) is not None:
            if code == MISCONFIGURED or child.starts >= MOST_STARTS:
                raise ChildProcessError(
                    f"index builder failed: exit code {code} after {child.starts} starts:\n{child.last_lines()}"
                )
            child.poll()  # restarts it
        if seconds >= QUIET_SECONDS:
            log(message)

    opened_exchange = Exchange.open(root, run_identity, grace=0.0 if child else 120.0)
    trainer = TrainerSide(opened_exchange, refresh.policy, (EMBEDDINGS,), on_wait)
    source = ExchangeSource(trainer, refresh, text, context.device, processes, build)
    try:
        with child or nullcontext():
            yield replace(context, checkpoints=source, checkpoint_every=refresh.every), source
            trainer.finish("done")
    except (ValueError, TimeoutError, ChildProcessError, RuntimeError) as error:
        with suppress(FencedError):  # a newer trainer publishes the final state
            trainer.finish("failed", str(error))
        raise
