"""The exchange as a stage has it: the trainer's side for a training loop, and the index builder as a child process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from realmops.bert import PRECISIONS
from realmops.corpus.snapshot import Snapshot
from realmops.index.builder import MISCONFIGURED
from realmops.index.builder_process import builder_command, identity
from realmops.index.embeddings import EMBEDDINGS, embeddings_in
from realmops.index.exchange import Exchange, Fenced
from realmops.index.mips import PassageIndex
from realmops.index.process import Child
from realmops.index.staleness import generation_in_use
from realmops.index.trainer import Policy, Trainer
from realmops.index.versions import Version
from realmops.model.files import retriever_files, retriever_from_files
from realmops.model.retriever import Retriever
from realmops.train.loop import Context
from realmops.train.pretrain import Index, SharedSource

BUILDER_LOG = "index-builder.log"
MOST_STARTS = 20  # of a builder that goes on ending
QUIET_SECONDS = 5.0  # a shorter wait is not worth a line


@dataclass(frozen=True)
class Refresh:
    """When a training of ``steps`` steps publishes its weights, who builds their index, and how it is waited for."""

    steps: int
    every: int
    lag: int
    delay: int  # first steps in which the retriever stands still
    builder: str  # child or external
    exchange: str  # a folder, or auto
    shard_rows: int
    policy: Policy


@dataclass(frozen=True)
class Site:
    """Where a training works: a folder that outlives a kill, so many threads, and somebody who listens."""

    work: Path
    threads: int
    say: Callable[[str], None]


@contextmanager
def exchange(
    context: Context,
    site: Site,
    refresh: Refresh,
    snapshot: Snapshot,
    retriever: Retriever,
    passages: Callable[[Tensor, Retriever], PassageIndex],
) -> Iterator[tuple[Context, SharedSource]]:
    """A training's surroundings and indexes on an exchange, with its builder beside it where that is a child.

    ``passages`` makes a searchable index from the embeddings of a generation and its retriever.  Only the first of
    several processes has the exchange; it says the last word there at the end.
    """
    team, device = context.team, context.device
    if not team.leads:
        yield context, SharedSource(team, None, passages, device)
        return
    root = site.work / "exchange" if refresh.exchange == "auto" else Path(refresh.exchange)
    card = identity(
        snapshot,
        run_key=site.work.name,
        embedding_width=retriever.width,
        precision=PRECISIONS[context.dtype],
        threads=site.threads,
        part_rows=refresh.shard_rows,
    )
    child = _builder(root, snapshot, site.work / BUILDER_LOG) if refresh.builder == "child" else None

    def on_wait(message: str, seconds: float) -> None:
        if child is not None:
            _keep_alive(child)
        if seconds >= QUIET_SECONDS:
            site.say(message)

    opened = Exchange.open(root, card, grace=0.0 if child else 120.0)
    trainer = Trainer(opened, refresh.policy, on_wait, mapped=(EMBEDDINGS,))
    own = ExchangeSource(trainer, refresh, snapshot.vocabulary_hash, device, passages)
    try:
        with child or nullcontext():
            yield replace(context, checkpoints=own), SharedSource(team, own, passages, device)
            trainer.finish("done")
    except (ValueError, TimeoutError, ChildProcessError, RuntimeError) as error:
        with suppress(Fenced):  # the last word is the successor's
            trainer.finish("failed", str(error))
        raise


def _builder(root: Path, snapshot: Snapshot, log: Path) -> Child:
    """An index builder that ends with this process."""
    command = builder_command(root, snapshot.folder, "--watch-parent", str(os.getpid()))
    return Child(command, pause=0.0, log=log, environment={**os.environ, "HOSTNAME": "child"})


def _keep_alive(builder: Child) -> None:
    """Start a builder again when it has ended; ChildProcessError when that is of no use."""
    code = builder.look()
    if code is None:
        return
    if code == MISCONFIGURED or builder.starts >= MOST_STARTS:
        raise ChildProcessError(
            f"the index builder ended with exit code {code} after {builder.starts} starts:\n{builder.last_lines()}"
        )
    builder.look()


@dataclass(eq=False)
class ExchangeSource:
    """The trainer's side of the exchange as the training loop wants it: checkpoints, and an index for each step."""

    trainer: Trainer
    refresh: Refresh
    vocabulary_hash: str
    device: torch.device
    passages: Callable[[Tensor, Retriever], PassageIndex]  # from the embeddings of a generation and its retriever
    waited: float = 0.0  # seconds, in all lives of the run
    refreshes: int = 0
    _step: int | None = None  # of the index in use

    def restore(self) -> dict[str, bytes] | None:
        """The newest checkpoint's files."""
        version = self.trainer.restore()
        if version is None:
            return None
        self.refreshes = version.meta["trainer"]["refreshes"]
        self.waited = version.meta["trainer"]["waited"]
        return version.files

    def save(self, step: int, files: Mapping[str, bytes]) -> None:
        """Commit a checkpoint to the exchange."""
        self.trainer.save_checkpoint(step, files, {"refreshes": self.refreshes, "waited": self.waited})

    def at_step(self, step: int, retriever: Retriever) -> Index | None:
        """Publish the weights when it is time, and adopt an index when one is due."""
        self.trainer.beat(step)
        if self._publishes(step):
            files = retriever_files(retriever, self.vocabulary_hash)
            self.trainer.publish_weights(step, files, {"published": time.time()})
        used = self.trainer.index_step
        started = time.perf_counter()
        version = self._due(step)
        if self.refresh.policy.adopt == "as_soon_as_ready":
            new = step == 0 or (version is not None and version.step != used)
        else:
            new = step == 0 or self._generation(step) != self._generation(step - 1)
        self.waited += time.perf_counter() - started
        if version is None:
            return None
        self._step = version.step
        self.refreshes += int(new and step > 0)
        embedding_PE = embeddings_in(version.files[EMBEDDINGS])
        searcher = retriever_from_files(version.files).to(self.device).eval()
        passages = self.passages(embedding_PE, searcher)
        return Index(version.step, passages, searcher, float(version.meta["published"]), new)

    def _due(self, step: int) -> Version | None:
        if self.refresh.policy.adopt == "as_soon_as_ready":
            return self.trainer.newest_index(step)
        wanted = self._generation(step)
        return None if wanted == self._step else self.trainer.index_for(wanted)

    def _publishes(self, step: int) -> bool:
        """At step 0 and every ``refresh_every`` steps; not while the retriever stands still, nor what nobody adopts."""
        if step == 0 or self.trainer.lacks_index:
            return True
        in_time = self.refresh.policy.adopt != "fixed_lag" or step + self.refresh.lag < self.refresh.steps
        return step % self.refresh.every == 0 and step > self.refresh.delay and in_time

    def _generation(self, step: int) -> int:
        """The step whose weights the index of ``step`` is made from, under ``fixed_lag``."""
        wanted = generation_in_use(step, refresh_every=self.refresh.every, lag=self.refresh.lag)
        return wanted if wanted > self.refresh.delay else 0
