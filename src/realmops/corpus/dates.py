"""Regular expressions for English dates: salient spans next to those of a named-entity tagger (REALM, section 3.4).

They match days (12 May 1999, May 12th, 2004-05-12, 12/05/1999), months with a year, years 1000 to 2100 and ranges of
them, years with an era (44 BC), decades (1990s, the '90s) and centuries (19th century). A bare number of four digits is
a year only where its neighbours allow it: "in 1999" or "(1999)" but not "1999 people", "ISO 1999" or "$1999".
Every pattern has bounded length and no nested repetition, so matching takes linear time.
"""

import re

from realmops.corpus.languages import ENGLISH
from realmops.corpus.local_dates import DAY, ISO_DAY, NUMBER_END, NUMBER_START, WINDOW, YEAR, find_local_dates

_MONTH = (
    r"(?:January|February|March|April|May|June|July|August|September|October|November|December"
    r"|JANUARY|FEBRUARY|MARCH|APRIL|MAY|JUNE|JULY|AUGUST|SEPTEMBER|OCTOBER|NOVEMBER|DECEMBER"
    r"|(?:Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept|Sep|Oct|Nov|Dec)\b\.?)"
)
_DAYS = rf"{DAY}(?:st|nd|rd|th)?(?:\s?[-–—/]\s?{DAY}(?:st|nd|rd|th)?)?"
_ERA = r"(?:BCE|BC|CE|AD|B\.C\.E\.|B\.C\.|C\.E\.|A\.D\.)"
_ORDINAL = (
    r"(?:(?:1?\d|2[01])(?:st|nd|rd|th)"
    r"|(?:[Ff]irst|[Ss]econd|[Tt]hird|[Ff]ourth|[Ff]ifth|[Ss]ixth|[Ss]eventh|[Ee]ighth|[Nn]inth|[Tt]enth"
    r"|[Ee]leventh|[Tt]welfth|[Tt]hirteenth|[Ff]ourteenth|[Ff]ifteenth|[Ss]ixteenth|[Ss]eventeenth"
    r"|[Ee]ighteenth|[Nn]ineteenth|[Tt]wentieth|[Tt]wenty-first))"
)

_PATTERNS = (
    ISO_DAY,
    rf"{NUMBER_START}(?P<first>{DAY})(?P<mark>[/.-])(?P<second>{DAY})(?P=mark){YEAR}{NUMBER_END}",
    rf"{NUMBER_START}{_DAYS}\s(?:of\s)?{_MONTH}(?:,?\s{YEAR}{NUMBER_END})?(?!\w)",
    rf"\b{_MONTH}\s{_DAYS}(?:,?\s{YEAR}{NUMBER_END}|(?!\w|[.,:/-]\d))",
    rf"\b{_MONTH}(?:,|\sof)?\s{YEAR}(?:\s?[-–—/]\s?(?:{YEAR}|\d\d))?{NUMBER_END}",
    rf"\b{_ORDINAL}(?:\s(?:and|to|or)\s{_ORDINAL}|[-–—]{_ORDINAL})?[\s-][Cc]entur(?:y|ies)\b(?:\s{_ERA}(?!\w))?",
    rf"(?:{NUMBER_START}|(?<=[a-z]-))(?:1\d|20)\d0['’]?s\b",
    r"(?:(?<=\bthe\s)|(?<=\bearly\s)|(?<=\blate\s)|(?<=\bmid[-\s])|(?<=\bearly-)|(?<=\blate-))['’‘]?[1-9]0['’]?s\b",
    rf"{NUMBER_START}[1-9]\d{{0,3}}\s{_ERA}(?!\w)|\bAD\s[1-9]\d{{0,3}}{NUMBER_END}",
    rf"(?P<bare>(?:{NUMBER_START}|(?<=[a-z]-)){YEAR}(?:\s?[-–—/]\s?(?:{YEAR}|\d\d))?{NUMBER_END})",
)
# A cheap test first: no date begins inside a word, and few words begin like a date.
_START = (
    r"(?<!\w)(?=['’‘]?\d|[JFMASOND][A-Za-z][A-Za-z]|AD\s"
    r"|[Ff]i|[Ff]ou|[Ss]e[cv]|[Ss]ix|[Tt]hi|[Tt]en|[Tt]we|[Ee]i|[Ee]le|[Nn]in)"
)
_DATE = re.compile(f"{_START}(?:{'|'.join(_PATTERNS)})")

_WORD_BEFORE = re.compile(r"([$€£¥]|[\w’'-]+\.?)[ \u00a0]?$")
_WORD_AFTER = re.compile(r"[ \u00a0-](\w+)")


def _word_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


# A number after one of these is a name, an amount or a page.
_NO_YEAR_BEFORE = _word_set(
    "$ € £ ¥ approximately almost exactly nearly over roughly another some these those only no. no nos. number "
    "numbers page pages p. pp. chapter section sections line lines item items article vol. volume model type "
    "version v v. code area route highway flight room port lot rfc iso din psalm boeing"
)
_VERSION_BEFORE = _word_set("version versions v v. release build ip firmware")
_YEAR_BEFORE = _word_set(
    "in since until till during circa c. ca. year years early late mid spring summer autumn fall winter"
)
_UNITS = _word_set(
    "people men women persons inhabitants residents soldiers troops students households families workers hours hrs "
    "minutes seconds days weeks months years times dollars euros pounds francs marks yen cents metres meters miles "
    "kilometres kilometers feet ft yards acres hectares m km cm mm kg g lb lbs tons tonnes mph hp kw mw watts volts "
    "hz mhz ghz mb gb kb percent per species copies words votes points items units million billion thousand"
)
# Counted things are plural; these words in -s are not, and may follow a year.
_NO_PLURAL = _word_set("as census class focus has his is its process series this was")


def find_dates(text: str, language: str = ENGLISH) -> list[tuple[int, int]]:
    """Return (start, end) characters of the dates in a text, in order and without overlap."""
    if language != ENGLISH:
        return find_local_dates(text, language)
    return [match.span() for match in _DATE.finditer(text) if _is_date(match)]


def _is_date(match: re.Match[str]) -> bool:
    if match["mark"]:
        before, _ = _neighbours(match)
        return min(int(match["first"]), int(match["second"])) <= 12 and before.lower() not in _VERSION_BEFORE
    return not match["bare"] or _is_year(*_neighbours(match))


def _is_year(before: str, after: str) -> bool:
    """Return whether a number between these two words ("" for none) is a year."""
    lower = before.lower()
    if lower in _NO_YEAR_BEFORE or before.isdigit() or after.isdigit() or after.lower() in _UNITS:
        return False
    if len(before) > 1 and before.isalpha() and before.isupper() and before not in ("AD", "CE", "IN"):
        return False  # ISO 1999, USD 1500
    is_count = after.islower() and after.endswith("s") and after not in _NO_PLURAL
    return lower in _YEAR_BEFORE or not is_count


def _neighbours(match: re.Match[str]) -> tuple[str, str]:
    """Return the words directly before and after a match, with only a blank between; "" for none."""
    text = match.string
    before = _WORD_BEFORE.search(text[max(0, match.start() - WINDOW) : match.start()])
    after = _WORD_AFTER.match(text, match.end(), match.end() + WINDOW)
    return before[1] if before else "", after[1] if after else ""
