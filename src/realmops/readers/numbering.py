"""Automatic numbers of paragraphs, as Word shows them."""

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_ROMAN = {"m": 1000, "cm": 900, "d": 500, "cd": 400, "c": 100, "xc": 90, "l": 50, "xl": 40, "x": 10, "ix": 9, "v": 5}
_ROMAN |= {"iv": 4, "i": 1}
_LEVEL = f"{WORD}ilvl"


def format_number(number: int, kind: str) -> str:
    """Return a number in a format of ISO/IEC 29500, such as ``lowerRoman``; decimal in rare ones."""
    text = f"{number:02}" if kind == "decimalZero" else str(number)
    if kind.endswith("Letter") and 0 < number < 1000:
        text = chr(ord("a") + (number - 1) % 26) * ((number + 25) // 26)
    elif kind.endswith("Roman") and 0 < number < 4000:
        text = ""
        for numeral, size in _ROMAN.items():
            text += numeral * (number // size)
            number %= size
    return text.upper() if kind.startswith("upper") else text


def read_value(node: Any, path: str) -> str:
    """Return the attribute ``val`` of a descendant, "" without one; in the path, ``*`` is the namespace of Word."""
    found = None if node is None else node.find(path.replace("*", WORD))
    return "" if found is None else str(found.get(f"{WORD}val", "1"))


def read_number(node: Any, path: str, default: int = 0) -> int:
    text = read_value(node, path)
    return int(text) if re.fullmatch(r"\d{1,9}", text) else default


class Numbering:
    """Numbers of paragraphs, counted in the order of the calls (ISO/IEC 29500-1, 17.9); ``nodes`` define them."""

    def __init__(self, nodes: Sequence[Any]) -> None:
        self._lists = {node.get(f"{WORD}numId"): node for node in nodes}
        self._definitions = {node.get(f"{WORD}abstractNumId"): node for node in nodes}
        self._linked = {read_value(node, "*styleLink") or None: key for key, node in self._definitions.items()}
        self._numbers: dict[Any, dict[int, int]] = defaultdict(dict)  # the last ones by definition and level
        self._restarted: set[tuple[str, int]] = set()  # lists and levels

    def label(self, paragraph: Any, styles: Sequence[Any]) -> str:
        """Return the number of the next paragraph, "" if it has none; ``styles`` are its style and its bases."""
        nodes = [paragraph, *styles]
        list_id = next(filter(None, (read_value(node, "*pPr/*numPr/*numId") for node in nodes)), "0")
        if (own_list := self._lists.get(list_id)) is None:
            return ""
        definition = read_value(own_list, "*abstractNumId")
        definition = self._linked.get(read_value(self._definitions.get(definition), "*numStyleLink"), definition)
        owners = self._definitions.get(definition, own_list), own_list
        levels = {int(node.get(_LEVEL, "0")): node for owner in owners for node in owner.iter(f"{WORD}lvl")}
        overrides = {int(node.get(_LEVEL, "0")): node for node in own_list.iter(f"{WORD}lvlOverride")}
        of_style = {read_value(node, "*pStyle"): level for level, node in levels.items()}
        linked = [of_style[key] for style in styles if (key := style.get(f"{WORD}styleId")) in of_style]
        own = [read_number(node, "*pPr/*numPr/*ilvl", -1) for node in nodes]
        level = next((level for level in (own[0], *linked, *own) if level >= 0), 0)
        if level > 8 or level not in levels or read_value(levels[level], "*numFmt") == "bullet":
            return ""
        numbers = self._numbers[definition]
        if (list_id, level) not in self._restarted and read_value(overrides.get(level), "*startOverride"):
            self._restarted.add((list_id, level))
            numbers.pop(level, None)
        if level in numbers:
            numbers[level] += 1
        for number in range(level + 1):  # levels that were skipped have their first number
            start = read_number(levels.get(number), "*start")
            numbers.setdefault(number, read_number(overrides.get(number), "*startOverride", start))
        restarts = {lower: read_number(levels.get(lower), "*lvlRestart", lower) for lower in numbers}
        for lower in (lower for lower, restart in restarts.items() if level < min(lower, restart)):
            del numbers[lower]

        def shown(match: re.Match[str]) -> str:
            number = int(match[1]) - 1
            kind = "" if read_value(levels[level], "*isLgl") == "1" else read_value(levels.get(number), "*numFmt")
            return "" if number not in numbers or kind == "none" else format_number(numbers[number], kind)

        return re.sub("%([1-9])", shown, read_value(levels[level], "*lvlText")).strip()
