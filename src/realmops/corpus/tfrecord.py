"""The passages of a published REALM checkpoint: TensorFlow records (ORQA's blocks.tfr, titles.tfr) to JSON lines."""

import gzip
import hashlib
import itertools
import json
import struct
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from realmops.corpus.passages import passage_digest
from realmops.corpus.seen_ids import SeenIds
from realmops.text.compressed import open_plain

_LARGEST = 16 << 20  # bytes of one record


def read_records(path: Path) -> Iterator[bytes]:
    """The records of a TFRecord file; ValueError names the file and the record at which it is cut.

    A record is its length (8 bytes, little endian), a checksum (4), the bytes and another checksum (4).
    """
    if path.suffix == ".npy":
        raise ValueError(
            f"{path} is a pickled array, which can run any program and is not opened; take the records that it was "
            "made from, blocks.tfr and titles.tfr of enwiki-20181220 (ORQA's published data), or bring the passages "
            'as JSON lines {"title": ..., "text": ...} in the same order'
        )
    with open_plain(path) as file:
        for number in itertools.count(1):
            head = file.read(12)
            if not head:
                return
            length = struct.unpack("<Q", head[:8])[0] if len(head) == 12 else -1
            record = file.read(length) if 0 <= length <= _LARGEST else b""
            if len(record) != length or len(file.read(4)) != 4:
                raise ValueError(
                    f"{path}: record {number} is cut or the file is no TFRecord file; copy or download it again"
                )
            yield record


def convert_blocks(
    blocks: Path, titles: Path | None, out: Path, progress: Callable[[int], None] | None = None
) -> tuple[int, str]:
    """Write blocks and, where given, their titles as JSON lines (gzip), one passage a line.

    Returns:
        Their number, and the corpus hash of a snapshot in which each of them is one passage.

    Raises:
        ValueError: Text that is no UTF-8, or more of one file than of the other; names file and record.
    """
    names: Iterator[bytes] = itertools.repeat(b"") if titles is None else read_records(titles)
    count = 0
    corpus = hashlib.sha256()
    with (
        open(out, "wb") as raw,
        gzip.GzipFile("", "wb", 1, raw, mtime=0) as file,
        closing(SeenIds(out.with_name(f"{out.name}.ids"))) as seen,
    ):
        for block in read_records(blocks):
            count += 1
            title = next(names, None)
            if title is None:
                raise ValueError(f"{titles} ends at record {count}, {blocks} goes on; the two belong to one data set")
            passage = {"title": _text(title, titles, count), "text": _text(block, blocks, count)}
            corpus.update(f"{seen.passage_id(passage_digest(**passage))}\n".encode())
            file.write(json.dumps(passage, ensure_ascii=False).encode() + b"\n")
            if progress is not None and count % 10_000 == 0:
                progress(10_000)
    if titles is not None and next(names, None) is not None:
        raise ValueError(f"{blocks} ends at record {count}, {titles} goes on; the two belong to one data set")
    return count, corpus.hexdigest()


def _text(record: bytes, path: Path | None, number: int) -> str:
    try:
        return record.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: record {number} is no UTF-8 text (byte {error.start}); name a file of texts"
        ) from None
