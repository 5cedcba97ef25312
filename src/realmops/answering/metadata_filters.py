"""Filters on the metadata of documents: which passages satisfy conditions on the fields.

Shape suffixes: P passages, A passages that pass the filters, U distinct metadata records, V distinct values of a field,
N pairs of a record and a value.
"""

import json
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realmops.answering.answer import InvalidRequest
from realmops.artifacts import canonical_json
from realmops.corpus.snapshot_reader import Snapshot, parse_extra

Where = Mapping[str, Any]
Ids = NDArray[np.int64]
RANGES: dict[str, Callable[[Any, Any], bool]] = {
    "gte": operator.ge, "gt": operator.gt, "lte": operator.le, "lt": operator.lt
}  # fmt: skip
KINDS = {"boolean": "unquoted true or false", "string": "a quoted string", "number": "an unquoted number"}
DOCUMENT_ID = "document_id"  # filterable in addition to the metadata fields
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)  # as in JSON, so that 007 is a string
_MESSAGE_CHARACTERS = 60  # of a value in an error message
_CACHED_FILTERS = 64
_CACHED_PASSAGES = 1 << 24  # of all cached filters together


@dataclass(frozen=True, eq=False)
class _Column:
    """Distinct values of a field [V]; metadata record ``row_N`` has the value ``number_N``."""

    values: list[Any]
    row_N: NDArray[np.int64]
    number_N: NDArray[np.int64]


