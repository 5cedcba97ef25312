"""``realmops verify``: does every quotation stand in its source, where the answer says that it stands?"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realmops.corpus.documents import Document, check_text, read_json_lines
from realmops.corpus.formats import sources
from realmops.corpus.formats.paged import PDF
from realmops.corpus.formats.paged import boxes as boxes_of
from realmops.corpus.ingest import batches, convert
from realmops.corpus.snapshot_reader import document_name

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Quotation:
    """What an answer says to stand in a document; ``start`` and ``end`` are characters of the document's text."""

    place: str
    document: str
    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Verdict:
    """What was checked, and one sentence for each thing that is wrong."""

    answers: int
    quotations: int
    documents: int
    problems: list[str]


def verify(
    answers: Path,
    documents: Path,
    format: str,
    progress: Callable[[str, int, str], Progress],
    boxes: Path | None = None,
) -> Verdict:
    """Check the citations and passages of answers, records of ``realmops ask --json`` and ``POST /v1/answer``.

    The documents are read as the stage ``snapshot`` reads them, in flat memory; the answers' quotations are held.
    An answer that was not abstained must be what its first citation quotes.

    Args:
        boxes: a file for the rectangles of what is quoted from PDF: a JSON line for each, with its page.

    Raises ValueError, naming the line, for a file that holds no such records.
    """
    wanted: dict[str, list[Quotation]] = defaultdict(list)
    problems: list[str] = []
    counted = quotations = 0
    for place, answer in _records(answers):
        counted += 1
        problems += _unfounded(answer, place)
        for quotation in _quotations(answer, place):
            quotations += 1
            wanted[quotation.document].append(quotation)
    if not counted:
        raise ValueError(f"{answers} holds no answers; write some with 'realmops ask --json'")
    found = sources(documents, format)
    places: list[str] = []
    bar = progress("documents", sum(source.size for source in found), "B")
    looked_in = len(wanted)
    for source in found:
        for batch in batches([source]):
            for outcome in convert([(source.format.name, records) for _, records in batch.runs]):
                if isinstance(outcome, Document):  # of an id that comes twice the first document counts
                    quoted = wanted.pop(document_name(outcome), [])
                    problems += _misquoted(quoted, outcome)
                    if boxes and source.format.name == PDF:
                        places += _boxes(quoted, outcome)
        bar(source.size)
    for missing in wanted.values():
        problems += [f"{one.place}: {documents} holds no document {one.document}" for one in missing]
    if boxes:
        boxes.write_text("".join(places), encoding="utf-8")
    return Verdict(counted, quotations, looked_in, problems)


def _boxes(quotations: list[Quotation], document: Document) -> Iterator[str]:
    for one in quotations:
        if document.text[one.start : one.end] == one.text:
            for page, box in boxes_of(Path(document.place), one.start, one.end):
                found = {"quotation": one.place, "document_id": one.document, "start": one.start, "end": one.end}
                yield f"{json.dumps({**found, 'page': page, 'box': [round(edge, 2) for edge in box]})}\n"


def _records(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each answer; a line may also hold several, as ``POST /v1/answer`` gives them for several questions."""
    for place, line in read_json_lines(path):
        for answer in line["answers"] if isinstance(line.get("answers"), list) else [line]:
            match answer:
                case {"answer": str() | None, "citations": list(citations), "passages": list(passages)} if all(
                    isinstance(one, dict) for one in (*citations, *passages)
                ):
                    yield place, answer
                case {"error": _} if "answer" not in answer:
                    pass  # of a question that could not be asked
                case _:
                    raise ValueError(
                        f"{place}: no answer with 'answer', 'citations' and 'passages'; give what "
                        "'realmops ask --json' or POST /v1/answer writes"
                    )


def _quotations(answer: Mapping[str, Any], place: str) -> Iterator[Quotation]:
    sentence = [answer["quote"]] if answer.get("quote") else []  # versions before had none
    for key, text, those in (
        ("citations", "quote", answer["citations"]),
        ("passages", "text", answer["passages"]),
        ("quote", "quote", sentence),
    ):
        for number, one in enumerate(those):
            match one:
                case {"document_id": str(document), "start": int(start), "end": int(end)} if 0 <= start <= end:
                    where = f"{place}: {key}[{number}]"
                    yield Quotation(where, document, start, end, check_text(one.get(text), text, where))
                case _:
                    raise ValueError(
                        f"{place}: {key}[{number}] has no document_id with whole numbers start and end, "
                        "0 <= start <= end; give answers as they were written"
                    )


def _unfounded(answer: Mapping[str, Any], place: str) -> list[str]:
    """An answer without a source, or other words than its source has."""
    if not answer["answer"]:
        return []
    first = answer["citations"][0].get("quote") if answer["citations"] else None
    return [] if first == answer["answer"] else [f"{place}: the answer {answer['answer']!r} has the source {first!r}"]


def _misquoted(quotations: list[Quotation], document: Document) -> Iterator[str]:
    for one in quotations:
        if (there := document.text[one.start : one.end]) != one.text:
            yield f"{one.place}: {document.place} has {there!r} at {one.start} to {one.end}, quoted is {one.text!r}"
