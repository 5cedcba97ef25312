"""Exact match and F1 of predictions, and the occurrences of answers in passages (``MATCH_RULES``)."""

import re
import string
import unicodedata
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realmops.corpus.languages import ENGLISH, UNSPACED, compile_regex, load_languages

MATCH_SECONDS = 1.0  # of processor time, per expression and text
LONGEST_EXPRESSION = 10_000  # characters
TOKEN_SEPARATOR = b"\xff"  # occurs in no UTF-8
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ELIDING = ("fr", "it")  # languages in which an apostrophe ends an article
_APOSTROPHE = re.compile("['’]")
_ASCII_TOKEN = re.compile(r"[0-9A-Za-z]+|[!-/:-@\[-`{-~]")
_ANY_PUNCTUATION = r"[\p{P}$+<=>^`|~]"
_UNSPACED_CHARACTER = rf"[{UNSPACED}]\p{{M}}*"
# An unspaced character, a run of the Unicode categories L, M and N, or one other character outside Z and C.
_TOKEN = (
    rf"{_UNSPACED_CHARACTER}|[[\p{{L}}\p{{M}}\p{{N}}]--[{UNSPACED}]]+"
    r"|[^\p{L}\p{M}\p{N}\p{Z}\p{C}]"
)
CharSpan = tuple[int, int]


def normalize_answer(answer: str, language: str = ENGLISH) -> str:
    """Normalize an answer: in English as SQuAD, with NFD as in ORQA's release, else as MLQA (Lewis et al. 2020).

    MLQA uses NFC, removes the language's articles, and puts blanks around each character of a script without blanks.
    """
    return " ".join(_articles(language).sub(" ", _bare(answer, language)).split())


def _bare(text: str, language: str) -> str:
    if language == ENGLISH:
        return unicodedata.normalize("NFD", text).lower().translate(_PUNCTUATION)
    text = unicodedata.normalize("NFC", text).lower()
    if language in _ELIDING:
        text = _APOSTROPHE.sub(" ", text)
    spaced: str = compile_regex(_UNSPACED_CHARACTER).sub(r" \g<0> ", compile_regex(_ANY_PUNCTUATION).sub("", text))
    return spaced


@cache
def _articles(language: str) -> re.Pattern[str]:
    if language == "ar":
        return re.compile("ال")
    words = "|".join(sorted(load_languages()[language].articles))
    return re.compile(rf"\b(?:{words})\b" if words else "(?!)")


def exact_match(prediction: str, answers: Iterable[str], language: str = ENGLISH) -> bool:
    form = normalize_answer(prediction, language)
    return bool(prediction) and any(normalize_answer(answer, language) == form for answer in answers)


def match_normal_form(
    text: str, answer: str, spans: NDArray[np.integer[Any]], language: str = ENGLISH
) -> NDArray[np.bool_]:
    """Return which spans [S, 2], start and end characters in a text, have the answer's normal form, bool [S]."""
    form = normalize_answer(answer, language)
    possible = np.ones(len(spans), bool)
    simple, positions = _simple_form(text, language)
    if form and simple:
        span_positions = positions[spans]
        possible[:] = False
        between = rf"(?:\s|{_articles(language).pattern})+?"
        for match in re.finditer(f"(?=({between.join(map(re.escape, form.split()))}))", simple):
            possible |= (span_positions[:, 0] <= match.start(1)) & (match.end(1) <= span_positions[:, 1])
    same = np.zeros(len(spans), bool)
    for row in np.flatnonzero(possible):
        start, end = spans[row]
        same[row] = normalize_answer(text[start:end], language) == form
    return same


@lru_cache(1024)
def _simple_form(text: str, language: str) -> tuple[str, NDArray[np.int64]]:
    """Return the text as normalized by ``_bare``, "" if its parts could differ alone, and each character's position."""
    if text.isascii() and language == ENGLISH:
        simple = text.lower().translate(_PUNCTUATION)
        lengths = [1 - (character in string.punctuation) for character in text]
        return simple, np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    parts = [_bare(character, language) for character in text]
    simple = "".join(parts)
    return simple if simple == _bare(text, language) and "\u03a3" not in text else "", np.cumsum([0, *map(len, parts)])


def token_f1(prediction: str, answers: Iterable[str], language: str = ENGLISH) -> float:
    """Return the best F1 over the answers, on words (SQuAD's script, Rajpurkar et al. 2016); 1 if neither has words."""
    predicted = normalize_answer(prediction, language).split()
    return max((words_f1(predicted, normalize_answer(answer, language).split()) for answer in answers), default=0.0)


def words_f1(predicted: list[str], expected: list[str]) -> float:
    if not predicted or not expected:
        return float(predicted == expected)
    return 2 * (Counter(predicted) & Counter(expected)).total() / (len(predicted) + len(expected))


def substring_spans(text: str, answer: str) -> list[CharSpan]:
    """Return (start, end) characters of the raw string, the rule of REALM's release ("1" occurs in "1995")."""
    spans = []
    start = text.find(answer) if answer else -1
    while start >= 0:
        spans.append((start, start + len(answer)))
        start = text.find(answer, start + 1)
    return spans


