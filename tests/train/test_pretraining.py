"""REALM pre-training on twelve passages: examples, candidates, indexes and the loop; the loss is in test_reader.py."""

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from small_world import (
    MemoryJournal,
    World,
    build_world,
    index_of,
    killed_and_resumed,
    same_parameters,
    section,
    tiny_context,
    tiny_models,
)
from torch import Tensor

from realmops.model.encoder import Encoder
from realmops.model.packed import PackedBatch
from realmops.model.reader import Reader
from realmops.model.retriever import Retriever
from realmops.model.sequences import join_query
from realmops.options import Pretrain
from realmops.refresh.trainer import TrainerSide
from realmops.search.embed import document_sequences, embed, query_sequences
from realmops.search.exact import ExactIndex
from realmops.train import index_source
from realmops.train import realm as module
from realmops.train.index_source import ExchangeSource, Index, RefreshSchedule
from realmops.train.masked_sentences import Example, Examples
from realmops.train.parallel import SINGLE_PROCESS
from realmops.train.pretraining import COLLAPSE_WINDOW, Candidates, CollapseAlarm, find_run, pretrain
from realmops.train.realm import Realm

FP32 = torch.float32
NOTHING = np.zeros(0, dtype=np.int64)


def options(**changes: Any) -> Pretrain:
    steps = {"steps": 10, "batch_size": 4, "refresh_every": 4, "lag": 2}
    rates = {"retriever_delay": 0, "retriever_learning_rate": 1e-2, "reader_learning_rate": 1e-2}
    lengths = {"reader_wordpieces": 60, "candidates": 4, "masking": "salient"}
    return section("pretrain", **{**steps, **rates, **lengths, **changes})


def row_of(world: World, passage: int, span: int) -> int:
    return int(world.spans.offsets[passage]) + span


def example(world: World, passage: int, span: int, **changes: Any) -> Example:
    examples = Examples(world.snapshot, world.spans, options(**changes))
    return examples.example(row_of(world, passage, span), np.random.default_rng(0))


def ranked_index(world: World, order: Sequence[int] | None = None) -> tuple[Index, Tensor]:
    """Return an index that ranks passages in this order (0, 1, 2 ... without it), and a query for it."""
    retriever, count = tiny_models(world)[0], len(world.snapshot)
    embedding_PE = torch.zeros(count, retriever.query.projection.out_features)
    for rank, passage in enumerate(order or range(count)):
        embedding_PE[passage, 0] = float(count - rank)
    query_E = torch.zeros(embedding_PE.shape[1])
    query_E[0] = 1.0
    return Index(0, ExactIndex(embedding_PE), retriever, 0.0, True), query_E


# ---- examples


def test_an_example_is_one_sentence_with_one_span_masked(world: World) -> None:
    """Passage 1, "The Cold Sea", second span: Oslo in "It is set in Oslo." """
    masked = example(world, 1, 1)
    assert masked.passage == 1
    texts = [world.words(tokens) for tokens in (masked.original, masked.x, masked.targets)]
    assert texts == ["it is set in oslo .", "it is set in [MASK] .", "oslo"]
    assert (masked.original[masked.positions] == masked.targets).all()
    assert world.special.mask not in world.snapshot.body(1), "the snapshot does not change"


def test_passages_are_uniform_and_so_are_their_spans(world: World) -> None:
    """12 passages, 22 spans: 4,800 draws give each passage 400 (deviation 19) and each of two spans 200."""
    examples = Examples(world.snapshot, world.spans, options())
    rng = np.random.default_rng(0)
    found = [examples.draw(rng) for _ in range(4800)]
    passages = np.bincount([e.passage for e in found])
    assert passages.tolist() == pytest.approx([400] * 12, abs=80)
    masked = [world.words(e.targets) for e in found if e.passage == 6]
    assert sorted(set(masked)) == ["1972", "maria holm"]
    assert masked.count("1972") == pytest.approx(len(masked) / 2, abs=50)


