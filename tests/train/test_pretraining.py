"""REALM pre-training on twelve passages: examples, candidates, the whole loop; the loss itself is in test_reader.py."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
    tiny_optimiser,
)
from torch import Tensor

from realmops.model.encoder import Encoder
from realmops.model.packed import PackedBatch
from realmops.model.reader import Reader
from realmops.model.retriever import Retriever
from realmops.model.sequences import join_query
from realmops.options import Pretrain
from realmops.search.embed import document_sequences, embed, query_sequences
from realmops.search.exact import ExactIndex
from realmops.train import realm as module
from realmops.train.candidates import Candidates
from realmops.train.examples import Example, Examples
from realmops.train.index_source import Index, generation_in_use
from realmops.train.pretraining import COLLAPSE_WINDOW, CollapseAlarm, pretrain
from realmops.train.realm import Realm

FP32 = torch.float32
NOTHING = np.zeros(0, dtype=np.int64)


def options(**changes: Any) -> Pretrain:
    steps = {"steps": 10, "batch_size": 4, "refresh_every": 4, "lag": 2}
    rates = {"retriever_delay": 0, "retriever_learning_rate": 1e-2, "reader_learning_rate": 1e-2}
    lengths = {"query_wordpieces": 40, "reader_wordpieces": 60, "candidates": 4, "masking": "salient"}
    return section("pretrain", **{**steps, **rates, **lengths, **changes})


def row_of(world: World, passage: int, span: int) -> int:
    return int(world.spans.offsets[passage]) + span


def example(world: World, passage: int, span: int, **changes: Any) -> Example:
    examples = Examples(world.snapshot, world.spans, options(**changes))
    return examples.example(row_of(world, passage, span), np.random.default_rng(0))


def ranked_index(count: int, retriever: Retriever, order: Sequence[int] | None = None) -> tuple[Index, Tensor]:
    """An index that ranks passages as ``order`` says (0, 1, 2 ... without it) for the query that comes with it."""
    width = retriever.query.projection.out_features
    embedding_PE = torch.zeros(count, width)
    for rank, passage in enumerate(order or range(count)):
        embedding_PE[passage, 0] = float(count - rank)
    query_E = torch.zeros(width)
    query_E[0] = 1.0
    return Index(0, ExactIndex(embedding_PE), retriever, 0.0, True), query_E


# ---- examples


def test_an_example_is_one_sentence_with_one_span_masked(world: World) -> None:
    """Passage 1, "The Cold Sea", second span: Oslo in "It is set in Oslo." """
    found = example(world, 1, 1)
    assert found.passage == 1
    assert world.words(found.original) == "it is set in oslo ."
    assert world.words(found.x) == "it is set in [MASK] ."
    assert world.words(found.targets) == "oslo"
    assert (found.x[found.positions] == world.special.mask).all()
    assert (found.original[found.positions] == found.targets).all()
    unmasked = np.delete(np.arange(len(found.x)), found.positions)
    assert (found.original[unmasked] == found.x[unmasked]).all()
    assert world.snapshot.body(1).tolist().count(world.special.mask) == 0, "the snapshot stays as it is"


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


def test_an_example_has_at_most_max_masks(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realmops.train.examples.MAX_MASKS", 2)
    assert len(example(world, 6, 0).positions) == 2


@pytest.mark.parametrize("masking", ["random_token", "random_span", "matched_span"])
def test_the_controls_mask_elsewhere(world: World, masking: str) -> None:
    """Same sentence as under salient masking; masks anywhere in it."""
    examples = Examples(world.snapshot, world.spans, options(masking=masking))
    places = set()
    for seed in range(50):
        found = examples.example(row_of(world, 6, 0), np.random.default_rng(seed))
        assert world.words(found.original) == "maria holm sang in bergen ."
        assert (found.x[found.positions] == world.special.mask).all()
        places.update(found.positions.tolist())
    assert len(places) > 4


def test_long_sentences_are_cut_around_the_span(tmp_path: Path) -> None:
    """Room for 10 wordpieces: spans at the start, behind the limit, and longer than all the room."""
    text = f"Anna {'in it ' * 20}was Oslo then."
    world = build_world(tmp_path, (("Long", text, ("Anna", "Oslo", text[7:80], text[:-1])),), block_wordpieces=200)
    chosen = options(query_wordpieces=12)
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
        assert any(start <= at + masks[0] and at + masks[-1] < end for at in places), "masks lie in the span"
        assert len(masks) == min(end - start, 10 - start if start < 10 else 10)


# ---- candidates


def test_trivial_candidates_are_dropped_by_id_and_by_containment(world: World) -> None:
    """ "He lived in Bergen until 1950." stands in passage 2 and, word for word, in passage 3."""
    retriever, _ = tiny_models(world)
    index, query_E = ranked_index(12, retriever)
    candidates = Candidates(world.snapshot, options(candidates=8))
    asked = [example(world, 2, 1), example(world, 4, 0)]
    found = candidates.retrieve(asked, torch.stack([query_E, query_E]), index)
    assert found == [[0, 1, 4, 5, 6, 7, 8], [0, 1, 2, 3, 5, 6, 7]], "best first, seven beside the null document"
    assert dict(candidates.counts) == {"dropped_own": 2, "dropped_containing": 1, "short": 0}
    everything = Candidates(world.snapshot, options(candidates=8, exclude_trivial=False))
    assert everything.retrieve(asked[:1], query_E[None], index) == [[0, 1, 2, 3, 4, 5, 6]]
    without_null = Candidates(world.snapshot, options(candidates=8, null_document=False))
    assert without_null.retrieve(asked[:1], query_E[None], index) == [[0, 1, 4, 5, 6, 7, 8, 9]]


def test_a_sentence_of_another_text_has_no_passage_of_its_own(world: World) -> None:
    """What is dropped beside it is dropped for its content, never for the number of its passage."""
    retriever, _ = tiny_models(world)
    index, query_E = ranked_index(12, retriever)
    candidates = Candidates(world.snapshot, options(candidates=4))
    examples = Examples(world.snapshot, world.spans, options(), elsewhere=True)
    asked = [examples.example(row_of(world, 4, 0), np.random.default_rng(0))]
    assert candidates.retrieve(asked, query_E[None], index) == [[0, 1, 2]]
    assert dict(candidates.counts) == {"short": 0}


def test_containment_looks_at_the_unmasked_sentence(world: World) -> None:
    """A passage that only shares the masked form is no trivial candidate: "It rains" in 11 is no part of 3's."""
    retriever, _ = tiny_models(world)
    index, query_E = ranked_index(12, retriever, order=[3, 11, *range(3), *range(4, 11)])
    candidates = Candidates(world.snapshot, options())
    assert candidates.retrieve([example(world, 3, 0)], query_E[None], index)[0][0] == 11
    assert dict(candidates.counts) == {"dropped_own": 1, "short": 0}


