"""Answers that are spans of passages: p(y|x) by hand, decoding against a slow search, the prior, and citation marks."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_open_qa import BORN, FP32, NEVER, PORT, cut, open_qa, options
from small_readers import write_reader
from small_world import DOCUMENTS, World, build_world, tiny_models

from realmops.answering.answer import InvalidRequest, Span
from realmops.answering.extractive import ExtractiveQa
from realmops.answering.opened_model import OpenedModel, Query
from realmops.answering.openqa import OpenQa
from realmops.answering.record import enclosing_sentence
from realmops.answering.retrieval import SearchOnly
from realmops.answering.span_answers import CITATION_MARK, minimum_bayes_risk
from realmops.model.extractive_reader import ExtractiveReader, load_extractive_reader
from realmops.model.retriever import FusionWeights
from realmops.questions.answer_matching import exact_match, normalize_answer, token_f1
from realmops.questions.question_sets import Question
from realmops.search.bm25 import Bm25
from realmops.search.embed import document_sequences, embed
from realmops.search.exact import ExactIndex

BUILT = Question("built", "Who built the Star?", ("Jon Vik",))
WORDS = ("the port", "of", "Bergen", "1992", "May", "in")


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> ExtractiveReader:
    return load_extractive_reader(write_reader(tmp_path_factory.mktemp("reader") / "bert", "bert")).eval()


def extractive(world: World, reader: ExtractiveReader, order: list[int] | None = None, **changes: Any) -> ExtractiveQa:
    """A model that retrieves by embeddings or, with ``order``, these passages for every question."""
    retriever, _ = tiny_models(world)
    embedding = embed(retriever.document, document_sequences(world.snapshot, range(len(world.snapshot))), FP32)
    ranker = None if order is None else (lambda question, k: np.array([*order, *[-1] * k][:k]))
    passages = ExactIndex(embedding) if order is None else None
    return ExtractiveQa(retriever, reader, world.snapshot, passages, options(**changes), FP32, ranker)


def by_hand(model: ExtractiveQa, question: str, passages: list[int], p_z: list[float]) -> list[dict[str, float]]:
    """p(y, z|x) of every normal form y by passage: the sum over its spans, one passage read at a time."""
    forms = []
    for passage, p in zip(passages, p_z, strict=True):
        text, sums = model.snapshot.text(passage), defaultdict[str, float](float)
        limits: dict[str, Any] = {"limit": model.options.reader_wordpieces, "dtype": FP32}
        limits["answer_wordpieces"] = model.options.answer_wordpieces
        [spans] = model.reader.read([(question, text)], **limits)
        for (start, end), log_p in zip(spans.chars.tolist(), spans.log_p.tolist(), strict=True):
            sums[normalize_answer(text[start:end])] += p * math.exp(log_p)
        forms.append(dict(sums))
    return forms


def test_the_probability_is_a_sum_over_passages_and_spans(world: World, reader: ExtractiveReader) -> None:
    """p(y|x) = sum over z of p(z|x) p(y|x, z), over two passages; also for an answer y that is given."""
    model = extractive(world, reader, reader_candidates=2)
    retrieved = model.find([BORN, BUILT])
    for item, answer in zip(retrieved, model.read(retrieved), strict=True):
        f = np.exp(np.array(item.relevance) - max(item.relevance))
        np.testing.assert_allclose(item.p_z, f / f.sum(), rtol=1e-5)
        forms = by_hand(model, item.question.question, list(item.passages), list(f / f.sum()))
        y = normalize_answer(answer.text)
        assert answer.probability == pytest.approx(sum(sums.get(y, 0.0) for sums in forms), rel=1e-4)
        assert answer.p_y == pytest.approx(answer.probability)
        for read, sums in zip(answer.read, forms, strict=True):
            assert read.p_y_z == pytest.approx(sums.get(y, 0.0), rel=1e-4, abs=1e-12)
            assert read.p_z_given_y == pytest.approx(read.p_y_z / answer.p_y)
        assert sum(read.p_z for read in answer.read) == pytest.approx(1, abs=1e-6)
        assert sum(sum(sums.values()) for sums in forms) < 1 + 1e-6, "the null answers have the rest"
    given = model.read(retrieved, ["the OSLO.", None])[0]
    forms = by_hand(model, BORN.question, list(retrieved[0].passages), list(retrieved[0].p_z))
    assert given.y == "the OSLO."
    assert given.p_y == pytest.approx(sum(sums.get("oslo", 0.0) for sums in forms), rel=1e-4)
    assert given.best_gold is None or given.best_gold.text == "Oslo"
    assert [read.best_of_y.text for read in given.read if read.best_of_y] == ["Oslo"] * sum("oslo" in s for s in forms)
    assert model.read(retrieved, ["no such words", None])[0].p_y == 0.0


def test_an_answer_does_not_depend_on_what_another_question_excludes(
    world: World, reader: ExtractiveReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where more candidates would give other passages."""
    monkeypatch.setattr("realmops.answering.retrieval.HYBRID_DEPTH", 1)
    model = extractive(world, reader, reader_candidates=1)
    model.bm25, model.retriever.mixture = Bm25.of(world.snapshot), FusionWeights(1.0, 0.3)
    opened, query = OpenedModel(model, "", None, 0, None), Query("Jon built born")
    other = Query(NEVER.question, [world.snapshot.passage_id(n) for n in range(8)])
    assert opened.find([query, other])[0].passages == opened.find([query])[0].passages


