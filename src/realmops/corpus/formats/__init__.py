"""The file formats that a corpus may come in: which files are there, in which format, and how each is read."""

import re
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from realmops.artifacts import special_kind
from realmops.corpus.documents import Format, Raw, Rejected, cut_lines, json_object
from realmops.corpus.formats import tables, text
from realmops.corpus.formats.delimited import CSV
from realmops.corpus.formats.jsonl import JSONL
from realmops.corpus.formats.mediawiki import MEDIAWIKI
from realmops.corpus.formats.paged import PAGED
from realmops.corpus.formats.rst import RST
from realmops.corpus.formats.tables import DATASET, PARQUET
from realmops.corpus.formats.text import TEXT
from realmops.corpus.formats.warc import WARC
from realmops.corpus.walk import files_below
from realmops.text.compressed import DAMAGE, open_compressed, open_plain

_FORMATS = (JSONL, PARQUET, CSV, TEXT, RST, *PAGED, MEDIAWIKI, WARC, DATASET)
FORMATS: dict[str, Format] = {one.name: one for one in _FORMATS}
_BY_SUFFIX = {
    **dict.fromkeys((".jsonl", ".json", ".ndjson"), "jsonl"),
    **dict.fromkeys((*text.PLAIN, *text.MARKDOWN, *text.PAGES), "text"),
    ".parquet": "parquet",
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    ".rst": "rst",
    **{f".{one.name}": one.name for one in PAGED},
    ".xml": "mediawiki",
    ".warc": "warc",
}
_BY_FIRST_BYTES = {
    b"PAR1": "parquet",
    b"WARC/": "warc",
    b"<mediawiki": "mediawiki",
    b"%PDF-": "pdf",
}
_EXTRACT = b"<doc "  # begins the text that tools extract from a dump of Wikipedia
_HEAD = 1024
_EXTRACT_PROBLEM = (
    "it begins with <doc, as text that was extracted from a dump of Wikipedia; name the dump itself (.xml.bz2), which "
    "the format mediawiki reads"
)
_COLUMNS = {"title", "text"}
_KIND = re.compile(r"[a-z0-9]{1,10}")  # of a file that is no document, by its name


@dataclass(frozen=True)
class Source:
    """One file of a corpus (or split of a dataset); ``size`` is in bytes.

    One that is broken ends the stage, unless ``broken`` is the kind that it is then counted under.
    """

    path: Path
    format: Format
    size: int
    broken: str = ""


def sources(documents: Path, format: str) -> list[Source]:
    """The files of a corpus in sorted order: ``documents`` itself, or all below it where it is a folder.

    Args:
        documents: a file, a folder, a dataset that was saved on disk, or ``hf:owner/name[:split]``.
        format: a name of ``FORMATS``, or "auto" for what content and name say. A name given for a folder picks
            the files of that format; given for a file it holds whatever the file looks like.

    Of a folder with files of several formats each is read by its own when ``format`` is "auto"; a file of no known
    format becomes a source of one ``Rejected`` with its kind. Raises ValueError when there is nothing else, and where
    the package that a format needs is not installed.
    """
    found = _sources(documents, format)
    for one in found:
        if one.format.needs and find_spec(one.format.needs) is None:
            raise ValueError(
                f"{one.path}: reading {one.format.name} needs the package {one.format.needs}; "
                "pip install 'realmops[documents]', or name a format to read only files of that"
            )
    return found


def _sources(documents: Path, format: str) -> list[Source]:
    if format != "auto" and format not in FORMATS:
        raise ValueError(f"the format {format!r} is none of auto, {', '.join(FORMATS)}")
    if str(documents).startswith(tables.HUB):
        _check_dataset(documents, format)
        return [Source(Path(name), DATASET, size) for name, size in tables.hub_splits(str(documents))]
    if not documents.exists():
        raise ValueError(f"{documents}: there is no such file or folder; check the path")
    splits = _dataset_splits(documents)
    if splits:
        _check_dataset(documents, format)
        return [Source(split, DATASET, _dataset_size(split)) for split in splits]
    if not documents.is_dir():
        open_plain(documents).close()
        name = _format_of(documents) if format == "auto" else format
        return [Source(documents, FORMATS[_known(documents, name)], _kind_and_size(documents)[1])]
    kinds = {path: _kind_and_size(path)[0] for path in files_below(documents)}
    found = {path: _format_of(path) for path in kinds}
    if format != "auto":  # what a folder holds that cannot be listed is not known
        found = {path: name for path, name in found.items() if name == format or kinds[path] == "folder"}
    formats = {name for path, name in found.items() if not kinds[path]}
    if not formats:
        of_format = "" if format == "auto" else f" of the format {format}"
        first = next((f"; {path} is a {kinds[path]}, which is not read" for path in found), "")
        raise ValueError(f"{documents}: the folder holds no file{of_format}{first}; check the path")
    if formats == {None}:
        _known(next(path for path in found if not kinds[path]), None)
    is_strict = len(formats) == 1 and (format != "auto" or not FORMATS[str(*formats)].is_document)
    return [_of_folder(path, name, kinds[path], is_strict) for path, name in found.items()]


