"""JSON lines, plain or compressed: {"title", "text", "id"?, "spans"?, ...} or CC-News rows, one on each line."""

from __future__ import annotations

from realmops.corpus.documents import Format, Outcome, Raw, Rejected, cut_lines, json_object, outcome_of


def _convert(raw: Raw) -> Outcome:
    try:
        record = json_object(raw.data, raw.place)
    except ValueError as error:
        return Rejected(raw.place, str(error).removeprefix(f"{raw.place}: "))
    return outcome_of(record, raw.place)


JSONL = Format("jsonl", cut_lines, _convert)
