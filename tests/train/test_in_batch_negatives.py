"""Both towers learn from questions with in-batch negatives."""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from small_world import (
    MemoryJournal,
    World,
    section,
    tiny_context,
    tiny_models,
)
from torch import Tensor

from realmops.model.packed import PackedBatch
from realmops.model.retriever import Retriever
from realmops.model.sequences import join_query
from realmops.options import Finetune
from realmops.questions.question_sets import Question
from realmops.search.embed import document_sequences
from realmops.train import in_batch_negatives as module
from realmops.train.in_batch_negatives import (
    NEIGHBOURS,
    group_by_passage,
    passage_batches,
    train_by_passages,
)
from realmops.train.loop import TrainingContext
from realmops.train.parallel import ProcessGroup

# Passages 0, 1, 4 and 5 hold Oslo, 2, 3 and 9 hold 1950, 6 alone 1972, 8 and 2 Karl Lund
QUESTIONS = [
    Question("born", "Where was Anna Berg born?", ("Oslo",)),
    Question("until", "Until when did he live in Bergen?", ("1950",)),
    Question("died", "When did Maria Holm die?", ("1972",)),
    Question("never", "Who is she?", ("Nobody",)),
    Question("sold", "To whom did he sell a ship?", ("Karl Lund",)),
    Question("capital", "Which city is the capital?", ("Oslo",)),
    Question("poet", "Where is the poet from?", ("Oslo",)),
]
POSITIVES = group_by_passage([[0], [2], [6], [], [8], [5], [0]])
PASSAGES = list(POSITIVES)


def options(**changes: Any) -> Finetune:
    values = {"retriever_epochs": 2, "retriever_batch_size": 2, "retriever_learning_rate": 3e-3}
    return section("finetune", **{**values, "query_wordpieces": 24, **changes})


def test_positives_by_hand() -> None:
    assert list(POSITIVES.items()) == [(0, [0, 6]), (2, [1]), (5, [5]), (6, [2]), (8, [4])]
    assert group_by_passage([[], []]) == {}


@pytest.mark.parametrize(("count", "batch_size"), [(50, 16), (50, 7), (5, 2), (3, 32), (8, 8), (1, 1)])
def test_each_epoch_has_each_passage_once_next_to_its_neighbours(count: int, batch_size: int) -> None:
    """In another order in each epoch and for each seed, in runs of eight (the first and the last may be shorter)."""
    per_epoch = math.ceil(count / batch_size)
    orders = []
    for seed, epoch in itertools.product(range(2), range(4)):
        batch = passage_batches(tiny_context(seed=seed), count, batch_size)
        batches = [batch(epoch * per_epoch + step) for step in range(per_epoch)]
        assert all(len(rows) == batch_size for rows in batches[:-1])
        order = [row for rows in batches for row in rows]
        assert sorted(order) == list(range(count))
        assert len(np.flatnonzero(np.diff(order) != 1)) <= math.ceil(count / NEIGHBOURS)
        orders.append(tuple(order))
    assert count < 50 or len({*orders}) == 8


def slow_loss(world: World, retriever: Retriever, rows: list[int], chosen: Finetune) -> float:
    """Return the mean over all questions of -log of the own passage's share among irrelevant passages."""
    losses = []
    with torch.no_grad():
        documents = {}
        for row in rows:
            [document] = document_sequences(world.snapshot, [PASSAGES[row]])
            documents[row] = retriever.document(PackedBatch([document[0]], [document[1]]))[0].double()
        for own in rows:
            for asked in POSITIVES[PASSAGES[own]]:
                question = QUESTIONS[asked]
                tokens = join_query(world.wordpieces(question.question), world.special, chosen.query_wordpieces)
                query, total = retriever.query(PackedBatch([tokens]))[0].double(), 0.0
                f = {row: float(retriever.scale * query @ document) for row, document in documents.items()}
                for row in rows:
                    holds = question.answers[0] in world.snapshot.text(PASSAGES[row])
                    total += math.exp(f[row]) if row == own or not holds else 0.0
                losses.append(-math.log(math.exp(f[own]) / total))
    return float(np.mean(losses))


def train(world: World, chosen: Finetune, **changes: Any) -> tuple[Retriever, MemoryJournal]:
    retriever, _ = tiny_models(world, dropout=changes.pop("dropout", 0.0), seed=changes.pop("start", 0))
    context = tiny_context(**{"journal": MemoryJournal(), "checkpoint_every": 2, **changes})
    arguments = retriever, world.snapshot, QUESTIONS, POSITIVES, chosen
    train_by_passages(context, *arguments)
    assert isinstance(context.journal, MemoryJournal)
    return retriever, context.journal


def test_the_first_loss_equals_the_slow_one(world: World) -> None:
    """0 and 5 contain Oslo, 2 and 8 Karl Lund; neither is a negative of the other."""
    chosen = options(retriever_batch_size=5, retriever_epochs=1)
    start, _ = tiny_models(world)
    _, journal = train(world, chosen)
    expected = slow_loss(world, start, [0, 1, 2, 3, 4], chosen)
    assert journal.values("loss") == pytest.approx([expected], rel=1e-5)
    assert 0 <= journal.values("accuracy")[0] <= 1


def test_a_passage_with_many_questions_gets_a_sample_of_them(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_QUESTIONS", 1)
    queries: list[int] = []

    def batches(context: TrainingContext, groups: Any, step_loss: Any, **rest: Any) -> int:
        for step in range(40):
            step_loss(step)
        return 0

    def packed(sequences: list[np.ndarray], *segments: Any) -> PackedBatch:
        if not segments:
            queries.extend(hash(tokens.tobytes()) for tokens in sequences)
        return PackedBatch(sequences, *segments)

    monkeypatch.setattr(module, "fit", batches)
    monkeypatch.setattr(module, "PackedBatch", packed)
    train(world, options(retriever_batch_size=5))
    assert len(queries) == 40 * 5, "one of each passage"
    assert len(set(queries)) == 6, "both of passage 0, sometimes"


# ---- several processes


@dataclass(frozen=True)
class Together(ProcessGroup):
    """One of several processes that run one after the other; the embeddings of all are gathered in a first pass."""

    gathered: list[Tensor] = field(default_factory=list)

    def gather(self, x_BD: Tensor) -> Tensor:
        if len(self.gathered) < self.size:
            self.gathered.append(x_BD.detach())
            return torch.cat([x_BD] * self.size)
        assert torch.equal(self.gathered[self.rank], x_BD)
        return torch.cat([x_BD if rank == self.rank else other for rank, other in enumerate(self.gathered)])

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        pass


@pytest.mark.parametrize("processes", [2, 3, 7])
@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4], [4, 0], [3]])
def test_the_mean_loss_of_processes_is_that_of_the_batch(
    world: World, rows: list[int], processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a passage has more questions than another, and for more processes than passages."""
    monkeypatch.setattr(module, "passage_batches", lambda *_: lambda step: rows)
    losses: list[float] = []

    def one_step(context: TrainingContext, groups: Any, step_loss: Any, **rest: Any) -> int:
        losses.append(step_loss(0)[0].item())
        return 0

    monkeypatch.setattr(module, "fit", one_step)
    gathered: list[Tensor] = []
    for _ in range(2):
        losses.clear()
        for rank in range(processes):
            train(world, options(), processes=Together(rank, processes, gathered))
    assert len(losses) == processes
    start, _ = tiny_models(world)
    assert sum(losses) / processes == pytest.approx(slow_loss(world, start, rows, options()), rel=1e-5)
