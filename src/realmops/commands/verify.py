"""``realmops verify``: check that every quotation is at its position in its source document."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realmops.config import recorded_options
from realmops.corpus.ingest import iter_batches, parse_records
from realmops.corpus.snapshot_reader import document_name
from realmops.options import Options
from realmops.readers.documents import Document, check_text, read_json_lines
from realmops.readers.ocr import find_data
from realmops.readers.sources import list_sources
from realmops.stages import STAGES

Bars = Callable[[str, int, str], Callable[[int], None]]  # of progress


@dataclass(frozen=True)
class Quotation:
    """A text that an answer quotes from a document; ``start`` and ``end`` are character offsets in its text."""

    place: str
    document: str
    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Verdict:
    """Counts of what was checked, and a message for each problem."""

    answers: int
    quotations: int
    documents: int
    problems: list[str]


def verify(answers: Path, documents: Path, format: str, progress: Bars, root: Path = Path()) -> Verdict:
    """Check the quotations of answer records; an answer, unless abstained, must equal its first citation's quote."""
    by_document: dict[str, list[Quotation]] = defaultdict(list)
    problems: list[str] = []
    count = quotations = 0
    for place, answer in _records(answers):
        count += 1
        quote = answer["citations"][0].get("quote") if answer["citations"] else None
        if answer["answer"] and quote != answer["answer"]:
            problems.append(f"{place}: the answer {answer['answer']!r} has the quote {quote!r}")
        for quotation in _quotations(answer, place):
            quotations += 1
            by_document[quotation.document].append(quotation)
    if not count:
        raise ValueError(f"{answers} has no answers; write some with 'realmops ask --json'")
    run = recorded_options(root / STAGES["snapshot"].folder) or Options()
    files = list_sources(documents, format, find_data(run.snapshot.ocr))
    bar = progress("documents", sum(source.size for source in files), "B")
    document_count = len(by_document)
    for source in files:
        for batch in iter_batches([source]):
            for outcome in parse_records(batch):
                if isinstance(outcome, Document):  # of several documents with one id the first counts
                    problems += _check_quotations(by_document.pop(document_name(outcome), []), outcome)
        bar(source.size)
    for missing in by_document.values():
        problems += [f"{quotation.place}: {documents} has no document {quotation.document}" for quotation in missing]
    return Verdict(count, quotations, document_count, problems)


def _records(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each answer with its line; a line may have several, like a response of ``POST /v1/answer``."""
    for place, line in read_json_lines(path):
        for answer in line["answers"] if isinstance(line.get("answers"), list) else [line]:
            match answer:
                case {"answer": str() | None, "citations": list(citations), "passages": list(passages)} if all(
                    isinstance(item, dict) for item in (*citations, *passages)
                ):
                    yield place, answer
                case {"error": _} if "answer" not in answer:
                    pass  # a question without an answer
                case _:
                    raise ValueError(
                        f"{place}: not an answer record with answer, citations and passages; give lines of ask --json"
                    )


def _quotations(answer: Mapping[str, Any], place: str) -> Iterator[Quotation]:
    sentence = [answer["quote"]] if answer.get("quote") else []  # records of earlier versions have none
    for key, text, items in (
        ("citations", "quote", answer["citations"]),
        ("passages", "text", answer["passages"]),
        ("quote", "quote", sentence),
    ):
        for number, item in enumerate(items):
            match item:
                case {"document_id": str(document), "start": int(start), "end": int(end)} if 0 <= start <= end:
                    where = f"{place}: {key}[{number}]"
                    yield Quotation(where, document, start, end, check_text(item.get(text), text, where))
                case _:
                    raise ValueError(
                        f"{place}: {key}[{number}] needs a document_id and integers 0 <= start <= end; write it again"
                    )


def _check_quotations(quotations: list[Quotation], document: Document) -> Iterator[str]:
    for quote in quotations:
        if (text := document.text[quote.start : quote.end]) != quote.text:
            span = f"{quote.start} to {quote.end}"
            yield f"{quote.place}: {document.place} has {text!r} at {span}, but the quotation is {quote.text!r}"
