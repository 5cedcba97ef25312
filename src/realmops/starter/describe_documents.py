"""The documents of a new project: their formats, size and languages."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from realmops.corpus.languages import AUTO, ENGLISH, detect_language, load_languages
from realmops.readers.documents import Document, RawRecord
from realmops.readers.ocr import INSTALL, find_data
from realmops.readers.sources import Source, list_sources
from realmops.starter.new_project import Project, path_in_params

FILES, RECORDS = 20, 50  # that are read, of all files and of each; more until there is a document
SHOWN = 5  # files that are named
SHORT = 100  # characters; language detection is unreliable below
SEVERAL = 0.05  # share of documents in a second language from which each document is detected on its own (auto)


def add_documents(project: Project, documents: Path) -> int:
    """Set snapshot.documents and its language, describe what can be read of them, and return their size in bytes."""
    files = list_sources(documents, "auto")
    counts = Counter(source.format.name for source in files)
    size = sum(source.size for source in files)
    kinds = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    project.lines.append(f"documents: {kinds}, {size / 1e6:,.1f} MB")
    read, problems, languages = _read(files)
    if not read and (data := find_data(AUTO)):  # scans only: a small one shows the language
        smallest_first = sorted(list_sources(documents, "auto", data), key=lambda source: source.size)
        read, problems, languages = _read(smallest_first, enough=1)
    if not read:
        raise ValueError("\n  ".join([f"{documents}: no document can be read:", *problems[:SHOWN]]))
    count = min(len(files), FILES)
    project.lines.append(f"documents: {len(read)} of a sample of {count} files read: {', '.join(read[:SHOWN])}")
    project.lines += [f"documents: {problem}" for problem in problems[:SHOWN]]
    project.lines += _set_language(project, languages)
    if (scans := sum(INSTALL in problem for problem in problems)) and not find_data(AUTO):
        project.lines.append(f"documents: {scans} scanned files of this sample wait for OCR")
    project.put("snapshot.documents", path_in_params(project, documents))
    return size


def _read(files: Sequence[Source], enough: int = FILES) -> tuple[list[str], list[str], Counter[str]]:
    """Read the first documents; return names of files that have some, a problem of each other one, and languages."""
    read, problems, languages = list[str](), list[str](), Counter[str]()
    for number, source in enumerate(files):
        if number >= enough and read:
            break
        has_document, problem = False, ""
        for n, raw in enumerate(source.format.records(source.path)):
            if n >= RECORDS and (read or has_document):
                break
            document = source.format.convert(raw) if isinstance(raw, RawRecord) else raw
            if isinstance(document, Document):
                has_document = True
                likely = detect_language(document.text)
                languages.update(likely if len(likely) == 1 and len(document.text) >= SHORT else ())
            elif not problem:
                problem = f"{document.place}: {getattr(document, 'problem', 'it has no text')}"
        read += [source.path.name] if has_document else []
        problems += [problem] if problem else []
    return read, problems, languages


def _set_language(project: Project, detected: Counter[str]) -> list[str]:
    shares = {code: n / detected.total() for code, n in detected.most_common() if n >= SEVERAL * detected.total()}
    if not shares or [*shares] == [ENGLISH]:
        return []
    project.put("snapshot.language", AUTO if len(shares) > 1 else next(iter(shares)))
    names = ", ".join(f"{load_languages()[code].name} {share:.0%}" for code, share in shares.items())
    return [f"language: {names} (snapshot.language: {project.own['snapshot']['language']})"]
