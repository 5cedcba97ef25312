from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from realmops.refresh.trainer import RefreshPolicy
from realmops.search.embeddings import EMBEDDINGS
from realmops.train import index_source as module
from realmops.train.index_source import ExchangeSource, RefreshSchedule, generation_in_use, top_k_change


@pytest.mark.parametrize(
    ("step", "expected"), [(0, 0), (49, 0), (50, 0), (74, 0), (75, 50), (76, 50), (124, 50), (125, 100), (399, 350)]
)
def test_an_index_is_adopted_lag_steps_after_its_weights(step: int, expected: int) -> None:
    """Weights of steps 0, 50, 100, ...; each index is in use from 25 steps later, until the next."""
    assert generation_in_use(step, refresh_every=50, lag=25) == expected


def test_no_lag_and_a_lag_over_several_refreshes() -> None:
    assert [generation_in_use(step, refresh_every=2, lag=0) for step in range(5)] == [0, 0, 2, 2, 4]
    assert [generation_in_use(step, refresh_every=2, lag=5) for step in range(10)] == [0] * 7 + [2, 2, 4]


def test_staleness_under_a_fixed_lag_is_between_lag_and_lag_plus_refresh() -> None:
    stale = [step - generation_in_use(step, refresh_every=50, lag=25) for step in range(75, 1000)]
    assert (min(stale), max(stale)) == (25, 74)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ([[1, 2, 3, 4]], [[4, 3, 2, 1]], 0.0),
        ([[1, 2, 3, 4]], [[1, 2, 9, 4]], 0.25),
        ([[1, 2], [3, 4]], [[1, 2], [7, 8]], 0.5),
        ([[1, 2]], [[8, 9]], 1.0),
    ],
    ids=["order does not count", "one of four", "one query of two", "all"],
)
def test_top_k_change(old: list[list[int]], new: list[list[int]], expected: float) -> None:
    assert top_k_change(np.array(old), np.array(new)) == expected


class Seen:
    """A trainer's exchange that remembers which weights were published, and which index was asked for when."""

    def __init__(self) -> None:
        self.published, self.asked = list[int](), dict[int, int]()
        self.step, self.index_step, self.lacks_index = 0, 0, False

    def beat(self, step: int) -> None:
        self.step = step

    def publish_weights(self, step: int, files: dict[str, bytes], meta: dict[str, Any]) -> None:
        self.published.append(step)

    def index_for(self, step: int) -> Any:
        self.asked[self.step] = self.index_step = step
        return SimpleNamespace(step=step, files={EMBEDDINGS: b""}, meta={"published": 0.0})


@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("delay", [0, 1, 2, 4, 5, 20])
def test_what_is_published_is_what_is_adopted(
    monkeypatch: pytest.MonkeyPatch, every: int, lag: int, delay: int
) -> None:
    """Weights are published for the steps whose index a later step takes, and for no other.

    In its first ``delay`` steps the retriever stands still: the weights of step ``delay`` are those of step 0.
    """
    monkeypatch.setattr(module, "retriever_files", lambda *_: {})
    monkeypatch.setattr(module, "view_embeddings", lambda content: None)
    monkeypatch.setattr(module, "retriever_from_files", lambda files: torch.nn.Identity())
    steps, trainer = 12, Seen()
    refresh = RefreshSchedule(steps, every, lag, delay, "external", "auto", 1, RefreshPolicy())
    source = ExchangeSource(trainer, refresh, "", torch.device("cpu"))  # type: ignore[arg-type]
    new = [bool((index := source.at_step(step, Any)) and index.new) for step in range(steps)]  # type: ignore[arg-type]
    made = [s if s > delay else 0 for s in range(0, steps, every)]  # the index of step s is made from these weights
    wanted = [max([0] + [made[i] for i, s in enumerate(range(0, steps, every)) if s + lag <= t]) for t in range(steps)]
    first = [t for t in range(steps) if t == 0 or wanted[t] != wanted[t - 1]]
    assert trainer.asked == {t: wanted[t] for t in first}
    assert [t for t in range(steps) if new[t]] == first
    assert trainer.published == sorted({*wanted})
