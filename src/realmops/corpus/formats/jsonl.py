"""JSON lines, plain or compressed: one {"title", "text", "id"?, "spans"?, ...} or CC-News row per line."""

from realmops.corpus.documents import Format, iter_lines, parse_document_or_drop, parse_json_object

JSONL = Format(
    "jsonl", iter_lines, lambda raw: parse_document_or_drop(parse_json_object(raw.data, raw.place), raw.place)
)
