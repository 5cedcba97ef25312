"""The retriever learns from questions by batches of passages."""

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from small_world import (
    MemoryJournal,
    World,
    index_of,
    killed_and_resumed,
    same_parameters,
    section,
    tiny_context,
    tiny_models,
    tiny_optimiser,
)
from torch import Tensor

from realmops.model.packed import PackedBatch
from realmops.model.retriever import Retriever
from realmops.model.sequences import join_query
from realmops.options import Finetune
from realmops.questions.question_sets import Question
from realmops.search.embed import document_sequences, embed
from realmops.train import passage_batches as module
from realmops.train.index_source import Index
from realmops.train.loop import TrainingContext
from realmops.train.parallel import ProcessGroup
from realmops.train.passage_batches import (
    NEIGHBOURS,
    Positives,
    hard_negatives,
    passage_batches,
    passage_steps,
    train_by_passages,
)

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
POSITIVES = Positives.of([[0], [2], [6], [], [8], [5], [0]])


def options(**changes: Any) -> Finetune:
    values = {"retriever_epochs": 2, "retriever_batch_size": 2, "retriever_learning_rate": 3e-3}
    return section("finetune", **{**values, "query_wordpieces": 24, "checkpoint_every": 2, **changes})


def test_positives_by_hand() -> None:
    assert POSITIVES.passages == [0, 2, 5, 6, 8]
    assert POSITIVES.questions == [[0, 6], [1], [5], [2], [4]]
    assert Positives.of([[], []]) == Positives([], [])


@pytest.mark.parametrize(("epochs", "steps"), [(2, 6), (1, 3), (0.5, 2), (0, 0)])
def test_steps_by_hand(epochs: float, steps: int) -> None:
    """Five passages, two at a time, are three batches."""
    assert passage_steps(5, options(retriever_epochs=epochs)) == steps


@pytest.mark.parametrize(("count", "batch_size"), [(50, 16), (50, 7), (5, 2), (3, 32), (8, 8), (1, 1)])
def test_each_passage_comes_once_an_epoch_beside_its_neighbours(count: int, batch_size: int) -> None:
    """All of them, in another order in each epoch, in runs of eight (the first and the last may be shorter)."""
    context = tiny_context()
    batch = passage_batches(context, count, batch_size)
    per_epoch = math.ceil(count / batch_size)
    orders = []
    for epoch in range(6):
        order = [row for step in range(per_epoch) for row in batch(epoch * per_epoch + step)]
        assert sorted(order) == list(range(count))
        runs = np.split(order, np.flatnonzero(np.diff(order) != 1) + 1)
        assert len(runs) <= math.ceil(count / NEIGHBOURS) + 1
        orders.append(order)
    assert [batch(0), batch(1)] == [orders[0][:batch_size], (orders[0] + orders[1])[batch_size : 2 * batch_size]] or (
        per_epoch == 1
    )
    if count == 50:
        assert len({tuple(order) for order in orders}) == 6
        starts = {min(order.index(row) for row in range(8)) for order in orders}
        assert len(starts) > 1
    other = passage_batches(tiny_context(seed=1), count, batch_size)
    assert [batch(step) for step in range(per_epoch)] == [batch(step) for step in range(per_epoch)]
    assert count < 50 or [other(step) for step in range(3)] != [batch(step) for step in range(3)]


def slow_loss(world: World, retriever: Retriever, rows: list[int], chosen: Finetune) -> float:
    """The mean over all questions of -log of the own passage's share among the passages that hold no answer."""
    losses = []
    with torch.no_grad():
        documents = {}
        for row in rows:
            [document] = document_sequences(world.snapshot, [POSITIVES.passages[row]])
            documents[row] = retriever.document(PackedBatch([document[0]], [document[1]]))[0].double()
        for own in rows:
            for asked in POSITIVES.questions[own]:
                question = QUESTIONS[asked]
                tokens = join_query(world.wordpieces(question.question), world.special, chosen.query_wordpieces)
                query, total = retriever.query(PackedBatch([tokens]))[0].double(), 0.0
                f = {row: float(retriever.scale * query @ document) for row, document in documents.items()}
                for row in rows:
                    holds = question.answers[0] in world.snapshot.text(POSITIVES.passages[row])
                    total += math.exp(f[row]) if row == own or not holds else 0.0
                losses.append(-math.log(math.exp(f[own]) / total))
    return float(np.mean(losses))


def train(world: World, chosen: Finetune, **changes: Any) -> tuple[Retriever, MemoryJournal]:
    retriever, _ = tiny_models(world, dropout=changes.pop("dropout", 0.0), seed=changes.pop("start", 0))
    context = tiny_context(**{"journal": MemoryJournal(), **changes})
    arguments = retriever, world.snapshot, QUESTIONS, POSITIVES, chosen, tiny_optimiser()
    train_by_passages(context, *arguments)
    assert isinstance(context.journal, MemoryJournal)
    return retriever, context.journal


def test_the_first_loss_is_the_slow_ones(world: World) -> None:
    """All five passages: 0 and 5 hold Oslo, 2 and 8 hold Karl Lund; neither is a negative of the other."""
    chosen = options(retriever_batch_size=5, retriever_epochs=1)
    start, _ = tiny_models(world)
    _, journal = train(world, chosen)
    expected = slow_loss(world, start, [0, 1, 2, 3, 4], chosen)
    assert journal.values("loss") == pytest.approx([expected], rel=1e-5)
    assert 0 <= journal.values("accuracy")[0] <= 1