def test_long_sentences_are_cut_around_the_span(tmp_path: Path) -> None:
    """Room for 10 wordpieces: spans at the start, after the limit, and longer than the room."""
    text = f"Anna {'in it ' * 20}was Oslo then."
    world = build_world(tmp_path, (("Long", text, ("Anna", "Oslo", text[7:80], text[:-1])),), block_wordpieces=200)
    chosen = options(reader_wordpieces=13)
    body = world.snapshot.body(0).tolist()
    spans = [(int(start), int(end)) for start, end in world.spans.of(0)[:, 2:4]]
    assert max(end - start for start, end in spans) > 10
    for row, (start, end) in enumerate(spans):
        examples = Examples(world.snapshot, world.spans, chosen)
        found = examples.example(row, np.random.default_rng(0))
        assert len(found.original) <= 10
        places = [i for i in range(len(body)) if body[i : i + len(found.original)] == found.original.tolist()]
        masks = found.positions
        assert (np.diff(masks) == 1).all()
        assert any(start <= at + masks[0] and at + masks[-1] < end for at in places), "masks are in the span"
        assert len(masks) == min(end - start, 10 - start if start < 10 else 10)


# ---- candidates


def retrieve(world: World, sentences: Sequence[Example], index: Index, query_E: Tensor, **changes: Any) -> Any:
    candidates = Candidates(world.snapshot, options(**changes))
    return candidates.retrieve(sentences, query_E.expand(len(sentences), -1), index), dict(candidates.counts)


def test_trivial_candidates_are_dropped_by_id_and_by_containment(world: World) -> None:
    """ "He lived in Bergen until 1950." is in passage 2 and, word for word, in passage 3."""
    index = ranked_index(world)
    sentences = [example(world, 2, 1), example(world, 4, 0)]
    passages, counts = retrieve(world, sentences, *index, candidates=8)
    assert passages == [[0, 1, 4, 5, 6, 7, 8], [0, 1, 2, 3, 5, 6, 7]], "best first, seven next to the null document"
    assert counts == {"dropped_own": 2, "dropped_containing": 1, "short": 0}
    passages, _ = retrieve(world, sentences[:1], *index, candidates=8, exclude_trivial=False)
    assert passages == [[0, 1, 2, 3, 4, 5, 6]]
    passages, _ = retrieve(world, sentences[:1], *index, candidates=8, null_document=False)
    assert passages == [[0, 1, 4, 5, 6, 7, 8, 9]]
    elsewhere = Examples(world.snapshot, world.spans, options(), elsewhere=True)
    foreign = elsewhere.example(row_of(world, 4, 0), np.random.default_rng(0))
    assert retrieve(world, [foreign], *index) == ([[0, 1, 2]], {"short": 0}), "no passage of its text"
    index = ranked_index(world, order=[3, 11, *range(3), *range(4, 11)])
    passages, counts = retrieve(world, [example(world, 3, 0)], *index)
    assert (passages[0][0], counts) == (11, {"dropped_own": 1, "short": 0}), "containing the masked form is not enough"


def test_containment_is_of_wordpieces_in_sequence() -> None:
    """256 and 1 are in memory as 0 1 0 0 ... and 1 0 0 0 ...: equal bytes at a shifted place are no match."""
    rng = np.random.default_rng(0)
    for _ in range(2000):
        body = rng.choice([0, 1, 256, 65536], size=rng.integers(0, 9)).astype(np.int64)
        run = rng.choice([0, 1, 256, 65536], size=rng.integers(0, 4)).astype(np.int64)
        starts = [i for i in range(len(body) + 1) if body[i : i + len(run)].tolist() == run.tolist()]
        assert bool(starts) == any(True for _ in find_run(body, run)), (body, run)


@dataclass(frozen=True)
class CountedIndex(ExactIndex):
    """An index that records how many passages each search requests."""

    depths: list[int] = field(default_factory=list)

    def search(self, query_QE: Tensor, k: int) -> tuple[Tensor, Tensor]:
        self.depths.append(k)
        return super().search(query_QE, k)


@pytest.mark.parametrize(
    ("copies", "others", "passages", "depths", "short"),
    [(9, 20, [9, 10], [10, 160], 0), (20, 20, [20, 21], [10, 160], 0), (3, 20, [3, 4], [10], 0), (1, 1, [1], [10], 1)],
    ids=["most are copies", "more copies than the first search finds", "enough", "a small corpus"],
)
def test_a_search_is_repeated_deeper_only_if_candidates_are_missing(
    tmp_path: Path, copies: int, others: int, passages: list[int], depths: list[int], short: int
) -> None:
    documents = [(f"Copy {i}", "Anna was in Oslo.", ("Oslo",)) for i in range(copies)]
    documents += [(f"Other {i}", f"Jon saw {i} ships.", ("Jon",)) for i in range(others)]
    world = build_world(tmp_path, tuple(documents))
    index, query_E = ranked_index(world)
    index.passages = counted = CountedIndex(index.passages.vectors(slice(None)))
    found, counts = retrieve(world, [example(world, 0, 0)], index, query_E, candidates=3)
    assert (found, counted.depths, counts["short"]) == ([passages], depths, short)


