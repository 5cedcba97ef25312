"""REALM's loss with each reader equals loops in the paper's letters, in double precision.

With a copy head, p(y_j|z,x) = (1 - g) p_vocabulary(y_j) + g times the attention on the wordpieces of z that are y_j.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_world import MemoryJournal, OneIndex, World, build_world, section, tiny_context, tiny_models
from torch import Tensor

from realmops.model.packed import PackedBatch
from realmops.model.reader import MaskedSentences, Reader, SpanHead
from realmops.model.retriever import Retriever
from realmops.model.sequences import join_document, join_query, join_reader
from realmops.options import Pretrain
from realmops.train.inverse_cloze import train_reader
from realmops.train.masked_sentences import NULL, Example, Examples
from realmops.train.pretraining import Candidates, pretrain
from realmops.train.realm import Realm

LIMIT = 60
NOTHING = np.zeros(0, dtype=np.int64)
pytestmark = pytest.mark.usefixtures("double")
TOGETHER, APART = {"copies": True, "apart": False}, {"copies": True, "apart": True}
READERS = {"paper": {}, "together": TOGETHER, "apart": APART}
HOW = pytest.mark.parametrize("copying", [TOGETHER, APART], ids=["together", "apart"])


def models(world: World, copying: dict[str, bool], **changes: Any) -> tuple[Retriever, Reader]:
    """Far from the start, where query and key are the identity and the gate is one half."""
    retriever, reader = tiny_models(world, copying=copying, **changes)
    retriever.double()
    reader.double()
    if reader.copy is not None:
        torch.nn.init.constant_(reader.copy.gate.bias, 0.4)
    return retriever, reader


def options(**changes: Any) -> Pretrain:
    lengths = {"reader_wordpieces": LIMIT, "candidates": 4, "batch_size": 4}
    rest = {"masking": "salient", "marginal": "joint", "null_document": True, "retriever_delay": 0}
    return section("pretrain", **{**lengths, **rest, **changes})


def example(world: World, passage: int, span: int, **changes: Any) -> Example:
    examples = Examples(world.snapshot, world.spans, options(**changes))
    return examples.example(int(world.spans.offsets[passage]) + span, np.random.default_rng(0))


def hidden(world: World, *examples: Example) -> MaskedSentences:
    sentences, positions, targets = ([getattr(e, name) for e in examples] for name in ("x", "positions", "targets"))
    return MaskedSentences(sentences, positions, targets, world.special, LIMIT)


def p_words(reader: Reader, world: World, x: np.ndarray, j: int, z: np.ndarray, limit: int = LIMIT) -> list[float]:
    """p(y_j = w|z, x) for every wordpiece w, one pair and one wordpiece at a time."""
    special, copy = world.special, reader.copy
    if reader.apart:
        h_j = reader.bert(PackedBatch([join_query(x, special, limit)]))[1 + j]
        joined, segments, first = join_reader(NOTHING, z, special, limit)
    else:
        joined, segments, first = join_reader(x, z, special, limit)
        assert joined[1 + j] == special.mask
    h = reader.bert(PackedBatch([joined], [segments]))
    if not reader.apart:
        h_j = h[1 + j]
    p = reader.masked_words(h_j[None], reader.bert.word_vectors)[0].softmax(-1).tolist()
    if copy is None or not len(z):
        return p
    scores = [float(copy.query(h_j) @ copy.key(h[i])) / math.sqrt(len(h_j)) for i in range(first, len(joined) - 1)]
    total = sum(map(math.exp, scores))
    g = 1 / (1 + math.exp(-float(copy.gate(h_j))))
    p = [(1 - g) * value for value in p]
    for score, w in zip(scores, joined[first:-1].tolist(), strict=True):
        p[w] += g * math.exp(score) / total
    return p


@HOW
def test_every_word_has_the_probability_of_a_slow_version(world: World, copying: dict[str, bool]) -> None:
    """Three masks; a passage, a long one that is cut, one wordpiece, and the null document, all in one batch."""
    _, reader = models(world, copying)
    masked = example(world, 6, 0)
    long = np.tile(world.snapshot.body(4), 4)[:80]
    documents = [world.snapshot.body(7), NOTHING, long, world.wordpieces("Oslo")]
    assert len(masked.positions) > 1
    with torch.no_grad():
        log_word_KMV = reader.log_masked_words(hidden(world, masked), documents)
        expected = [[p_words(reader, world, masked.x, j, z) for j in masked.positions.tolist()] for z in documents]
    torch.testing.assert_close(log_word_KMV.exp(), torch.tensor(expected), rtol=1e-9, atol=1e-15)
    torch.testing.assert_close(log_word_KMV.exp().sum(-1), torch.ones(4, len(masked.positions)), rtol=0, atol=1e-12)


@HOW
def test_a_target_has_the_probability_that_it_has_among_all_words(world: World, copying: dict[str, bool]) -> None:
    """Sentences with one and with several masks in one batch, the second with the null document."""
    _, reader = models(world, copying)
    masked = [example(world, 0, 0), example(world, 6, 0), example(world, 5, 1)]
    documents = [world.snapshot.body(4), NOTHING, world.snapshot.body(0)]
    with torch.no_grad():
        found = reader.log_masked_pairs(hidden(world, *masked), documents)
        expected = []
        for one, z in zip(masked, documents, strict=True):
            log_word_MV = reader.log_masked_words(hidden(world, one), [z])[0]
            expected += [float(log_word_MV[m, w]) for m, w in enumerate(one.targets.tolist())]
    assert found.tolist() == pytest.approx(expected, rel=1e-12)
    assert len({len(one.positions) for one in masked}) > 1


@HOW
def test_only_words_of_the_passage_are_copied(world: World, copying: dict[str, bool]) -> None:
    """With an open gate Oslo is likely, which passage 4 has, and Bergen is not; a closed gate copies neither."""
    _, reader = models(world, copying)
    masked, z = example(world, 0, 0), world.snapshot.body(4)
    oslo, bergen = (int(world.wordpieces(name)[0]) for name in ("Oslo", "Bergen"))
    assert (z == oslo).sum() == 1
    assert (z == bergen).sum() == 0

    def log_words(bias: float) -> Tensor:
        reader.copy.gate.bias.data.fill_(bias)
        return reader.log_masked_words(hidden(world, masked), [z, NOTHING])[:, 0]

    with torch.no_grad():
        reader.copy.gate.weight.zero_()
        copied_V, alone_V = log_words(100.0)
        assert float(copied_V[np.unique(z)].exp().sum()) == pytest.approx(1, abs=1e-12)
        assert float(copied_V[bergen]) < -40
        assert float(copied_V[oslo]) > -5
        shut_V, alone_V = log_words(-100.0)
        if reader.apart:
            torch.testing.assert_close(shut_V, alone_V, rtol=0, atol=1e-12)


def test_the_span_head_by_hand() -> None:
    """w . LayerNorm(ReLU(W_s h_start + W_e h_end)), width 2: ReLU gives (3, 1), LayerNorm (1, -1), w gives 5 - 7."""
    head = SpanHead(2, 2)
    with torch.no_grad():
        head.start.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        head.start.bias.copy_(torch.tensor([1.0, 0.0]))
        head.end.weight.copy_(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
        head.score.weight.copy_(torch.tensor([[5.0, 7.0]]))
    hidden_TD = torch.tensor([[2.0, 4.0], [-3.0, 0.0], [9.0, 9.0]])
    # start row 0: (2 + 1, 4); end row 1: (0, -3); together (3, 1)
    assert head(hidden_TD, torch.tensor([0]), torch.tensor([1])).tolist() == pytest.approx([5.0 - 7.0], abs=1e-4)


# ---- the loss


def slow(
    world: World,
    retriever: Retriever,
    reader: Reader,
    examples: Sequence[Example],
    candidates: Sequence[Sequence[int]],
    chosen: Pretrain,
) -> dict[str, float]:
    """The loss and its metrics, one z and one masked word at a time, in probability space."""
    snapshot, special = world.snapshot, world.special
    joint, per_token, null_shares, shares, gains, utilities, tops, bests = ([] for _ in range(8))
    for x, row in zip(examples, candidates, strict=True):
        query = retriever.query(PackedBatch([join_query(x.x, special, chosen.query_wordpieces)]))[0]
        f, p_y, p_tokens = [], [], []
        for z in [*row, *([NULL] if chosen.null_document else [])]:
            title, body = (NOTHING, NOTHING) if z == NULL else (snapshot.title_tokens(z), snapshot.body(z))
            document, segments = join_document(title, body, special, snapshot.block_wordpieces)
            f.append(float(retriever.scale * query @ retriever.document(PackedBatch([document], [segments]))[0]))
            pairs = zip(x.positions.tolist(), x.targets.tolist(), strict=True)
            p_tokens.append([p_words(reader, world, x.x, j, body, chosen.reader_wordpieces)[y_j] for j, y_j in pairs])
            p_y.append(math.prod(p_tokens[-1]))
        p_z = [math.exp(value) / sum(map(math.exp, f)) for value in f]
        joint.append(math.log(sum(y * z for y, z in zip(p_y, p_z, strict=True))))
        for j in range(len(x.positions)):
            per_token.append(math.log(sum(z * p_j[j] for z, p_j in zip(p_z, p_tokens, strict=True))))
        shares.append(max(p_z))
        if chosen.null_document:
            null_shares.append(p_z[-1])
            gains.append(joint[-1] - math.log(p_y[-1]))
            ru = [math.log(y / p_y[-1]) for y in p_y[:-1]]
            utilities += ru
            tops += ru[:1]
            bests += [max(ru)] if ru else []
    means = {"log_marginal": joint, "top_share": shares, "p_null": null_shares, "marginal_gain": gains}
    means |= {"retrieval_utility": utilities, "retrieval_utility_top": tops, "retrieval_utility_best": bests}
    means["loss"] = [-value for value in (joint if chosen.marginal == "joint" else per_token)]
    return {name: float(np.mean(values)) for name, values in means.items() if values}


@pytest.mark.parametrize(
    ("reading", "head"),
    [*(("paper", head) for head in ("paper", "release", "normalised")), ("together", "normalised"), ("apart", "paper")],
)
@pytest.mark.parametrize("null_document", [True, False])
@pytest.mark.parametrize("marginal", ["joint", "per_token"])
def test_the_loss_equals_a_slow_version(
    world: World, reading: str, head: str, marginal: str, null_document: bool
) -> None:
    """Different numbers of masks, and rows of different lengths: three, five and one passage."""
    chosen = options(marginal=marginal, null_document=null_document)
    retriever, reader = models(world, READERS[reading], head=head, share_embedders=head == "release")
    examples = [example(world, 0, 0), example(world, 6, 0), example(world, 5, 1)]
    candidates = [[4, 1, 5], [7, 2, 8, 0, 1], [0]]
    realm = Realm(retriever, reader, world.snapshot, chosen, torch.float32)
    with torch.no_grad():
        loss, later = realm.loss(examples, candidates, retriever_learns=True)
        half, _ = realm.loss(examples, candidates, retriever_learns=True, weight=0.5)
        expected = slow(world, retriever, reader, examples, candidates, chosen)
    assert loss.item() == pytest.approx(expected.pop("loss"), rel=1e-9)
    assert half.item() == pytest.approx(loss.item() / 2, rel=1e-12)
    assert later.now() == pytest.approx(expected, rel=1e-9)


def test_an_example_with_the_null_document_alone(world: World) -> None:
    """One of two sentences has no passage: the loss is finite, and the metrics count what exists."""
    retriever, reader = models(world, {})
    examples, candidates = [example(world, 0, 0), example(world, 5, 1)], [[4, 1], list[int]()]
    realm = Realm(retriever, reader, world.snapshot, options(), torch.float32)
    loss, later = realm.loss(examples, candidates, retriever_learns=True)
    with torch.no_grad():
        expected = slow(world, retriever, reader, examples, candidates, options())
    assert loss.item() == pytest.approx(expected.pop("loss"), rel=1e-9)
    assert later.now() == pytest.approx(expected, rel=1e-9)
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in retriever.parameters() if p.grad is not None)
    metrics = realm.loss(examples[1:], [[]], retriever_learns=True)[1].now()
    assert set(metrics) == {"log_marginal", "top_share", "p_null", "marginal_gain"}
    assert metrics["p_null"] == pytest.approx(1.0)


def test_masks_are_within_the_readers_limit(tmp_path: Path) -> None:
    """Where the reader's is shorter than the query's."""
    text = f"Anna {'in it ' * 10}was Oslo then."
    world = build_world(tmp_path, (("Long", text, ("Oslo",)), ("Short", "It is in Oslo.", ("Oslo",))), 100)
    changes = {"reader_wordpieces": 16, "candidates": 2}
    chosen, found = options(**changes), example(world, 0, 0, **changes)
    assert len(found.x) <= 13
    retriever, reader = models(world, {})
    with torch.no_grad():
        realm = Realm(retriever, reader, world.snapshot, chosen, torch.float32)
        loss, _ = realm.loss([found], [[1]], retriever_learns=True)
        expected = slow(world, retriever, reader, [found], [[1]], chosen)
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-9)


@pytest.mark.parametrize("reading", READERS)
def test_guesses_are_equation_1_and_the_likeliest_wordpieces(world: World, reading: str) -> None:
    """With the null document alone too, which is the vocabulary; and without it."""
    retriever, reader = models(world, READERS[reading])
    masked = example(world, 6, 0)
    alone = [math.log(p_words(reader, world, masked.x, int(j), NOTHING)[int(y)]) for j, y in zip(
        masked.positions, masked.targets, strict=True
    )]  # fmt: skip
    for found, null in (([], True), ([7], True), ([7, 2, 8], False), ([7, 2, 8], True)):
        realm = Realm(retriever.eval(), reader.eval(), world.snapshot, options(null_document=null), torch.float32)
        guess = realm.guess(masked, found)
        with torch.no_grad():
            loss, _ = realm.loss([masked], [found], retriever_learns=False)
        assert guess["masked_log_p"] == pytest.approx(-loss.item(), rel=1e-9)
        assert guess.get("masked_log_p_without") == (pytest.approx(sum(alone), rel=1e-9) if null else None)
    with torch.no_grad():
        log_prior_BK, _ = realm.log_prior([masked], [found])
        words_KMV = realm.log_words(masked, found)[: log_prior_BK.shape[1]]
    likeliest = (log_prior_BK[0].exp()[:, None, None] * words_KMV.exp()).sum(0).argmax(-1).numpy()
    assert guess["masked_accuracy"] == float((likeliest == masked.targets).all())
    assert realm.guess(replace(masked, targets=likeliest), found)["masked_accuracy"] == 1.0


def test_late_interaction_encodes_each_sentence_and_each_passage_once(world: World) -> None:
    retriever, reader = models(world, APART)
    realm, sizes, forward = Realm(retriever, reader, world.snapshot, options(), torch.float32), [], reader.bert.forward
    examples = [example(world, 0, 0), example(world, 6, 0), example(world, 5, 1)]
    reader.bert.forward = lambda batch: (sizes.append(len(batch)), forward(batch))[1]
    with torch.no_grad():
        realm.log_token(examples, [[4, 1, 5], [7, 1], [0]])
    assert sizes == [3, 5]


# ---- candidates of the whole batch


def test_candidates_are_shared_without_the_trivial_ones(world: World) -> None:
    """Passages 2 and 3 both hold "He lived in Bergen until 1950.", which is the first sentence; 4 is the second's."""
    asked = [example(world, 2, 1), example(world, 4, 0)]
    candidates = Candidates(world.snapshot, options())
    assert candidates.shared(asked, [[8, 1], [3, 2, 0]]) == [[8, 1, 0, 4], [3, 2, 0, 1, 8]]
    assert dict(candidates.counts) == {"dropped_own": 2, "dropped_containing": 1}
    everything = Candidates(world.snapshot, options(exclude_trivial=False))
    assert everything.shared(asked, [[8], []]) == [[8, 2, 4], [2, 4, 8]]
    strangers = [replace(one, passage=NULL) for one in asked]
    assert Candidates(world.snapshot, options()).shared(strangers, [[8], []]) == [[8], [8]]
    without = Candidates(world.snapshot, options(candidates=1))
    assert without.shared(asked, [[], []]) == [[], []], "a BERT without retrieval"


