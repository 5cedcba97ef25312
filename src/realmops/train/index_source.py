"""Sources of the training loop's indexes: the exchange delivers generations of embeddings to index.

Shape suffixes: P passages, E embedding width, Q queries, K results.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from realmops.model.retriever import Retriever
from realmops.model.retriever_files import TextFormat, retriever_files, retriever_from_files
from realmops.refresh.trainer import RefreshPolicy, TrainerSide
from realmops.refresh.versions import Version
from realmops.search.embeddings import EMBEDDINGS, view_embeddings
from realmops.search.exact import PassageIndex


@dataclass(frozen=True)
class IndexGeneration:
    """Embeddings of all passages by one published version of the retriever."""

    step: int  # of the published weights
    embedding_PE: Tensor
    retriever: Retriever
    published: float  # seconds since 1970
    new: bool  # False if a resumed run had already adopted it


@dataclass
class Index:
    """A searchable index generation."""

    step: int
    passages: PassageIndex
    retriever: Retriever
    published: float
    new: bool


class IndexSource(Protocol):
    """Protocol of what provides the index of each training step."""

    def at_step(self, step: int, retriever: Retriever) -> Index | None:
        """Return the index to use from this step on, or None to keep the current one."""


def generation_in_use(step: int, *, refresh_every: int, lag: int) -> int:
    """Return the step whose weights built the index of training step ``step`` under a fixed lag."""
    assert step >= 0
    return max(0, (step - lag) // refresh_every * refresh_every)


def top_k_change(old_QK: np.ndarray, new_QK: np.ndarray) -> float:
    """Return the fraction of top-k results, over all queries, that differ between two indexes, ignoring order."""
    assert old_QK.shape == new_QK.shape
    common = sum(len(set(old) & set(new)) for old, new in zip(old_QK.tolist(), new_QK.tolist(), strict=True))
    return 1 - common / old_QK.size


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


@dataclass(eq=False)
class ExchangeSource:
    """The trainer's side of the exchange: checkpoint store and source of index generations."""

    trainer: TrainerSide
    refresh: RefreshSchedule
    text: TextFormat
    device: torch.device
    waited: float = 0.0  # seconds, including those before a resume
    refreshes: int = 0
    _step: int | None = None  # of the current index

    def restore(self) -> dict[str, bytes] | None:
        """Return the files of the newest checkpoint, or None."""
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
        """Publish the weights if they are due, and return the generation to adopt, or None to keep the current one."""
        self.trainer.beat(step)
        if self._publishes(step):
            files = retriever_files(retriever, self.text)
            self.trainer.publish_weights(step, files, {"published": time.time()})
        previous = self.trainer.index_step
        started = time.perf_counter()
        version = self._due(step)
        if self.refresh.policy.adopt == "as_soon_as_ready":
            new = step == 0 or (version is not None and version.step != previous)
        else:
            new = step == 0 or self._generation(step) != self._generation(step - 1)
        self.waited += time.perf_counter() - started
        if version is None:
            return None
        self._step = version.step
        self.refreshes += int(new and step > 0)
        embedding_PE = view_embeddings(version.files[EMBEDDINGS])
        searcher = retriever_from_files(version.files).to(self.device).eval()
        return IndexGeneration(version.step, embedding_PE, searcher, float(version.meta["published"]), new)

    def _due(self, step: int) -> Version | None:
        if self.refresh.policy.adopt == "as_soon_as_ready":
            return self.trainer.newest_index(step)
        due = self._generation(step)
        return None if due == self._step else self.trainer.index_for(due)

    def _publishes(self, step: int) -> bool:
        """Return whether to publish weights: not those of a frozen retriever, nor those that no step adopts."""
        if step == 0 or self.trainer.lacks_index:
            return True
        is_adopted = self.refresh.policy.adopt != "fixed_lag" or step + self.refresh.lag < self.refresh.steps
        return step % self.refresh.every == 0 and step > self.refresh.delay and is_adopted

    def _generation(self, step: int) -> int:
        """Return the step whose weights built the index of ``step`` under ``fixed_lag``."""
        generation = generation_in_use(step, refresh_every=self.refresh.every, lag=self.refresh.lag)
        return generation if generation > self.refresh.delay else 0
