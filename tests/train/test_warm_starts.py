"""Warm starts on twelve passages: the inverse cloze task, the reader's masked words, and towers made from passages."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix
from small_world import MemoryJournal, World, build_world, section, tiny_context, tiny_models
from torch import Tensor

from realmops.artifacts import seed_for
from realmops.corpus.masking import SentencesWithSpans
from realmops.model.build import build_models
from realmops.model.packed import PackedBatch
from realmops.model.reader import Reader
from realmops.model.retriever import Retriever
from realmops.options import Ict
from realmops.search.embed import document_sequences, embed
from realmops.train import inverse_cloze
from realmops.train.initialisation import init_towers, latent_directions, wordpiece_idf
from realmops.train.inverse_cloze import (
    cloze_batch,
    crop_run,
    draw_cloze,
    drop_words,
    ict_steps,
    train_reader,
    train_retriever,
)


def options(**changes: Any) -> Ict:
    values = {"steps": 30, "batch_size": 8, "neighbours": 2, "learning_rate": 3e-3, "removal": 0.9}
    values |= {"reader_steps": 30, "reader_batch_size": 8, "reader_learning_rate": 3e-3}
    return section("ict", **{**values, **changes})


def draws(world: World, passage: int, count: int, **changes: Any) -> list[inverse_cloze.Cloze]:
    rng, chosen, special = np.random.default_rng(0), options(**changes), world.special
    return [draw_cloze(world.snapshot, passage, rng, chosen, special) for _ in range(count)]


def test_a_cloze_query_is_a_uniform_sentence_removed_at_the_rate(world: World) -> None:
    """Passage 3, "Bergen", has three sentences; the title stays."""
    sentences = ["bergen is a port .", "he lived in bergen until 1950 .", "it rains ."]
    examples, queries = draws(world, 3, 3000), list[str]()
    for example in examples:
        query = world.words(example.queries[0]).removeprefix("[CLS] ").removesuffix(" [SEP]")
        rest = [s for s in sentences if not (s == query and example.removed)]
        tokens, segments = example.document
        assert world.words(tokens) == f"[CLS] bergen [SEP] {' '.join(rest)} [SEP]"
        assert segments.tolist() == [0, 0, 0] + [1] * (len(tokens) - 3)
        queries.append(query)
    assert [queries.count(query) / 3000 for query in sentences] == pytest.approx([1 / 3] * 3, abs=0.03)
    assert np.mean([e.removed for e in examples]) == pytest.approx(0.9, abs=0.02)
    for rate in (0.0, 1.0):
        assert [e.removed for e in draws(world, 3, 50, removal=rate)] == [bool(rate)] * 50


def test_a_passage_of_one_sentence_keeps_it(world: World) -> None:
    for example in draws(world, 11, 50, removal=1.0):
        assert example.removed is False
        assert world.words(example.document[0]) == "[CLS] rain [SEP] it rains in bergen . [SEP]"


def test_a_query_is_cut_at_its_limit(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inverse_cloze, "QUERY_WORDPIECES", 5)
    for example in draws(world, 3, 20):
        assert len(example.queries[0]) <= 5
        assert world.words(example.queries[0][[0, -1]]) == "[CLS] [SEP]"


# ---- crops


CROP = {"crops": 3}
TALE = (
    "Oslo",
    "The poet Anna Berg was born there in a small house by the cold sea, where it rains and rains until the ships "
    "of Bergen come in. She wrote a novel. It is set in the port of Norway, and Karl Lund sold it.",
    ("Anna Berg", "Bergen"),
)


@pytest.fixture(scope="module")
def tale(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A passage of some fifty words, and one of two."""
    documents = (TALE, ("Rain", "Rains.", ("Rains",)))
    return build_world(tmp_path_factory.mktemp("tale"), documents, block_wordpieces=200)


CONTINUES = np.array([n % 7 in (2, 3, 6) for n in range(100)])  # wordpieces after the first of a word
BOUNDS = [*np.flatnonzero(~CONTINUES).tolist(), 100]


