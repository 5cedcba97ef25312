"""Languages: their properties (``languages.yaml``), language detection and word segmentation.

py3langid misclassifies 5 of 5,793 questions in five languages, each below ``_CONFIDENT``, and none of 1,174 paragraphs.
"""

from __future__ import annotations

import copy
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

if TYPE_CHECKING:
    from py3langid.langid import LanguageIdentifier

ENGLISH, AUTO = "en", "auto"
NO_BLANKS = r"\p{Han}\p{Hiragana}\p{Katakana}ー\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"  # written without blanks
UNSPACED = rf"{NO_BLANKS}\p{{Hangul}}"  # Korean particles attach to the word
_UNIT = rf"[[{UNSPACED}]--\p{{M}}]\p{{M}}*"  # such a character with its marks
_CLUSTER = r"\X"
NORMAL_FORM: Final = "NFKC"  # of the words of texts and queries
_SOFT_HYPHEN = "\u00ad"
_MARKED_I = r"[Ii]\p{M}+"
LETTERS = r"\p{L}\p{N}_\p{InSC=Vowel_Dependent}"  # characters that can form a word; other marks cannot
_SPACED = rf"[[{LETTERS}]--[{UNSPACED}]][[\p{{L}}\p{{M}}\p{{N}}_]--[{UNSPACED}]]*+"  # a word between blanks
_NO_WORD = r"[\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}--\p{InSC=Vowel_Dependent}]+"  # letters without a vowel sign
_CONFIDENT = 0.9  # probability from which a detected language is certain
_DETECTION_LENGTH = 2000  # characters of a text used for detection
WordSpan = tuple[str, int, int]  # a word with its start and end character


def token_pattern(word: str) -> str:
    """Return a pattern of words, alone or joined or with signs: 33,970, 3.10.2, e-mail, AT&T, O'Neill, .NET, C++."""
    thousands = r"(?<=\d)(?<!\d{4})[, ](?=\d{3}(?!\d))"
    return rf"\.?{word}(?:(?:[-.'’&/@+‐–]|{thousands}){word})*+[+#]*+"


_TOKEN = rf"(?P<run>(?:{_UNIT})+)|{token_pattern(_SPACED)}"
_ENGLISH_TOKEN = re.compile(r"(?!A (?<!\w A ))" + token_pattern(r"\w++"))  # without the article A of a sentence


@dataclass(frozen=True)
class Language:
    """Properties of one language, an entry of ``languages.yaml``, whose head describes the fields."""

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
    not_years: frozenset[str] = frozenset()
    versions: frozenset[str] = frozenset()
    units: frozenset[str] = frozenset()
    singulars: frozenset[str] = frozenset()


@cache
def compile_regex(pattern: str) -> Any:
    """Compile a pattern with ``regex``, which supports scripts and set differences; imported on first use."""
    import regex

    return regex.compile(pattern, regex.V1)


@cache
def load_languages() -> dict[str, Language]:
    entries = yaml.load(Path(__file__).with_suffix(".yaml").read_bytes(), yaml.CSafeLoader)
    lists = {field.name for field in fields(Language) if field.default == frozenset()}
    for entry in entries.values():
        entry |= {key: frozenset(entry[key].split()) for key in lists & entry.keys()}
    return {code: Language(**entry) for code, entry in entries.items()}


def check_language(code: str) -> None:
    if code not in (AUTO, *load_languages()):
        raise ValueError(
            f"snapshot.language is {code!r}; expected {AUTO} (of each document) or one of {', '.join(load_languages())}"
        )


def detect_language(text: str, among: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the language of a text's beginning if it is certain, else the two most probable, most probable first."""
    if len(among) == 1:
        return (among[0],)
    ranked = _identifier(tuple(among) or tuple(load_languages())).rank(text[:_DETECTION_LENGTH])
    return tuple(code for code, _ in ranked[: 1 if ranked[0][1] >= _CONFIDENT else 2])


@lru_cache(32)
def _identifier(among: tuple[str, ...]) -> LanguageIdentifier:
    identifier = copy.copy(_model())
    identifier.set_languages(among)
    return identifier


@cache
def _model() -> LanguageIdentifier:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def normalize_unicode(text: str) -> str:
    """Normalize to NFKC without soft hyphens, and without U+0307 after i and I: the lower case of Turkish İ has it."""
    if text.isascii():
        return text
    if "\u0130" in text or "\u0307" in text:
        decomposed = unicodedata.normalize("NFKD", text)  # also the i of a ligature
        text = compile_regex(_MARKED_I).sub(lambda match: match[0].replace("\u0307", ""), decomposed)
    return unicodedata.normalize(NORMAL_FORM, text.replace(_SOFT_HYPHEN, ""))


def find_with_offsets(find: Callable[[str], Iterator[WordSpan]], text: str) -> Iterator[WordSpan]:
    """Apply ``find`` to the normalized text and map the offsets of its words back to ``text``."""
    if unicodedata.is_normalized(NORMAL_FORM, text) and not {"\u0130", "\u0307", _SOFT_HYPHEN} & set(text):
        return find(normalize_unicode(text))
    clusters = [(normalize_unicode(match[0]), *match.span()) for match in compile_regex(_CLUSTER).finditer(text)]
    starts = [start for part, start, _ in clusters for _ in part]
    ends = [end for part, _, end in clusters for _ in part]
    whole = "".join(part for part, _, _ in clusters)
    return ((word, starts[start], ends[end - 1]) for word, start, end in find(whole))


def find_tokens(text: str, language: str = ENGLISH) -> list[str]:
    """Return the normalized tokens of a text, each of one word or of several (``token_pattern``)."""
    normalized = normalize_unicode(text)
    if language == ENGLISH:
        return _ENGLISH_TOKEN.findall(normalized)
    return [token for token, _, _ in token_spans(normalized, language)]


def token_spans(text: str, language: str) -> Iterator[WordSpan]:
    """Yield the tokens of a normalized text with their characters.

    Indic vowel signs count as letters, other marks do not. In scripts without blanks, tokens are pairs of adjacent
    characters, or one isolated character.
    """
    if language == ENGLISH:
        yield from ((match[0], *match.span()) for match in _ENGLISH_TOKEN.finditer(text))
        return
    for match in compile_regex(_TOKEN).finditer(text):
        token, (start, end) = match[0], match.span()
        if match["run"] is None:
            yield token, start, end
            continue
        # Usually there are no marks, and each character is a unit.
        units = compile_regex(_UNIT).finditer(token)
        starts = range(start, end) if token.isalpha() else [start + unit.start() for unit in units]
        if len(starts) > 1 or not compile_regex(_NO_WORD).fullmatch(token):
            for first, stop in zip(starts, [*starts[2:], end], strict=False):
                yield text[first:stop], first, stop
