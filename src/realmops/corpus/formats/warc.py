"""WARC files, plain or gzipped: the main text of the web pages in them, as of CC-News.

warcio reads the records. They are cut here, because warcio's iterator stops at the first damage and takes each
gzip member for one record: a damaged record or member is rejected and the next one is looked for, and a
member may end anywhere.
"""

import io
import re
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from realmops.corpus.documents import Dropped, Format, Outcome, Raw, Rejected, document_or_dropped, guarded
from realmops.corpus.formats.html import decode_page, page_outcome
from realmops.text.compressed import open_plain

RECORD_LIMIT = 16 << 20
_HEAD_LIMIT = 64 << 10
_READ = 64 << 10
_GZIP = b"\x1f\x8b\x08"
_VERSION = b"WARC/"
_KEPT = ("response", "resource")
_PAGES = ("text/html", "application/xhtml+xml")
_CHARSET = re.compile(r"charset\s*=\s*[\"']?([\w.:-]{1,40})", re.IGNORECASE)


class _BrokenError(Exception):
    """A record is damaged; reading on gives what follows the damage."""


def _plain_blocks(raw: BinaryIO) -> Iterator[bytes | None]:
    """The bytes of a file, those of all its gzip members if it has any; None where bytes were lost."""
    data = raw.read(_READ)
    if not data.startswith(_GZIP):
        while data:
            yield data
            data = raw.read(_READ)
        return
    decoder = None
    lost = False
    while data:
        if decoder is None:
            start = data.find(_GZIP)
            before = data[:start] if start >= 0 else data
            if not lost and before.strip(b"\0"):  # zeros may fill a block
                lost = True
                yield None
            if start < 0:
                data = raw.read(_READ)
                continue
            data = data[start:]
            decoder = zlib.decompressobj(31)
        try:
            block = decoder.decompress(data, _READ)
        except zlib.error:
            if not lost:
                lost = True
                yield None
            data, decoder = data[1:] or raw.read(_READ), None
            continue
        if block:
            lost = False
            yield block
        if decoder.eof:
            data, decoder = decoder.unused_data, None
            if len(data) < len(_GZIP):
                data += raw.read(_READ)
        else:
            data = decoder.unconsumed_tail or raw.read(_READ)
    if decoder is not None and not lost:
        yield None


class _Plain(io.RawIOBase):
    """``_plain_blocks`` as a file; reading over lost bytes raises ``_BrokenError`` once."""

    def __init__(self, raw: BinaryIO) -> None:
        self._blocks = _plain_blocks(raw)
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        if not self._rest:
            block = next(self._blocks, b"")
            if block is None:
                raise _BrokenError(
                    "the gzip data is damaged or cut here, so that this record is lost; copy or download it again"
                )
            self._rest = memoryview(block)
        view = memoryview(target)
        size = min(len(view), len(self._rest))
        view[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


def _records(path: Path) -> Iterator[Raw | Rejected]:
    with open_plain(path) as raw:
        stream: BinaryIO = io.BufferedReader(_Plain(raw), _READ)
        number = 0
        found: bytes | None = b""  # a version line that was read already
        while found is not None:
            number += 1
            place = f"{path}:record {number}"
            try:
                data = _cut(stream, found)
                found = b""
            except _BrokenError as error:
                found = _next_version(stream)
                yield Rejected(place, str(error), ends_file=found is None)
                continue
            if data is None:
                return
            yield Raw(place, data, raw.tell())


def _cut(stream: BinaryIO, version: bytes) -> dict[str, Any] | None:
    """The next record's type and bytes (None where nobody wants them); None at the end of the file."""
    line = version
    while not line.strip():
        line = stream.readline(_HEAD_LIMIT)
        if not line:
            return None
    if not line.startswith(_VERSION):
        raise _BrokenError(f"found {line[:40]!r} where a record begins, wanted a line 'WARC/1.0'; make the file again")
    head = line
    while line := stream.readline(_HEAD_LIMIT):
        head += line
        if not line.strip() or len(head) > _HEAD_LIMIT:
            break
    headers = parsed_head(head)
    length = headers.get(b"content-length", b"")
    if not (length.isdigit() and len(length) < 19):
        raise _BrokenError(f"the record's Content-Length is {length[:40]!r}, wanted a number of bytes")
    size = int(length)
    kind = headers.get(b"warc-type", b"").decode("ascii", "replace")
    wanted = kind in _KEPT and size <= RECORD_LIMIT
    parts = [head]
    left = size
    while left and (part := stream.read(min(left, _READ))):
        left -= len(part)
        if wanted:
            parts.append(part)
    if left:
        raise _BrokenError("the file ends in the middle of this record; it was cut: copy or download it again")
    return {"type": kind, "record": b"".join([*parts, b"\r\n\r\n"]) if wanted else None}


def parsed_head(head: bytes) -> dict[bytes, bytes]:
    """The fields of a record's head, by their names in small letters."""
    fields = (line.partition(b":") for line in head.split(b"\n") if not line[:1].isspace())
    return {name.strip().lower(): value.strip() for name, colon, value in fields if colon}


def _next_version(stream: BinaryIO) -> bytes | None:
    """The next line that begins a record; None when none follows."""
    while True:
        try:
            line = stream.readline(_HEAD_LIMIT)
        except _BrokenError:
            continue
        if not line:
            return None
        if line.startswith(_VERSION):
            return line


def _understand(raw: Raw) -> Outcome:
    kind, record = raw.data["type"], raw.data["record"]
    if record is None:
        return Dropped(raw.place, "too_long" if kind in _KEPT else "record_type")
    return guarded(partial(_page, record, raw.place), partial(Rejected, raw.place))


class _Brotli:
    """A decompressor as warcio wants it; its own asks of brotli what brotli 1.2 has no longer, and has no limit."""

    unused_data = None

    def __init__(self) -> None:
        import brotli

        self._decoder = brotli.Decompressor()

    def decompress(self, data: bytes) -> bytes:
        """What the next bytes unpack to, up to about twice ``RECORD_LIMIT``: more is not asked for."""
        unpacked: bytes = self._decoder.process(data, output_buffer_limit=RECORD_LIMIT + 1)
        return unpacked


def _page(data: bytes, place: str) -> Outcome:
    from warcio.archiveiterator import ArchiveIterator
    from warcio.bufferedreaders import BufferedReader

    BufferedReader.DECOMPRESSORS["br"] = _Brotli
    record = next(iter(ArchiveIterator(io.BytesIO(data))))
    headers = record.http_headers
    if headers is None and record.rec_type == "response":
        return Dropped(place, "record_type")  # of another protocol: DNS
    if headers is not None and headers.get_statuscode() != "200":
        return Dropped(place, "status")
    media = (headers or record.rec_headers).get_header("Content-Type") or ""
    kind = media.partition(";")[0].strip().lower()
    if kind not in (*_PAGES, "text/plain"):
        return Dropped(place, "content_type")
    payload = record.content_stream().read(RECORD_LIMIT + 1)
    if len(payload) > RECORD_LIMIT:
        return Dropped(place, "too_long")
    charset = _CHARSET.search(media)
    text = decode_page(payload, charset[1] if charset else None)
    url = record.rec_headers.get_header("WARC-Target-URI") or ""
    date = (record.rec_headers.get_header("WARC-Date") or "")[:10]
    if kind == "text/plain":
        return document_or_dropped({"title": url, "text": text.strip(), "url": url, "date": date}, place)
    return page_outcome(text, place, title=url, url=url or None, date=date)


WARC = Format("warc", _records, _understand)
