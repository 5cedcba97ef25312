import re
import sys
import time
import unicodedata
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realmops.questions.answer_matching import (
    answer_token_spans,
    check_expression,
    compile_expression,
    contains_answer,
    exact_match,
    match_normal_form,
    normalize_answer,
    regex_match_spans,
    regex_search_spans,
    substring_spans,
    token_boundary_spans,
    token_f1,
)


@pytest.mark.parametrize(
    ("answer", "form"),
    [
        ("The  Beatles!", "beatles"), ("An apple, a day", "apple day"), ("theatre", "theatre"), ("U.S.A.", "usa"),
        ("3.5", "35"), ("Café", "cafe\u0301"), ("the", ""),
    ],
)  # fmt: skip
def test_normal_form(answer: str, form: str) -> None:
    assert normalize_answer(answer) == form


@pytest.mark.parametrize(
    ("prediction", "answers", "f1"),
    [
        ("Tor Hollow", ("tor hollow!",), 1.0),
        ("in the Tor Hollow", ("Tor Hollow",), 0.8),  # precision 2/3, recall 1
        ("Tor", ("Tor Hollow", "the Moor"), 2 / 3),  # precision 1, recall 1/2
        ("Tor", ("Moor", "Tor Hollow", "Tor"), 1.0),  # the best of three
        ("to be or not to be", ("to be",), 0.5),  # each "to" and "be" counts once: precision 2/6, recall 1
        ("a b b", ("b b b",), 0.8),  # "a" is an article: precision 2/2, recall 2/3
        ("north", ("south",), 0.0),
        ("", ("south",), 0.0),
        ("the", ("a",), 1.0),  # both empty after normalisation
        ("", (), 0.0),
    ],
)
def test_f1_by_hand(prediction: str, answers: tuple[str, ...], f1: float) -> None:
    assert token_f1(prediction, answers) == pytest.approx(f1)


def squad_f1(prediction: str, truth: str) -> float:
    """``compute_f1`` of SQuAD's evaluation script 2.0."""
    pred_toks, gold_toks = normalize_answer(prediction).split(), normalize_answer(truth).split()
    num_same = sum((Counter(gold_toks) & Counter(pred_toks)).values())
    if len(gold_toks) == 0 or len(pred_toks) == 0:
        return int(gold_toks == pred_toks)
    if num_same == 0:
        return 0
    precision, recall = 1.0 * num_same / len(pred_toks), 1.0 * num_same / len(gold_toks)
    return (2 * precision * recall) / (precision + recall)


@given(st.lists(st.text("ab the,", max_size=12), min_size=2, max_size=4))
def test_f1_is_that_of_squads_script(texts: list[str]) -> None:
    prediction, *answers = texts
    assert token_f1(prediction, answers) == pytest.approx(max(squad_f1(prediction, answer) for answer in answers))
    assert (token_f1(prediction, answers) == 1) >= exact_match(prediction, answers)


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


def test_occurrences_become_wordpieces() -> None:
    text = "John Playing, john."
    chars = np.array([[0, 4], [5, 9], [9, 12], [12, 13], [14, 18], [18, 19]], np.int32)  # john play ##ing , john .
    assert answer_token_spans(text, ["john"], chars, rule="token_boundary", max_wordpieces=10) == [(0, 1), (4, 5)]
    assert answer_token_spans(text, ["John", "John Playing"], chars, rule="substring", max_wordpieces=10) == [
        (0, 1),
        (0, 3),
    ]
    assert answer_token_spans(text, ["Play"], chars, rule="substring", max_wordpieces=10) == [(1, 2)]
    assert answer_token_spans(text, ["lay", "Pl", "ing, j"], chars, rule="substring", max_wordpieces=10) == []
    assert answer_token_spans(text, ["absent"], chars, rule="substring", max_wordpieces=10) == []


def test_answers_over_the_limit_are_left_out() -> None:
    text = "a b c d"
    chars = np.array([[0, 1], [2, 3], [4, 5], [6, 7]], np.int32)
    assert answer_token_spans(text, ["a b c"], chars, rule="substring", max_wordpieces=3) == [(0, 3)]
    assert answer_token_spans(text, ["a b c"], chars, rule="substring", max_wordpieces=2) == []
    assert answer_token_spans(text, ["a"], chars[:0], rule="substring", max_wordpieces=10) == []


def test_no_word_hides_from_the_quick_look() -> None:
    """The rule looks for an ASCII word in ``lower`` first: no character but itself becomes one by NFD."""
    for number in range(sys.maxunicode + 1):
        decomposed = unicodedata.normalize("NFD", chr(number)).lower()
        if re.fullmatch("[0-9a-z]+", decomposed):
            assert chr(number).lower() == decomposed, hex(number)
    assert token_boundary_spans("300 \u212a", "k") == [(4, 5)]  # the Kelvin sign


# ---- regular expressions


def test_expressions_match_at_the_start_or_anywhere() -> None:
    text = "In Boston\nand BOSTON"
    assert regex_match_spans(text, "boston") == []
    assert regex_match_spans("Boston, Massachusetts", "boston|Lyon") == [(0, 6)]
    assert regex_search_spans(text, "boston") == [(3, 9), (14, 20)]
    assert regex_search_spans(text, "^and") == [(10, 13)]
    assert regex_search_spans(text, "boston$") == [(3, 9), (14, 20)]
    assert regex_search_spans("École", "é") == [(0, 1)]


