"""Document file formats: list the files of a corpus and detect the format of each."""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from realmops.artifacts import special_file_kind
from realmops.compressed import DECOMPRESSION_ERRORS, bare_name, is_archive, list_members, open_compressed, open_raw
from realmops.readers import tables
from realmops.readers.beir import BEIR, corpus_file
from realmops.readers.delimited import CSV
from realmops.readers.documents import Format, RawRecord, Rejected, parse_json_object, text_key
from realmops.readers.jsonl import JSONL, iter_objects
from realmops.readers.mediawiki import MEDIAWIKI
from realmops.readers.paged import FILES, IMAGE, IMAGES, PDF, read_file
from realmops.readers.tables import DATASET, PARQUET
from realmops.readers.walk import walk_files

_FORMATS = (JSONL, PARQUET, CSV, *FILES, MEDIAWIKI, BEIR, DATASET)
FORMATS: dict[str, Format] = {entry.name: entry for entry in _FORMATS}
_BY_SUFFIX = {suffix: entry.name for entry in _FORMATS for suffix in entry.suffixes}
_BY_FIRST_BYTES = {  # formats, and why other files are not read
    b"PAR1": "parquet",
    b"<mediawiki": "mediawiki",
    b"%PDF-": "pdf",
    b"{\\rtf": "rtf",
    b"<doc ": "it begins with <doc, like text extracted from a Wikipedia dump; name the dump itself (.xml.bz2)",
    b"WARC/": "it is a web archive, which is not read; extract its pages as HTML files, for example with warcio",
}
_REGULAR = "only regular files are read, in folders and whole archives that can be listed, without a password"
_UNKNOWN = "unknown format (checked: suffix and first bytes)"
_LOCKS = ("~$", ".~lock.")  # first characters of the names of lock files
_KIND = re.compile(r"[a-z0-9]{1,10}")  # suffixes under which files without a known format are counted


@dataclass(frozen=True)
class Source:
    """One input file of a corpus, or one split of a dataset."""

    path: Path  # the file, the split's folder, or ``hf:owner/name:split``
    format: Format  # the format that reads it
    size: int  # bytes on disk
    broken: str = ""  # the kind under which the file is counted if it cannot be read; "" if that ends the stage


def list_sources(documents: Path, format: str, ocr: tuple[str, ...] = ()) -> list[Source]:
    """List the files of a corpus in sorted order; one of unknown format yields one ``Rejected`` with its kind.

    ``documents`` may be ``hf:owner/name[:split]``; ``format`` selects files, or is "auto"; ``ocr`` is ``find_data``'s.
    """
    listed = _list_sources(documents, format)
    for source in listed:
        if source.format.needs and find_spec(source.format.needs) is None:
            raise ValueError(
                f"{source.path}: reading {source.format.name} needs the package {source.format.needs}; "
                "pip install 'realmops[documents]', or set the format to read only files of that format"
            )
    formats = {name: replace(FORMATS[name], records=partial(read_file, ocr=ocr)) for name in (IMAGE, PDF) if ocr}
    return [replace(source, format=formats.get(source.format.name, source.format)) for source in listed]


def may_have_scans(documents: Path) -> bool:
    return any(path.suffix.lower() in (*IMAGES, ".pdf") or is_archive(path) for path in walk_files(documents))


def _list_sources(documents: Path, format: str) -> list[Source]:
    if format != "auto" and format not in FORMATS:
        raise ValueError(f"unknown format {format!r}; allowed are auto, {', '.join(FORMATS)}")
    if splits := tables.list_splits(documents):
        if format not in ("auto", DATASET.name):
            raise ValueError(f"{documents}: is a Hugging Face dataset, not {format}; set the format to dataset")
        return [Source(path, DATASET, size) for path, size in splits]
    if not documents.exists():
        raise ValueError(f"{documents}: there is no such file or folder; check the path")
    if format in ("auto", BEIR.name) and (corpus := corpus_file(documents)) is not None:
        return [Source(corpus, BEIR, _kind_and_size(corpus)[1])]
    if not documents.is_dir() and not is_archive(documents):
        open_raw(documents).close()
        known = _known_format(documents, _detect_format(documents) if format == "auto" else format)
        return [Source(documents, known, _kind_and_size(documents)[1])]
    files = walk_files(documents) if documents.is_dir() else [documents]
    listed = [entry for file in files for entry in _list_file(file, *_kind_and_size(file))]
    found = [(path, "" if kind else _detect_format(path), kind, size) for path, kind, size in listed]
    if format != "auto":  # an unreadable subfolder may hold files of this format, so it stays in the list
        found = [entry for entry in found if entry[1] == format or entry[2] == "folder"]
    formats = {name for _, name, kind, _ in found if not kind}
    if not formats:
        of_format = "" if format == "auto" else f" of the format {format}"
        raise ValueError(f"{documents}: there is no file{of_format} that can be read; check the path")
    first, name = next((path, name) for path, name, kind, _ in found if not kind)
    if formats.isdisjoint(FORMATS):
        _known_format(first, name)  # raises ValueError
    is_strict = len(formats) == 1 and (format != "auto" or not FORMATS[name].is_document)
    return [_folder_source(*entry, is_strict) for entry in found]


