"""Running lines: heads, feet and page numbers, which interrupt the sentences that go on over a page."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

_EDGE = 3  # lines at each end of a page
_MIN_PAGES = 3
_MAX_GAP = 3  # pages for each that has the line: numbers of a table seldom count the pages in a row
_MIN_SHARE = 1.5  # pages^2 / all pages: the head of a chapter is on many pages, the title of some slides on a few
_TENS = ("", "x", "xx", "xxx", "xl", "l", "lx", "lxx", "lxxx", "xc")
_UNITS = ("", "i", "ii", "iii", "iv", "v", "vi", "vii", "viii", "ix")
_ROMAN = [f"{tens}{units}" for tens in _TENS for units in _UNITS]
_NUMBER = re.compile(  # not in a date, a decimal or a word
    r"(?<![^\W_])(?<![.,:/’'])(?:\d{1,6}|[ivxlc]+|[IVXLC]+)(?:(?=/\d+\W*\Z)|(?![\w’']|[.,:/-]\d))"
)
_FOLIO = re.compile(  # a number alone (7, A-7), or with a word for "page"
    r"(?:\w{1,2}-)?[^\w#]*#[^\w#]*(?:#[^\w#]*)?\Z"
    r"|.*(?:[第ページ쪽]|(?<!\w)(?:pp?|pg|page|p[aá]g(?:ina)?|s|seite|si[dv][aeu]|str\w*|стр\w*|oldal|sayfa|σελ\w*)(?!\w))",
    re.IGNORECASE,
)
_HEADING = re.compile(r"\W*(?:[^\W\d]+[^\w#]+){1,2}#\W*|\W*")  # Lesson 3, Invoice No. 1001; a row of numbers


def find_running_lines(pages: Sequence[Sequence[str]]) -> set[tuple[int, int]]:
    """Return (page, line) of lines near the ends of pages that count the pages, or are equal on many of them.

    Equal lines at the top of the first page stay: they name the document, or the columns of its table.
    """
    filled = [[n for n, line in enumerate(lines) if line.strip()] for lines in pages]
    tops, bottoms = [lines[:_EDGE] for lines in filled], [lines[: -_EDGE - 1 : -1] for lines in filled]
    equal: defaultdict[str, set[int]] = defaultdict(set)
    counting: defaultdict[tuple[str, int], set[tuple[int, int]]] = defaultdict(set)
    for page, lines in enumerate(pages):
        for n in {*tops[page], *bottoms[page]}:
            equal[lines[n].strip()].add(page)
            for form, number in _numbered_forms(lines[n].strip()):
                if n == bottoms[page][0] or _FOLIO.match(form) or not _HEADING.fullmatch(form):
                    counting[form, number - page].add((page, n))
    running: set[tuple[int, int]] = set()
    for (form, _), places in counting.items():
        numbers = {page for page, _ in places}
        few = max(2, min(_MIN_PAGES, len(pages))) if _FOLIO.match(form) else _MIN_PAGES
        if few <= len(numbers) and max(numbers) - min(numbers) < _MAX_GAP * len(numbers):
            running |= places
    repeated = _find_repeated(pages, equal, {page for page, _ in running})
    for page, lines in enumerate(pages):
        for end in (tops[page], bottoms[page]) if page else ([n for n in bottoms[0] if n not in tops[0]],):
            for n in end:  # from the outermost line
                if (page, n) not in running and lines[n].strip() not in repeated:
                    break
                running.add((page, n))
    return running


def _numbered_forms(line: str) -> Iterator[tuple[str, int]]:
    """Yield each number of a line, with the line in which it and the digits of all others are replaced."""
    for match in _NUMBER.finditer(line):
        roman = match[0].lower()
        if roman.isdigit() or roman in _ROMAN:
            form = f"{line[: match.start()]}#{line[match.end() :]}"
            yield re.sub(r"\d+", "#", form), int(roman) if roman.isdigit() else _ROMAN.index(roman)


def _find_repeated(pages: Sequence[Sequence[str]], ends: Mapping[str, set[int]], numbered: set[int]) -> set[str]:
    """Return the lines that are at the ends of enough pages and seldom elsewhere; none if the pages are equal forms.

    Two pages with numbers are enough if they are all pages, or all on one side of a book.
    """
    counts = Counter(line.strip() for lines in pages for line in lines if line.strip())
    if sum(n for n in counts.values() if n >= _MIN_PAGES) >= counts.total() / 2:
        return set()
    sides = [{*range(len(pages))[first :: 1 if len(pages) < _MIN_PAGES else 2]} for first in range(3)]
    return {
        line
        for line, at in ends.items()
        if (len(at) >= _MIN_PAGES and len(at) ** 2 >= _MIN_SHARE * len(pages))
        or (len(at) > 1 and at <= numbered and at in sides)
        if counts[line] < _MIN_SHARE * len(at)
    }
