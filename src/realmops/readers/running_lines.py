"""Running lines: heads, feet and page numbers, which interrupt the sentences that go on over a page."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import chain

_EDGE = 3  # lines at each end of a page
_FEW = 3  # pages with a line; they are at most as many apart, as numbers of a table seldom count pages
_SHARE = 1.4  # pages^2 / all pages: the head of a chapter is on many pages, the title of some slides on a few
_NUMBER = re.compile(  # not in a date, a decimal or a word
    r"(?<![^\W_])(?<![.,:/’'])\d{1,6}(?:(?=/\d+\W*\Z)|(?![\w’']|[.,:/-]\d))"
)
_ROMAN = re.compile(r"\W*[ivxlc]+\W*", re.IGNORECASE)
_FOLIO = re.compile(  # a number alone (7, A-7, 7 of 9), or after a word for "page"
    r"(?:\w{1,2}-)?[^\w#]*#[^\w#]*(?:(?:[^\W\d]{1,3}\s)?#[^\w#]*)?\Z"
    r"|.*(?:第|\b(?:pp?|pg|page|p[aá]g(?:ina)?|s|seite|si[dv][aeu]|str\w*|стр\w*|oldal|sayfa)\b)\W{0,3}#",
    re.IGNORECASE,
)
_OUTSIDE = re.compile(r"\W*#|.*#\W*\Z")  # a number at the start or end of a line
_HEADING = re.compile(r"(?:[^\W\d]+\.?\s+){1,2}#\W*|\W*")  # Lesson 3, Invoice No. 1001; a row of numbers


def find_running_lines(pages: Sequence[Sequence[str]]) -> set[tuple[int, int]]:
    """Return (page, line) of lines near the ends of pages that count the pages, or are equal on many of them.

    Equal lines stay at the top of the first page, which they name, and where they are half of a file: copies of a form.
    """
    counting: defaultdict[tuple[str, int], set[tuple[int, int]]] = defaultdict(set)
    equal: defaultdict[str, set[tuple[int, int]]] = defaultdict(set)
    heads: set[tuple[int, int]] = set()
    for page, lines in enumerate(pages):
        filled = [n for n, line in enumerate(lines) if line.strip()]
        heads |= {(0, n) for n in filled[:_EDGE] if not page}
        for n in {*filled[:_EDGE], *filled[-_EDGE:]}:
            equal[lines[n]].add((page, n))
            line = lines[n].strip()
            if _ROMAN.fullmatch(line):
                counting["#", 0].add((page, n))
            for match in _NUMBER.finditer(line):
                form = re.sub(r"\d+", "#", f"{line[: match.start()]}#{line[match.end() :]}")
                is_title = n < filled[-1] and _HEADING.fullmatch(form)
                if _FOLIO.match(form) or (_OUTSIDE.match(form) and not is_title):
                    counting[form, int(match[0]) - page].add((page, n))
    running: set[tuple[int, int]] = set()
    for (form, _), places in counting.items():
        at = {page for page, _ in places}
        few = 2 if len(pages) == 2 and _FOLIO.match(form) else _FEW
        if len(at) >= few and max(at) - min(at) < _FEW * len(at):
            running |= places
    numbered = {page for page, _ in running}
    counts = Counter(chain(*pages))
    counts[""] = 0
    is_form = sum(n for n in counts.values() if _FEW <= n <= len(pages)) >= counts.total() / 2
    for line, places in equal.items():
        at = {page for page, _ in places}
        is_often = len(at) ** 2 >= _SHARE * len(pages) and (len(at) >= _FEW or at <= numbered)
        is_side = len(at) > 1 and at <= numbered and at == {*range(min(at), len(pages), 2)} and len(pages) > _FEW
        if (is_often or is_side) and counts[line] < 1.5 * len(at) and not is_form:
            running |= places - heads
    return running
