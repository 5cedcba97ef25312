"""The outcomes of a file or folder by its readers, without a snapshot."""

from pathlib import Path

from realmops.corpus.ingest import iter_batches, parse_records
from realmops.readers.documents import Document, Outcome
from realmops.readers.sources import list_sources


def outcomes_of(path: Path) -> list[Outcome]:
    sources = list_sources(path, "auto")
    return [
        outcome
        for batch in iter_batches(sources)
        for outcome in parse_records([(sources[number].format.name, records) for number, records in batch])
    ]


def read_document(path: Path, content: str | bytes) -> Document:
    """Write a file and return its one document."""
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    [document] = outcomes_of(path)
    assert isinstance(document, Document), document
    return document
