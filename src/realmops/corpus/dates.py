"""Regular expressions for dates: salient spans next to those of a named-entity tagger (REALM, section 3.4).

Expressions have bounded length and no nested repetition, so matching takes linear time. A bare number of four digits
is a year only where its neighbours allow it: "in 1999" or "(1999)", but not "1999 people", "ISO 1999" or "$1999".
"""

import re
from functools import cache

from realmops.corpus.languages import ENGLISH, load_languages

_DAY, _YEAR, _ROMAN = r"(?:3[01]|[12]\d|0?[1-9])", r"(?:1\d{3}|20\d{2}|2100)", r"[IVX]{1,6}"
_YEARS = rf"{_YEAR}(?:\s?[-–—/]\s?(?:{_YEAR}|\d\d))?"
# Lookarounds: no adjacent character may make the digits part of a longer number, a word, a price or a code.
_NUMBER_START, _NUMBER_END = r"(?<![\w.,:/\\$€£¥#+=@'’-])", r"(?![\w%°€$£])(?![.,:/-]\d)(?!-\w)"
_ISO_DAY = rf"{_NUMBER_START}{_YEAR}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12]\d|3[01])(?!\d|-\w|\.\d)"
_WINDOW = 32  # characters examined before and after a match

_MONTH = (
    r"(?:January|February|March|April|May|June|July|August|September|October|November|December"
    r"|JANUARY|FEBRUARY|MARCH|APRIL|MAY|JUNE|JULY|AUGUST|SEPTEMBER|OCTOBER|NOVEMBER|DECEMBER"
    r"|(?:Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept|Sep|Oct|Nov|Dec)\b\.?)"
)
_DAYS = rf"{_DAY}(?:st|nd|rd|th)?(?:\s?[-–—/]\s?{_DAY}(?:st|nd|rd|th)?)?"
_ERA = r"(?:BCE|BC|CE|AD|B\.C\.E\.|B\.C\.|C\.E\.|A\.D\.)"
_ORDINAL = (
    r"(?:(?:1?\d|2[01])(?:st|nd|rd|th)"
    r"|(?:[Ff]irst|[Ss]econd|[Tt]hird|[Ff]ourth|[Ff]ifth|[Ss]ixth|[Ss]eventh|[Ee]ighth|[Nn]inth|[Tt]enth"
    r"|[Ee]leventh|[Tt]welfth|[Tt]hirteenth|[Ff]ourteenth|[Ff]ifteenth|[Ss]ixteenth|[Ss]eventeenth"
    r"|[Ee]ighteenth|[Nn]ineteenth|[Tt]wentieth|[Tt]wenty-first))"
)

_ENGLISH = (
    rf"{_NUMBER_START}(?P<first>{_DAY})(?P<mark>[/.-])(?P<second>{_DAY})(?P=mark){_YEAR}{_NUMBER_END}",
    rf"{_NUMBER_START}{_DAYS}\s(?:of\s)?{_MONTH}(?:,?\s{_YEAR}{_NUMBER_END})?(?!\w)",
    rf"\b{_MONTH}\s{_DAYS}(?:,?\s{_YEAR}{_NUMBER_END}|(?!\w|[.,:/-]\d))",
    rf"\b{_MONTH}(?:,|\sof)?\s{_YEARS}{_NUMBER_END}",
    rf"\b{_ORDINAL}(?:\s(?:and|to|or)\s{_ORDINAL}|[-–—]{_ORDINAL})?[\s-][Cc]entur(?:y|ies)\b(?:\s{_ERA}(?!\w))?",
    rf"(?:{_NUMBER_START}|(?<=[a-z]-))(?:1\d|20)\d0['’]?s\b",
    r"(?:(?<=\bthe\s)|(?<=\bearly\s)|(?<=\blate\s)|(?<=\bmid[-\s])|(?<=\bearly-)|(?<=\blate-))['’‘]?[1-9]0['’]?s\b",
    rf"{_NUMBER_START}[1-9]\d{{0,3}}\s{_ERA}(?!\w)|\bAD\s[1-9]\d{{0,3}}{_NUMBER_END}",
)
# A cheap test first: no date begins inside a word, and few words begin like a date.
_START = (
    r"(?<!\w)(?=['’‘]?\d|[JFMASOND][A-Za-z][A-Za-z]|AD\s"
    r"|[Ff]i|[Ff]ou|[Ss]e[cv]|[Ss]ix|[Tt]hi|[Tt]en|[Tt]we|[Ee]i|[Ee]le|[Nn]in)"
)
_CHARACTERS = {"zh": ("年", "月", "[日号號]"), "ja": ("年", "月", "日"), "ko": ("년", "월", "일")}
_CHINESE_DIGITS = "一二三四五六七八九十"
_NEIGHBOURS = {  # words before and after, by whether the language is English
    True: (re.compile(r"([$€£¥]|[\w’'-]+\.?)[ \u00a0]?$"), re.compile(r"[ \u00a0-](\w+)")),
    False: (re.compile(r"(\w+)[ \u00a0]$"), re.compile(r"[ \u00a0](\w+)")),
}


