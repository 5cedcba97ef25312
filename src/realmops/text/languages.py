"""Languages: what is known of them (``languages.yaml``), which one a text is in, and how words are parted.

Detection is by py3langid, which works without a network: among the languages of a corpus it takes 5 of XQuAD's and
SQuAD's 5,793 questions in five languages for another one, and is sure of none of these; of 1,174 paragraphs none.
"""

from __future__ import annotations

import copy
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
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
_UNIT = rf"[[{UNSPACED}]--\p{{M}}]\p{{M}}*"  # a character of them with its marks
_CLUSTER = r"\X"
_MARKED_I = r"[Ii]\p{M}+"
LETTERS = r"\p{L}\p{N}_\p{InSC=Vowel_Dependent}"  # what makes a word; other marks do not
_LETTER = rf"[[{LETTERS}]--[{UNSPACED}]]"
_WORD = rf"(?P<run>(?:{_UNIT})+)|{_LETTER}[[\p{{L}}\p{{M}}\p{{N}}_]--[{UNSPACED}]]+"
_TWO_LETTERS = rf"(?:{_LETTER}\p{{M}}*){{2}}"
_NO_WORD = r"[\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}--\p{InSC=Vowel_Dependent}]+"  # letters without a vowel sign
SURE = 0.9  # of a language, from this probability on
_LOOKED_AT = 2000  # characters of a text
Placed = tuple[str, int, int]  # a word, with its start and end characters


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
    also_words: frozenset[str] = frozenset()


@cache
def compiled(pattern: str) -> Any:
    """Return a pattern compiled by ``regex``, which knows scripts and differences of sets; it is imported late."""
    import regex

    return regex.compile(pattern, regex.V1)


@cache
def languages() -> dict[str, Language]:
    """All languages by their code."""
    found = yaml.load(Path(__file__).with_suffix(".yaml").read_bytes(), yaml.CSafeLoader)
    lists = ("stop", "articles", "of", "in_years", "before_nouns", "also_words")
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


def composed(text: str) -> str:
    """Return the text in NFC, with I and i instead of those letters with a dot above.

    The lower case of the Turkish capital letter is two characters, i and U+0307: without the dot, "İstanbul",
    "i̇stanbul" and "istanbul" are one word.
    """
    if text.isascii():
        return text
    if "\u0130" in text or "\u0307" in text:
        decomposed = unicodedata.normalize("NFD", text)
        text = compiled(_MARKED_I).sub(lambda match: match[0].replace("\u0307", ""), decomposed)
    return unicodedata.normalize("NFC", text)


def placed(find: Callable[[str], Iterator[Placed]], text: str) -> Iterator[Placed]:
    """Return what ``find`` yields of the composed text, (word, start, end), with the characters of ``text`` itself."""
    if unicodedata.is_normalized("NFC", text) and "\u0307" not in text:
        return find(composed(text))
    clusters = [(composed(match[0]), *match.span()) for match in compiled(_CLUSTER).finditer(text)]
    starts = [start for part, start, _ in clusters for _ in part]
    ends = [end for part, _, end in clusters for _ in part]
    whole = "".join(part for part, _, _ in clusters)
    return ((word, starts[start], ends[end - 1]) for word, start, end in find(whole))


def word_spans(text: str) -> Iterator[Placed]:
    """Words of any language, composed and in lower case, with their characters in the text.

    A word has two letters, digits or underscores at least: marks (accents, harakat, niqqud, tones) are none, but the
    vowel signs of Indic scripts are. Where a script has no blanks, words are pairs of neighbouring characters with
    their marks, or a character that is alone; of scripts with an alphabet (Thai, Lao, Khmer, Myanmar) one character is
    a word only with a vowel sign.
    """
    return placed(_composed_words, text)


def _composed_words(text: str) -> Iterator[Placed]:
    for match in compiled(_WORD).finditer(text):
        word, (start, end) = match[0], match.span()
        if match["run"] is None:
            if word.isalnum() or any(map(str.isalnum, word[1:])) or compiled(_TWO_LETTERS).match(word):
                yield unicodedata.normalize("NFC", word.lower()), start, end
            continue
        # each character without marks, which is usual, is its own
        units = compiled(_UNIT).finditer(word)
        begins = range(start, end) if word.isalpha() else [start + one.start() for one in units]
        if len(begins) > 1 or not compiled(_NO_WORD).fullmatch(word):
            for first, stop in zip(begins, [*begins[2:], end], strict=False):
                yield unicodedata.normalize("NFC", text[first:stop].lower()), first, stop
