"""Languages: what is known of them (``languages.yaml``), which one a text is in, and how words are parted.

Detection is by py3langid, which works without a network: among the languages of a corpus it takes 5 of XQuAD's and
SQuAD's 5,793 questions in five languages for another one, and is sure of none of these; of 1,174 paragraphs none.
"""

from __future__ import annotations

import copy
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from py3langid.langid import LanguageIdentifier

ENGLISH, AUTO = "en", "auto"
NO_BLANKS = r"\p{Han}\p{Hiragana}\p{Katakana}ー\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"  # scripts without, between words
UNSPACED = rf"{NO_BLANKS}\p{{Hangul}}"  # in Korean particles hang on the word
SURE = 0.9  # of a language, from this probability on
_LOOKED_AT = 2000  # characters of a text


@dataclass(frozen=True)
class Language:
    """What ``languages.yaml`` knows of a language."""

    name: str
    stemmer: str = ""
    questions: Mapping[str, Any] = field(default_factory=dict)
    stop: frozenset[str] = frozenset()
    articles: frozenset[str] = frozenset()
    century: str = ""
    of: frozenset[str] = frozenset()
    in_years: frozenset[str] = frozenset()
    before_nouns: frozenset[str] = frozenset()


@cache
def languages() -> dict[str, Language]:
    """All languages by their code."""
    found = yaml.load(Path(__file__).with_suffix(".yaml").read_bytes(), yaml.CSafeLoader)
    lists = ("stop", "articles", "of", "in_years", "before_nouns")
    for known in found.values():
        known |= {key: frozenset(known[key].split()) for key in lists if key in known}
    return {code: Language(**known) for code, known in found.items()}


def check_language(code: str) -> None:
    """ValueError for a value of ``snapshot.language`` that is no known language."""
    if code not in (AUTO, *languages()):
        raise ValueError(
            f"snapshot.language is {code!r}; {AUTO} (of each document) or one of {', '.join(languages())} is wanted"
        )


def detect(text: str, among: Sequence[str] = ()) -> tuple[str, ...]:
    """The language of a text, of all or of some: one where that is sure, else the likeliest two, likeliest first."""
    if len(among) == 1:
        return (among[0],)
    ranked = _identifier(tuple(among) or tuple(languages())).rank(text[:_LOOKED_AT])
    return tuple(code for code, _ in ranked[: 1 if ranked[0][1] >= SURE else 2])


@lru_cache(32)
def _identifier(among: tuple[str, ...]) -> LanguageIdentifier:
    found = copy.copy(_model())
    found.set_languages(among)
    return found


@cache
def _model() -> LanguageIdentifier:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def word_spans(text: str) -> Iterator[tuple[str, int, int]]:
    """Words of any language in lower case and NFC, with their characters: two letters, digits or underscores at least.

    Where a script has no blanks they are pairs of neighbouring characters, or a character that stands alone.
    """
    for match in _word().finditer(text):
        start, end = match.span()
        if match["run"] is None:
            yield unicodedata.normalize("NFC", match[0].lower()), start, end
            continue
        for first in range(start, max(end - 1, start + 1)):
            pair = text[first : min(first + 2, end)]
            yield unicodedata.normalize("NFC", pair.lower()), first, first + len(pair)


@cache
def _word() -> Any:
    import regex

    return regex.compile(rf"(?P<run>[{UNSPACED}]+)|[[\p{{L}}\p{{M}}\p{{N}}_]--[{UNSPACED}]]{{2,}}", regex.V1)
