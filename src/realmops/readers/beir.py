"""Folders of the benchmark BEIR (Thakur et al. 2021): corpus.jsonl, next to queries.jsonl and judgements in qrels."""

from pathlib import Path
from typing import Any

from realmops.readers.documents import (
    RESERVED_KEYS,
    Format,
    Outcome,
    RawRecord,
    check_text,
    iter_lines,
    parse_document,
    parse_json_object,
    require_key,
)

ID = "_id"
ENDINGS = ("", ".gz", ".bz2")


def beir_file(folder: Path, name: str) -> Path | None:
    return next((path for ending in ENDINGS if (path := folder / f"{name}{ending}").is_file()), None)


def corpus_file(folder: Path) -> Path | None:
    corpus = beir_file(folder, "corpus.jsonl")
    if corpus is None or beir_file(folder, "queries.jsonl") is None:
        return None
    first = next(iter_lines(corpus), None)
    return corpus if isinstance(first, RawRecord) and b'"_id"' in first.data else None


def _parse_record(raw: RawRecord) -> Outcome:
    """Parse a document; one without text has its title as text, and its metadata are columns."""
    record: dict[str, Any] = parse_json_object(raw.data, raw.place)
    identifier = require_key(record, ID, raw.place)
    title, text = (check_text(record.get(key) or "", key, raw.place) for key in ("title", "text"))
    if not text.strip():
        title, text = "", title
    metadata = record.get("metadata")
    columns = {**metadata, **record} if isinstance(metadata, dict) else record
    columns = {key: value for key, value in columns.items() if key not in {*RESERVED_KEYS, ID, "metadata"}}
    return parse_document({**columns, "id": identifier, "title": title, "text": text}, raw.place)


BEIR = Format("beir", iter_lines, _parse_record)