def _list_file(path: Path, kind: str, size: int, depth: int = 2) -> Iterator[tuple[Path, str, int]]:
    """Yield (path, kind, bytes) of a file, or of the members of an archive, also of archives in an archive."""
    if kind or not depth or not is_archive(path):
        yield path, "lock_file" if path.name.startswith(_LOCKS) else kind, size
        return
    for name, (size, kind, _) in list_members(path).items():
        yield from _list_file(name, "parquet" if name.suffix == ".parquet" else kind, size, depth - 1)


def _kind_and_size(path: Path) -> tuple[str, int]:
    """Return (kind, bytes); the kind is "" for a regular file, and for a broken link, which fails when it is opened."""
    with suppress(OSError):
        status = path.stat()
        return special_file_kind(status.st_mode), status.st_size
    return "", 0


def _known_format(path: Path, name: str) -> Format:
    if name not in FORMATS:
        remedy = f"; allowed are {', '.join(FORMATS)}; set the format, or keep only documents in the folder"
        raise ValueError(f"{path}: {name}{remedy if name == _UNKNOWN else ''}")
    return FORMATS[name]


def _folder_source(path: Path, name: str, special: str, size: int, is_strict: bool) -> Source:
    """Return the source; a ``special`` kind is never opened; with ``is_strict`` an unreadable one ends the stage."""
    suffix, problem = path.suffix[1:].lower(), f"it is of the kind {special}; {_REGULAR}"
    kind = special or (suffix if _KIND.fullmatch(suffix) else "other")
    if not special and is_strict:
        return Source(path, FORMATS[name], size)
    try:
        if not special:
            open_raw(path).close()
            problem = _first_problem(path) if name == "jsonl" else "" if name in FORMATS else name
        if not problem:
            return Source(path, FORMATS[name], size, f"broken_{name}")
    except ValueError as error:
        problem = str(error).removeprefix(f"{path}: ")
        kind = f"broken_{name}" if name in FORMATS else kind
    rejected = Rejected(str(path), problem, kind=kind)
    return Source(path, replace(FORMATS["text"], name="unread", records=lambda _: iter([rejected])), 0)


def _first_problem(path: Path) -> str:
    """Return why the first record is no document; "" also for a broken record unless the suffix is .json."""
    record = next(iter_objects(path), None)
    if isinstance(record, RawRecord):
        with suppress(ValueError):
            keys = parse_json_object(record.data, record.place)
            found = f"its first record has no key 'text' (keys found: {', '.join(sorted(keys))})"
            return "" if text_key(keys) in keys else found
    return "its first record is not a JSON object" if ".json" in path.suffixes else ""


def _detect_format(path: Path) -> str:
    """Return the format by the first bytes of a file, decompressed, or by its suffix; or why it is not read."""
    try:
        with open_compressed(path) as (file, _):
            head = file.read(1024)
    except (*DECOMPRESSION_ERRORS, ValueError):  # reported when the file is read
        head = b""
    bare = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    bare = bare.partition(b"?>")[2].lstrip() if bare.startswith(b"<?xml") else bare
    for magic, name in _BY_FIRST_BYTES.items():
        if bare.startswith(magic):
            return name
    by_suffix = _BY_SUFFIX.get(Path(bare_name(path)).suffix.lower())
    return by_suffix or ("jsonl" if bare.startswith((b"{", b"[{")) else _UNKNOWN)