def test_a_crop_is_a_uniform_run_of_4_to_16_whole_words() -> None:
    """Short passages whole, also those that begin inside a word."""
    rng = np.random.default_rng(0)
    runs = [tuple(map(BOUNDS.index, crop_run(CONTINUES, rng))) for _ in range(6500)]
    counts = np.bincount([end - first for first, end in runs], minlength=17)
    assert counts.tolist() == pytest.approx([0] * 4 + [500] * 13, abs=110), "a deviation is 21"
    assert {first for first, end in runs if end - first == 4} == set(range(len(BOUNDS) - 4))
    for continues in (np.array([False]), np.array([False, True, False]), np.array([True]), np.array([True, False])):
        assert {crop_run(continues, rng) for _ in range(20)} == {(0, len(continues))}


def test_words_are_dropped_whole_and_never_all() -> None:
    """Each with probability 0.3."""
    rng, kept = np.random.default_rng(0), 0
    for _ in range(300):
        left = set(drop_words(np.arange(100), CONTINUES, rng).tolist())
        words = [left & set(range(first, end)) for first, end in pairwise(BOUNDS)]
        assert all(len(word) in (0, end - first) for word, (first, end) in zip(words, pairwise(BOUNDS), strict=True))
        kept += sum(map(bool, words))
        assert drop_words(np.arange(1), CONTINUES[:1], rng).tolist() == [0]
    assert kept / (300 * (len(BOUNDS) - 1)) == pytest.approx(0.7, abs=0.02)


