"""``realmops search``: its filters, and its passages as text."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from realmops.answering.passage_search import ID, Where

_CONDITION = re.compile(r"([^<>=]+)(>=|<=|=|>|<)(.*)", re.DOTALL)
_BOUND = {">=": "gte", ">": "gt", "<=": "lte", "<": "lt"}
_AROUND = 90  # characters shown on either side of the words that were found


def filter_of(conditions: Sequence[str]) -> Where:
    """Of ``FIELD=VALUE``, ``FIELD>=VALUE`` and so on; a field with ``=`` twice has either.

    A value that is a number, true or false as JSON writes them is that; any other, and a document's id, is text.
    """
    found: dict[str, Any] = {}
    for text in conditions:
        match = _CONDITION.fullmatch(text)
        if not match:
            raise ValueError(f"--where {text!r}: FIELD=VALUE is wanted, or >=, >, <= or < in the place of =")
        field, sign, value = match[1].strip(), match[2], match[3].strip()
        known = found.setdefault(field, [] if sign == "=" else {})
        if isinstance(known, list) != (sign == "=") or _BOUND.get(sign) in known:
            raise ValueError(f"--where {text!r}: {field} has another condition that this one cannot stand beside")
        if sign == "=":
            known.append(_value(value, field))
        else:
            known[_BOUND[sign]] = _value(value, field)
    return found


def _value(text: str, field: str) -> Any:
    try:
        value = json.loads(text, parse_constant=str)
    except ValueError:
        return text
    return value if isinstance(value, str | int | float) and field != ID else text


def shown(record: Mapping[str, Any]) -> Iterator[str]:
    """The passages that were found, for people."""
    if not record["passages"]:
        yield "nothing was found"
    for number, one in enumerate(record["passages"], 1):
        places = one["highlights"]
        first = max(0, places[0][0] - _AROUND) if places else 0
        end = min(len(one["text"]), (places[0][1] if places else 0) + 2 * _AROUND)
        text, at = "", first
        for low, high in places:
            if high <= end:
                text += f"{one['text'][at:low]}[{one['text'][low:high]}]"
                at = high
        text = " ".join((text + one["text"][at:end]).split())
        before, after = "… " if first else "", " …" if end < len(one["text"]) else ""
        page = f", page {one['page']}" if one.get("page") else ""
        yield f"{number}. {one['title'] or one['document_id']}  ({one['score']:.3g})"
        yield f"   {before}{text}{after}"
        yield f"   {one['uri']}, characters {one['start']} to {one['end']}{page}"
