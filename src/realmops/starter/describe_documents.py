"""The documents of a new project: their formats, size and languages."""

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from realmops.corpus.languages import AUTO, ENGLISH, detect_language, load_languages
from realmops.readers.documents import Document, RawRecord, Rejected
from realmops.readers.sources import Source, list_sources
from realmops.starter.new_project import Project, path_in_params

SHORT = 100  # characters; language detection is unreliable below
SEVERAL = 0.05  # share of documents in a second language from which each document is detected on its own (auto)


def add_documents(project: Project, documents: Path) -> int:
    """Set snapshot.documents and its language, describe the documents, and return their size in bytes."""
    files = list_sources(documents, "auto")
    counts = Counter(_kind(source) for source in files)
    size = sum(source.size for source in files)
    kinds = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    project.lines.append(f"documents: {kinds}, {size / 1e6:,.1f} MB")
    project.lines += _inspect_records(project, files)
    project.put("snapshot.documents", path_in_params(project, documents))
    return size


def _kind(source: Source) -> str:
    ending = Path(source.path.name.removesuffix(".gz")).suffix.lstrip(".")
    return ending if ending and source.format.name == "text" else source.format.name


def _inspect_records(project: Project, files: Sequence[Source]) -> list[str]:
    """Return a line about the first broken record, if any, and one about languages, if not only English."""
    detected: Counter[str] = Counter()
    broken: list[Rejected] = []
    for source in files[:20]:
        for raw in islice(source.format.records(source.path), 50):
            document = source.format.convert(raw) if isinstance(raw, RawRecord) else raw
            if isinstance(document, Document):
                likely = detect_language(document.text)
                detected.update(likely if len(likely) == 1 and len(document.text) >= SHORT else ())
            elif isinstance(document, Rejected):
                broken.append(document)
    lines = [f"documents: {broken[0].place}: {broken[0].problem}"] if broken else []
    shares = {code: n / detected.total() for code, n in detected.most_common() if n >= SEVERAL * detected.total()}
    if not shares or [*shares] == [ENGLISH]:
        return lines
    project.put("snapshot.language", AUTO if len(shares) > 1 else next(iter(shares)))
    names = ", ".join(f"{load_languages()[code].name} {share:.0%}" for code, share in shares.items())
    lines.append(f"language: {names} (snapshot.language: {project.own['snapshot']['language']})")
    return lines
