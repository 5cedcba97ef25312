"""Dates in other languages than English: months and eras by CLDR (babel), the rest from ``languages.yaml``.

Found are days with a month, months with a year, days in digits, years 1000 to 2100 and ranges of them, years with an
era, centuries, and in Chinese, Japanese and Korean numbers before the signs for year, month and day. A bare number of
four digits is a year behind a word as "im" or "seit", before a mark, and between words that stand everywhere; but not
where a thing that may be counted follows. A day with a month whose name is another word, too (``also_words``), is a
date with a year, or with a full stop behind which the sentence goes on.
"""

import re
from functools import cache

from realmops.text.languages import languages

DAY, YEAR, _ROMAN = r"(?:3[01]|[12]\d|0?[1-9])", r"(?:1\d{3}|20\d{2}|2100)", r"[IVX]{1,6}"
# What may not touch the digits: it would make them part of a longer number, a word, a price or a code.
FREE, WHOLE = r"(?<![\w.,:/\\$€£¥#+=@'’-])", r"(?![\w%°€$£])(?![.,:/-]\d)(?!-\w)"
ISO_DAY = rf"{FREE}{YEAR}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12]\d|3[01])(?!\d|-\w|\.\d)"
_SIGNS = {"zh": ("年", "月", "[日号號]"), "ja": ("年", "月", "日"), "ko": ("년", "월", "일")}
_IN_WORDS = "一二三四五六七八九十"
_BEFORE, _AFTER = re.compile(r"(\w+)[ \u00a0]$"), re.compile(r"[ \u00a0](\w+)")
WINDOW = 32


def find_local_dates(text: str, language: str) -> list[tuple[int, int]]:
    """(start, end) characters of the dates in a text of a language, in order, without overlap."""
    return [match.span() for match in _pattern(language).finditer(text) if _is_date(match, language)]


def _is_date(match: re.Match[str], language: str) -> bool:
    if match.lastgroup == "bare":
        return _is_year(match, language)
    return match.lastgroup != "word" or _is_short(match)


def _is_short(match: re.Match[str]) -> bool:
    """Return whether the name of a month is cut by a full stop that does not end the sentence."""
    after = match.string[match.end() : match.end() + WINDOW].lstrip()
    return match[0].endswith(".") and bool(after) and not after[0].isupper()


def _is_year(match: re.Match[str], language: str) -> bool:
    text, known = match.string, languages()[language]
    before = _BEFORE.search(text[max(0, match.start() - WINDOW) : match.start()])
    after = _AFTER.match(text, match.end(), match.end() + WINDOW)
    if (before and before[1].isdigit()) or (after and after[1].isdigit()):
        return False
    return after is None or after[1] in known.stop or (before is not None and before[1].lower() in known.in_years)


@cache
def _pattern(language: str) -> re.Pattern[str]:
    names, eras = _names(language)
    known = languages()[language]
    month = f"(?i:{_any(names)})\\b\\.?"
    of = rf"(?:(?:{_any(known.of)})\s)?" if known.of else ""
    day = rf"{DAY}(?:\.º|[.ºª°]|er\b)?"
    days = rf"{day}(?:\s?[-–—/]\s?{day}|\s\w{{1,3}}\s{day})?"
    alone = f"(?i:(?P<word>{_any(known.also_words) or '(?!)'})|{_any(names)})\\b"
    one, century = rf"\d{{1,2}}(?:\.º|[.ºª°]|er?|ème|-?й)?|{_ROMAN}(?:e|ème)?", f"(?i:{known.century})\\b"
    patterns = [
        ISO_DAY,
        rf"{FREE}{DAY}(?P<mark>[/.-])(?:1[0-2]|0?[1-9])(?P=mark){YEAR}{WHOLE}",
    ]
    if signs := _SIGNS.get(language):
        year, of_year, of_month = signs
        number, era = r"(?<!\d)\d{1,2}\s?", f"(?:(?:{_any(eras)})\\s?)?"
        patterns += [
            rf"{era}(?<!\d)(?:\d{{2,4}}\s?[-–—]\s?)?\d{{1,4}}\s?{year}(?![前間间])"
            rf"(?:代|(?:\s?{number}{of_year}(?:\s?{number}{of_month})?))?",
            rf"{number}{of_year}\s?{number}{of_month}",
            rf"(?:{number}|[{_IN_WORDS}]{{1,3}})(?:{known.century})(?:\s?{number}{year}代)?",
        ]
    elif names:
        patterns += [
            rf"{FREE}{days}\s?{of}{month}(?:,?\s{of}{YEAR}{WHOLE})",
            rf"{FREE}{days}\s?{of}{alone}\.?",
            rf"\b{month}\s{of}{YEAR}(?:\s?[-–—/]\s?(?:{YEAR}|\d\d))?{WHOLE}",
            rf"{FREE}[1-9]\d{{0,3}}\s?(?:{_any(eras)})(?!\w)",
            rf"{FREE}(?:1\d|20)\d0er(?:[-\s]Jahren?)?\b",
        ]
        if known.century:
            patterns += [
                rf"(?<![\w.,])(?:{one})\s{century}(?:\s(?:{_any(eras)}))?",
                rf"\b{century}\s(?:al\s|a\s)?(?:{_ROMAN}|\d{{1,2}})(?:-lea)?\b(?:\s(?:{_any(eras)}))?",
            ]
    bare = rf"(?P<bare>{FREE}{YEAR}(?:\s?[-–—/]\s?(?:{YEAR}|\d\d))?{WHOLE})"
    return re.compile("|".join([*patterns, bare]))


def _names(language: str) -> tuple[set[str], set[str]]:
    """The names of months, none where they are numbers, and those of eras."""
    from babel import Locale

    locale = Locale.parse(language)
    names = {
        name.rstrip(".")
        for kind in ("format", "stand-alone")
        for width in ("wide", "abbreviated")
        for name in locale.months[kind][width].values()
    }
    eras = {name for width in ("wide", "abbreviated") for name in locale.eras[width].values()}
    # babel 2.18 gives some languages names of Japanese, too, by what was asked before
    return {name for name in names if not re.search(r"[\d月월]", name)}, eras | {name.replace(" ", "") for name in eras}


def _any(words: set[str] | frozenset[str]) -> str:
    """An expression for one of some words, the longest first."""
    return "|".join(
        re.escape(word).replace(r"\ ", r"\s") for word in sorted(words, key=lambda word: (-len(word), word))
    )