@pytest.mark.parametrize(
    ("y", "message"), [("\ud800", "the answer contains an unpaired surrogate"), (" \n", "is blank")]
)
def test_an_answer_to_evaluate_is_checked(world: World, reader: ExtractiveReader, y: str, message: str) -> None:
    opened = OpenedModel(extractive(world, reader), "", None, 0, None)
    opened.check(Query(BORN.question, y="Oslo"))
    with pytest.raises(InvalidRequest, match=message):
        opened.check(Query(BORN.question, y=y))


def test_equal_priors_without_weight_and_none_for_missing_passages(world: World, reader: ExtractiveReader) -> None:
    """A weight of 0 gives equal p(z|x); missing passages, whose relevance is -inf, are neither read nor counted."""
    model = extractive(world, reader, reader_candidates=3)
    assert model.prior_weight == 1.0
    model.retriever.mixture = FusionWeights(1.0, 0.0, 0.0)
    [equal] = model.find([BORN])
    np.testing.assert_allclose(equal.p_z, [1 / 3] * 3, rtol=1e-6)
    assert len(set(equal.relevance)) == 3
    for weight in (0.0, 1.0):
        model = extractive(world, reader, [4, 7], reader_candidates=3)
        model.retriever.mixture = FusionWeights(1.0, 0.0, weight)
        [few] = model.find([BORN])
        assert few.passages == (4, 7)
        np.testing.assert_allclose(few.p_z, [0.5, 0.5], rtol=1e-6)
        assert 0 < model.read([few])[0].probability < 1
    [none] = extractive(world, reader, []).answer([BORN])
    assert (none.text, none.p_y, none.log_p, none.read) == ("", 0.0, -math.inf, ())


def test_the_weight_of_relevance_is_in_the_prior(world: World, reader: ExtractiveReader) -> None:
    model = extractive(world, reader, reader_candidates=3)
    model.retriever.mixture = FusionWeights(1.0, 0.0, 2.0)
    [item] = model.find([BORN])
    f = np.exp(2 * np.array(item.relevance) - 2 * max(item.relevance))
    np.testing.assert_allclose(item.p_z, f / f.sum(), rtol=1e-5)


def test_a_question_longer_than_the_reader_allows_is_invalid(world: World, reader: ExtractiveReader) -> None:
    model = extractive(world, reader, query_wordpieces=58)
    most = reader.longest_question(60)
    assert most == 60 - 30 - 3 - 1
    model.check(" ".join(["in"] * most))
    with pytest.raises(InvalidRequest, match=f"has {most + 1} wordpieces of the reader, at most {most} are allowed"):
        model.check(" ".join(["in"] * (most + 1)))
    [answer] = model.answer([Question("long", " ".join(["in"] * 50), ())])
    assert answer.text, "a question of a file is cut instead"


def test_the_model_is_saved_with_its_reader(world: World, reader: ExtractiveReader, tmp_path: Path) -> None:
    model = extractive(world, reader)
    (tmp_path / "model").mkdir()
    model.save(tmp_path / "model")
    again = ExtractiveQa.load_reader(tmp_path / "model", world.snapshot).eval()
    for name, tensor in model.reader.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_search_alone_gives_passages_and_no_answer(world: World) -> None:
    retriever, _ = tiny_models(world)
    embedding = embed(retriever.document, document_sequences(world.snapshot, range(12)), FP32)
    model = SearchOnly(retriever, None, world.snapshot, ExactIndex(embedding), options(), FP32)
    [answer] = model.answer([BORN], ranked=5)
    assert (answer.text, answer.best, answer.p_y, answer.log_p) == ("", None, 0.0, -math.inf)
    assert answer.passages == answer.ranked[:3]
    assert sum(read.p_z for read in answer.read) == pytest.approx(1, abs=1e-6)
    assert all((read.p_y_z, read.p_z_given_y, read.best) == (0.0, None, None) for read in answer.read)
    assert model.read(model.find([BORN]), ["Oslo"])[0].y == "Oslo"


def test_a_citation_mark_is_no_answer(reader: ExtractiveReader, tmp_path: Path) -> None:
    citing = ("Anna Berg", "Anna Berg was born in 1901 [26, 3]. She [7] wrote.", ("Anna Berg",))
    model = extractive(build_world(tmp_path, (citing, *DOCUMENTS[1:])), reader, [0])
    retrieved = model.find([BORN])
    _, rows = model.candidates(retrieved)
    marks = model.is_citation(rows, [[0]])
    texts = {citing[1][start:end] for _, _, start, end in rows[marks].tolist()}
    assert {"26", "[26", "3]", "7", "[7]"} <= texts
    assert not texts & {"1901", "1901 [26", "She [7]"}
    [answer] = model.read(retrieved, ["26"])
    assert (answer.p_y, answer.read[0].best_of_y) == (0.0, None)
    assert model.read(retrieved, ["1901"])[0].p_y > 0