def test_late_interaction_pre_trains_on_every_passage_of_the_batch(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other readers have the candidates of each sentence."""
    batches: list[tuple[Sequence[Example], Sequence[Sequence[int]]]] = []
    original = Realm.loss

    def loss(self: Realm, examples: Sequence[Example], candidates: Sequence[Sequence[int]], **rest: Any) -> Any:
        batches.append((examples, candidates))
        return original(self, examples, candidates, **rest)

    monkeypatch.setattr(Realm, "loss", loss)
    for copying in (TOGETHER, APART):
        batches.clear()
        retriever, reader = models(world, copying)
        chosen = options(steps=3)
        examples = Examples(world.snapshot, world.spans, chosen)
        realm = Realm(retriever, reader, world.snapshot, chosen, torch.float32)
        pretrain(tiny_context(), realm, examples, OneIndex(world), evaluate=lambda index: {}, warn=print)
        assert len(batches) == 3
        for batch, rows in batches:
            pool = {p for row in rows for p in row} | {e.passage for e in batch}
            for each, row in zip(batch, rows, strict=True):
                assert len(row) == len(set(row))
                assert each.passage not in row
                # late interaction leaves out its own, and at most two that contain the sentence
                assert len(pool - set(row)) <= 3 if reader.apart else len(row) == 3


@HOW
def test_the_reader_learns_to_copy(world: World, copying: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty steps: the loss falls, and every part of the copy head changes."""
    monkeypatch.undo()
    torch.set_default_dtype(torch.float32)
    chosen = section("ict", reader_steps=30, reader_batch_size=8, reader_learning_rate=3e-3)
    _, reader = tiny_models(world, copying=copying)
    start, journal = {name: p.detach().clone() for name, p in reader.copy.named_parameters()}, MemoryJournal()
    train_reader(tiny_context(journal=journal), reader, world.snapshot, world.spans, chosen, 64)
    loss = journal.values("loss")
    assert np.mean(loss[-5:]) < 0.9 * np.mean(loss[:5])
    assert len(start) == 4
    assert not any(torch.equal(p, start[name]) for name, p in reader.copy.named_parameters())
