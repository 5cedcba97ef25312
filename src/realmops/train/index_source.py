"""Where a training has its indexes from: the exchange gives a generation of embeddings, of which an index is built.

Shape suffixes: P passages, E embedding width, Q queries, K results.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from realmops.model.checkpoint_files import retriever_files, retriever_from_files
from realmops.model.retriever import Retriever
from realmops.refresh.trainer import Policy, Trainer
from realmops.refresh.versions import Version
from realmops.search.embeddings import EMBEDDINGS, embeddings_in
from realmops.search.exact import PassageIndex


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


class IndexSource(Protocol):
    """What a training loop asks for an index before each step."""

    def at_step(self, step: int, retriever: Retriever) -> Index | None:
        """The index to use from this step on, or None to go on with the one in use."""


def generation_in_use(step: int, *, refresh_every: int, lag: int) -> int:
    """The step whose weights the index of training step ``step`` was built from, under ``adopt: fixed_lag``."""
    assert step >= 0
    return max(0, (step - lag) // refresh_every * refresh_every)


def top_k_change(old_QK: np.ndarray, new_QK: np.ndarray) -> float:
    """Share of the top k, over all queries, that another index would change (order does not count)."""
    assert old_QK.shape == new_QK.shape
    kept = sum(len(set(old) & set(new)) for old, new in zip(old_QK.tolist(), new_QK.tolist(), strict=True))
    return 1 - kept / old_QK.size


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