@pytest.mark.parametrize("text", ["[26]", "[3, 7]", "[4-6]", "[ 4 ; 11 ]", "[4\u20136,9]"])
def test_numbers_in_brackets_are_citation_marks(text: str) -> None:
    assert CITATION_MARK.fullmatch(text)
    for other in ("[in 1931]", "26", "(26)", "[]", "[a]", "[26"):
        assert not CITATION_MARK.search(other)


def expected_score(text: str, texts: list[str], p: np.ndarray) -> float:
    """The mean of exact match and F1, if one of the texts is drawn by p and is the right answer."""
    scores = [(exact_match(text, [right]) + token_f1(text, [right])) / 2 for right in texts]
    return float(np.dot(scores, p))


def test_the_text_is_the_one_with_the_highest_expected_score() -> None:
    rng = np.random.default_rng(0)
    all_texts = [" ".join(some) for n in (1, 2, 3) for some in itertools.permutations(WORDS, n)]
    others = 0
    for _ in range(300):
        texts = [all_texts[k] for k in rng.integers(len(all_texts), size=8)]
        p = np.sort(rng.dirichlet(np.full(8, 0.7)))[::-1]
        chosen = minimum_bayes_risk(texts, p * 3)
        scores = [expected_score(text, texts, p) for text in texts]
        assert scores[chosen] == pytest.approx(max(scores), rel=1e-9)
        others += chosen != 0
    assert 30 < others < 270, "neither always the first nor never"


@pytest.mark.parametrize(
    ("texts", "p", "chosen"),
    [
        (["Apple", "Walkman", "the Walkman"], [0.4, 0.35, 0.25], 1),  # equal texts
        (["1994", "May 1992", "1992", "in May 1992"], [0.3, 0.25, 0.25, 0.2], 1),  # words in common
        (["Oslo", "Bergen"], [0.5, 0.5], 0),
        (["Oslo", "Bergen"], [0.6, 0.4], 0),
        (["the", "a", "Bergen"], [0.4, 0.2, 0.4], 0),  # texts without a word have one normal form
        (["Oslo"], [0.0], 0),
    ],
)
def test_equal_texts_and_shared_words_count_together(texts: list[str], p: list[float], chosen: int) -> None:
    assert minimum_bayes_risk(texts, np.array(p)) == chosen


def test_the_answer_is_that_of_a_slow_search(world: World) -> None:
    """The best of all spans of the passages, their texts compared one by one."""
    model = open_qa(world, decoding="minimum_risk")
    plain = open_qa(world)
    questions = [BORN, PORT, NEVER]
    answers = model.answer(questions, ranked=5, batch_size=2)
    others = 0
    for question, answer, highest in zip(
        questions, answers, plain.answer(questions, ranked=5, batch_size=2), strict=True
    ):
        score_S, rows = model.spans([model.wordpieces(question.question)], [answer.passages])
        prior = np.array(answer.log_prior)[rows[:, 1]]
        logit_S = score_S.detach().double().numpy() + prior
        order = np.argsort(-logit_S, kind="stable")[: OpenQa.candidate_spans]
        texts = [cut(world, answer.passages[rank], first, last) for _, rank, first, last in rows[order].tolist()]
        p = np.exp(logit_S[order] - logit_S.max())
        scores = [expected_score(text, texts, p / p.sum()) for text in texts]
        assert scores[texts.index(answer.text)] == pytest.approx(max(scores), rel=1e-4)
        assert answer.best_of_passage == highest.best_of_passage
        others += answer.text != highest.text
        [explained] = model.read(model.find([Question("", question.question, ())]))
        assert explained.y == answer.text
        assert np.log(explained.p_y) == pytest.approx(answer.log_p, rel=1e-3)
    assert others, "one of these questions has another answer than its best span"


def test_a_quotation_is_the_sentences_that_a_span_touches(world: World) -> None:
    snapshot, several = world.snapshot, 0
    for passage in range(len(snapshot)):
        chars = snapshot.chars(passage)
        bounds = [(int(chars[a, 0]), int(chars[b - 1, 1])) for a, b in snapshot.sentences(passage)]
        for first, last in itertools.combinations_with_replacement(range(len(chars)), 2):
            start, end = int(chars[first, 0]), int(chars[last, 1])
            touched = [(a, b) for a, b in bounds if start < b and a < end]
            quoted = enclosing_sentence(snapshot, Span("", passage, (start, end), 0.0))
            assert quoted == (touched[0][0], touched[-1][1])
            several += len(touched) > 1
    assert several, "one passage has two sentences"