def token_boundary_spans(text: str, answer: str) -> list[CharSpan]:
    """Return (start, end) characters of whole-token matches, the rule of DPR (Karpukhin et al. 2020): any case, NFD.

    A token is a run of letters, digits and marks, or one other visible character; accents are significant. In scripts
    without blanks, and in Korean, whose particles attach to the word, each character is a token.
    """
    run = token_bytes(answer)
    if not run or run not in token_bytes(text):
        return []
    tokens, answer_words = _tokens(text), [token for token, _, _ in _tokens(answer)]
    words = [token for token, _, _ in tokens]
    spans = []
    for first in range(len(tokens) - len(answer_words) + 1):
        end = first + len(answer_words)
        if words[first] == answer_words[0] and words[first:end] == answer_words:
            spans.append((tokens[first][1], tokens[end - 1][2]))
    return spans


@lru_cache(1 << 15)
def token_bytes(text: str) -> bytes:
    """Return the tokens between ``TOKEN_SEPARATOR``s: a sequence of tokens is a substring, which is faster to find."""
    tokens = [token.encode() for token, _, _ in _tokens(text)]
    return TOKEN_SEPARATOR.join([b"", *tokens, b""]) if tokens else b""


class Expression:
    """An answer's regular expression: case-insensitive, Unicode, multi-line; empty matches are ignored.

    A match over ``MATCH_SECONDS`` of processor time counts as none, as do later ones, and sets ``timed_out``.
    """

    def __init__(self, text: str) -> None:
        import regex

        if len(text) > LONGEST_EXPRESSION:
            raise ValueError(f"it has {len(text)} characters; at most {LONGEST_EXPRESSION} are allowed")
        try:
            with warnings.catch_warnings(action="ignore"):
                re.compile(text, re.IGNORECASE | re.MULTILINE)
                flags = regex.IGNORECASE | regex.MULTILINE | regex.UNICODE | regex.VERSION0
                self.pattern: Any = regex.compile(text, flags)
        except (re.error, regex.error, ValueError, OverflowError, MemoryError, RecursionError) as error:
            raise ValueError(str(error) or type(error).__name__) from None
        self.timed_out = False

    def spans(self, text: str, *, at_start: bool = False) -> list[CharSpan]:
        if self.timed_out:
            return []
        try:
            if at_start:
                first = self.pattern.match(text, timeout=MATCH_SECONDS)
                matches = [first.span()] if first else []
            else:
                matches = [match.span() for match in self.pattern.finditer(text, timeout=MATCH_SECONDS)]
        except (TimeoutError, MemoryError):
            self.timed_out = True
            return []
        return [(start, end) for start, end in matches if start < end]


@cache
def compile_expression(text: str) -> Expression:
    return Expression(text)


def check_expression(text: str, place: str) -> None:
    try:
        compile_expression(text)
    except ValueError as error:
        raise ValueError(
            f"{place}: {text[:100]!r} is no regular expression ({error}); use the syntax of Python's re"
        ) from None


MATCH_RULES: dict[str, Callable[[str, str], list[CharSpan]]] = {
    "substring": substring_spans,
    "token_boundary": token_boundary_spans,
    "regex_match": lambda text, answer: compile_expression(answer).spans(text, at_start=True),  # ORQA's, of predictions
    "regex_search": lambda text, answer: compile_expression(answer).spans(text),  # of CuratedTREC's README
}
WORD_RULES = ("substring", "token_boundary")
REGEX_RULES = ("regex_match", "regex_search")


def contains_answer(text: str, answers: Iterable[str], rule: str) -> bool:
    return any(MATCH_RULES[rule](text, answer) for answer in answers)


def answer_token_spans(
    text: str, answers: Iterable[str], chars: NDArray[np.integer[Any]], *, rule: str, max_wordpieces: int
) -> list[tuple[int, int]]:
    """Return sorted (first, end) wordpieces of the answers' occurrences at wordpiece boundaries ``chars`` [t, 2]."""
    char_spans = matched_spans(text, answers, rule)
    if not char_spans or not len(chars):
        return []
    bounds = np.asarray(char_spans, np.int64)
    first = np.searchsorted(chars[:, 0], bounds[:, 0], side="left")
    end = np.searchsorted(chars[:, 1], bounds[:, 1], side="right")
    low, last = np.minimum(first, len(chars) - 1), np.maximum(end - 1, 0)
    fits = (chars[low, 0] == bounds[:, 0]) & (chars[last, 1] == bounds[:, 1])
    fits &= (first < end) & (end - first <= max_wordpieces)
    return sorted(set(zip(first[fits].tolist(), end[fits].tolist(), strict=True)))


def matched_spans(text: str, answers: Iterable[str], rule: str) -> list[CharSpan]:
    return sorted({_trimmed(text, span) for answer in answers for span in MATCH_RULES[rule](text, answer)})


def _trimmed(text: str, span: CharSpan) -> CharSpan:
    r"""Strip blanks from a span, which expressions such as ``\s?1995`` match too."""
    start, end = span
    matched = text[start:end]
    return start + len(matched) - len(matched.lstrip()), end - len(matched) + len(matched.rstrip())


@lru_cache(4096)  # the same passages are searched for the answers of many questions
def _tokens(text: str) -> Sequence[tuple[str, int, int]]:
    """Return (lower-case NFD token, start, end), with positions in the original text."""
    if text.isascii():
        return [(match[0].lower(), *match.span()) for match in _ASCII_TOKEN.finditer(text)]
    return [
        (unicodedata.normalize("NFD", match[0]).lower(), *match.span())
        for match in compile_regex(_TOKEN).finditer(text)
    ]
