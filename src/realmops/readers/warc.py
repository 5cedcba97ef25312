"""WARC files, plain or gzipped, such as CC-News: the main text of their web pages.

warcio parses the records, but this module splits the file: warcio's iterator stops at the first damage and expects one
record per gzip member. Here a damaged record or member is rejected and reading resumes at the next one, and a member
may end anywhere.
"""

import io
import re
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from realmops.compressed import open_raw
from realmops.readers.documents import (
    Dropped,
    Format,
    Outcome,
    RawRecord,
    Rejected,
    call_guarded,
    parse_document_or_drop,
)
from realmops.readers.html import decode_page, page_to_document

RECORD_LIMIT = 16 << 20  # bytes
_HEAD_LIMIT = 64 << 10  # bytes of a record's headers
_READ = 64 << 10  # bytes per read
_GZIP = b"\x1f\x8b\x08"
_VERSION = b"WARC/"
_PAGE_RECORDS = ("response", "resource", "conversion")  # the last has the text of a page, as in WET files
# Schemes of pages. Crawlers store their log and command line, with passwords, under others ("metadata:", "urn:").
_PAGE_SCHEMES = ("http", "https", "ftp", "file", "")
_HTML_TYPES = ("text/html", "application/xhtml+xml")
_CHARSET = re.compile(r"charset\s*=\s*[\"']?([\w.:-]{1,40})", re.IGNORECASE)


class _BrokenError(Exception):
    """Error for a damaged record; reading continues after the damage."""


def _decompress(raw: BinaryIO) -> Iterator[bytes | None]:
    """Yield the bytes of a file, decompressed if it consists of gzip members; None where bytes were lost."""
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
            if not lost and before.strip(b"\0"):  # zeros are padding
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


class _DecompressedFile(io.RawIOBase):
    """File interface of ``_decompress``; raises ``_BrokenError`` once where bytes were lost."""

    def __init__(self, raw: BinaryIO) -> None:
        self._blocks = _decompress(raw)
        self._unread = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        if not self._unread:
            block = next(self._blocks, b"")
            if block is None:
                raise _BrokenError(
                    "the gzip data is damaged or truncated here, so this record is lost; copy or download it again"
                )
            self._unread = memoryview(block)
        view = memoryview(target)
        size = min(len(view), len(self._unread))
        view[:size], self._unread = self._unread[:size], self._unread[size:]
        return size


def _records(path: Path) -> Iterator[RawRecord | Rejected]:
    with open_raw(path) as raw:
        stream: BinaryIO = io.BufferedReader(_DecompressedFile(raw), _READ)
        number = 0
        version: bytes | None = b""  # the version line, if already read
        while version is not None:
            number += 1
            place = f"{path}:record {number}"
            try:
                data = _read_record(stream, version)
                version = b""
            except _BrokenError as error:
                version = _next_version(stream)
                yield Rejected(place, str(error), ends_file=version is None)
                continue
            if data is None:
                return
            yield RawRecord(place, data, raw.tell())


def _read_record(stream: BinaryIO, version: bytes) -> dict[str, Any] | None:
    """Return the next record's type and bytes (None if it is skipped); None at the end of the file."""
    line = version
    while not line.strip():
        line = stream.readline(_HEAD_LIMIT)
        if not line:
            return None
    if not line.startswith(_VERSION):
        raise _BrokenError(f"a record begins with {line[:40]!r}, expected a line 'WARC/1.0'; create the file again")
    head = line
    while line := stream.readline(_HEAD_LIMIT):
        head += line
        if not line.strip() or len(head) > _HEAD_LIMIT:
            break
    headers = parse_headers(head)
    length = headers.get(b"content-length", b"")
    if not (length.isdigit() and len(length) < 19):
        raise _BrokenError(f"the record's Content-Length is {length[:40]!r}, expected a number of bytes")
    size = int(length)
    kind = headers.get(b"warc-type", b"").decode("ascii", "replace")
    is_read = kind in _PAGE_RECORDS and size <= RECORD_LIMIT
    parts = [head]
    left = size
    while left and (part := stream.read(min(left, _READ))):
        left -= len(part)
        if is_read:
            parts.append(part)
    if left:
        raise _BrokenError("the file is truncated in this record; copy or download it again")
    return {"type": kind, "record": b"".join([*parts, b"\r\n\r\n"]) if is_read else None}


def parse_headers(head: bytes) -> dict[bytes, bytes]:
    """Return a record's header fields by lower-case name."""
    fields = (line.partition(b":") for line in head.split(b"\n") if not line[:1].isspace())
    return {name.strip().lower(): value.strip() for name, colon, value in fields if colon}


def _next_version(stream: BinaryIO) -> bytes | None:
    """Return the next line that begins a record; None if there is none."""
    while True:
        try:
            line = stream.readline(_HEAD_LIMIT)
        except _BrokenError:
            continue
        if not line:
            return None
        if line.startswith(_VERSION):
            return line


def _parse_record(raw: RawRecord) -> Outcome:
    kind, record = raw.data["type"], raw.data["record"]
    if record is None:
        return Dropped(raw.place, "too_long" if kind in _PAGE_RECORDS else "record_type")
    return call_guarded(partial(_convert_page, record, raw.place), partial(Rejected, raw.place))


class _BrotliDecompressor:
    """Brotli decompressor for warcio, whose own has no size limit and calls an API that brotli 1.2 removed."""

    unused_data = None

    def __init__(self) -> None:
        import brotli

        self._decoder = brotli.Decompressor()

    def decompress(self, data: bytes) -> bytes:
        """Return the decompressed bytes, at most about twice ``RECORD_LIMIT``."""
        unpacked: bytes = self._decoder.process(data, output_buffer_limit=RECORD_LIMIT + 1)
        return unpacked


def _convert_page(data: bytes, place: str) -> Outcome:
    from warcio.archiveiterator import ArchiveIterator
    from warcio.bufferedreaders import BufferedReader

    BufferedReader.DECOMPRESSORS["br"] = _BrotliDecompressor
    record = next(iter(ArchiveIterator(io.BytesIO(data))))
    headers = record.http_headers
    if headers is None and record.rec_type == "response":
        return Dropped(place, "record_type")  # not HTTP, for example DNS
    url = record.rec_headers.get_header("WARC-Target-URI") or ""
    if url.strip("<>").partition(":")[0].lower() not in _PAGE_SCHEMES:
        return Dropped(place, "tool_record")
    if headers is not None and headers.get_statuscode() != "200":
        return Dropped(place, "status")
    media = (headers or record.rec_headers).get_header("Content-Type") or ""
    kind = media.partition(";")[0].strip().lower()
    if kind not in (*_HTML_TYPES, "text/plain"):
        return Dropped(place, "content_type")
    payload = record.content_stream().read(RECORD_LIMIT + 1)
    if len(payload) > RECORD_LIMIT:
        return Dropped(place, "too_long")
    charset = _CHARSET.search(media)
    text = decode_page(payload, charset[1] if charset else None)
    date = (record.rec_headers.get_header("WARC-Date") or "")[:10]
    if kind == "text/plain":
        return parse_document_or_drop({"title": url, "text": text.strip(), "url": url, "date": date}, place)
    return page_to_document(text, place, title=url, url=url or None, date=date)


WARC = Format("warc", _records, _parse_record)
