"""The exchange as a stage has it: the trainer's side for a training loop, and the index builder as a child process.

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
from realmops.refresh.builder import MISCONFIGURED
from realmops.refresh.builder_process import builder_command, identity
from realmops.refresh.child_processes import Child
from realmops.refresh.exchange import Exchange, Fenced
from realmops.refresh.trainer import Trainer
from realmops.search.embeddings import EMBEDDINGS
from realmops.search.exact import PassageIndex
from realmops.train.index_source import ExchangeSource, Index, IndexGeneration, Refresh
from realmops.train.loop import Context
from realmops.train.parallel import Team

BUILDER_LOG = "index-builder.log"
MOST_STARTS = 20  # of a builder that goes on ending
QUIET_SECONDS = 5.0  # a shorter wait is not worth a line

Build = Callable[[Tensor, Retriever], PassageIndex]
"""(embeddings P x E, the retriever that made them) -> an index of them."""


@dataclass(frozen=True)
class BuilderSettings:
    """Where a training works: a folder that outlives a kill, so many threads, and somebody who listens."""

    work: Path
    threads: int
    say: Callable[[str], None]


@dataclass(frozen=True)
class SharedSource:
    """The first process's own generations for all that train together, as indexes: it alone has the exchange.

    Embeddings are sent from host memory to host memory; those of an approximate index need not fit on a GPU.
    """

    team: Team
    own: ExchangeSource | None  # None in the other processes
    device: torch.device
    build: Build

    def at_step(self, step: int, retriever: Retriever) -> Index | None:
        """The index to use from this step on, or None to go on with the one in use."""
        found = self.own.at_step(step, retriever) if self.own else None
        if self.team.size > 1:
            found = self._shared(found, retriever)
        if found is None:
            return None
        passages = self.build(found.embedding_PE, found.retriever)
        return Index(found.step, passages, found.retriever, found.published, found.new)

    def _shared(self, found: IndexGeneration | None, retriever: Retriever) -> IndexGeneration | None:
        """The first process's generation, where it has a new one."""
        embedding_PE = found.embedding_PE.cpu() if found else torch.empty(0, 0)
        head = [1, found.step, *embedding_PE.shape, found.published, found.new] if found else [0] * 6
        there, made_at, passages, width, published, new = self.team.send_numbers(head, self.device)
        if not there:
            return None
        if found is None:
            embedding_PE = torch.empty(int(passages), int(width))
        searcher = found.retriever if found else copy.deepcopy(retriever).eval()
        self.team.send([embedding_PE, *searcher.parameters()])
        return found or IndexGeneration(int(made_at), embedding_PE, searcher, published, bool(new))


@contextmanager
def exchange(
    context: Context, site: BuilderSettings, refresh: Refresh, snapshot: Snapshot, retriever: Retriever, build: Build
) -> Iterator[tuple[Context, SharedSource]]:
    """A training's surroundings and indexes on an exchange, with its builder beside it where that is a child.

    Only the first of several processes has the exchange; it says the last word there at the end.
    """
    team, device = context.team, context.device
    if not team.leads:
        yield context, SharedSource(team, None, device, build)
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
    child = None
    if refresh.builder == "child":
        command = builder_command(root, snapshot.folder, "--watch-parent", str(os.getpid()))
        child = Child(command, pause=0.0, log=site.work / BUILDER_LOG, environment={**os.environ, "HOSTNAME": "child"})

    def on_wait(message: str, seconds: float) -> None:
        if child is not None and (code := child.look()) is not None:
            if code == MISCONFIGURED or child.starts >= MOST_STARTS:
                raise ChildProcessError(
                    f"the index builder ended with exit code {code} after {child.starts} starts:\n{child.last_lines()}"
                )
            child.look()  # starts it again
        if seconds >= QUIET_SECONDS:
            site.say(message)

    opened = Exchange.open(root, card, grace=0.0 if child else 120.0)
    trainer = Trainer(opened, refresh.policy, (EMBEDDINGS,), on_wait)
    own = ExchangeSource(trainer, refresh, snapshot.vocabulary_hash, device)
    try:
        with child or nullcontext():
            yield replace(context, checkpoints=own), SharedSource(team, own, device, build)
            trainer.finish("done")
    except (ValueError, TimeoutError, ChildProcessError, RuntimeError) as error:
        with suppress(Fenced):  # the last word is the successor's
            trainer.finish("failed", str(error))
        raise