def test_many_copies_are_searched_through_and_counted_once(tmp_path: Path) -> None:
    """Twenty copies of the sentence come first, more than the first search has: the second search finds others."""
    copies = tuple((f"Copy {i}", "Anna was in Oslo.", ("Oslo",)) for i in range(20))
    others = tuple((f"Other {i}", f"Jon saw {i} ships.", ("Jon",)) for i in range(20))
    world = build_world(tmp_path, copies + others)
    retriever, _ = tiny_models(world)
    index, query_E = ranked_index(40, retriever)
    candidates = Candidates(world.snapshot, options(candidates=4))
    assert candidates.retrieve([example(world, 5, 0)], query_E[None], index) == [[20, 21, 22]]
    assert dict(candidates.counts) == {"dropped_own": 1, "dropped_containing": 19, "short": 0}


@dataclass(frozen=True)
class Asked(ExactIndex):
    """Remembers how many passages were asked for."""

    asked_for: list[int] = field(default_factory=list)

    def search(self, query_QE: Tensor, k: int) -> tuple[Tensor, Tensor]:
        self.asked_for.append(k)
        return super().search(query_QE, k)


def test_a_deeper_search_is_made_where_candidates_are_missing_alone(tmp_path: Path) -> None:
    """Of ten that are asked for nine are copies of x: one is left, and the second search finds another."""
    copies = tuple((f"Copy {i}", "Anna was in Oslo.", ("Oslo",)) for i in range(9))
    world = build_world(tmp_path, copies + tuple((f"Other {i}", f"Jon saw {i} ships.", ("Jon",)) for i in range(20)))
    retriever, _ = tiny_models(world)
    index, query_E = ranked_index(29, retriever)
    index.passages = Asked(index.passages.vectors(slice(None)))
    candidates = Candidates(world.snapshot, options(candidates=3))
    assert candidates.retrieve([example(world, 5, 0)], query_E[None], index) == [[9, 10]]
    assert index.passages.asked_for == [10, 160]
    assert candidates.retrieve([example(world, 12, 0)], query_E[None], index) == [[0, 1]]
    assert index.passages.asked_for == [10, 160, 10], "there were as many as wanted"