def test_the_retriever_learns(world: World) -> None:
    _, journal = train(world, options(retriever_batch_size=5, retriever_epochs=25), start=1)
    loss = journal.values("loss")
    assert len(loss) == 25
    assert np.mean(loss[-5:]) < 0.3 * np.mean(loss[:5])
    assert journal.values("accuracy")[-1] == 1.0


def test_of_many_questions_of_a_passage_some_are_asked(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_QUESTIONS", 1)
    asked: list[int] = []

    def batches(context: TrainingContext, groups: Any, options: Any, step_loss: Any, **rest: Any) -> int:
        for step in range(40):
            step_loss(step)
        return 0

    def packed(sequences: list[np.ndarray], *segments: Any) -> PackedBatch:
        if not segments:
            asked.extend(hash(tokens.tobytes()) for tokens in sequences)
        return PackedBatch(sequences, *segments)

    monkeypatch.setattr(module, "fit", batches)
    monkeypatch.setattr(module, "PackedBatch", packed)
    train(world, options(retriever_batch_size=5))
    assert len(asked) == 40 * 5, "one of each passage"
    assert len(set(asked)) == 6, "both of passage 0 in turn"


# ---- several processes


@dataclass(frozen=True)
class Together(ProcessGroup):
    """One of several processes, run one after the other: all documents are embedded before, for all to gather."""

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
def test_processes_share_a_batch_of_any_size(
    world: World, rows: list[int], processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean of their losses is that of all questions, also where a passage has more questions than another."""
    monkeypatch.setattr(module, "passage_batches", lambda *_: lambda step: rows)
    found: list[float] = []

    def one_step(context: TrainingContext, groups: Any, options: Any, step_loss: Any, **rest: Any) -> int:
        found.append(step_loss(0)[0].item())
        return 0

    monkeypatch.setattr(module, "fit", one_step)
    gathered: list[Tensor] = []
    for _ in range(2):
        found.clear()
        for rank in range(processes):
            train(world, options(), processes=Together(rank, processes, gathered))
    assert len(found) == processes
    start, _ = tiny_models(world)
    assert sum(found) / processes == pytest.approx(slow_loss(world, start, rows, options()), rel=1e-5)


@pytest.mark.parametrize("kill_at", [1, 3, 4])
def test_killed_and_resumed_it_ends_with_the_same_bits(world: World, kill_at: int) -> None:
    """Six steps with dropout, a checkpoint at every second."""
    expected, lines = train(world, options(), dropout=0.1)
    (found, _), journal = killed_and_resumed(partial(train, world, options(), dropout=0.1), kill_at)
    same_parameters(found, expected)
    assert journal.without_times() == lines.without_times()


def test_hard_negatives_are_the_best_passages_without_an_answer_outside_the_batch(world: World) -> None:
    retriever, _ = tiny_models(world)
    index = index_of(world, retriever)
    asked, batch = [QUESTIONS[0], QUESTIONS[2]], [0, 7]
    found = hard_negatives(index, asked, batch, world.snapshot, 24, torch.float32)
    expected: list[int] = []
    for question, answer in zip(asked, ("oslo", "1972"), strict=True):
        query = join_query(world.wordpieces(question.question), world.special, 24)
        query_1E = embed(index.retriever.query, [(query, np.zeros(len(query), np.int64))], torch.float32)
        order = (query_1E @ index.passages.embedding_PE.T)[0].argsort(descending=True).tolist()
        texts = {p: world.snapshot.text(p).lower() for p in order}
        expected.append(next(p for p in order if answer not in texts[p] and p not in batch and p not in expected))
    assert found == expected
    everywhere = Question("all", "What?", tuple({world.snapshot.text(p) for p in range(12)}))
    assert hard_negatives(index, [everywhere], [], world.snapshot, 24, torch.float32) == []


def test_an_index_that_is_refreshed_meanwhile_gives_hard_negatives(world: World) -> None:
    """Five passages, two at a time: a quarter of a batch, rounded up, is one hard negative in each step."""
    retriever, _ = tiny_models(world)
    asked: list[int] = []

    class Source:
        def at_step(self, step: int, now: Retriever) -> Index | None:
            asked.append(step)
            return index_of(world, copy.deepcopy(now).eval(), step) if step % 2 == 0 else None

    journal = MemoryJournal()
    context = tiny_context(journal=journal)
    chosen = options(retriever_refresh_every=2)
    given = (retriever, world.snapshot, QUESTIONS, POSITIVES, chosen, tiny_optimiser())
    train_by_passages(context, *given, Source())
    assert asked == [0, 1, 2, 3, 4, 5]
    assert journal.values("hard_negatives") == [1.0] * 6
    without = MemoryJournal()
    plain, _ = tiny_models(world)
    train_by_passages(tiny_context(journal=without), plain, *given[1:])
    assert without.values("hard_negatives") == [0.0] * 6
    assert all(a > b for a, b in zip(journal.values("loss")[:1], without.values("loss")[:1], strict=True))