def test_crops_are_removed_from_their_passage_together(tale: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """All three of a passage, or none of them; the rest stays in its order."""
    drawn: list[tuple[int, int]] = []
    usual = inverse_cloze.crop_run
    monkeypatch.setattr(inverse_cloze, "crop_run", lambda *given: (drawn.append(usual(*given)), drawn[-1])[1])
    body, title = tale.snapshot.body(0).tolist(), tale.snapshot.title_tokens(0).tolist()
    head, removed = [tale.special.cls, *title, tale.special.sep], 0
    for example in draws(tale, 0, 300, **CROP, removal=0.5):
        runs, drawn[:] = drawn[:3], drawn[3:]
        covered = {place for first, end in runs for place in range(first, end)}
        rest = [token for place, token in enumerate(body) if place not in covered or not example.removed]
        assert example.document[0].tolist() == [*head, *rest, tale.special.sep]
        for query, (first, end) in zip(example.queries, runs, strict=True):
            assert 2 < len(query) <= end - first + 2
            assert set(query[1:-1].tolist()) <= set(body[first:end])
        removed += example.removed
    assert drawn == []
    assert removed / 300 == pytest.approx(0.5, abs=0.1)
    for example in draws(tale, 1, 20, **CROP, removal=1.0):
        assert example.removed is False, "nothing else would be left"
        assert len(example.document[0]) == len(tale.snapshot.title_tokens(1)) + len(tale.snapshot.body(1)) + 3


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


@pytest.mark.parametrize(("head", "task"), [("normalised", {}), ("cosine", CROP)], ids=["sentences", "crops"])
def test_the_first_loss_equals_the_slow_one(world: World, head: str, task: dict[str, Any]) -> None:
    """Step 0 again by hand, one sequence at a time: the mean over queries of -log of the own passage's share."""
    retriever, _ = tiny_models(world, head=head)
    context, chosen = tiny_context(), options(**task, steps=1)
    rng = np.random.default_rng(seed_for(context.seed, context.stream, "batch", 0))
    examples = [draw_cloze(world.snapshot, int(p), rng, chosen, world.special) for p in cloze_batch(12, 8, 2, rng)]
    losses = []
    with torch.no_grad():
        documents = [retriever.document(PackedBatch([e.document[0]], [e.document[1]]))[0].double() for e in examples]
        for own, example in enumerate(examples):
            assert len(example.queries) == (3 if task else 1)
            for tokens in example.queries:
                query = retriever.query(PackedBatch([tokens]))[0].double()
                f = np.array([float(retriever.scale * query @ document) for document in documents])
                losses.append(-np.log(np.exp(f[own] - f.max()) / np.exp(f - f.max()).sum()))
    journal = MemoryJournal()
    train_retriever(dataclasses.replace(context, journal=journal), retriever, world.snapshot, chosen)
    assert journal.values("loss") == pytest.approx([np.mean(losses)], rel=1e-4)


class Spy(Reader):
    """A reader that records its examples: x, with the targets in their places, z and the masked places of x."""

    seen: list[tuple[np.ndarray, np.ndarray, list[int]]]

    def log_token(self, batch: PackedBatch, rows_M: Tensor, targets_M: Tensor, *where: Any) -> Tensor:
        tokens_T = batch.tokens_T.clone()
        assert len(tokens_T[rows_M].unique()) == 1, "the mask"
        assert (tokens_T == tokens_T[rows_M[0]]).sum() == len(rows_M)
        tokens_T[rows_M] = targets_M
        for start, end in zip(batch.starts[:-1], batch.starts[1:], strict=True):
            inner = int(batch.segments_T[start:end].argmax()) - 1  # the row of the [SEP] between x and z
            tokens = tokens_T[start:end].numpy()
            masked = (rows_M[(rows_M > start) & (rows_M < start + inner)] - start - 1).tolist()
            self.seen.append((tokens[1:inner], tokens[inner + 1 : -1], masked))
        return super().log_token(batch, rows_M, targets_M, *where)


def seen_examples(world: World, held_out: Sequence[int] = ()) -> list[tuple[np.ndarray, np.ndarray, list[int]]]:
    _, reader = tiny_models(world)
    spy = Spy(reader.bert, reader.masked_words)
    spy.seen = []
    train_reader(tiny_context(), spy, world.snapshot, world.spans, options(), 64, held_out)
    return spy.seen


def test_neighbours_are_the_four_nearest_by_bm25_over_wordpieces(world: World, tmp_path: Path) -> None:
    """Against bm25s, for every sentence; equally near passages are interchangeable."""
    import bm25s

    theirs, snapshot = bm25s.BM25(backend="numpy"), world.snapshot
    theirs.index([list(map(str, snapshot.body(p).tolist())) for p in range(len(snapshot))], show_progress=False)
    neighbours = inverse_cloze.Neighbours(snapshot, tmp_path / "neighbours")
    assert not (tmp_path / "neighbours").exists(), "not before the first draw"
    for passage, first, end in snapshot.sentence_rows.tolist():
        sentence = snapshot.body(passage)[first:end]
        score_P = theirs.get_scores(list(map(str, sentence.tolist())))
        score_P[passage] = -np.inf
        drawn = {neighbours.draw(sentence, passage, np.random.default_rng(seed)) for seed in range(60)}
        assert sorted(score_P[list(drawn)]) == pytest.approx(sorted(score_P)[-4:], rel=1e-5)
    alone = np.array([snapshot.tokenizer.get_vocab_size()])
    assert neighbours.draw(alone, 5, np.random.default_rng(0)) == 5, "no passage has it"


def test_the_reader_reads_a_masked_sentence_with_every_kind_of_passage(world: World) -> None:
    """A salient span is masked whole, and other wordpieces as in BERT."""
    rows = SentencesWithSpans(world.snapshot, world.spans)[:]
    sentences = {world.snapshot.body(int(p))[a:b].tobytes(): int(p) for p, a, b, _, _ in rows}
    spans = {
        (world.snapshot.body(int(p))[a:b].tobytes(), tuple(range(s - a, t - a))) for p, a, b, s, t in rows.tolist()
    }
    bodies = {world.snapshot.body(i).tobytes(): i for i in range(len(world.snapshot))}
    kinds = {"own": 0, "other": 0, "null": 0}
    extra = 0
    for x, z, masked in seen_examples(world):
        mine = [set(span) for sentence, span in spans if sentence == x.tobytes()]
        assert any(span <= set(masked) for span in mine)
        extra += set(masked) not in mine
        if len(z) == 0:
            kinds["null"] += 1
        else:
            kinds["own" if bodies[z.tobytes()] == sentences[x.tobytes()] else "other"] += 1
    assert sum(kinds.values()) == 30 * 8
    assert min(kinds.values()) > 15, kinds
    assert extra > 50


def test_the_reader_is_not_trained_on_held_out_sentences(world: World) -> None:
    """Those of spans 0 and 6 are never x, whichever span is masked; not all can be held out."""
    rows = SentencesWithSpans(world.snapshot, world.spans)[:]
    held = {world.snapshot.body(int(p))[a:b].tobytes() for p, a, b, _, _ in rows[[0, 6]]}
    everything, without, all_held = (
        {x.tobytes() for x, _, _ in seen_examples(world, held_out)} for held_out in ((), [0, 6], range(len(rows)))
    )
    assert held <= everything
    assert without == everything - held
    assert all_held == everything


def test_steps_are_limited_by_epochs() -> None:
    few = options(steps=60, batch_size=32, reader_steps=40, reader_batch_size=16, epochs=1)
    assert ict_steps(170, few) == (6, 11)
    assert ict_steps(10, few) == (1, 1), "a batch has each passage once"
    assert ict_steps(170, few.model_copy(update={"epochs": 0})) == (60, 40)
    assert ict_steps(170, few.model_copy(update={"epochs": 0.5})) == (3, 6)


# ---- towers made from passages: LSI against a slow version


def no_bar(label: str, total: int) -> Callable[[int], None]:
    return lambda count: None


def bag_of(world: World, seed: int = 0, **changes: Any) -> Retriever:
    options = section("retriever", **{"tower": "bag", "head": "cosine", "embedding_width": 8, **changes})
    size = world.snapshot.tokenizer.get_vocab_size()
    retriever, _ = build_models(section("bert", width=16, heads=2), options, section("reader"), size, seed)
    init_towers(retriever, world.snapshot, seed, no_bar)
    return retriever


def test_rare_wordpieces_weigh_more_and_absent_ones_nothing() -> None:
    """Of 10 passages 1 and 9 have it: log(1 + 9.5 / 1.5) and log(1 + 1.5 / 9.5)."""
    idf_V = wordpiece_idf(np.array([1, 9, 0]), 10)
    assert idf_V.tolist() == pytest.approx([math.log(1 + 9.5 / 1.5), math.log(1 + 1.5 / 9.5), 0.0])


def test_directions_are_the_singular_vectors() -> None:
    """Of a matrix with a clear order, against numpy's whole decomposition."""
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.standard_normal((n, 12)))[0] for n in (60, 40))
    matrix = (left * 2.0 ** -np.arange(12)) @ right.T
    found_VE = latent_directions(csr_matrix(matrix.astype(np.float32)), 6, seed=0)
    theirs_VE = np.linalg.svd(matrix)[2][:6].T
    assert np.abs((found_VE * theirs_VE).sum(0)) == pytest.approx(np.ones(6), abs=1e-4)
    assert found_VE.T @ found_VE == pytest.approx(np.eye(6), abs=1e-4)
    assert (found_VE[np.abs(found_VE).argmax(0), range(6)] > 0).all(), "the sign is fixed"


