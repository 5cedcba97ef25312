"""The ceilings above exact match, on a corpus of four passages."""

from types import SimpleNamespace
from typing import Any

import numpy as np
from four_passages import QUESTIONS, TEXTS
from hypothesis import given, settings
from hypothesis import strategies as st

from realmops.evaluate.ceilings import answer_fits_reader, answered_in_corpus, reader_can_answer
from realmops.questions.answer_matching import contains_answer
from realmops.questions.question_sets import Question


def test_answered_in_corpus_searches_for_open_questions_alone() -> None:
    rule = "token_boundary"
    assert answered_in_corpus(QUESTIONS, TEXTS, rule=rule).tolist() == [True, True, False]
    assert answered_in_corpus(QUESTIONS, TEXTS[:3], rule=rule).tolist() == [True, False, False]
    known = np.array([False, True, False])
    assert answered_in_corpus(QUESTIONS, TEXTS[:3], rule=rule, known_Q=known).tolist() == [True, True, False]
    assert known.tolist() == [False, True, False]


def test_answer_fits_reader_takes_the_shortest_answer() -> None:
    questions = [
        Question("a", "?", ("one two three four five six seven eight nine ten eleven", "ten")),
        Question("b", "?", ("one two three four five six seven eight nine ten eleven",)),
        Question("c", "?", ("one two three four five six seven eight nine ten",)),
    ]
    words: Any = SimpleNamespace(encode=lambda text, add_special_tokens: SimpleNamespace(ids=text.split()))
    for most, expected in ((9, [True, False, False]), (10, [True, False, True]), (11, [True, True, True])):
        assert answer_fits_reader(questions, words, most).tolist() == expected


def test_reader_can_answer_needs_a_short_span_in_the_passages_read() -> None:
    words = [[(text.index(word), text.index(word) + len(word)) for word in text[:-1].split()] for text in TEXTS]
    snapshot: Any = SimpleNamespace(text=TEXTS.__getitem__, chars=lambda i: np.array(words[i]))
    ranked = np.array([[2, 2, 2, 2, 1, 3], [2, 2, 2, 2, -1, 3], [2, 1, 0, 3, 0, 0]])
    for read, wordpieces, expected in ((5, 10, [1, 0, 0]), (6, 10, [1, 1, 0]), (6, 1, [0, 1, 0])):
        found = reader_can_answer(QUESTIONS, ranked[:, :read], snapshot, "token_boundary", wordpieces)
        assert found.tolist() == expected, (read, wordpieces)


WORDS = ["Tor", "tor", "Hollow", "1", "1995", "5", "é", "É", "£5", "U.S.", "the", "mill", "mills", "\n", "\u00ff"]
texts = st.lists(st.lists(st.sampled_from(WORDS), max_size=5).map(" ".join), max_size=6)
answers = st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=2).map(" ".join), min_size=1, max_size=2)


@settings(deadline=None, max_examples=150)
@given(
    texts, st.lists(answers, min_size=1, max_size=4), st.sampled_from(["substring", "token_boundary", "regex_search"])
)
def test_many_passages_at_once_give_what_one_by_one_gives(texts: list[str], wanted: list[list[str]], rule: str) -> None:
    questions = [Question(str(i), "?", tuple(answers)) for i, answers in enumerate(wanted)]
    plain = [any(contains_answer(text, q.answers, rule) for text in texts) for q in questions]
    assert answered_in_corpus(questions, texts, rule=rule).tolist() == plain
