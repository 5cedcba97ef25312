"""Sources of the training loop's indexes: the trainer's side of the exchange, and its index builder.

Shape suffixes: P passages, E embedding width.
"""

import copy
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from realmops.corpus.snapshot_reader import Snapshot
from realmops.devices import PRECISIONS
from realmops.model.retriever import Retriever
from realmops.model.retriever_files import TextFormat, retriever_files, retriever_from_files
from realmops.options import Pretrain
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
MAX_STALENESS_STEPS = 5000  # age of the index for which training waits, if lag is auto
MOST_STARTS = 20  # before a builder that keeps exiting fails the training
QUIET_SECONDS = 5.0  # shorter waits are not logged

_Generation = tuple[int, Tensor, Retriever, float, bool]  # an index before it is built, in the order of its fields
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

    def at_step(self, step: int, retriever: Retriever) -> Iterable[Index]:
        """Yield the index to use from this step on, none to keep the current one.

        A process that resumes where an index is adopted first gets the index before it, to compare them.
        """


@dataclass(frozen=True)
class RefreshSchedule:
    """Schedule of publishing weights and adopting their index, by the options of a pre-training."""

    options: Pretrain

    @property
    def policy(self) -> RefreshPolicy:
        is_auto = self.options.lag == "auto"
        return RefreshPolicy(
            "as_soon_as_ready" if is_auto else "fixed_lag", MAX_STALENESS_STEPS, self.options.builder_timeout
        )

    def generation(self, step: int) -> int:
        """Return the step whose weights built the index of training step ``step`` under a fixed lag."""
        lag, every = self.options.lag, self.options.refresh_every
        assert lag != "auto"
        published = (step - lag) // every * every
        return published if published > self.options.retriever_delay else 0

    def publishes(self, step: int) -> bool:
        """Return whether weights are due: not those of a frozen retriever, nor those that no step adopts."""
        lag, every = self.options.lag, self.options.refresh_every
        is_adopted = lag == "auto" or step + lag < self.options.steps
        return step == 0 or (step % every == 0 and step > self.options.retriever_delay and is_adopted)


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

    def at_step(self, step: int, retriever: Retriever) -> Iterator[Index]:
        """Publish the weights if they are due, and yield the indexes to adopt."""
        own = self._next_generations(self.trainer, step, retriever) if self.trainer else iter(())
        while (generation := self._broadcast(next(own, None), retriever)) is not None:
            weights_step, embedding_PE, searcher, published, new = generation
            yield Index(weights_step, self.build(embedding_PE, searcher), searcher, published, new)

    def _next_generations(self, trainer: TrainerSide, step: int, retriever: Retriever) -> Iterator[_Generation]:
        trainer.beat(step)
        if trainer.lacks_index or self.refresh.publishes(step):
            trainer.publish_weights(step, retriever_files(retriever, self.text), {"published": time.time()})
        started, previous = time.perf_counter(), trainer.index_step
        if self.refresh.options.lag == "auto":
            versions = [trainer.newest_index(step)]
        else:
            before, due = (self.refresh.generation(max(at, 0)) for at in (step - 1, step))
            resumed_at = [before] if self._step is None and before != due else []
            versions = [trainer.index_for(one) for one in (*resumed_at, due) if one != self._step]
        self.waited += time.perf_counter() - started
        for version in filter(None, versions):
            self._step, new = version.step, step == 0 or version.step != previous
            self.refreshes += int(new and step > 0)
            searcher = retriever_from_files(version.files).to(self.device).eval()
            embedding_PE = view_embeddings(version.files[EMBEDDINGS])
            yield version.step, embedding_PE, searcher, float(version.meta["published"]), new

    def _broadcast(self, own: _Generation | None, retriever: Retriever) -> _Generation | None:
        """Return the first process's generation in all processes, None if it has no new one."""
        if self.processes.size == 1:
            return own
        step, embedding_PE, searcher, published, new = own or (0, torch.empty(0, 0), retriever, 0.0, False)
        header = [own is not None, step, *embedding_PE.shape, published, new]
        sent = self.processes.broadcast_numbers(header, self.device)
        if not sent[0]:
            return None
        embedding_PE = embedding_PE.cpu() if own else torch.empty(*map(int, sent[2:4]))
        searcher = searcher if own else copy.deepcopy(retriever).eval()
        self.processes.broadcast([embedding_PE, *searcher.parameters()])
        return own or (int(sent[1]), embedding_PE, searcher, sent[4], bool(sent[5]))


@contextmanager
def open_exchange(
    context: TrainingContext,
    options: Pretrain,
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
    processes, text, refresh = context.processes, TextFormat.of(snapshot), RefreshSchedule(options)
    if not processes.is_main_process:
        yield context, ExchangeSource(None, refresh, text, context.device, processes, build)
        return
    root = work / "exchange" if options.exchange == "auto" else Path(options.exchange)
    run_identity = {
        "run_key": work.name,
        **corpus_identity(snapshot),
        "embedding_width": retriever.width,
        "precision": PRECISIONS[context.dtype],
        "threads": torch.get_num_threads(),
        "part_rows": options.shard_rows,
    }
    child = None
    if options.builder == "child":
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
            yield replace(context, checkpoints=source, checkpoint_every=options.refresh_every), source
            trainer.finish("done")
    except (ValueError, TimeoutError, ChildProcessError, RuntimeError) as error:
        with suppress(FencedError):  # a newer trainer publishes the final state
            trainer.finish("failed", str(error))
        raise
