"""When a prediction is right, and where an answer stands in a passage.

Numbers depend on these rules, so each has a name: the normal form behind exact match, and two ways to find an
answer in a text (``MATCH_RULES``).
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realmops.corpus.characters import character_class

MAX_ANSWER_WORDPIECES = 10  # ORQA, Lee et al. 2019
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_ASCII_TOKEN = re.compile(r"[0-9A-Za-z]+|[!-/:-@\[-`{-~]")
CharSpan = tuple[int, int]


def normal_form(answer: str) -> str:
    """The form in which answers are compared (SQuAD's, with NFD as in ORQA's release).

    NFD, lower case, ASCII punctuation removed, the articles a, an, the removed, runs of blanks made one.
    """
    text = unicodedata.normalize("NFD", answer).lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def exact_match(prediction: str, answers: Iterable[str]) -> bool:
    """Whether the prediction has the normal form of one of the answers."""
    return normal_form(prediction) in {normal_form(answer) for answer in answers}


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

    A token is a run of letters, digits and marks, or one other visible character; accents count.
    """
    wanted = [token for token, _, _ in _tokens(answer)]
    tokens = _tokens(text)
    words = [token for token, _, _ in tokens]
    spans = []
    for first in range(len(tokens) - len(wanted) + 1) if wanted else ():
        if words[first] == wanted[0] and words[first : first + len(wanted)] == wanted:
            spans.append((tokens[first][1], tokens[first + len(wanted) - 1][2]))
    return spans


MATCH_RULES: dict[str, Callable[[str, str], list[CharSpan]]] = {
    "substring": substring_spans,
    "token_boundary": token_boundary_spans,
}


def contains_answer(text: str, answers: Iterable[str], rule: str) -> bool:
    """Whether one of the answers occurs in the text by a rule of ``MATCH_RULES``."""
    spans_of = _rule(rule)
    return any(spans_of(text, answer) for answer in answers)


def answer_token_spans(
    text: str,
    answers: Iterable[str],
    chars: NDArray[np.integer[Any]],
    *,
    rule: str,
    max_wordpieces: int = MAX_ANSWER_WORDPIECES,
) -> list[tuple[int, int]]:
    """(first, end) wordpieces of every occurrence of an answer in a passage, in order.

    Only occurrences that begin and end where a wordpiece does: the text cut by the span's characters is then
    the text found. Longer ones than ``max_wordpieces`` are left out.

    Args:
        chars: [t, 2] start and end character of each wordpiece in the text.
    """
    spans_of = _rule(rule)
    found = sorted({span for answer in answers for span in spans_of(text, answer)})
    if not found or not len(chars):
        return []
    bounds = np.asarray(found, np.int64)
    first = np.searchsorted(chars[:, 0], bounds[:, 0], side="left")
    end = np.searchsorted(chars[:, 1], bounds[:, 1], side="right")
    low, last = np.minimum(first, len(chars) - 1), np.maximum(end - 1, 0)
    fits = (chars[low, 0] == bounds[:, 0]) & (chars[last, 1] == bounds[:, 1])
    fits &= (first < end) & (end - first <= max_wordpieces)
    return sorted(set(zip(first[fits].tolist(), end[fits].tolist(), strict=True)))


def _rule(name: str) -> Callable[[str, str], list[CharSpan]]:
    if name not in MATCH_RULES:
        raise ValueError(f"match rule {name!r} is unknown; choose one of {', '.join(MATCH_RULES)}")
    return MATCH_RULES[name]


# The same passages are searched for the answers of many questions.
@lru_cache(4096)
def _tokens(text: str) -> Sequence[tuple[str, int, int]]:
    """(lower-case NFD token, start, end) with characters of the text as it is."""
    if text.isascii():
        return [(match[0].lower(), *match.span()) for match in _ASCII_TOKEN.finditer(text)]
    return [
        (unicodedata.normalize("NFD", match[0]).lower(), *match.span())
        for match in _unicode_token().finditer(text)
    ]


@cache
def _unicode_token() -> re.Pattern[str]:
    """Runs of the Unicode categories L, M and N, else one character of neither Z nor C."""
    words = character_class("L", "M", "N")
    return re.compile(f"[{words}]+|[^{words}{character_class('Z', 'C')}]")