def find_dates(text: str, language: str = ENGLISH) -> list[tuple[int, int]]:
    """Return (start, end) characters of the dates in a text, in order and without overlap."""
    return [match.span() for match in _expression(language).finditer(text) if _is_date(match, language)]


def _is_date(match: re.Match[str], language: str) -> bool:
    match match.lastgroup:
        case "second":  # a day in digits
            is_version = _neighbours(match, language)[0].lower() in load_languages()[language].versions
            return min(int(match["first"]), int(match["second"])) <= 12 and not is_version
        case "word":  # a month that is also a word: its full stop must not end the sentence
            after = match.string[match.end() : match.end() + _WINDOW].lstrip()
            return match[0].endswith(".") and bool(after) and not after[0].isupper()
        case "bare":
            return _is_year(*_neighbours(match, language), language)
    return True


def _is_year(before: str, after: str, language: str) -> bool:
    rules, lower = load_languages()[language], before.lower()
    if lower in rules.not_years or before.isdigit() or after.isdigit() or after.lower() in rules.units:
        return False
    if language != ENGLISH:
        return not after or after in rules.stop or lower in rules.in_years
    if len(before) > 1 and before.isalpha() and before.isupper() and before not in ("AD", "CE", "IN"):
        return False  # ISO 1999, USD 1500
    is_count = after.islower() and after.endswith("s") and after not in rules.singulars
    return lower in rules.in_years or not is_count


def _neighbours(match: re.Match[str], language: str) -> tuple[str, str]:
    """Return the words directly before and after a match, with only a blank between; "" for none."""
    (word_before, word_after), text = _NEIGHBOURS[language == ENGLISH], match.string
    before = word_before.search(text[max(0, match.start() - _WINDOW) : match.start()])
    after = word_after.match(text, match.end(), match.end() + _WINDOW)
    return before[1] if before else "", after[1] if after else ""


@cache
def _expression(language: str) -> re.Pattern[str]:
    is_english = language == ENGLISH
    start, bare = (_START, rf"(?:{_NUMBER_START}|(?<=[a-z]-))") if is_english else ("", _NUMBER_START)
    patterns = [_ISO_DAY, *(_ENGLISH if is_english else _local_patterns(language))]
    return re.compile(f"{start}(?:{'|'.join(patterns)}|(?P<bare>{bare}{_YEARS}{_NUMBER_END}))")


def _local_patterns(language: str) -> list[str]:
    names, eras = _month_and_era_names(language)
    properties = load_languages()[language]
    month = f"(?i:{_alternatives(names)})\\b\\.?"
    of = rf"(?:(?:{_alternatives(properties.of)})\s)?" if properties.of else ""
    day = rf"{_DAY}(?:\.º|[.ºª°]|er\b)?"
    days = rf"{day}(?:\s?[-–—/]\s?{day}|\s\w{{1,3}}\s{day})?"
    alone = f"(?i:(?P<word>{_alternatives(properties.also_words) or '(?!)'})|{_alternatives(names)})\\b"
    ordinal = rf"\d{{1,2}}(?:\.º|[.ºª°]|er?|ème|-?й)?|{_ROMAN}(?:e|ème)?"
    century = f"(?i:{properties.century})\\b"
    patterns = [rf"{_NUMBER_START}{_DAY}(?P<mark>[/.-])(?:1[0-2]|0?[1-9])(?P=mark){_YEAR}{_NUMBER_END}"]
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
            rf"{_NUMBER_START}{days}\s?{of}{month}(?:,?\s{of}{_YEAR}{_NUMBER_END})",
            rf"{_NUMBER_START}{days}\s?{of}{alone}\.?",
            rf"\b{month}\s{of}{_YEARS}{_NUMBER_END}",
            rf"{_NUMBER_START}[1-9]\d{{0,3}}\s?(?:{_alternatives(eras)})(?!\w)",
            rf"{_NUMBER_START}(?:1\d|20)\d0er(?:[-\s]Jahren?)?\b",
        ]
        if properties.century:
            patterns += [
                rf"(?<![\w.,])(?:{ordinal})\s{century}(?:\s(?:{_alternatives(eras)}))?",
                rf"\b{century}\s(?:al\s|a\s)?(?:{_ROMAN}|\d{{1,2}})(?:-lea)?\b(?:\s(?:{_alternatives(eras)}))?",
            ]
    return patterns


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
    return "|".join(
        re.escape(word).replace(r"\ ", r"\s") for word in sorted(words, key=lambda word: (-len(word), word))
    )