def test_an_empty_match_is_none() -> None:
    assert regex_search_spans("abc", "x*") == []
    assert not contains_answer("", ["x*"], "regex_match")


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [("(Oslo", "missing \\)"), ("*", "nothing to repeat"), ("(?R)", "unknown extension"), ("a" * 10_001, "10001 char")],
)
def test_an_expression_that_does_not_compile_is_named(wrong: str, problem: str) -> None:
    with pytest.raises(ValueError, match=f"^file:7: .* is no regular expression .*{problem}"):
        check_expression(wrong, "file:7")


# Every pair takes exponential or endless time in a plain search.
@pytest.mark.parametrize(
    ("slow", "text"),
    [
        ("(a+)+$", "a" * 5000 + "!"),
        (r"(.*)*\d$", "word " * 2000 + "!"),
        (r"(\w+\s?)+$", "word " * 2000 + "!"),
        ("(?:(?:(?:a+)+)+)+z", "a" * 5000 + "!"),
    ],
)
def test_a_catastrophic_expression_is_given_up(monkeypatch: pytest.MonkeyPatch, slow: str, text: str) -> None:
    monkeypatch.setattr("realmops.questions.answer_matching.MATCH_SECONDS", 0.05)
    assert compile_expression(slow).timed_out is False
    before = time.process_time()
    assert not contains_answer(text, [slow], "regex_search")
    assert compile_expression(slow).timed_out is True
    for _ in range(1000):
        assert not contains_answer(text, [slow], "regex_search")
    assert time.process_time() - before < 2, "one match of 0.05 s and none after it"


PIECES = ["a", "b", "(a|ab)", "[a-c]", r"\d", r"\s", "?", "*", "+", "{2}", "|", "^", "$", ".", r"\b", "é", "(b)"]


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=6), st.text("abcAé1 \n", max_size=12))
def test_expressions_mean_what_they_mean_in_re(pieces: list[str], text: str) -> None:
    pattern = "".join(pieces)
    try:
        plain = re.compile(pattern, re.IGNORECASE | re.MULTILINE)
    except re.error:
        with pytest.raises(ValueError, match="is no regular expression"):
            check_expression(pattern, "here")
        return
    found = [match.span() for match in plain.finditer(text) if match.group()]
    assert regex_search_spans(text, pattern) == found


def test_an_expressions_match_loses_its_blanks_as_wordpieces() -> None:
    text = "born  in 1995 ."
    chars = np.array([[0, 4], [6, 8], [9, 13], [14, 15]], np.int32)
    assert answer_token_spans(text, [r"\s*in\s(19)?\d\d\s?"], chars, rule="regex_search", max_wordpieces=10) == [(1, 3)]
    assert (
        answer_token_spans(text, [r"in\s\d\d"], chars, rule="regex_search", max_wordpieces=10) == []
    )  # ends inside of 1995
    assert answer_token_spans(text, [r"\s"], chars, rule="regex_search", max_wordpieces=10) == []


# ---- spans with the answer's normal form


WORDS = (
    "the", "a", "an", "The A", "Theory", "(cat)", "café", "cafe\u0301", "Σας", "–", "½", "İ", "1950.", "–a–",
    "\x1c",
)  # fmt: skip


@given(st.lists(st.sampled_from(WORDS), min_size=1, max_size=8), st.sampled_from([" ", "", "\n"]), st.data())
def test_spans_of_an_answer_are_those_with_its_normal_form(words: list[str], blank: str, data: st.DataObject) -> None:
    text = blank.join(words)
    spans = np.array([(i, j) for i in range(len(text)) for j in range(i + 1, min(len(text), i + 16) + 1)])
    start, end = data.draw(st.sampled_from(spans.tolist()))
    wanted = [normalize_answer(text[i:j]) == normalize_answer(text[start:end]) for i, j in spans]
    assert match_normal_form(text, text[start:end], spans).tolist() == wanted


@pytest.mark.parametrize(
    ("language", "one", "other"),
    [
        ("de", "Die Stadt Köln", "stadt köln"),
        ("de", "„Häuser“", "ha\u0308user"),
        ("es", "¿Las casas?", "casas"),
        ("fr", "L’Université", "universite\u0301"),
        ("ro", "un râu", "râu"),
        ("zh", "《北京》。", "北京"),
        ("zh", "1949 年", "1949年"),
        ("ko", "서울 대학교", "서울대학교"),
        ("vi", "những con sông", "con sông"),
        ("ar", "البيت", "بيت"),
    ],
)
def test_forms_are_equal_by_the_rules_of_the_language(language: str, one: str, other: str) -> None:
    assert normalize_answer(one, language) == normalize_answer(other, language)
    assert exact_match(one, [other], language)
    assert token_f1(one, [other], language) == 1
    found = match_normal_form(f"x {one} x", other, np.array([(2, 2 + len(one)), (0, 1), (2, 3 + len(one))]), language)
    assert found.tolist() == [True, False, True]


def test_articles_are_those_of_the_language_alone() -> None:
    assert normalize_answer("the die", "de") == "the"
    assert normalize_answer("the die") == "die"
    assert token_f1("黑豹队", ["黑豹"], "zh") == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("text", "answer", "found"),
    [
        ("中国于1949年成立。", "1949年", [(3, 8)]),
        ("中国于1949年成立。", "国于", [(1, 3)]),
        ("中国于1949年成立。", "194", []),
        ("그는 서울에서 태어났다", "서울", [(3, 5)]),
        ("ตลาดน้ำอยู่ที่กรุงเทพ", "กรุงเทพ", [(14, 21)]),
        ("Die Häuser", "Häus", []),
    ],
)
def test_in_scripts_without_blanks_each_character_is_a_token(
    text: str, answer: str, found: list[tuple[int, int]]
) -> None:
    assert token_boundary_spans(text, answer) == found
