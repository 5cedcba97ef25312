"""Numbers as a spreadsheet shows them, by format codes of ECMA-376, part 1, sections 18.8.30 and 18.8.31."""

import re
from datetime import datetime, timedelta
from decimal import ROUND_HALF_UP, Context, Decimal
from fractions import Fraction
from functools import cache, lru_cache
from locale import windows_locale

GENERAL, _DATE = "General", "yyyy-mm-dd"  # of ISO 8601, for built-in codes that differ between countries
_BUILT_IN = (  # numbers and code
    f"1=0|2=0.00|3 5 6 37 38 41 42=#,##0|4 7 8 39 40 43 44=#,##0.00|9=0%|10=0.00%|11=0.00E+00|12=# ?/?|13=# ??/??"
    f"|14 27 28 29 30 31 36 50 51 52 53 54 57 58={_DATE}|15=d-mmm-yy|16=d-mmm|17=mmm-yy|18=h:mm AM/PM|19=h:mm:ss AM/PM"
    f"|20 32 33=h:mm|21=h:mm:ss|22={_DATE} h:mm|45=mm:ss|46=[h]:mm:ss|47=mm:ss.0|48=##0.0E+0|49=@"
)
CODES = {n: code for numbers, code in (entry.split("=") for entry in _BUILT_IN.split("|")) for n in numbers.split()}
_LITERAL = 0xF0000  # added to the characters of literal text, so that they are no part of a code
_QUOTED = re.compile(r'"([^"]*)"?|\\(.)|_(.)|\*.', re.DOTALL)
_BRACKETS = re.compile(r"\[(?:\$([^\]-]*)|(?!(?:h+|m+|s+)\]))[^\]]*\]", re.IGNORECASE)
_PLACE = re.compile("[#0?]")  # of a digit
_COMPARISONS = {1: ("<>=",), 2: (">=", "<>="), 3: (">", "<", "<>=")}  # with zero, of sections without conditions


def _literal(text: str) -> str:
    return "".join(chr(_LITERAL + ord(character)) for character in text)


def _plain(text: str) -> str:
    return "".join(chr(ord(character) % _LITERAL) for character in text)


@cache
def _sections(code: str) -> tuple[list[tuple[str, float, bool, str, str]], str]:
    """Return the sections for numbers, and the code for texts: a fourth section, or a last one with "@"."""
    parts = _QUOTED.sub(lambda match: _literal(match[1] or match[2] or " " * bool(match[3])), code).split(";")
    for_texts = parts[-1] if len(parts) > 3 or "@" in parts[-1] else "@"
    numbers = parts[: max(1, min(3, len(parts) - (for_texts is parts[-1])))]
    sections = []
    for n, (part, default) in enumerate(zip(numbers, _COMPARISONS[len(numbers)], strict=True)):
        language = re.search(r"\[\$[^\]-]*-([\dA-Fa-f]+)", part)
        condition = re.search(r"\[([<>=]+) *(-?\d+\.?\d*)\]", part)
        names, limit = (condition[1], float(condition[2])) if condition else (default, 0.0)
        is_signed = n == 1 and "<" in names and limit <= 0
        text = _BRACKETS.sub(lambda match: _literal(match[1] or ""), part)
        # Comparisons with a limit, whether the code has the sign of the number, language, code
        sections.append((names, limit, is_signed, language[1] if language else "409", text))
    return sections, for_texts


@lru_cache(1 << 16)
def format_value(value: float | str, code: str, is_1904: bool = False) -> str:
    """Return a text or a number as ``code`` shows it; dates are days since 1900, or since 1904."""
    sections, for_texts = _sections(code)
    if isinstance(value, str):
        return _plain(for_texts.replace("@", _literal(value)))
    matches = (one for one in sections if "<=>"[1 + (value > one[1]) - (value < one[1])] in one[0])
    *_, is_signed, language, text = next(matches, ("", 0.0, False, "", GENERAL))
    if GENERAL in text or "@" in text:
        text = re.sub(f"{GENERAL}|@", format_general(abs(value)), text)
    elif re.search("(?i)[dhmsy]", text):
        text = _date(value, text, language, is_1904) if value >= 0 else format_general(-value)
    else:
        text = _number(Decimal(f"{abs(value):.15g}"), text)
    return ("-" if value < 0 and not is_signed else "") + _plain(text)