@pytest.mark.parametrize(("passages", "words", "width"), [(3, 40, 8), (60, 9, 9), (1, 5, 5)])
def test_directions_beyond_the_rank_are_orthogonal_too(passages: int, words: int, width: int) -> None:
    matrix = np.random.default_rng(0).random((passages, words)).astype(np.float32)
    found_VE = latent_directions(csr_matrix(matrix), width, seed=0)
    assert found_VE.T @ found_VE == pytest.approx(np.eye(width), abs=1e-3)


def test_a_bag_starts_as_lsi_times_idf(world: World) -> None:
    """In full width, cosines are those of tf-idf vectors themselves: an orthogonal turn of all dimensions."""
    size = world.snapshot.tokenizer.get_vocab_size()
    retriever = bag_of(world, embedding_width=size)
    sequences = document_sequences(world.snapshot, range(12))
    special = {world.snapshot.tokenizer.token_to_id(f"[{name}]") for name in ("CLS", "SEP", "MASK", "UNK", "PAD")}
    count_PV = np.zeros((12, size))
    for passage, (tokens, _) in enumerate(sequences):
        for token in tokens:
            count_PV[passage, token] += token not in special
    idf_V = wordpiece_idf((count_PV > 0).sum(0), 12)
    slow_PV = count_PV * idf_V
    slow_PV /= np.linalg.norm(slow_PV, axis=1, keepdims=True)
    embedding_PE = embed(retriever.document, sequences, torch.float32).numpy()
    assert embedding_PE @ embedding_PE.T == pytest.approx(slow_PV @ slow_PV.T, abs=1e-3)


@pytest.mark.parametrize("form", [{}, {"projection": "identity", "embedding_width": 0}])
def test_other_towers_do_not_change(world: World, form: dict[str, Any]) -> None:
    retriever, _ = tiny_models(world, **form)
    before = {name: tensor.clone() for name, tensor in retriever.state_dict().items()}
    init_towers(retriever, world.snapshot, 0, no_bar)
    assert all(torch.equal(tensor, before[name]) for name, tensor in retriever.state_dict().items())
