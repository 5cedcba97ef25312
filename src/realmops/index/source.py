"""Where a training has its indexes from: the exchange gives a generation of embeddings, of which an index is built.

Shape suffixes: P passages, E embedding width.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from realmops.index.embeddings import EMBEDDINGS, embeddings_in
from realmops.index.mips import PassageIndex
from realmops.index.staleness import generation_in_use
from realmops.index.trainer import Policy, Trainer
from realmops.index.versions import Version
from realmops.model.files import retriever_files, retriever_from_files
from realmops.model.retriever import Retriever


@dataclass(frozen=True)
class IndexGeneration:
    """The embeddings of all passages, the retriever that made them, and when its weights were published."""

    step: int
    embedding_PE: Tensor
    retriever: Retriever
    published: float
    new: bool  # False for the one that a resumed run had in use already


@dataclass
class Index:
    """A generation that can be searched."""

    step: int
    passages: PassageIndex
    retriever: Retriever
    published: float
    new: bool


class GenerationSource(Protocol):
    """The trainer's side of the exchange."""

    def at_step(self, step: int, retriever: Retriever) -> IndexGeneration | None:
        """Publish and adopt as the options say; the generation to use from this step on, or None to go on."""


class IndexSource(Protocol):
    """What a training loop asks for an index before each step."""

    def at_step(self, step: int, retriever: Retriever) -> Index | None:
        """The index to use from this step on, or None to go on with the one in use."""


@dataclass(frozen=True)
class Indexes:
    """An index of each generation, made of its embeddings by ``build``."""

    generations: GenerationSource
    build: Callable[[Tensor, Retriever], PassageIndex]

    def at_step(self, step: int, retriever: Retriever) -> Index | None:
        """That of the generation, where there is a new one."""
        found = self.generations.at_step(step, retriever)
        if found is None:
            return None
        passages = self.build(found.embedding_PE, found.retriever)
        return Index(found.step, passages, found.retriever, found.published, found.new)


class IndexTeam(Protocol):
    """The processes that train together, as far as indexes go (``train.parallel.Team``)."""

    @property
    def size(self) -> int:
        """How many they are."""

    def send(self, tensors: Iterable[Tensor]) -> None:
        """Put the first process's values into the tensors of the others."""

    def send_numbers(self, numbers: Sequence[float], device: torch.device) -> list[float]:
        """The first process's numbers, for all."""


@dataclass(frozen=True)
class SharedSource:
    """The first process's own generations for all that train together: it alone has the exchange.

    Embeddings are sent from host memory to host memory; those of an approximate index need not fit on a GPU.
    """

    team: IndexTeam
    own: GenerationSource | None
    device: torch.device

    def at_step(self, step: int, retriever: Retriever) -> IndexGeneration | None:
        """What the first process's source says."""
        found = None if self.own is None else self.own.at_step(step, retriever)
        if self.team.size == 1:
            return found
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


@dataclass(eq=False)
class ExchangeSource:
    """The trainer's side of the exchange as the training loop wants it: checkpoints, and a generation for each step."""

    trainer: Trainer
    refresh: Refresh
    vocabulary_hash: str
    device: torch.device
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

    def at_step(self, step: int, retriever: Retriever) -> IndexGeneration | None:
        """Publish the weights when it is time, and adopt a generation when one is due."""
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
        return IndexGeneration(version.step, embedding_PE, searcher, float(version.meta["published"]), new)

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
