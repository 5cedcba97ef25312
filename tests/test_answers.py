from __future__ import annotations

import numpy as np
import pytest

from realmops.corpus.answers import (
    answer_token_spans,
    contains_answer,
    exact_match,
    normal_form,
    substring_spans,
    token_boundary_spans,
)


@pytest.mark.parametrize(
    ("answer", "form"),
    [
        ("The  Beatles!", "beatles"),
        ("An apple, a day", "apple day"),
        ("theatre", "theatre"),
        ("U.S.A.", "usa"),
        ("3.5", "35"),
        ("Café", "cafe\u0301"),
        ("the", ""),
    ],
)
def test_normal_form(answer: str, form: str) -> None:
    assert normal_form(answer) == form


def test_exact_match_takes_the_best_reference() -> None:
    assert exact_match("the beatles", ["Queen", "The Beatles"])
    assert exact_match("Café", ["cafe\u0301"])
    assert not exact_match("cafe", ["Café"])
    assert not exact_match("beatles band", ["The Beatles"])


def test_the_release_looks_for_the_raw_string() -> None:
    assert substring_spans("In 1995, 1", "1") == [(3, 4), (9, 10)]
    assert substring_spans("aaa", "aa") == [(0, 2), (1, 3)]
    assert substring_spans("The Beatles", "the beatles") == []
    assert substring_spans("text", "") == []


def test_dpr_looks_for_whole_tokens() -> None:
    assert token_boundary_spans("In 1995, 1", "1") == [(9, 10)]
    assert token_boundary_spans("THE BEATLES played", "the beatles") == [(0, 11)]
    assert token_boundary_spans("in the U.S. army", "u.s.") == [(7, 11)]
    assert token_boundary_spans("a U.S.-led war", "us") == []
    assert token_boundary_spans("un Cafe\u0301 noir", "café") == [(3, 8)]
    assert token_boundary_spans("un Cafe noir", "café") == []
    assert token_boundary_spans("東京 – x_1", "1") == [(7, 8)]
    assert token_boundary_spans("text", " ") == []


def test_contains_answer_by_the_name_of_the_rule() -> None:
    assert contains_answer("In 1995", ["x", "1"], "substring")
    assert not contains_answer("In 1995", ["x", "1"], "token_boundary")
    with pytest.raises(ValueError, match="'regex' is unknown; choose one of substring, token_boundary"):
        contains_answer("", ["a"], "regex")


def test_occurrences_become_wordpieces() -> None:
    text = "John Playing, john."
    chars = np.array(
        [[0, 4], [5, 9], [9, 12], [12, 13], [14, 18], [18, 19]], np.int32
    )  # john play ##ing , john .
    assert answer_token_spans(text, ["john"], chars, rule="token_boundary") == [(0, 1), (4, 5)]
    assert answer_token_spans(text, ["John", "John Playing"], chars, rule="substring") == [(0, 1), (0, 3)]
    assert answer_token_spans(text, ["Play"], chars, rule="substring") == [(1, 2)]
    assert answer_token_spans(text, ["lay", "Pl", "ing, j"], chars, rule="substring") == []
    assert answer_token_spans(text, ["absent"], chars, rule="substring") == []


def test_answers_over_the_limit_are_left_out() -> None:
    text = "a b c d"
    chars = np.array([[0, 1], [2, 3], [4, 5], [6, 7]], np.int32)
    assert answer_token_spans(text, ["a b c"], chars, rule="substring", max_wordpieces=3) == [(0, 3)]
    assert answer_token_spans(text, ["a b c"], chars, rule="substring", max_wordpieces=2) == []
    assert answer_token_spans(text, ["a"], chars[:0], rule="substring") == []
