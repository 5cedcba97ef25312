"""``reader.matches``: features of wordpieces against a slow version, shapes of words, the reader that has them."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from small_world import World, section, tiny_context, tiny_models

from realmops.answering.openqa import OpenQa
from realmops.corpus.word_shape import WordShape, classify_word, classify_words
from realmops.model.build import add_span_head
from realmops.model.lexical_features import SIZES, UNITS, LexicalFeatures
from realmops.model.packed import SHAPE_STEP, PackedBatch
from realmops.model.reader import MaskedSentences, Reader
from realmops.model.sequences import SpecialTokens, join_reader
from realmops.train.initialisation import init_lexical_features
from realmops.train.inverse_cloze import train_reader
from realmops.train.masked_sentences import Examples
from realmops.train.realm import Realm

VOCABULARY = [
    "[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", "who", "wrote", "writes", "the", "cold", "sea", ".", "anna", "##s",
    "when", "how", "many", "1931", "in",
]  # fmt: skip
STEMS = ["write" if piece in ("wrote", "writes") else piece for piece in VOCABULARY]
SPECIAL = SpecialTokens(cls=1, sep=2, mask_if_any=3, unknown=4, padding=0)
SPECIALS = range(5)
IDF = np.array([0.0] * 5 + [2.0, 3.0, 3.5, 0.5, 4.0, 4.0, 0.0, 5.0, 1.0, 2.0, 2.0, 4.0, 5.0, 1.0])


def features() -> LexicalFeatures:
    built = LexicalFeatures(len(VOCABULARY), 8)
    continues = np.array([piece.startswith("##") for piece in VOCABULARY])
    built.learn_words(VOCABULARY, continues, STEMS, SPECIALS, IDF)
    return built


def ids(text: str) -> np.ndarray:
    return np.array([VOCABULARY.index(word) for word in text.split()], dtype=np.int64)


def packed(*pairs: tuple[np.ndarray, np.ndarray]) -> PackedBatch:
    joined = [join_reader(x, z, SPECIAL, 64) for x, z in pairs]
    return PackedBatch([tokens for tokens, *_ in joined], [segments for _, segments, _ in joined])


# ---- features


def test_masks_and_null_documents_match_nothing() -> None:
    """Nothing matches across sequences either."""
    x = ids("[MASK] sea [UNK]")
    classes = features().classes(packed((x, ids("[MASK] [UNK] anna")), (x, ids("")), (ids("anna"), ids("sea"))))
    assert not classes["match"].any()
    assert not classes["pair"].any()
    assert classes["best"].max() == 1
    empty = slice(8, 13)
    assert all(not classes[name][empty].any() for name in SIZES)


def test_features_equal_a_slow_version() -> None:
    rng = np.random.default_rng(0)
    pairs = []
    for _ in range(40):
        x, z = (rng.integers(3, len(VOCABULARY), rng.integers(0, most)) for most in (9, 50))
        pairs.append((x, z + SHAPE_STEP * rng.integers(1, len(WordShape), len(z))))
    model = features()
    found = model.classes(packed(*pairs))
    expected = [slow(x, z) for x, z in pairs]
    for name in SIZES:
        assert found[name].tolist() == [value for one in expected for value in one[name]], name
        assert found[name].max() < SIZES[name]
        assert len(set(found[name].tolist())) > 2, "several classes occur"


def slow(x: np.ndarray, z: np.ndarray) -> dict[str, list[int]]:
    """Each feature of join(x, z), by its words."""
    weight = [0 if i in SPECIALS else max(1, round(UNITS * IDF[i])) for i in range(len(VOCABULARY))]
    tokens = [SPECIAL.cls, *x.tolist(), SPECIAL.sep, *(z % SHAPE_STEP).tolist(), SPECIAL.sep]
    forms = [0] * (len(x) + 2) + (z // SHAPE_STEP).tolist() + [0]
    rows, body = range(len(tokens)), range(len(x) + 2, len(tokens) - 1)
    sides = [{i for i in range(len(x) + 1) if weight[tokens[i]]}, {i for i in body if weight[tokens[i]]}]
    other = [sides[1] if i in sides[0] else sides[0] if i in sides[1] else set() for i in rows]
    same = [any(tokens[j] == tokens[i] for j in other[i]) for i in rows]
    alike = [any(STEMS[tokens[j]] == STEMS[tokens[i]] for j in other[i]) for i in rows]
    rarity = [5 * weight[tokens[i]] // (max(weight) + 1) for i in rows]
    pairs_x = {(tokens[i], tokens[j]) for i, j in pairwise(sorted(sides[0])) if j == i + 1}
    pairs_z = [{a, b} <= sides[1] and (tokens[a], tokens[b]) in pairs_x for a, b in pairwise(rows)]
    paired = [any(pairs_z[max(0, i - 1) : i + 1]) for i in rows]
    hit = [weight[tokens[i]] if alike[i] and i in sides[1] else 0 for i in rows]
    whole = max(1, sum(weight[tokens[i]] for i in sides[0]))
    rare = [i for i in rows if hit[i] and rarity[i] >= 2]
    sentence = [sum(VOCABULARY[tokens[j]] in ".?!" for j in body if j < i) for i in rows]
    of_sentence = [sum(hit[j] for j in rows if sentence[j] == sentence[i]) for i in rows]
    asking = [i for i in sorted(sides[0]) if VOCABULARY[tokens[i]] in ("who", "when", "how")]
    kind = 0
    if asking:
        kind = {"who": 1, "when": 2, "how": 7}[VOCABULARY[tokens[asking[0]]]]
        kind = 8 if VOCABULARY[tokens[asking[0] + 1]] == "many" else kind

    def share(part: int) -> int:
        return 1 + min(7, 8 * part // whole)

    def distance(near: list[int]) -> int:
        return 1 + sum(min(near, default=26) > bound for bound in (0, 1, 2, 3, 5, 8, 14, 25))

    def continues(i: int) -> bool:
        return VOCABULARY[tokens[i]].startswith("##")

    about = {
        "near": lambda i: share(sum(hit[max(0, i - 12) : i + 13])),
        "previous": lambda i: distance([i - j for j in rare if j <= i]),
        "next": lambda i: distance([j - i for j in rare if j >= i]),
        "sentence": lambda i: share(of_sentence[i]),
        "best": lambda i: 1 + (of_sentence[i] == max(of_sentence) > 0),
        "piece": lambda i: 1 + 2 * continues(i) + continues(i + 1),
        "question": lambda i: 10 * kind + forms[i],
        **{f"form{by:+d}": lambda i, by=by: forms[i + by] if 0 <= i + by < len(forms) else 0 for by in (-2, -1, 1, 2)},
    }
    found = {name: [int(f(i)) if i in sides[1] else 0 for i in rows] for name, f in about.items()}
    found["match"] = [1 + rarity[i] if same[i] else 6 + rarity[i] if alike[i] else 0 for i in rows]
    found["pair"] = [1 + rarity[i] if paired[i] else 0 for i in rows]
    return found


# ---- shapes


@pytest.mark.parametrize(
    ("word", "form"),
    [
        ("sea", WordShape.LOWER), ("Sea", WordShape.CAPITAL), ("A", WordShape.CAPITAL), ("NATO", WordShape.CAPITALS),
        ("iPod", WordShape.MIXED), ("1931", WordShape.YEAR), ("3100", WordShape.NUMBER), ("20", WordShape.NUMBER),
        ("20th", WordShape.DIGITS), ("海", WordShape.LOWER), ("Ås", WordShape.CAPITAL), ("-", WordShape.MARK),
    ],
)  # fmt: skip
def test_the_shape_of_a_word(word: str, form: WordShape) -> None:
    assert classify_word(word, starts_sentence=False) is form
    if form is WordShape.CAPITAL:
        assert classify_word(word, starts_sentence=True) is WordShape.FIRST


def test_wordpieces_have_the_shape_of_their_word() -> None:
    """Anna sang | . | She; a passage that begins within a word counts that part as a word."""
    chars = np.array([[0, 2], [2, 4], [5, 9], [9, 10], [11, 14]], np.int32)
    continues = np.array([False, True, False, False, False])
    starts = np.array([0, 4], np.int32)
    form = classify_words("Anna sang. She", chars, continues, starts)
    assert form.tolist() == [WordShape.FIRST, WordShape.FIRST, WordShape.LOWER, WordShape.MARK, WordShape.FIRST]
    assert classify_words("Anna", chars[:2], ~continues[:2], starts[:1]).tolist() == [WordShape.FIRST, WordShape.LOWER]
    assert classify_words("", chars[:0], continues[:0], starts[:0]).tolist() == []


def test_packed_batches_separate_wordpieces_and_shapes(world: World) -> None:
    snapshot = world.snapshot
    for passage in range(len(snapshot)):
        batch = PackedBatch([snapshot.written(passage)])
        assert batch.tokens_T.tolist() == snapshot.body(passage).tolist()
        assert batch.forms_T.tolist() == snapshot.forms(passage).tolist()
    shapes = {WordShape.FIRST, WordShape.CAPITAL, WordShape.LOWER, WordShape.YEAR, WordShape.MARK}
    assert set(snapshot.forms(0)) == shapes
    assert not PackedBatch([snapshot.body(0)]).forms_T.any()


# ---- the reader


def readers(world: World) -> tuple[Reader, Reader]:
    """Without lexical features and with untrained ones, otherwise equal."""
    plain, matching = tiny_models(world)[1], tiny_models(world, copying={"matches": True})[1]
    matching.load_state_dict(plain.state_dict(), strict=False)
    matching.matches = LexicalFeatures(world.snapshot.tokenizer.get_vocab_size(), 16)
    init_lexical_features(matching, world.snapshot, 0, lambda label, total: lambda count: None)
    return plain, matching


def log_tokens(reader: Reader, world: World) -> torch.Tensor:
    """Of two masks, next to a passage and next to the null document."""
    body = world.snapshot.body(0)
    x = [np.where(np.arange(8) == at, world.special.mask, body[:8]) for at in (2, 5)]
    documents = [reader.document(world.snapshot, 0), body[:0]]
    masked = MaskedSentences(x, [np.array([2]), np.array([5])], [body[[2]], body[[5]]], world.special, 64)
    return reader.log_masked_pairs(masked, documents)


def test_untrained_features_change_nothing_until_they_learn(world: World) -> None:
    plain, matching = readers(world)
    before = log_tokens(matching, world)
    assert torch.equal(before, log_tokens(plain, world))
    options = section("ict", reader_steps=3, reader_batch_size=4)
    train_reader(tiny_context(), matching, world.snapshot, world.spans, options, 64)
    assert bool(matching.matches.vectors.weight.any())


def test_word_statistics_are_those_of_the_passages(world: World) -> None:
    matches, pieces = readers(world)[1].matches, world.snapshot.vocabulary
    weight = dict(zip(pieces, matches.weight_V.tolist(), strict=True))
    stem = dict(zip(pieces, matches.stem_V.tolist(), strict=True))
    assert [weight[pieces[i]] for i in world.special.ids] == [0] * 5
    # 5 of 12 passages have bergen, in text or title: log(1 + 7.5 / 5.5); all have a full stop: log(1 + .5 / 12.5)
    assert weight["bergen"] == round(UNITS * np.log(1 + 7.5 / 5.5))
    assert weight["."] == 1
    assert stem["bergen"] != stem["oslo"]


def test_pretraining_and_fine_tuning_read_the_same_features(world: World) -> None:
    """log p(y_j|z,x) of REALM is that of join(x, z) with word shapes, for each z and for the whole vocabulary."""
    retriever = tiny_models(world)[0]
    reader = readers(world)[1].eval()
    torch.nn.init.normal_(reader.matches.vectors.weight)
    options = section("pretrain", reader_wordpieces=60)
    masked = Examples(world.snapshot, world.spans, options).example(0, np.random.default_rng(0))
    realm = Realm(retriever, reader, world.snapshot, options, torch.float32)
    passages = [4, 1]
    with torch.no_grad():
        log_token_BKM, _ = realm.log_token([masked], [passages])
        log_words_KMV = realm.log_words(masked, passages)
        bodies = [world.snapshot.written(p) for p in passages] + [world.snapshot.body(0)[:0]]
        for k, body in zip([0, 1, -1], bodies, strict=True):
            tokens, segments, _ = join_reader(masked.x, body, world.special, 60)
            hidden_TD = reader.encode(PackedBatch([tokens], [segments]))
            logits_MV = reader.masked_words(hidden_TD[1 + masked.positions], reader.bert.word_vectors)
            log_word_MV = logits_MV.log_softmax(-1)
            torch.testing.assert_close(log_words_KMV[k], log_word_MV, rtol=1e-4, atol=1e-4)
            expected_M = log_word_MV[range(len(masked.targets)), masked.targets]
            torch.testing.assert_close(log_token_BKM[0, k], expected_M, rtol=1e-4, atol=1e-4)


def test_answers_depend_on_word_shapes(world: World) -> None:
    retriever, (_, matching) = tiny_models(world)[0], readers(world)
    add_span_head(matching, 16, 0)
    torch.nn.init.normal_(matching.matches.vectors.weight)
    options = section("finetune", query_wordpieces=16, reader_wordpieces=64, retriever_candidates=12)
    model = OpenQa(retriever, matching, world.snapshot, None, options, torch.float32, ranker=lambda q, k: np.arange(k))
    tokens = model.wordpieces("Who wrote The Cold Sea?")
    with torch.no_grad():
        score_S, _ = model.spans([tokens], [[0]])
        matching.document = lambda snapshot, passage: snapshot.body(passage)
        other_S, _ = model.spans([tokens], [[0]])
    assert not torch.allclose(score_S, other_S)
