"""When a prediction is right, and where an answer stands in a passage.

Numbers depend on these rules, so each has a name: the normal form behind exact match, and the ways to find an
answer in a text (``MATCH_RULES``): two for answers in words, two for answers that are regular expressions.
"""

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

from realmops.text.languages import ENGLISH, UNSPACED, compiled, languages

MATCH_SECONDS = 1.0  # of processor time, for one expression in one text
LONGEST_EXPRESSION = 10_000  # characters
BETWEEN = b"\xff"  # occurs in no UTF-8
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ELIDING = ("fr", "it")  # languages in which an apostrophe ends an article
_APOSTROPHE = re.compile("['’]")
_ASCII_TOKEN = re.compile(r"[0-9A-Za-z]+|[!-/:-@\[-`{-~]")
_ANY_PUNCTUATION = r"[\p{P}$+<=>^`|~]"
_UNSPACED_CHARACTER = rf"[{UNSPACED}]\p{{M}}*"
# Such a character, runs of the Unicode categories L, M and N, else one character of neither Z nor C.
_TOKEN = (
    rf"{_UNSPACED_CHARACTER}|[[\p{{L}}\p{{M}}\p{{N}}]--[{UNSPACED}]]+"
    r"|[^\p{L}\p{M}\p{N}\p{Z}\p{C}]"
)
CharSpan = tuple[int, int]


def normal_form(answer: str, language: str = ENGLISH) -> str:
    """The form in which answers are compared.

    In English SQuAD's, with NFD as in ORQA's release: lower case, ASCII punctuation removed, the articles a, an, the
    removed, runs of blanks made one. In others MLQA's (Lewis et al. 2020): NFC, any punctuation removed, the articles
    of the language, and a blank round each character of a script that has none.
    """
    return " ".join(_articles(language).sub(" ", _bare(answer, language)).split())


def _bare(text: str, language: str) -> str:
    """The normal form before articles and blanks are looked for."""
    if language == ENGLISH:
        return unicodedata.normalize("NFD", text).lower().translate(_PUNCTUATION)
    text = unicodedata.normalize("NFC", text).lower()
    if language in _ELIDING:
        text = _APOSTROPHE.sub(" ", text)
    found: str = compiled(_UNSPACED_CHARACTER).sub(r" \g<0> ", compiled(_ANY_PUNCTUATION).sub("", text))
    return found


@cache
def _articles(language: str) -> re.Pattern[str]:
    if language == "ar":
        return re.compile("ال")
    words = "|".join(sorted(languages()[language].articles))
    return re.compile(rf"\b(?:{words})\b" if words else "(?!)")


def exact_match(prediction: str, answers: Iterable[str], language: str = ENGLISH) -> bool:
    """Whether the prediction has the normal form of one of the answers; "", which says nothing, never has."""
    return bool(prediction) and normal_form(prediction, language) in {normal_form(one, language) for one in answers}


def same_form(text: str, answer: str, spans: NDArray[np.integer[Any]], language: str = ENGLISH) -> NDArray[np.bool_]:
    """Which spans [S, 2] (start and end character) of a text have the answer's normal form, [S].

    Only spans that contain its words, one behind another, are brought into their normal form.
    """
    form = normal_form(answer, language)
    possible = np.ones(len(spans), bool)
    simple, place = _simple_form(text, language)
    if form and simple:
        at = place[spans]
        possible[:] = False
        between = rf"(?:\s|{_articles(language).pattern})+?"
        for found in re.finditer(f"(?=({between.join(map(re.escape, form.split()))}))", simple):
            possible |= (at[:, 0] <= found.start(1)) & (found.end(1) <= at[:, 1])
    same = np.zeros(len(spans), bool)
    for row in np.flatnonzero(possible):
        start, end = spans[row]
        same[row] = normal_form(text[start:end], language) == form
    return same


