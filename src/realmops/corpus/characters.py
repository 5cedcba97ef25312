"""Unicode categories for regular expressions: the standard library's ``re`` knows none."""

from __future__ import annotations

import sys
import unicodedata
from functools import cache


@cache
def character_class(*categories: str) -> str:
    """The characters of these categories ("Mn", or "L" for all letters) as the inside of a set ``[...]``."""
    ranges: list[list[int]] = []
    for code in range(sys.maxunicode + 1):
        if unicodedata.category(chr(code)).startswith(categories):
            if ranges and ranges[-1][1] == code - 1:
                ranges[-1][1] = code
            else:
                ranges.append([code, code])
    return "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in ranges)
