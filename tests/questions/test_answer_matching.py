import re
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realmops.questions.answer_matching import (
    MATCH_RULES,
    answer_token_spans,
    check_expression,
    compile_expression,
    contains_answer,
    exact_match,
    match_normal_form,
    normalize_answer,
    token_f1,
)


@pytest.mark.parametrize(
    ("answer", "form"),
    [
        ("The  Beatles!", "beatles"), ("An apple, a day", "apple day"), ("theatre", "theatre"), ("U.S.A.", "usa"),
        ("3.5", "35"), ("Café", "cafe\u0301"), ("the", ""),
    ],
)  # fmt: skip
def test_the_normal_form_is_squads(answer: str, form: str) -> None:
    assert normalize_answer(answer) == form
    assert exact_match(answer, ["Queen", form])
    assert not exact_match("", [form])


@pytest.mark.parametrize(
    ("rule", "text", "answer", "spans"),
    [
        ("substring", "In 1995, 1", "1", [(3, 4), (9, 10)]),
        ("substring", "aaa", "aa", [(0, 2), (1, 3)]),
        ("substring", "The Beatles", "the beatles", []),
        ("substring", "text", "", []),
        ("token_boundary", "In 1995, 1", "1", [(9, 10)]),
        ("token_boundary", "THE BEATLES played", "the beatles", [(0, 11)]),
        ("token_boundary", "in the U.S. army", "u.s.", [(7, 11)]),
        ("token_boundary", "a U.S.-led war", "us", []),
        ("token_boundary", "un Cafe\u0301 noir", "café", [(3, 8)]),
        ("token_boundary", "un Cafe noir", "café", []),
        ("token_boundary", "300 \u212a", "k", [(4, 5)]),  # the Kelvin sign
        ("token_boundary", "text", " ", []),
        ("token_boundary", "中国于1949年成立。", "1949年", [(3, 8)]),
        ("token_boundary", "中国于1949年成立。", "194", []),
        ("token_boundary", "그는 서울에서 태어났다", "서울", [(3, 5)]),
        ("token_boundary", "ตลาดน้ำอยู่ที่กรุงเทพ", "กรุงเทพ", [(14, 21)]),
        ("token_boundary", "Die Häuser", "Häus", []),
        ("regex_match", "In Boston", "boston", []),
        ("regex_match", "Boston, Massachusetts", "boston|Lyon", [(0, 6)]),
        ("regex_search", "In Boston\nand BOSTON", "boston$", [(3, 9), (14, 20)]),
        ("regex_search", "In Boston\nand BOSTON", "^and", [(10, 13)]),
        ("regex_search", "École", "é", [(0, 1)]),
        ("regex_search", "abc", "x*", []),  # empty matches
    ],
)
def test_each_rule_finds_its_occurrences(rule: str, text: str, answer: str, spans: list[tuple[int, int]]) -> None:
    assert MATCH_RULES[rule](text, answer) == spans
    assert contains_answer(text, ["x1x", answer], rule) == bool(spans)


@pytest.mark.parametrize(
    ("answers", "rule", "longest", "wordpieces"),
    [
        (["john"], "token_boundary", 10, [(0, 1), (4, 5)]),
        (["John", "John Playing"], "substring", 10, [(0, 1), (0, 3)]),
        (["John", "John Playing"], "substring", 2, [(0, 1)]),
        (["Play"], "substring", 10, [(1, 2)]),
        (["lay", "Pl", "ing, j", "absent"], "substring", 10, []),  # within wordpieces
        ([r"\s*play\w+\s?", r"\s"], "regex_search", 10, [(1, 3)]),  # without blanks
    ],
)
def test_occurrences_become_wordpieces(
    answers: list[str], rule: str, longest: int, wordpieces: list[tuple[int, int]]
) -> None:
    chars = np.array([[0, 4], [5, 9], [9, 12], [12, 13], [14, 18], [18, 19]], np.int32)  # john play ##ing , john .
    text = "John Playing, john."
    assert answer_token_spans(text, answers, chars, rule=rule, max_wordpieces=longest) == wordpieces
    assert answer_token_spans(text, answers, chars[:0], rule=rule, max_wordpieces=longest) == []


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
def test_expressions_match_as_in_re(pieces: list[str], text: str) -> None:
    pattern = "".join(pieces)
    try:
        plain = re.compile(pattern, re.IGNORECASE | re.MULTILINE)
    except re.error:
        with pytest.raises(ValueError, match="is no regular expression"):
            check_expression(pattern, "here")
        return
    found = [match.span() for match in plain.finditer(text) if match.group()]
    assert MATCH_RULES["regex_search"](text, pattern) == found


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