@lru_cache(1024)
def _simple_form(text: str, language: str) -> tuple[str, NDArray[np.int64]]:
    """The text as ``normal_form`` has it before it looks for articles and blanks, and where each character went.

    The first is "" where a part of the text could have another form than it has within the whole.
    """
    if text.isascii() and language == ENGLISH:
        simple = text.lower().translate(_PUNCTUATION)
        kept = [1 - (character in string.punctuation) for character in text]
        return simple, np.concatenate([[0], np.cumsum(kept, dtype=np.int64)])
    parts = [_bare(character, language) for character in text]
    simple = "".join(parts)
    return simple if simple == _bare(text, language) and "\u03a3" not in text else "", np.cumsum([0, *map(len, parts)])


def token_f1(prediction: str, answers: Iterable[str], language: str = ENGLISH) -> float:
    """The best F1 of the words of both normal forms over the answers, as SQuAD's script has it (Rajpurkar et al. 2016).

    F1 is the harmonic mean of both shares of common words. Where a form has no words it is 1 if both have none, else 0.
    """
    said = normal_form(prediction, language).split()
    return max((words_f1(said, normal_form(answer, language).split()) for answer in answers), default=0.0)


def words_f1(said: list[str], wanted: list[str]) -> float:
    """``token_f1`` of the words of two normal forms."""
    if not said or not wanted:
        return float(said == wanted)
    return 2 * (Counter(said) & Counter(wanted)).total() / (len(said) + len(wanted))


def substring_spans(text: str, answer: str) -> list[CharSpan]:
    """(start, end) characters by the rule of REALM's release: the raw string ("1" occurs in "1995")."""
    spans = []
    start = text.find(answer) if answer else -1
    while start >= 0:
        spans.append((start, start + len(answer)))
        start = text.find(answer, start + 1)
    return spans


def token_boundary_spans(text: str, answer: str) -> list[CharSpan]:
    """(start, end) characters by the rule of DPR (Karpukhin et al. 2020): whole tokens, any case, NFD.

    A token is a run of letters, digits and marks, or one other visible character; accents count. In scripts without
    blanks, and in Korean, whose particles hang on the word, each character is a token.
    """
    run = token_bytes(answer)
    if not run or run not in token_bytes(text):
        return []
    tokens, wanted = _tokens(text), [token for token, _, _ in _tokens(answer)]
    words = [token for token, _, _ in tokens]
    spans = []
    for first in range(len(tokens) - len(wanted) + 1):
        if words[first] == wanted[0] and words[first : first + len(wanted)] == wanted:
            spans.append((tokens[first][1], tokens[first + len(wanted) - 1][2]))
    return spans


@lru_cache(1 << 15)
def token_bytes(text: str) -> bytes:
    """The tokens that ``token_boundary_spans`` compares, marks before, between and behind them.

    A run of tokens is a run of these bytes, which is found many times as fast. Empty without a token.
    """
    tokens = [token.encode() for token, _, _ in _tokens(text)]
    return BETWEEN.join([b"", *tokens, b""]) if tokens else b""


def regex_match_spans(text: str, answer: str) -> list[CharSpan]:
    """(start, end) of the expression's match at the start of the text, the rule of ORQA's release for predictions."""
    return expression(answer).spans(text, at_start=True)


def regex_search_spans(text: str, answer: str) -> list[CharSpan]:
    """(start, end) of the expression's matches anywhere, as the README of CuratedTREC wants it."""
    return expression(answer).spans(text)


