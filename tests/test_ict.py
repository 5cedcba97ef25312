"""Warm starts on twelve passages: what an inverse cloze example is, what a batch is, and that both trainings learn."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from tiny import MemoryJournal, World, section, tiny_context, tiny_models, tiny_optimiser
from torch import Tensor

from realmops.bert import Packed
from realmops.config import Ict
from realmops.model.reader import Reader
from realmops.train import ict
from realmops.train.ict import cloze, cloze_batch, sentences_with_spans, train_reader, train_retriever

ONE_SENTENCE = 11


def options(**changes: Any) -> Ict:
    values = {"steps": 30, "batch_size": 8, "neighbours": 2, "learning_rate": 3e-3, "removal": 0.9}
    values |= {"reader_steps": 30, "reader_batch_size": 8, "reader_learning_rate": 3e-3, "reader_wordpieces": 64}
    found: Ict = section("ict", **{**values, "query_wordpieces": 64, "checkpoint_every": 100, **changes})
    return found


def draws(world: World, passage: int, count: int, **changes: Any) -> list[ict.Cloze]:
    rng, chosen, special = np.random.default_rng(0), options(**changes), world.special
    return [cloze(world.snapshot, passage, rng, chosen, special) for _ in range(count)]


def test_a_cloze_example_by_hand(world: World) -> None:
    """Passage 3, "Bergen": each of its three sentences is the query, taken out of the document or left in."""
    sentences = ["bergen is a port .", "he lived in bergen until 1950 .", "it rains ."]
    seen = set()
    for example in draws(world, 3, 200, removal=0.5):
        query = world.words(example.query).removeprefix("[CLS] ").removesuffix(" [SEP]")
        seen.add((query, example.removed))
        rest = [s for s in sentences if not (s == query and example.removed)]
        tokens, segments = example.document
        assert world.words(tokens) == f"[CLS] bergen [SEP] {' '.join(rest)} [SEP]", "the title stays"
        assert segments.tolist() == [0, 0, 0] + [1] * (len(tokens) - 3)
    assert seen == {(sentence, removed) for sentence in sentences for removed in (True, False)}


def test_sentences_are_uniform_and_removed_at_the_rate(world: World) -> None:
    """3,000 draws: 0.9 removed (deviation 0.0055), each of three sentences a third (deviation 0.009)."""
    examples = draws(world, 3, 3000)
    assert np.mean([e.removed for e in examples]) == pytest.approx(0.9, abs=0.02)
    queries = [world.words(e.query) for e in examples]
    shares = [queries.count(query) / 3000 for query in sorted(set(queries))]
    assert shares == pytest.approx([1 / 3] * 3, abs=0.03)
    assert [e.removed for e in draws(world, 3, 50, removal=0.0)] == [False] * 50
    assert [e.removed for e in draws(world, 3, 50, removal=1.0)] == [True] * 50


def test_a_passage_of_one_sentence_keeps_it(world: World) -> None:
    for example in draws(world, ONE_SENTENCE, 50, removal=1.0):
        assert example.removed is False
        assert world.words(example.document[0]) == "[CLS] rain [SEP] it rains in bergen . [SEP]"
        assert world.words(example.query) == "[CLS] it rains in bergen . [SEP]"


def test_queries_and_documents_are_cut_at_their_limits(world: World) -> None:
    for example in draws(world, 3, 20, query_wordpieces=5):
        assert len(example.query) <= 5
        assert world.words(example.query[[0, -1]]) == "[CLS] [SEP]"
        assert len(example.document[0]) <= world.snapshot.block_wordpieces


@pytest.mark.parametrize(
    ("count", "batch_size", "neighbours"),
    [(12, 8, 4), (12, 8, 3), (12, 8, 1), (12, 12, 5), (12, 50, 4), (13, 8, 4), (13, 13, 4), (1, 8, 4), (100, 32, 4)],
)
def test_batches_are_runs_of_neighbours(count: int, batch_size: int, neighbours: int) -> None:
    """No passage twice, as many as asked for, every passage within reach, runs of consecutive passages."""
    reached: set[int] = set()
    for seed in range(200):
        batch = cloze_batch(count, batch_size, neighbours, np.random.default_rng(seed))
        assert len(batch) == len(set(batch.tolist())) == min(batch_size, count)
        assert batch.min() >= 0
        assert batch.max() < count
        reached.update(batch.tolist())
        runs = 1 + int((np.diff(batch) != 1).sum())
        assert runs <= -(-len(batch) // neighbours) + 1
    assert reached == set(range(count))


def test_batches_differ_by_seed_and_repeat() -> None:
    batches = [cloze_batch(100, 32, 4, np.random.default_rng(seed)).tolist() for seed in (0, 1, 0)]
    assert batches[0] == batches[2] != batches[1]


def test_the_retriever_learns_the_inverse_cloze_task(world: World) -> None:
    """30 steps on twelve passages: the loss falls, and both accuracies are logged where there is something to log."""
    retriever, _ = tiny_models(world)
    journal = MemoryJournal()
    train_retriever(tiny_context(journal=journal), retriever, world.snapshot, options(), tiny_optimiser())
    loss = journal.values("loss")
    assert len(loss) == 30
    assert np.mean(loss[-5:]) < 0.7 * np.mean(loss[:5])
    assert journal.values("accuracy_removed")
    assert len(journal.values("accuracy_kept")) < 30, "some batches have no kept sentence"
    for name in ("accuracy_removed", "accuracy_kept"):
        assert all(0 <= value <= 1 for value in journal.values(name))


def test_the_first_loss_is_the_slow_ones(world: World) -> None:
    """Step 0 again by hand: one sequence at a time, -log of the own passage's share among the batch's."""
    retriever, _ = tiny_models(world)
    context = tiny_context()
    rng = np.random.default_rng(ict.seed_for(context.seed, context.stream, "batch", 0))
    passages = cloze_batch(12, 8, 2, rng)
    examples = [cloze(world.snapshot, int(p), rng, options(), world.special) for p in passages]
    total = 0.0
    with torch.no_grad():
        documents = [retriever.document(Packed([e.document[0]], [e.document[1]]))[0].double() for e in examples]
        for own, example in enumerate(examples):
            query = retriever.query(Packed([example.query]))[0].double()
            f = [float(retriever.scale * query @ document) for document in documents]
            total += -np.log(np.exp(f[own]) / np.sum(np.exp(f)))
    journal = MemoryJournal()
    train_retriever(
        dataclasses.replace(context, journal=journal), retriever, world.snapshot, options(steps=1), tiny_optimiser()
    )
    assert journal.values("loss") == pytest.approx([total / len(examples)], rel=1e-4)


def test_rows_of_sentences_with_spans(world: World) -> None:
    """Passage 1, "The Cold Sea": Anna Berg in its first sentence, Oslo in its second."""
    rows = sentences_with_spans(world.snapshot, world.spans)
    assert rows.dtype == np.int64
    found = [
        (world.words(world.snapshot.body(1)[first:end]), world.words(world.snapshot.body(1)[start:stop]))
        for passage, first, end, start, stop in rows
        if passage == 1
    ]
    assert found == [("the cold sea is a novel by anna berg .", "anna berg"), ("it is set in oslo .", "oslo")]


def test_a_corpus_without_spans_is_refused(world: World) -> None:
    class NoSpans:
        rows = np.zeros((0, 6), dtype=np.int32)
        folder = "some/tag"

    with pytest.raises(ValueError, match="some/tag holds no salient span: nothing can be masked; see the tag"):
        sentences_with_spans(world.snapshot, NoSpans())  # type: ignore[arg-type]


class Spy(Reader):
    """A reader that keeps what it was asked."""

    def log_token(self, batch: Packed, rows_M: Tensor, targets_M: Tensor) -> Tensor:
        self.asked = [*getattr(self, "asked", []), (batch, rows_M, targets_M)]
        return super().log_token(batch, rows_M, targets_M)


def test_the_readers_examples(world: World) -> None:
    """[CLS] sentence [SEP] passage [SEP] with a salient span masked whole; every kind of passage occurs."""
    _, reader = tiny_models(world)
    spy = Spy(reader.bert, reader.masked_words)
    train_reader(tiny_context(), spy, world.snapshot, world.spans, options(), tiny_optimiser())
    rows = sentences_with_spans(world.snapshot, world.spans)
    sentences = {world.snapshot.body(int(p))[a:b].tobytes(): int(p) for p, a, b, _, _ in rows}
    spans = {
        (world.snapshot.body(int(p))[a:b].tobytes(), tuple(range(s - a, t - a))) for p, a, b, s, t in rows.tolist()
    }
    bodies = {world.snapshot.body(i).tobytes(): i for i in range(len(world.snapshot))}
    kinds = {"own": 0, "other": 0, "null": 0}
    extra = 0
    for batch, rows_M, targets_M in spy.asked:
        tokens_T = batch.tokens_T.clone()
        assert (tokens_T[rows_M] == world.special.mask).all()
        assert (tokens_T == world.special.mask).sum() == len(rows_M)
        tokens_T[rows_M] = targets_M
        for start, end in zip(batch.starts[:-1], batch.starts[1:], strict=True):
            tokens, segments = tokens_T[start:end].numpy(), batch.segments_T[start:end].numpy()
            inner = int(segments.argmax()) - 1  # the row of the [SEP] between x and z
            x, z = tokens[1:inner], tokens[inner + 1 : -1]
            masked = (rows_M[(rows_M > start) & (rows_M < start + inner)] - start - 1).tolist()
            assert any(set(span) <= set(masked) for sentence, span in spans if sentence == x.tobytes())
            extra += not any(set(span) == set(masked) for sentence, span in spans if sentence == x.tobytes())
            if len(z) == 0:
                kinds["null"] += 1
            else:
                kinds["own" if bodies[z.tobytes()] == sentences[x.tobytes()] else "other"] += 1
    assert sum(kinds.values()) == 30 * 8
    assert min(kinds.values()) > 15, kinds
    assert extra > 50, "other wordpieces are masked as in BERT"


def test_the_reader_learns_masked_words(world: World) -> None:
    _, reader = tiny_models(world)
    journal = MemoryJournal()
    train_reader(
        tiny_context(journal=journal), reader, world.snapshot, world.spans, options(reader_steps=60), tiny_optimiser()
    )
    loss = journal.values("loss")
    assert np.mean(loss[-5:]) < 0.8 * np.mean(loss[:5])
