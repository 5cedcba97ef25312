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
    """Yield the records of a TFRecord file, without verifying checksums.

    A record is its length (8 bytes, little endian), a checksum (4), the bytes and another checksum (4).

    Raises:
        ValueError: If the file is truncated, with the number of the record, or is an array in .npy format.
    """
    if path.suffix == ".npy":
        raise ValueError(
            f"{path} is a pickled array, which can run any code and is not opened; use the records that it was built "
            "from, blocks.tfr and titles.tfr of enwiki-20181220 (ORQA's published data), or convert the passages to "
            'JSON lines {"title": ..., "text": ...} in the same order'
        )
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
    """Convert blocks, and titles if given, to gzipped JSON lines with one passage per line.

    ``titles`` has one record for each block. ``progress`` gets the number of passages since the last call.

    Returns:
        (number of passages, corpus hash of a snapshot in which each block is one passage).

    Raises:
        ValueError: If a text is not UTF-8 or the files differ in length, with file and record.
    """
    names: Iterator[bytes] = itertools.repeat(b"") if titles is None else read_records(titles)
    count = 0
    corpus = hashlib.sha256()
    with (
        open(out, "wb") as raw,
        gzip.GzipFile("", "wb", 1, raw, mtime=0) as file,
        closing(SeenIds(out.with_name(f"{out.name}.ids"))) as ids,
    ):
        for block in read_records(blocks):
            count += 1
            title = next(names, None)
            if title is None:
                raise ValueError(f"{titles} ends at record {count}, {blocks} is longer; use files of one data set")
            passage = {"title": _text(title, titles, count), "text": _text(block, blocks, count)}
            corpus.update(f"{ids.passage_id(passage_digest(**passage))}\n".encode())
            file.write(json.dumps(passage, ensure_ascii=False).encode() + b"\n")
            if progress is not None and count % 10_000 == 0:
                progress(10_000)
    if titles is not None and next(names, None) is not None:
        raise ValueError(f"{blocks} ends at record {count}, {titles} is longer; use files of one data set")
    return count, corpus.hexdigest()


def _text(record: bytes, path: Path | None, number: int) -> str:
    try:
        return record.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: record {number} is not valid UTF-8 (byte {error.start}); give a file of texts"
        ) from None