class Expression:
    """An answer's regular expression: any case, Unicode, ^ and $ at every line; an empty match is none.

    Its language is that of the standard library's ``re``.  A match that takes longer than ``MATCH_SECONDS`` of
    processor time is no match, and then the expression is not tried again in this process.
    """

    def __init__(self, text: str) -> None:
        import regex

        if len(text) > LONGEST_EXPRESSION:
            raise ValueError(f"it has {len(text)} characters, at most {LONGEST_EXPRESSION} are taken")
        try:
            with warnings.catch_warnings(action="ignore"):
                re.compile(text, re.IGNORECASE | re.MULTILINE)
                flags = regex.IGNORECASE | regex.MULTILINE | regex.UNICODE | regex.VERSION0
                self.pattern: Any = regex.compile(text, flags)
        except (re.error, regex.error, ValueError, OverflowError, MemoryError, RecursionError) as error:
            raise ValueError(str(error) or type(error).__name__) from None
        self.timed_out = False

    def spans(self, text: str, *, at_start: bool = False) -> list[CharSpan]:
        """(start, end) of the matches in a text, or of the one at its start."""
        if self.timed_out:
            return []
        try:
            if at_start:
                first = self.pattern.match(text, timeout=MATCH_SECONDS)
                found = [first.span()] if first else []
            else:
                found = [match.span() for match in self.pattern.finditer(text, timeout=MATCH_SECONDS)]
        except (TimeoutError, MemoryError):
            self.timed_out = True
            return []
        return [(start, end) for start, end in found if start < end]

    def first(self, text: str, start: int) -> int:
        """Where the first match at or behind ``start`` begins, -1 without one; TimeoutError as of a slow match."""
        found = self.pattern.search(text, start, timeout=MATCH_SECONDS)
        return found.start() if found else -1


@cache
def expression(text: str) -> Expression:
    """The expression of that text, one for the whole process."""
    return Expression(text)


def check_expression(text: str, place: str) -> None:
    """ValueError that names the place when a text is no regular expression."""
    try:
        expression(text)
    except ValueError as error:
        raise ValueError(
            f"{place}: {text[:100]!r} is no regular expression ({error}); correct it, as Python's re wants it"
        ) from None


MATCH_RULES: dict[str, Callable[[str, str], list[CharSpan]]] = {
    "substring": substring_spans,
    "token_boundary": token_boundary_spans,
    "regex_match": regex_match_spans,
    "regex_search": regex_search_spans,
}
WORD_RULES = ("substring", "token_boundary")
REGEX_RULES = ("regex_match", "regex_search")


def contains_answer(text: str, answers: Iterable[str], rule: str) -> bool:
    """Whether one of the answers occurs in the text by a rule of ``MATCH_RULES``."""
    return any(MATCH_RULES[rule](text, answer) for answer in answers)


def answer_token_spans(
    text: str, answers: Iterable[str], chars: NDArray[np.integer[Any]], *, rule: str, max_wordpieces: int
) -> list[tuple[int, int]]:
    """(first, end) wordpieces of every occurrence of an answer in a passage, in order.

    ``chars`` [t, 2] are start and end character of each wordpiece in the text.  Only occurrences that begin and end
    where a wordpiece does: the text cut by the span's characters is then the text found, less blanks around it.
    Longer ones than ``max_wordpieces`` are left out.
    """
    found = sorted({_trimmed(text, span) for answer in answers for span in MATCH_RULES[rule](text, answer)})
    if not found or not len(chars):
        return []
    bounds = np.asarray(found, np.int64)
    first = np.searchsorted(chars[:, 0], bounds[:, 0], side="left")
    end = np.searchsorted(chars[:, 1], bounds[:, 1], side="right")
    low, last = np.minimum(first, len(chars) - 1), np.maximum(end - 1, 0)
    fits = (chars[low, 0] == bounds[:, 0]) & (chars[last, 1] == bounds[:, 1])
    fits &= (first < end) & (end - first <= max_wordpieces)
    return sorted(set(zip(first[fits].tolist(), end[fits].tolist(), strict=True)))


def _trimmed(text: str, span: CharSpan) -> CharSpan:
    """The span without the blanks that an expression such as ``\\s?1995`` takes in."""
    start, end = span
    found = text[start:end]
    return start + len(found) - len(found.lstrip()), end - len(found) + len(found.rstrip())


# The same passages are searched for the answers of many questions.
@lru_cache(4096)
def _tokens(text: str) -> Sequence[tuple[str, int, int]]:
    """(lower-case NFD token, start, end) with characters of the text as it is."""
    if text.isascii():
        return [(match[0].lower(), *match.span()) for match in _ASCII_TOKEN.finditer(text)]
    return [
        (unicodedata.normalize("NFD", match[0]).lower(), *match.span()) for match in compiled(_TOKEN).finditer(text)
    ]
