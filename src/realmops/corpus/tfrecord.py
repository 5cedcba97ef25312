"""Conversion of a published REALM checkpoint's passages (ORQA's blocks.tfr and titles.tfr) to JSON lines."""

import gzip
import hashlib
import itertools
import json
import struct
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from realmops.compressed import open_raw
from realmops.corpus.passages import passage_digest
from realmops.corpus.seen_ids import SeenIds

_MAX_RECORD = 16 << 20  # bytes


def read_records(path: Path) -> Iterator[bytes]:
    """Yield contents of TFRecords: length (8 bytes, little endian), checksum (4, unverified), content, checksum (4)."""
    with open_raw(path) as file:
        for number in itertools.count(1):
            head = file.read(12)
            if not head:
                return
            length = struct.unpack("<Q", head[:8])[0] if len(head) == 12 else -1
            record = file.read(length) if 0 <= length <= _MAX_RECORD else b""
            if len(record) != length or len(file.read(4)) != 4:
                raise ValueError(
                    f"{path}: record {number} is truncated, or this is not a TFRecord file; copy or download it again"
                )
            yield record


def convert_blocks(
    blocks: Path, titles: Path | None, out: Path, progress: Callable[[int], None] | None = None
) -> tuple[int, str]:
    """Convert blocks to gzipped JSON lines; return (number of passages, corpus hash with one passage per block)."""
    texts = read_records(blocks)
    pairs: Iterator[tuple[bytes | None, bytes | None]] = (
        ((b"", text) for text in texts) if titles is None else itertools.zip_longest(read_records(titles), texts)
    )
    count, corpus = 0, hashlib.sha256()
    with (
        open(out, "wb") as raw,
        gzip.GzipFile("", "wb", 1, raw, mtime=0) as file,
        closing(SeenIds(out.with_name(f"{out.name}.ids"))) as ids,
    ):
        for count, (title, text) in enumerate(pairs, start=1):
            if title is None or text is None:
                raise ValueError(f"only one of {titles} and {blocks} has a record {count}; use files of one data set")
            try:
                passage = {"title": title.decode(), "text": text.decode()}
            except UnicodeDecodeError as error:
                raise ValueError(f"{blocks}: record {count}, or its title, is not valid UTF-8 ({error})") from None
            corpus.update(f"{ids.passage_id(passage_digest(**passage))}\n".encode())
            file.write(json.dumps(passage, ensure_ascii=False).encode() + b"\n")
            if progress is not None and count % 10_000 == 0:
                progress(10_000)
    return count, corpus.hexdigest()
