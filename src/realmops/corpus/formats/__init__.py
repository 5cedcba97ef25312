"""The file formats that a corpus may come in: which files are there, in which format, and how each is read."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from realmops.corpus.compressed import DAMAGE, open_compressed
from realmops.corpus.documents import Format
from realmops.corpus.formats import tables, text
from realmops.corpus.formats.jsonl import JSONL
from realmops.corpus.formats.mediawiki import MEDIAWIKI
from realmops.corpus.formats.tables import DATASET, PARQUET
from realmops.corpus.formats.text import TEXT
from realmops.corpus.formats.warc import WARC
from realmops.corpus.formats.wikiextractor import WIKIEXTRACTOR

FORMATS: dict[str, Format] = {one.name: one for one in (JSONL, PARQUET, TEXT, MEDIAWIKI, WIKIEXTRACTOR, WARC, DATASET)}
_BY_SUFFIX = {
    **dict.fromkeys((".jsonl", ".json", ".ndjson"), "jsonl"),
    **dict.fromkeys((*text.PLAIN, *text.MARKDOWN, *text.PAGES), "text"),
    ".parquet": "parquet",
    ".xml": "mediawiki",
    ".warc": "warc",
}
_BY_FIRST_BYTES = {b"PAR1": "parquet", b"WARC/": "warc", b"<mediawiki": "mediawiki", b"<doc ": "wikiextractor"}
_HEAD = 1024


@dataclass(frozen=True)
class Source:
    """One file of a corpus (or split of a dataset); ``size`` is in bytes."""

    path: Path
    format: Format
    size: int


def sources(documents: Path, format: str) -> list[Source]:
    """The files of a corpus in sorted order: ``documents`` itself, or all below it where it is a folder.

    Args:
        documents: a file, a folder, a dataset that was saved on disk, or ``hf:owner/name[:split]``.
        format: a name of ``FORMATS``, or "auto" for what content and name say. A name given for a folder picks
            the files of that format; given for a file it holds whatever the file looks like.

    Raises ValueError for a file of no known format, for a folder that mixes formats when ``format`` is "auto",
    and when nothing is found.
    """
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
        return [Source(split, DATASET, sum(map(_size, _files(split)))) for split in splits]
    if documents.is_file():
        name = _format_of(documents) if format == "auto" else format
        return [Source(documents, FORMATS[_known(documents, name)], _size(documents))]
    found = {path: _format_of(path) for path in _files(documents)}
    if format == "auto":
        _check_one_format(documents, found)
    else:
        found = {path: name for path, name in found.items() if name == format}
    if not found:
        wanted = "" if format == "auto" else f" of the format {format}"
        raise ValueError(f"{documents}: the folder holds no file{wanted}; check the path")
    return [Source(path, FORMATS[_known(path, name)], _size(path)) for path, name in found.items()]


def _files(folder: Path) -> Iterator[Path]:
    """Every file below a folder in sorted order, hidden ones left out.

    A link to a folder elsewhere is followed, once; one to a folder that is read anyway is not.
    """
    top = folder.resolve()
    seen = {top}

    def is_wanted(path: Path) -> bool:
        place = path.resolve()
        if path.name.startswith(".") or place in seen or (path.is_symlink() and place.is_relative_to(top)):
            return False
        seen.add(place)
        return True

    for above, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [name for name in sorted(folders) if is_wanted(Path(above, name))]
        yield from (Path(above, name) for name in sorted(files) if not name.startswith("."))


def _size(path: Path) -> int:
    return path.stat().st_size


def _dataset_splits(folder: Path) -> list[Path]:
    """The folders of a dataset's splits; empty for anything else."""
    if tables.is_dataset_folder(folder):
        return [folder]
    if (folder / "dataset_dict.json").is_file():
        return sorted(path for path in folder.iterdir() if tables.is_dataset_folder(path))
    return []


def _check_dataset(documents: Path, format: str) -> None:
    if format not in ("auto", DATASET.name):
        raise ValueError(f"{documents}: this is a dataset of Hugging Face, not {format}; set the format to dataset")


def _known(path: Path, name: str | None) -> str:
    if name is None:
        raise ValueError(
            f"{path}: neither its name nor its first bytes tell its format; it may be {', '.join(FORMATS)}: "
            "name the format, or keep only the documents in the folder"
        )
    return name


def _check_one_format(folder: Path, found: dict[Path, str | None]) -> None:
    examples = {_known(path, name): path for path, name in reversed(found.items())}
    if len(examples) > 1:
        listed = ", ".join(f"{name} ({examples[name]})" for name in sorted(examples))
        raise ValueError(
            f"{folder}: the folder mixes formats: {listed}; name the one to read, or put them into folders of their own"
        )


def _format_of(path: Path) -> str | None:
    """The name of a file's format by its first bytes, else by its name; None when neither tells."""
    try:
        with open_compressed(path) as (file, _):
            head = file.read(_HEAD)
    except DAMAGE:  # the reader will say what is wrong
        head = b""
    bare = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if bare.startswith(b"<?xml"):
        bare = bare.partition(b"?>")[2].lstrip()
    for first, name in _BY_FIRST_BYTES.items():
        if bare.startswith(first):
            return name
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in (".gz", ".bz2")]
    named = _BY_SUFFIX.get(suffixes[-1]) if suffixes else None
    return named or ("jsonl" if bare.startswith(b"{") else None)
