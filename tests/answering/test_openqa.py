"""Spans as answers: which of them are candidates."""

from pathlib import Path

import pytest
import torch
from small_open_qa import open_qa
from small_world import DOCUMENTS, build_world

from realmops.answering.span_answers import CITATION_MARK
from realmops.questions.question_sets import Question

CITING = ("Anna Berg", "Anna Berg was born in 1901 [26, 3]. She [7] wrote 12 books [in 1931].", ("Anna Berg",))


@pytest.mark.parametrize("text", ["[26]", "[3, 7]", "[4-6]", "[ 4 ; 11 ]", "[4\u20136,9]"])
def test_numbers_in_brackets_are_citation_marks(text: str) -> None:
    assert CITATION_MARK.fullmatch(text)


@pytest.mark.parametrize("text", ["[in 1931]", "26", "(26)", "[]", "[a]", "[26"])
def test_other_brackets_and_numbers_are_no_citation_marks(text: str) -> None:
    assert not CITATION_MARK.search(text)


def test_a_citation_mark_is_never_an_answer_and_takes_no_probability(tmp_path: Path) -> None:
    world = build_world(tmp_path, (CITING, *DOCUMENTS[1:]))
    model = open_qa(world, answer_wordpieces=2, reader_candidates=12)
    [retrieved] = model.find([Question("born", "When was Anna Berg born?", ("1901",))])
    assert 0 in retrieved.passages
    with torch.no_grad():
        _, rows = model.candidates([retrieved])
    text = world.snapshot.text(0)
    rank = retrieved.passages.index(0)
    of_passage = rows[:, 1] == rank
    texts = [text[start:end] for _, _, start, end in rows[of_passage].tolist()]
    marked = model.is_citation(rows, [retrieved.passages])
    assert not marked[~of_passage].any()
    excluded = {t for t, is_marked in zip(texts, marked[of_passage], strict=True) if is_marked}
    assert excluded <= {"26", "[26", "26,", "[2", "2", "6", "[", "]", ",", "3", ", 3", "3]", "7", "[7", "7]", "6,"}
    assert {"7", "3"} <= excluded
    assert "1901" not in excluded
    assert not any("19" in t or "12" in t for t in excluded)
    [of_mark] = [read for read in model.read([retrieved], ["7"])[0].read if read.passage == 0]
    assert of_mark.p_y_z == 0.0
    assert of_mark.best_of_y is None
    assert model.read([retrieved])[0].best is not None


@pytest.mark.parametrize("answer", ["26", "Oslo"])
def test_passages_of_citation_marks_alone_have_no_answer(answer: str, tmp_path: Path) -> None:
    world = build_world(tmp_path, tuple((f"T{n}", text, (text,)) for n, text in enumerate(["[26]", "[26, 3]", "[7]"])))
    [found] = open_qa(world).answer([Question("q", "What is it?", (answer,))])
    assert (found.best, found.text, found.p_y, found.best_gold) == (None, "", 0.0, None)
    assert found.passages