def format_general(value: float) -> str:
    """Return a number as a cell without a format shows it; integers in full: they name articles and accounts."""
    is_name = value.is_integer() and abs(value) < 1e15
    return str(int(value)) if is_name else f"{value:.{9 if abs(value) < 1 else 10}G}"


def _number(value: Decimal, code: str) -> str:
    special = re.search("(?i)E([+-])([#0?]+)|([#0?]+) */ *([0-9]+|[#0?]+)", code)  # a power or a fraction
    head, tail = (code[: special.start()], code[special.end() :]) if special else (code, "")
    scale = re.search(r"[#0?.](,+)[^#0?,]*$", head)
    value = value.scaleb(2 * code.count("%") - 3 * len(scale[1] if scale else ""))
    whole, point, decimals = head.partition(".")
    has_groups, whole = re.search("[#0?],+[#0?]", whole), whole.replace(",", "")
    places, has_digits = "".join(_PLACE.findall(decimals)), _PLACE.search(whole)
    if special and special[1]:
        power = Decimal(f"{value:.{len(places)}E}").adjusted() if value else 0
        value = value.scaleb(-power)
        tail = f"E{'-' if power < 0 else special[1].strip('-')}{_fill(special[2], str(abs(power)))}{tail}"
    elif special:
        rest = Fraction(value) - (int(value) if has_digits else 0)
        nearest = rest.limit_denominator(10 ** len(special[4]) - 1)
        below = int(special[4]) if special[4].strip("#0?") else nearest.denominator
        above = round(rest * below)
        value = Decimal(int(value) + above // below) if has_digits else Decimal(0)
        tail = f"{above}/{below}{tail}" if not has_digits or above % below else f"{'0' * (not value)}{tail}"
    rounded = value.quantize(Decimal(1).scaleb(-len(places)), context=Context(prec=400, rounding=ROUND_HALF_UP))
    digits, _, fraction = f"{rounded:f}".partition(".")
    last = iter(fraction.rstrip("0").ljust(places.rfind("0") + 1, "0"))
    shown = _fill(whole if has_digits or not point else whole + "#", digits)
    shown = re.sub(r"(?<=\d)(?=(?:\d{3})+(?!\d))", ",", shown) if has_groups else shown
    return shown + point + _PLACE.sub(lambda _: next(last, ""), decimals.replace(",", "")) + tail


def _fill(code: str, digits: str) -> str:
    """Put the digits of an integer in their places from the right; the first place takes all that remain."""
    left = iter(digits.lstrip("0")[::-1])
    code = _PLACE.sub(lambda match: "#" * len(digits) + match[0], code, count=1)
    return _PLACE.sub(lambda match: next(left, match[0].strip("#?")), code[::-1])[::-1]


def _date(days: float, code: str, language: str, is_1904: bool) -> str:
    """Return a date by the pattern of CLDR, part 4, that has the meaning of a code."""
    from babel.dates import format_datetime

    code = re.sub("(?i)[bcfgi-lnoqrt-xz']", lambda match: _literal(match[0]), code).lower()
    pattern = re.sub(r"\.0+", lambda match: match[0].replace("0", "S"), code)
    seconds = round(days * 86_400, pattern.count("S"))
    pattern = re.sub("am/pm|a/p", "a", pattern).replace("m", "M")
    pattern = re.sub(r"(?<=h)[^a-z]*M+|M+(?=[^a-z]*s)", lambda match: match[0].lower(), pattern)  # minutes
    for unit, size in (("h", 3600), ("m", 60), ("s", 1)):
        pattern = re.sub(rf"(?i)\[({unit}+)\]", lambda match: f"{seconds // size:0{len(match[1])}.0f}", pattern)  # noqa: B023
    pattern = pattern if "a" in pattern else pattern.replace("h", "H")
    pattern = re.sub("d{3,}", lambda match: "E" * len(match[0]), pattern)
    pattern = re.sub("y{3,}|e+", "y", re.sub(r"(?<!y)yy?(?!y)", "yy", pattern))
    locale = windows_locale.get(int(language, 16) & 0xFFFF, "en_US")
    moment = datetime(1904, 1, 1) if is_1904 else datetime(1899, 12, 30)
    return format_datetime(moment + timedelta(seconds=seconds), pattern, locale=locale)