class MetadataFilters:
    """Metadata filters of a snapshot; thread-safe, fields are loaded on first use.

    A filter maps fields to conditions, all of which must hold: a value, a list of alternatives, or a range such as
    ``{"gte": 1990, "lt": 2000}``. A field whose value is a list matches by any of its items. A number is compared with
    numbers, and with strings that are a JSON number (all CSV fields are strings); a string only with strings.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._lock = Lock()
        self._coded = lru_cache(2)(snapshot.dictionary_encode)
        self._columns: dict[str, _Column] = {}
        self._cache: dict[bytes, Ids] = {}  # in order of last use

    def passages(self, filters: Sequence[Where]) -> Ids:
        """Return the passages that satisfy all filters, ascending int64 [A].

        InvalidRequest if a condition is malformed, or if none of the documents that passed the previous filters has the
        field, or a value that it can be compared with.
        """
        predicates = [{field: _predicate(field, condition) for field, condition in where.items()} for where in filters]
        try:
            key = canonical_json([*filters])
        except UnicodeEncodeError:
            raise InvalidRequest("a filter contains an unpaired surrogate; send valid Unicode") from None
        with self._lock:
            if key not in self._cache:
                passes_P = np.ones(len(self._snapshot), bool)
                for where, tests in zip(filters, predicates, strict=True):
                    self._check_fields(where, passes_P)
                    for field, passes in tests.items():
                        passes_P = passes_P & self._matching(field, passes)
                self._cache[key] = np.flatnonzero(passes_P)
            ids = self._cache[key] = self._cache.pop(key)  # the most recently used is last
            while sum(map(len, self._cache.values())) > _CACHED_PASSAGES or len(self._cache) > _CACHED_FILTERS:
                self._cache.pop(next(iter(self._cache)))
            return ids

    @cached_property
    def _extra(self) -> tuple[list[dict[str, Any]], NDArray[np.int32]]:
        """Distinct metadata records [U], and the record of each passage [P]."""
        text_U, code_P = self._coded("extra")
        return [parse_extra(text) for text in text_U], code_P

    def _check_fields(self, where: Where, passes_P: NDArray[np.bool_]) -> None:
        if not where:
            return
        fields_U, code_P = self._extra
        fields = {DOCUMENT_ID, *(name for code in np.unique(code_P[passes_P]) for name in fields_U[code])}
        for field, condition in where.items():
            if field not in fields:
                raise InvalidRequest(f"no document has the field {field!r}; available: {', '.join(sorted(fields))}")
            column, code_P = self._column(field), self._codes(field)
            has_U = np.zeros(code_P.max(initial=-1) + 1, bool)
            has_U[code_P[passes_P]] = True
            values = [column.values[n] for n in np.unique(column.number_N[has_U[column.row_N]])]
            _check_kinds(field, condition, values)

    def _codes(self, field: str) -> NDArray[np.int32]:
        return self._coded(DOCUMENT_ID)[1] if field == DOCUMENT_ID else self._extra[1]

    def _matching(self, field: str, passes: Callable[[Any], bool]) -> NDArray[np.bool_]:
        code_P, column = self._codes(field), self._column(field)
        passes_V = np.fromiter(map(passes, column.values), bool, len(column.values))
        passes_U = np.zeros(code_P.max(initial=-1) + 1, bool)
        passes_U[column.row_N[passes_V[column.number_N]]] = True
        matching: NDArray[np.bool_] = passes_U[code_P]
        return matching

    def _column(self, field: str) -> _Column:
        if field not in self._columns:
            ids, records = self._coded(DOCUMENT_ID)[0], self._extra[0]
            values = ids if field == DOCUMENT_ID else [fields.get(field) for fields in records]
            number_of: dict[Any, int] = {}
            rows = [
                (row, number_of.setdefault(_key(item), len(number_of)))
                for row, value in enumerate(values)
                for item in (value if isinstance(value, list) else [value])
                if _is_value(item)
            ]
            distinct = [value for _, value in number_of]
            self._columns[field] = _Column(distinct, *np.array(rows, np.int64).reshape(-1, 2).T)
        return self._columns[field]


def _predicate(field: str, condition: Any) -> Callable[[Any], bool]:
    """Return whether a value satisfies a condition (a numeric string counts as both types), which is checked."""
    if not isinstance(condition, Mapping):
        items = condition if isinstance(condition, list) else [condition]
        keys = {_key(item) for item in items}
        numbers = {item for item in items if _kind(item) == "number"}
        return lambda value: _key(value) in keys or _number(value) in numbers
    if not condition or not set(condition) <= set(RANGES):
        names = ", ".join(map(str, condition)) or "nothing"
        raise InvalidRequest(f"the range of {field} has {names}; allowed: {', '.join(RANGES)}")
    for name, bound in condition.items():
        if isinstance(bound, bool) or not _is_value(bound):
            raise InvalidRequest(f"{name} of {field} is {bound!r}; expected a number or a string")

    def is_in_range(value: Any) -> bool:
        for name, bound in condition.items():
            operand = _number(value) if _kind(bound) == "number" else value
            if _kind(operand) != _kind(bound) or not RANGES[name](operand, bound):
                return False
        return True

    return is_in_range


def _key(value: Any) -> tuple[bool, Any]:
    """Return a dictionary key for a value, which distinguishes true from 1."""
    if not _is_value(value):
        raise InvalidRequest(
            f"a filter has the value {value!r}; allowed: strings, numbers, true, false, or a list of them"
        )
    return isinstance(value, bool), value


def _is_value(value: Any) -> bool:
    return isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


def _kind(value: Any) -> str:
    """Return the key of ``KINDS`` for a value; "" for None."""
    if isinstance(value, bool | str):
        return "string" if isinstance(value, str) else "boolean"
    return "number" if value is not None else ""


def _number(value: Any) -> float | None:
    """Return a number, or that of a numeric string (an int if it is whole); None for other values."""
    if not isinstance(value, str):
        return None if isinstance(value, bool) else value
    text = value.strip()
    if not _NUMBER.fullmatch(text) or not math.isfinite(number := float(text)):
        return None
    return int(text) if text.lstrip("-").isdigit() else number


def _check_kinds(field: str, condition: Any, values: Sequence[Any]) -> None:
    """Raise InvalidRequest if no value of a field is comparable with a bound of a range, or with any item of a list."""
    is_range = isinstance(condition, Mapping)
    operands = [*condition.values()] if is_range else condition if isinstance(condition, list) else [condition]
    misfits = [x for x in operands if not any(_kind(x) in (_kind(v), _kind(_number(v))) for v in values)]
    if not values or not misfits or (not is_range and len(misfits) < len(operands)):
        return
    bound, example = (json.dumps(x, ensure_ascii=False)[:_MESSAGE_CHARACTERS] for x in (misfits[0], values[0]))
    raise InvalidRequest(
        f"the field {field} has no {_kind(misfits[0])} to compare with {bound}: it has {example}, for example; "
        f"compare with {KINDS[_kind(values[0])]}"
    )