# ---- the loss


def test_the_crop_loss_equals_the_slow_one(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """``crop_weight`` of it is added to the loss, unless the retriever is frozen."""
    retriever, reader = tiny_models(world)
    examples, found = [example(world, 0, 0), example(world, 6, 0)], [[4, 1, 5], [7, 2, 8]]
    realm = Realm(retriever, reader, world.snapshot, options(crop_weight=0.25, batch_size=2), FP32)
    queries: list[np.ndarray] = []
    joined = module.join_query

    def spy(x: np.ndarray, *more: Any) -> np.ndarray:
        queries.append(joined(x, *more))
        return queries[-1]

    def loss(learns: bool, seed: int | None) -> tuple[float, dict[str, float]]:
        crops = None if seed is None else np.random.default_rng(seed)
        value, later = realm.loss(examples, found, retriever_learns=learns, crops=crops)
        return value.item(), later.now()

    plain, _ = loss(True, None)
    assert loss(False, 0)[0] == pytest.approx(plain)
    monkeypatch.setattr(module, "join_query", spy)
    whole, metrics = loss(True, 0)
    assert whole == pytest.approx(plain + 0.25 * metrics["crop_loss"], rel=1e-5)
    passages, expected = [1, 2, 4, 5, 7, 8], []
    places = np.random.default_rng(0).integers(len(passages), size=2).tolist()
    sequences = document_sequences(world.snapshot, passages)
    with torch.no_grad():
        documents = [retriever.document(PackedBatch([tokens], [segments]))[0] for tokens, segments in sequences]
        for place, crop in zip(places, queries[-2:], strict=True):
            query = retriever.query(PackedBatch([crop]))[0]
            f = [math.exp(float(retriever.scale * query @ document)) for document in documents]
            expected.append(-math.log(f[place] / sum(f)))
    assert retriever.scale != 1.0
    assert metrics["crop_loss"] == pytest.approx(sum(expected) / 2, rel=1e-4)


def test_a_sentence_without_any_candidate_is_refused(world: World) -> None:
    retriever, reader = tiny_models(world)
    realm = Realm(retriever, reader, world.snapshot, options(null_document=False), FP32)
    with pytest.raises(ValueError, match=r"no candidate.*pretrain\.null_document is false; set it to true"):
        realm.loss([example(world, 0, 0)], [[]], retriever_learns=True)


# ---- collapse


@pytest.mark.parametrize(
    ("p_null", "first", "message"),
    [
        (0.95, list(range(8)), "the null document has 95% of p"),
        (0.1, [7] * 19 + [3], "passage 7 ranks first for 95% of the queries"),
        (0.1, [7] * 9 + [3], None),
        (0.5, [], None),
    ],
    ids=["null document", "one passage", "nine of ten", "no candidates"],
)
def test_the_alarm_warns_once_of_a_collapse(p_null: float, first: list[int], message: str | None) -> None:
    warnings: list[str] = []
    alarm = CollapseAlarm(warnings.append)
    states = [alarm.watch(step, p_null, first) for step in range(COLLAPSE_WINDOW + 10)]
    assert states == [False] * (COLLAPSE_WINDOW - 1) + [message is not None] * 11
    assert len(warnings) == (message is not None)
    assert not warnings or f"step {COLLAPSE_WINDOW - 1}: the retriever has collapsed: {message}" in warnings[0]


def test_the_alarm_considers_the_last_steps_only() -> None:
    """Collapsed, recovered, collapsed again."""
    alarm = CollapseAlarm(lambda message: None)
    states = [alarm.watch(s, 1.0 if s < 60 or s >= 160 else 0.0, range(s, s + 8)) for s in range(240)]
    assert (states[59], states[140], states[239]) == (True, False, True)


# ---- the loop


class Source:
    """Indexes weights immediately and yields an index after the lag; its indexes survive a process."""

    def __init__(self, world: World, chosen: Pretrain, published: dict[int, Index]) -> None:
        self.world, self.options, self.published = world, chosen, published
        self.in_use: int | None = None
        self.adopted: list[int] = []

    def at_step(self, step: int, retriever: Retriever) -> Iterator[Index]:
        if step % self.options.refresh_every == 0:
            self.published[step] = index_of(self.world, copy.deepcopy(retriever).eval(), step)
        refresh = RefreshSchedule(self.options)
        before, due = (refresh.generation(max(at, 0)) for at in (step - 1, step))
        for generation in dict.fromkeys([due] if self.in_use is not None else [before, due]):
            if generation != self.in_use:
                self.in_use = generation
                self.adopted.append(generation)
                yield replace(self.published[generation], new=step == 0 or generation != before)


def run(
    world: World, chosen: Pretrain, *, published: dict[int, Index] | None = None, **context: Any
) -> tuple[Retriever, Reader, MemoryJournal, Source, list[str]]:
    retriever, reader = tiny_models(world, dropout=0.1)
    source, warnings = Source(world, chosen, {} if published is None else published), list[str]()
    surroundings = tiny_context(**{"checkpoint_every": chosen.refresh_every, **context})
    pretrain(
        surroundings,
        Realm(retriever, reader, world.snapshot, chosen, FP32),
        Examples(world.snapshot, world.spans, chosen),
        source,
        evaluate=lambda index: {"recall_at_5": index.step / 100},
        warn=warnings.append,
    )
    return retriever, reader, surroundings.journal, source, warnings


def test_the_loop_adopts_indexes_and_logs_staleness(world: World) -> None:
    """Weights of steps 0, 4 and 8; in use two steps later: staleness 0 ... 5, then 2 ... 5."""
    _, _, journal, source, warnings = run(world, options(steps=10))
    assert source.adopted == [0, 4]
    assert journal.values("staleness_steps") == [0, 1, 2, 3, 4, 5, 2, 3, 4, 5]
    lines = journal.lines()
    assert [line["step"] for line in lines if "refreshed" in line] == [0, 6]
    assert [line["recall_at_5"] for line in lines if "recall_at_5" in line] == [0.0, 0.04]
    assert ["top_k_change" in line for line in lines] == [step == 6 for step in range(10)]
    assert 0 <= lines[6]["top_k_change"] <= 1
    assert all(line["staleness_seconds"] > 0 for line in lines)
    assert all(0 <= line["dropped_own"] <= 4 for line in lines if "dropped_own" in line)
    assert any("dropped_own" in line for line in lines)
    assert warnings == []


@pytest.mark.parametrize(("kill_at", "every"), [(1, 4), (4, 4), (5, 4), (7, 4), (9, 4), (5, 1), (7, 1)])
def test_killed_and_resumed_it_ends_with_the_same_bits(world: World, kill_at: int, every: int) -> None:
    """Before the first checkpoint, on one, between publication and adoption of an index, where one is adopted."""
    chosen, published = options(steps=10, retriever_delay=1), dict[int, Index]()

    def life(**surroundings: Any) -> Any:
        if not surroundings["checkpoints"].saved:
            published.clear()
        return run(world, chosen, published=published, checkpoint_every=every, **surroundings)

    expected, (found, journal) = run(world, chosen), killed_and_resumed(life, kill_at)
    for ours, theirs in zip(found[:2], expected[:2], strict=True):
        same_parameters(ours, theirs)
    assert journal.without_times() == expected[2].without_times()


def test_gradient_checkpointing_ends_with_the_same_bits(world: World) -> None:
    *expected, journal, _, _ = run(world, options(steps=3, crop_weight=0.5))
    *found, other, _, _ = run(world, options(steps=3, crop_weight=0.5, gradient_checkpointing=True))
    for ours, theirs in zip(found, expected, strict=True):
        encoders = [module for module in ours.modules() if isinstance(module, Encoder)]
        assert encoders
        assert all(encoder.model.is_gradient_checkpointing for encoder in encoders)
        same_parameters(ours, theirs)
    assert other.without_times() == journal.without_times()


def test_the_retriever_is_frozen_and_its_index_not_stale_during_the_delay(world: World) -> None:
    start, reader_start = tiny_models(world, dropout=0.1)
    retriever, reader, *_ = run(world, options(steps=3, retriever_delay=3))
    same_parameters(retriever, start)
    assert not torch.equal(reader.bert.word_vectors, reader_start.bert.word_vectors)
    retriever, _, journal, _, _ = run(world, options(steps=6, retriever_delay=3, refresh_every=100))
    assert not torch.equal(retriever.query.projection.weight, start.query.projection.weight)
    assert journal.values("staleness_steps") == [0, 0, 0, 0, 1, 2]


@pytest.mark.parametrize("query_encoder", ["snapshot", "fresh"])
def test_the_query_encoder_is_that_of_the_index_or_the_trained_one(
    world: World, query_encoder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At step 3 the index of step 0 is in use."""
    searches: list[tuple[Sequence[Example], Tensor]] = []
    real = Candidates.retrieve

    def spy(self: Candidates, examples: Sequence[Example], query_BE: Tensor, index: Index) -> list[list[int]]:
        searches.append((examples, query_BE))
        return real(self, examples, query_BE, index)

    monkeypatch.setattr(Candidates, "retrieve", spy)
    chosen = options(steps=4, query_encoder=query_encoder)
    _, _, _, source, _ = run(world, chosen)
    examples, query_BE = searches[3]
    queries = query_sequences([join_query(e.x, world.special, chosen.query_wordpieces) for e in examples])
    old_BE = embed(source.published[0].retriever.query, queries, FP32)
    assert torch.equal(query_BE, old_BE) is (query_encoder == "snapshot")


# ---- the indexes of the exchange


class SeenTrainer:
    """A trainer's exchange that records which weights were published, and which index was requested at each step."""

    def __init__(self) -> None:
        self.published, self.requested = list[int](), dict[int, int]()
        self.step, self.index_step, self.lacks_index = 0, 0, False

    def beat(self, step: int) -> None:
        self.step = step

    def publish_weights(self, step: int, files: dict[str, bytes], meta: dict[str, Any]) -> None:
        self.published.append(step)

    def index_for(self, step: int) -> Any:
        self.requested[self.step] = self.index_step = step
        return SimpleNamespace(step=step, files={"embeddings.safetensors": b""}, meta={"published": 0.0})


@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("delay", [0, 1, 2, 4, 5, 20])
def test_the_weights_that_are_published_are_those_whose_index_is_adopted(
    world: World, monkeypatch: pytest.MonkeyPatch, every: int, lag: int, delay: int
) -> None:
    """In its first ``delay`` steps the retriever is frozen: the weights of step ``delay`` are those of step 0.

    A process that resumes at a step adopts the index before it, too.
    """
    monkeypatch.setattr(index_source, "EMBEDDINGS", "embeddings.safetensors")
    monkeypatch.setattr(index_source, "retriever_files", lambda *_: {})
    monkeypatch.setattr(index_source, "view_embeddings", lambda content: None)
    monkeypatch.setattr(index_source, "retriever_from_files", lambda files: retriever)
    steps, trainer, retriever = 12, SeenTrainer(), tiny_models(world)[0]
    refresh = RefreshSchedule(options(steps=steps, refresh_every=every, lag=lag, retriever_delay=delay))
    rest: Any = (refresh, "", torch.device("cpu"), SINGLE_PROCESS, lambda *_: None)
    source = ExchangeSource(cast(TrainerSide, trainer), *rest)
    new = [[index.new for index in source.at_step(step, retriever)] == [True] for step in range(steps)]
    built = [s if s > delay else 0 for s in range(0, steps, every)]  # the index of step s is built from these weights
    due = [max([0] + [built[i] for i, s in enumerate(range(0, steps, every)) if s + lag <= t]) for t in range(steps)]
    first = [t for t in range(steps) if t == 0 or due[t] != due[t - 1]]
    assert trainer.requested == {t: due[t] for t in first}
    assert [t for t in range(steps) if new[t]] == first
    assert trainer.published == sorted({*due})
    for step in range(1, steps):
        resumed = SeenTrainer()
        resumed.index_step = due[step - 1]
        adopted = [index.new for index in ExchangeSource(cast(TrainerSide, resumed), *rest).at_step(step, retriever)]
        assert adopted == ([False, True] if step in first else [False])
