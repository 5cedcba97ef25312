"""Dates in languages other than English: months and eras from CLDR (babel), the rest from ``load_languages.yaml``.

The expressions match days with a month, months with a year, days in digits, years 1000 to 2100 and ranges of them,
years with an era, centuries, and in Chinese, Japanese and Korean numbers before the characters for year, month and day.
A bare number of four digits is a year after a word such as "im" or "seit", before punctuation or before a stop word,
but not before a word that may be counted. A day with a month whose name is also another word (``also_words``) is a date
only with a year, or with a full stop within the sentence.
"""

import re
from functools import cache

from realmops.corpus.languages import load_languages

DAY, YEAR, _ROMAN = r"(?:3[01]|[12]\d|0?[1-9])", r"(?:1\d{3}|20\d{2}|2100)", r"[IVX]{1,6}"
# Lookarounds: no adjacent character may make the digits part of a longer number, a word, a price or a code.
NUMBER_START, NUMBER_END = r"(?<![\w.,:/\\$€£¥#+=@'’-])", r"(?![\w%°€$£])(?![.,:/-]\d)(?!-\w)"
ISO_DAY = rf"{NUMBER_START}{YEAR}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12]\d|3[01])(?!\d|-\w|\.\d)"
_CHARACTERS = {"zh": ("年", "月", "[日号號]"), "ja": ("年", "月", "日"), "ko": ("년", "월", "일")}
_CHINESE_DIGITS = "一二三四五六七八九十"
_BEFORE, _AFTER = re.compile(r"(\w+)[ \u00a0]$"), re.compile(r"[ \u00a0](\w+)")
WINDOW = 32  # characters examined before and after a match


def find_local_dates(text: str, language: str) -> list[tuple[int, int]]:
    """Return (start, end) characters of the dates in a text, in order and without overlap."""
    return [match.span() for match in _pattern(language).finditer(text) if _is_date(match, language)]


def _is_date(match: re.Match[str], language: str) -> bool:
    if match.lastgroup == "bare":
        return _is_year(match, language)
    return match.lastgroup != "word" or _is_abbreviation(match)


def _is_abbreviation(match: re.Match[str]) -> bool:
    """Return whether the month's name ends in a full stop that does not end the sentence."""
    after = match.string[match.end() : match.end() + WINDOW].lstrip()
    return match[0].endswith(".") and bool(after) and not after[0].isupper()


def _is_year(match: re.Match[str], language: str) -> bool:
    text, in_years, stop = match.string, load_languages()[language].in_years, load_languages()[language].stop
    before = _BEFORE.search(text[max(0, match.start() - WINDOW) : match.start()])
    after = _AFTER.match(text, match.end(), match.end() + WINDOW)
    if (before and before[1].isdigit()) or (after and after[1].isdigit()):
        return False
    return after is None or after[1] in stop or (before is not None and before[1].lower() in in_years)


@cache
def _pattern(language: str) -> re.Pattern[str]:
    names, eras = _month_and_era_names(language)
    properties = load_languages()[language]
    month = f"(?i:{_alternatives(names)})\\b\\.?"
    of = rf"(?:(?:{_alternatives(properties.of)})\s)?" if properties.of else ""
    day = rf"{DAY}(?:\.º|[.ºª°]|er\b)?"
    days = rf"{day}(?:\s?[-–—/]\s?{day}|\s\w{{1,3}}\s{day})?"
    alone = f"(?i:(?P<word>{_alternatives(properties.also_words) or '(?!)'})|{_alternatives(names)})\\b"
    ordinal = rf"\d{{1,2}}(?:\.º|[.ºª°]|er?|ème|-?й)?|{_ROMAN}(?:e|ème)?"
    century = f"(?i:{properties.century})\\b"
    patterns = [ISO_DAY, rf"{NUMBER_START}{DAY}(?P<mark>[/.-])(?:1[0-2]|0?[1-9])(?P=mark){YEAR}{NUMBER_END}"]
    if characters := _CHARACTERS.get(language):
        year, month_character, day_character = characters
        number, era = r"(?<!\d)\d{1,2}\s?", f"(?:(?:{_alternatives(eras)})\\s?)?"
        patterns += [
            rf"{era}(?<!\d)(?:\d{{2,4}}\s?[-–—]\s?)?\d{{1,4}}\s?{year}(?![前間间])"
            rf"(?:代|(?:\s?{number}{month_character}(?:\s?{number}{day_character})?))?",
            rf"{number}{month_character}\s?{number}{day_character}",
            rf"(?:{number}|[{_CHINESE_DIGITS}]{{1,3}})(?:{properties.century})(?:\s?{number}{year}代)?",
        ]
    elif names:
        patterns += [
            rf"{NUMBER_START}{days}\s?{of}{month}(?:,?\s{of}{YEAR}{NUMBER_END})",
            rf"{NUMBER_START}{days}\s?{of}{alone}\.?",
            rf"\b{month}\s{of}{YEAR}(?:\s?[-–—/]\s?(?:{YEAR}|\d\d))?{NUMBER_END}",
            rf"{NUMBER_START}[1-9]\d{{0,3}}\s?(?:{_alternatives(eras)})(?!\w)",
            rf"{NUMBER_START}(?:1\d|20)\d0er(?:[-\s]Jahren?)?\b",
        ]
        if properties.century:
            patterns += [
                rf"(?<![\w.,])(?:{ordinal})\s{century}(?:\s(?:{_alternatives(eras)}))?",
                rf"\b{century}\s(?:al\s|a\s)?(?:{_ROMAN}|\d{{1,2}})(?:-lea)?\b(?:\s(?:{_alternatives(eras)}))?",
            ]
    bare = rf"(?P<bare>{NUMBER_START}{YEAR}(?:\s?[-–—/]\s?(?:{YEAR}|\d\d))?{NUMBER_END})"
    return re.compile("|".join([*patterns, bare]))


def _month_and_era_names(language: str) -> tuple[set[str], set[str]]:
    """Return the names of months, empty if they are numbers, and of eras."""
    from babel import Locale

    locale = Locale.parse(language)
    names = {
        name.rstrip(".")
        for kind in ("format", "stand-alone")
        for width in ("wide", "abbreviated")
        for name in locale.months[kind][width].values()
    }
    eras = {name for width in ("wide", "abbreviated") for name in locale.eras[width].values()}
    # babel 2.18 may add Japanese names to other languages, depending on earlier calls
    return {name for name in names if not re.search(r"[\d月월]", name)}, eras | {name.replace(" ", "") for name in eras}


def _alternatives(words: set[str] | frozenset[str]) -> str:
    """Return an expression that matches any of the words, longest first."""
    return "|".join(
        re.escape(word).replace(r"\ ", r"\s") for word in sorted(words, key=lambda word: (-len(word), word))
    )