def _kind_and_size(path: Path) -> tuple[str, int]:
    """Return the kind of what is no regular file, and the bytes; a broken link is a file that cannot be opened."""
    try:
        status = path.stat()
    except OSError:
        return "", 0
    return special_kind(status.st_mode), status.st_size


def _dataset_size(folder: Path) -> int:
    """Return the bytes of a split; ValueError where it holds a pipe or the like."""
    total = 0
    for path in files_below(folder):
        kind, size = _kind_and_size(path)
        if kind:
            raise ValueError(f"{path}: is a {kind}, and a saved dataset holds regular files alone; save it again")
        total += size
    return total


def _dataset_splits(folder: Path) -> list[Path]:
    """The folders of a dataset's splits; empty for anything else."""
    if tables.is_dataset_folder(folder):
        return [folder]
    if (folder / "dataset_dict.json").is_file():
        folders = sorted({path.parent for path in files_below(folder)})
        return [path for path in folders if path.parent == folder and tables.is_dataset_folder(path)]
    return []


def _check_dataset(documents: Path, format: str) -> None:
    if format not in ("auto", DATASET.name):
        raise ValueError(f"{documents}: this is a dataset of Hugging Face, not {format}; set the format to dataset")


def _known(path: Path, name: str | None) -> str:
    if name is None and _first_bytes(path).startswith(_EXTRACT):
        raise ValueError(f"{path}: {_EXTRACT_PROBLEM}")
    if name is None:
        raise ValueError(
            f"{path}: neither its name nor its first bytes tell its format; it may be {', '.join(FORMATS)}: "
            "name the format, or keep only the documents in the folder"
        )
    return name


def _of_folder(path: Path, name: str | None, special: str, is_strict: bool) -> Source:
    """Return the source of a file of a folder.

    Args:
        special: the kind of what is no regular file: it is never opened, and counted as unread.
        is_strict: a file that cannot be read ends the stage: all are tables or dumps of one format, or it was named.
    """
    if special:
        is_folder = special == "folder"
        problem = "cannot be listed; check its permissions" if is_folder else "only regular files are read"
        return _unread(path, f"it is a {special}; {problem}", special)
    size = _kind_and_size(path)[1]
    if name is not None and is_strict:
        return Source(path, FORMATS[name], size)
    suffix = path.suffix[1:].lower()
    kind = suffix if _KIND.fullmatch(suffix) else "other"
    problem = "neither its name nor its first bytes tell a format that is read"
    try:
        open_plain(path).close()
        if name == "jsonl" and not _holds_documents(path):
            problem = "its first line is no JSON object with a title and a text"
        elif name is None and _first_bytes(path).startswith(_EXTRACT):
            problem = _EXTRACT_PROBLEM
        elif name is not None:
            return Source(path, FORMATS[name], size, f"broken_{name}")
    except ValueError as error:
        problem = str(error).removeprefix(f"{path}: ")
        kind = f"broken_{name}" if name else kind
    return _unread(path, problem, kind)


def _unread(path: Path, problem: str, kind: str) -> Source:
    """Return a source of one ``Rejected``, which counts a file as one that cannot be read."""
    rejected = Rejected(str(path), problem, kind=kind)
    return Source(path, replace(TEXT, name="unread", records=lambda _: iter([rejected])), 0)


def _holds_documents(path: Path) -> bool:
    """Whether the first line is a document, or at least a broken line in a file whose name promises lines."""
    for line in cut_lines(path):
        with suppress(ValueError):
            if isinstance(line, Raw):
                return json_object(line.data, line.place).keys() >= _COLUMNS
        break
    return ".json" not in path.suffixes


def _first_bytes(path: Path) -> bytes:
    """Return the first bytes of a file, unpacked, without a byte order mark, blanks and an XML declaration."""
    try:
        with open_compressed(path) as (file, _):
            head = file.read(_HEAD)
    except (*DAMAGE, ValueError):  # the reader will say what is wrong
        head = b""
    bare = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    return bare.partition(b"?>")[2].lstrip() if bare.startswith(b"<?xml") else bare


def _format_of(path: Path) -> str | None:
    """The name of a file's format by its first bytes, else by its name; None when neither tells."""
    bare = _first_bytes(path)
    if bare.startswith(_EXTRACT):
        return None
    for first, name in _BY_FIRST_BYTES.items():
        if bare.startswith(first):
            return name
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in (".gz", ".bz2")]
    named = _BY_SUFFIX.get(suffixes[-1]) if suffixes else None
    return named or ("jsonl" if bare.startswith(b"{") else None)