def test_a_small_corpus_is_short_of_candidates(tmp_path: Path) -> None:
    world = build_world(tmp_path, (("A", "Anna is in Oslo.", ("Oslo",)), ("B", "Jon is in Bergen.", ("Jon",))))
    retriever, _ = tiny_models(world)
    index, query_E = ranked_index(2, retriever)
    candidates = Candidates(world.snapshot, options(candidates=8))
    assert candidates.retrieve([example(world, 0, 0)], query_E[None], index) == [[1]]
    assert candidates.counts["short"] == 1


# ---- the loss


def test_the_loss_of_crops_is_that_of_each_crop_against_all_passages(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By loops over crops and passages; it adds ``crop_weight`` of itself to the loss, and nothing while all rests."""
    retriever, reader = tiny_models(world)
    examples, found = [example(world, 0, 0), example(world, 6, 0)], [[4, 1, 5], [7, 2, 8]]
    realm = Realm(retriever, reader, world.snapshot, options(crop_weight=0.25, batch_size=2), FP32)
    asked: list[np.ndarray] = []
    joined = module.join_query

    def spy(x: np.ndarray, *more: Any) -> np.ndarray:
        asked.append(joined(x, *more))
        return asked[-1]

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
        for place, crop in zip(places, asked[-2:], strict=True):
            query = retriever.query(PackedBatch([crop]))[0]
            f = [math.exp(float(retriever.scale * query @ document)) for document in documents]
            expected.append(-math.log(f[place] / sum(f)))
    assert retriever.scale != 1.0
    assert metrics["crop_loss"] == pytest.approx(sum(expected) / 2, rel=1e-4)


def test_without_retrieval_it_is_a_bert_that_guesses_masked_words(world: World) -> None:
    retriever, reader = tiny_models(world)
    realm = Realm(retriever, reader, world.snapshot, options(candidates=1), FP32)
    masked = example(world, 0, 0)
    loss, later = realm.loss([masked], [[]], retriever_learns=True)
    metrics = later.now()
    log_token_BKM, _ = realm.log_token([masked], [[]])
    assert log_token_BKM.shape[1] == 1
    assert loss.item() == pytest.approx(-log_token_BKM.sum().item(), rel=1e-5)
    assert set(metrics) == {"log_marginal", "top_share"}, "no share of the null document to be alarmed by"
    loss.backward()
    assert all(p.grad is None or p.grad.abs().max() < 1e-6 for p in retriever.parameters())


def test_no_candidate_at_all_is_an_error_that_says_what_to_do(world: World) -> None:
    retriever, reader = tiny_models(world)
    realm = Realm(retriever, reader, world.snapshot, options(null_document=False), FP32)
    with pytest.raises(ValueError, match=r"no candidate.*pretrain\.null_document is false; set it to true"):
        realm.loss([example(world, 0, 0)], [[]], retriever_learns=True)


def test_the_gradient_of_the_retriever_is_r_of_z(world: World) -> None:
    """By finite differences in a parameter of the retriever: the loss moves as the gradient says."""
    retriever, reader = tiny_models(world)
    realm = Realm(retriever, reader, world.snapshot, options(), FP32)
    examples, candidates = [example(world, 0, 0), example(world, 6, 0)], [[4, 1, 5], [7, 2, 8]]
    loss, _ = realm.loss(examples, candidates, retriever_learns=True)
    loss.backward()
    weight = retriever.query.projection.weight
    direction = weight.grad / weight.grad.norm()
    before = []
    for sign in (1, -1):
        with torch.no_grad():
            weight.add_(sign * 1e-2 * direction)
            before.append(realm.loss(examples, candidates, retriever_learns=False)[0].item())
            weight.sub_(sign * 1e-2 * direction)
    assert (before[0] - before[1]) / 2e-2 == pytest.approx(weight.grad.norm().item(), rel=0.02)


def test_a_resting_retriever_gets_no_gradient(world: World) -> None:
    retriever, reader = tiny_models(world)
    realm = Realm(retriever, reader, world.snapshot, options(), FP32)
    for learns in (False, True):
        loss, _ = realm.loss([example(world, 0, 0)], [[4, 1, 5]], retriever_learns=learns)
        loss.backward()
        assert any(p.grad is not None for p in retriever.parameters()) is learns
    assert all(p.grad is not None for p in reader.parameters() if p.requires_grad)


# ---- collapse


def test_the_alarm_warns_once_when_null_takes_all() -> None:
    warnings: list[str] = []
    alarm = CollapseAlarm(warnings.append)
    choices = list(range(8))
    states = [alarm.watch(step, 0.95, choices) for step in range(COLLAPSE_WINDOW + 10)]
    assert states == [False] * (COLLAPSE_WINDOW - 1) + [True] * 11
    assert len(warnings) == 1
    assert f"step {COLLAPSE_WINDOW - 1}: the retriever has collapsed: the null document has 95%" in warnings[0]
    assert "pretrain.retriever_learning_rate" in warnings[0]


def test_the_alarm_warns_when_one_passage_is_everybodys_first() -> None:
    warnings: list[str] = []
    alarm = CollapseAlarm(warnings.append)
    for step in range(COLLAPSE_WINDOW):
        assert alarm.watch(step, 0.1, [7] * 9 + [100 + step]) is False, "nine of ten are not more than 0.9"
    for step in range(COLLAPSE_WINDOW):
        alarm.watch(COLLAPSE_WINDOW + step, 0.1, [7] * 10)
    assert len(warnings) == 1
    assert "passage 7 ranks first for 9" in warnings[0]


def test_the_alarm_looks_at_the_last_steps_only() -> None:
    """Collapsed, recovered, collapsed again: told by the value each time, by a warning once."""
    warnings: list[str] = []
    alarm = CollapseAlarm(warnings.append)
    healthy = [list(range(i, i + 8)) for i in range(1000)]
    states = [alarm.watch(s, 1.0 if s < 60 or s >= 160 else 0.0, healthy[s]) for s in range(240)]
    assert states[59] is True
    assert states[140] is False
    assert states[239] is True
    assert len(warnings) == 1


def test_a_step_without_candidates_does_not_stop_the_alarm() -> None:
    alarm = CollapseAlarm(lambda message: None)
    for step in range(2 * COLLAPSE_WINDOW):
        alarm.watch(step, 0.5, [])


# ---- the loop


class Source:
    """Publishes and indexes at once, hands an index on after the lag; what it published survives a process."""

    def __init__(self, world: World, chosen: Pretrain, published: dict[int, Index]) -> None:
        self.world, self.options, self.published = world, chosen, published
        self.in_use: int | None = None
        self.adopted: list[int] = []
        self.resumed = bool(published)

    def at_step(self, step: int, retriever: Retriever) -> Index | None:
        if step % self.options.refresh_every == 0:
            self.published[step] = index_of(self.world, copy.deepcopy(retriever).eval(), step)
        wanted = generation_in_use(step, refresh_every=self.options.refresh_every, lag=self.options.lag)
        if wanted == self.in_use:
            return None
        first, self.in_use = self.in_use is None, wanted
        self.adopted.append(wanted)
        index = copy.copy(self.published[wanted])
        index.new = not (first and self.resumed)
        return index


def run(
    world: World, chosen: Pretrain, *, published: dict[int, Index] | None = None, **context: Any
) -> tuple[Retriever, Reader, MemoryJournal, Source, list[str]]:
    retriever, reader = tiny_models(world, dropout=0.1)
    source, warnings = Source(world, chosen, {} if published is None else published), list[str]()
    surroundings = tiny_context(**context)
    pretrain(
        surroundings,
        Realm(retriever, reader, world.snapshot, chosen, FP32),
        Examples(world.snapshot, world.spans, chosen),
        tiny_optimiser(),
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


def test_the_loop_learns(world: World) -> None:
    *_, journal, _, _ = run(world, options(steps=60, refresh_every=20, lag=5, reader_learning_rate=3e-3))
    loss = journal.values("loss")
    assert np.mean(loss[-10:]) < 0.85 * np.mean(loss[:10])


@pytest.mark.parametrize("kill_at", [1, 4, 5, 7, 9])
def test_killed_and_resumed_it_ends_with_the_same_bits(world: World, kill_at: int) -> None:
    """Before the first checkpoint, on one, between the publication and the adoption of an index, behind both."""
    chosen, published = options(steps=10, retriever_delay=1), dict[int, Index]()

    def life(**surroundings: Any) -> Any:
        if not surroundings["checkpoints"].saved:
            published.clear()
        return run(world, chosen, published=published, **surroundings)

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
        assert all(encoder.gradient_checkpointing for encoder in encoders)
        same_parameters(ours, theirs)
    assert other.without_times() == journal.without_times()


def test_the_retriever_rests_at_first(world: World) -> None:
    start, _ = tiny_models(world, dropout=0.1)
    retriever, reader, *_ = run(world, options(steps=3, retriever_delay=3))
    same_parameters(retriever, start)
    _, reader_start = tiny_models(world, dropout=0.1)
    assert not torch.equal(reader.bert.word_vectors, reader_start.bert.word_vectors)
    retriever, *_ = run(world, options(steps=4, retriever_delay=3))
    assert not torch.equal(retriever.query.projection.weight, start.query.projection.weight), "it learns in step 3"


def test_an_index_is_not_stale_while_the_retriever_rests(world: World) -> None:
    """Rest for three steps: the index of step 0 is as fresh in step 3 as in step 0."""
    *_, journal, _, _ = run(world, options(steps=6, retriever_delay=3, refresh_every=100))
    assert journal.values("staleness_steps") == [0, 0, 0, 0, 1, 2]


@pytest.mark.parametrize("query_encoder", ["snapshot", "fresh"])
def test_who_searches(world: World, query_encoder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At step 3 the index of step 0 is in use: its own retriever searches it, or the trained one of this step."""
    asked: list[tuple[Sequence[Example], Tensor]] = []
    real = Candidates.retrieve

    def spy(self: Candidates, examples: Sequence[Example], query_BE: Tensor, index: Index) -> list[list[int]]:
        asked.append((examples, query_BE))
        return real(self, examples, query_BE, index)

    monkeypatch.setattr(Candidates, "retrieve", spy)
    chosen = options(steps=4, query_encoder=query_encoder)
    _, _, _, source, _ = run(world, chosen)
    examples, query_BE = asked[3]
    queries = query_sequences([join_query(e.x, world.special, chosen.query_wordpieces) for e in examples])
    old_BE = embed(source.published[0].retriever.query, queries, FP32)
    assert torch.equal(query_BE, old_BE) is (query_encoder == "snapshot")
