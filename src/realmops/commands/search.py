"""``realmops search``: parse filters."""

import json
import re
from collections.abc import Sequence
from typing import Any

from realmops.answering.metadata_filters import DOCUMENT_ID, Where

_CONDITION = re.compile(r"([^<>=]+)(>=|<=|=|>|<)(.*)", re.DOTALL)
_BOUND = {">=": "gte", ">": "gt", "<=": "lte", "<": "lt"}


def parse_filter(conditions: Sequence[str]) -> Where:
    """Parse conditions such as ``FIELD>=VALUE`` into a filter; two ``=`` of a field match either.

    A value that is a JSON number, true or false has that type; any other value, and the id of a document, is a string.
    """
    filters: dict[str, Any] = {}
    for text in conditions:
        match = _CONDITION.fullmatch(text)
        if not match:
            raise ValueError(f"--where {text!r}: expected FIELD=VALUE, or >=, >, <= or < instead of =")
        field, sign, value = match[1].strip(), match[2], match[3].strip()
        conditions_of_field = filters.setdefault(field, [] if sign == "=" else {})
        if isinstance(conditions_of_field, list) != (sign == "=") or _BOUND.get(sign) in conditions_of_field:
            raise ValueError(f"--where {text!r}: conflicts with another condition on {field}; leave one out")
        if sign == "=":
            conditions_of_field.append(_parse_value(value, field))
        else:
            conditions_of_field[_BOUND[sign]] = _parse_value(value, field)
    return filters


def _parse_value(text: str, field: str) -> Any:
    try:
        value = json.loads(text, parse_constant=str)
    except ValueError:
        return text
    return value if isinstance(value, str | int | float) and field != DOCUMENT_ID else text
