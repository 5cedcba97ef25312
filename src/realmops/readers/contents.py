"""Contents of a file that is one document: its title, the texts of its pages, and what its reader left out."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from io import BytesIO
from zipfile import BadZipFile, ZipFile

from realmops.readers.documents import LINE_LIMIT

PARAGRAPH = "\n\n"
_UNPACKED_LIMIT = 512 << 20  # bytes of an archive with its pictures
_XML_LIMIT = 64 << 20  # bytes of its XML, which takes about ten times as much memory when parsed
_XML_SUFFIXES = (".xml", ".rels", ".opf", ".xhtml", ".html", ".htm")
_OLE_MAGIC = b"\xd0\xcf\x11\xe0"  # the container of old Office files and of password-protected ones
_ENCRYPTED_STREAM = "EncryptedPackage".encode("utf-16-le")


class UnreadableError(Exception):
    """Error for a file that cannot be read, counted under ``kind``; its message states problem and remedy."""

    def __init__(self, kind: str, problem: str) -> None:
        super().__init__(problem)
        self.kind = kind


@dataclass
class Contents:
    """Contents of a file."""

    title: str  # the title in the file's metadata, may be empty
    pages: Iterable[str]  # the text of each page, read while it is iterated
    # What was left out of the pages that have been iterated, by kind
    omitted: Counter[str] = field(default_factory=Counter)


def check_remaining(remaining: int) -> None:
    """Raise ``UnreadableError`` if more than ``LINE_LIMIT`` characters were read."""
    if remaining < 0:
        raise UnreadableError("too_large", f"the text is longer than {LINE_LIMIT >> 20} Mi characters; split the file")


def open_package(data: bytes, kind: str) -> ZipFile:
    """Open a ZIP archive of XML whose declared size is within the limits; the memory limit covers the rest.

    ``kind`` is what it should be, for the message.
    """
    if data.startswith(_OLE_MAGIC) and _ENCRYPTED_STREAM in data:
        raise UnreadableError("encrypted", "the file needs a password; save it without one")
    try:
        package = ZipFile(BytesIO(data))
    except BadZipFile:
        raise ValueError(f"not {kind}") from None
    parts = package.infolist()
    xml = sum(part.file_size for part in parts if part.filename.lower().endswith(_XML_SUFFIXES))
    if xml > _XML_LIMIT or sum(part.file_size for part in parts) > _UNPACKED_LIMIT:
        raise UnreadableError(
            "too_large",
            f"the file unpacks to more than {_XML_LIMIT >> 20} MiB of text or {_UNPACKED_LIMIT >> 20} MiB; split it",
        )
    return package
