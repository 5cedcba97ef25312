"""JSON lines, plain or compressed: one {"title", "text", "id"?, "spans"?, ...} or CC-News row per line."""

from realmops.corpus.documents import Format, cut_lines, document_or_dropped, json_object

JSONL = Format("jsonl", cut_lines, lambda raw: document_or_dropped(json_object(raw.data, raw.place), raw.place))
