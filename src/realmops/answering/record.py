"""The record of an answer with its sources, as commands, servers and the registered model return it."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from realmops.answering.answer import Answer, ReadPassage, RetrievedPassages, Span
from realmops.answering.confidence import TOO_FEW_RIGHT, Confidence
from realmops.answering.retrieval import SearchOnly
from realmops.corpus.snapshot_reader import Snapshot

Record = dict[str, Any]
TOP_PASSAGES = 3  # shown before an answer that is held back
_PREVIEW = 240  # characters shown of a passage
_CONTEXT = 60  # characters shown on either side of a quotation


def preview(text: str, limit: int) -> str:
    """Return a text of at most ``limit`` characters, cut at a blank, or anywhere in scripts without blanks."""
    text = " ".join(text.split())
    if len(text) <= limit:
        return text
    words = text[: limit - 1].rpartition(" ")[0]
    return f"{words if 2 * len(words) > limit else text[: limit - 2]} …"


def answer_record(
    snapshot: Snapshot, answer: Answer, found: RetrievedPassages, about: Record, confidence: Confidence | None,
    y: str | None = None,
) -> Record:  # fmt: skip
    """Build the record of an answer.

    Without a ``confidence``, or with one that promises nothing, there is no probability of being right, and the model
    abstains. With an answer ``y`` to evaluate, citations and p(z|x, y) are of y, and the record has y and p(y|x).
    """

    def shares(read: ReadPassage) -> Record:
        return {"p_z": read.p_z, "p_z_given_y": read.p_z_given_y}

    best = answer.best
    citing = [(read, read.best_of_y) for read in answer.read if read.best_of_y is not None] if best else []
    citing.sort(key=lambda pair: (pair[1] != best, -pair[0].p_y_z))  # the chosen span first
    return {
        "question": answer.question,
        "answer": answer.text,
        "score": min(answer.probability, 1.0),  # p(y|x): it ranks answers
        "probability": confidence.probability(answer) if confidence and not confidence.holds_all else None,
        "calibration": confidence.description if confidence else None,
        "threshold": confidence.threshold if confidence else None,
        "abstained": confidence.abstains(answer) if confidence else True,
        **({} if y is None else {"y": y, "p_y": answer.p_y}),
        "citations": [citation_record(snapshot, read.passage, span.characters) | shares(read) for read, span in citing],
        "quote": citation_record(snapshot, best.passage, enclosing_sentence(snapshot, best)) if best else None,
        "passages": [
            passage_record(snapshot, read.passage, found.copies[read.passage])
            | shares(read)
            | {"span": read.best.text if read.best else None, "score": read.best.score if read.best else None}
            for read in answer.read
        ],
        "model": about,
    }


def sources_record(snapshot: Snapshot, retrieved: RetrievedPassages, about: Record) -> Record:
    return {
        "question": retrieved.question.question,
        "passages": [
            passage_record(snapshot, p, retrieved.copies[p]) | {"p_z": p_z}
            for p, p_z in zip(retrieved.passages, retrieved.p_z, strict=True)
        ],
        "model": about,
    }


def passage_record(snapshot: Snapshot, passage: int, copies: Sequence[int] = ()) -> Record:
    place = citation_record(snapshot, passage, (0, len(snapshot.text(passage))))
    same_text = {"copies": [passage_record(snapshot, copy) for copy in copies]} if copies else {}
    return place | {"text": place.pop("quote")} | same_text


def enclosing_sentence(snapshot: Snapshot, span: Span) -> tuple[int, int]:
    """Return the character offsets of the sentence or sentences that contain a span."""
    chars, (begin_N, end_N) = snapshot.chars(span.passage), snapshot.sentences(span.passage).T
    starts = chars[begin_N, 0]
    first, last = np.searchsorted(starts, [span.characters[0], span.characters[1] - 1], side="right") - 1
    return int(starts[first]), int(chars[end_N[last] - 1, 1])


def citation_record(snapshot: Snapshot, passage: int, characters: tuple[int, int]) -> Record:
    first = snapshot.start(passage)
    start, end = characters
    page, last_page = snapshot.page(passage, start), snapshot.page(passage, end - 1)
    return {
        "uri": snapshot.uri(passage),
        "document_id": snapshot.document_id(passage),
        "passage_id": snapshot.passage_id(passage),
        "title": snapshot.title(passage),
        "start": first + start,
        "end": first + end,
        "page": page,
        "last_page": last_page if last_page != page else None,
        "ocr": snapshot.extra(passage).get("ocr") is True,
        "quote": snapshot.text(passage)[start:end],
    }


def always_abstains(record: Mapping[str, Any]) -> bool:
    return record["threshold"] is not None and record["threshold"] > 1


def searches(record: Mapping[str, Any]) -> bool:
    return bool(record["model"]["reader"] == SearchOnly.kind)


def format_probability(record: Mapping[str, Any]) -> str:
    """Format the probability of an answer and, if the model abstains, the reason; without a probability the score."""
    if record["probability"] is None:
        score = f"score {record['score']:.3g}"
        return f"{score}, held back: {TOO_FEW_RIGHT}" if always_abstains(record) else f"not calibrated: {score}"
    probability = f"p = {record['probability']:.3g}"
    is_shown = not record["answer"] or not record["abstained"]
    return probability if is_shown else f"{probability}, held back below {record['threshold']:.3g}"


def format_record(record: Record) -> list[str]:
    if "error" in record:
        return [f"error: {record['error']}"]
    if searches(record):
        return ["search, not answers: the best passages", *_passage_lines(record)]
    if not record["answer"]:
        return ["no answer"]
    lines = [f"{record['answer']}  ({format_probability(record)})"]
    if record["abstained"] and record["quote"]:
        certain = "no answer is certain enough" if record["calibration"] else "not calibrated"
        lines = [
            f"{certain}: the best passages",
            *_passage_lines(record),
            f"possible answer: {lines[0]}",
            f"  in: {' '.join(record['quote']['quote'].split())}",
        ]
    texts = {passage["passage_id"]: passage for passage in record["passages"]}
    for citation in record["citations"]:
        passage: Record = texts[citation["passage_id"]]
        start, end = citation["start"] - passage["start"], citation["end"] - passage["start"]
        before, after = _context(passage["text"], start, end)
        marked = " ".join(f"{before}[{citation['quote']}]{after}".split())
        lines += _source_lines(passage | citation, marked)
    return lines


def _passage_lines(record: Record) -> list[str]:
    texts = ((passage, preview(passage["text"], _PREVIEW)) for passage in record["passages"])
    return [line for passage, text in islice(texts, TOP_PASSAGES) for line in _source_lines(passage, text)]


def _source_lines(source: Record, text: str) -> list[str]:
    return [
        f"  {source['title'] or source['document_id']}: {text}",
        f"    document {source['document_id']}, {source['uri']}, characters {source['start']} to {source['end']}"
        f"{format_page(source)}, p(z|x) {source['p_z']:.2f}",
    ]


def format_page(source: Mapping[str, Any]) -> str:
    page = f", page {source['page']}" if source.get("page") else ""
    if source.get("last_page"):
        page = f", pages {source['page']}-{source['last_page']}"
    scan = ", read from a scan" if source.get("ocr") else ""
    copies = [f"{copy['title'] or copy['document_id']}{format_page(copy)}" for copy in source.get("copies", ())]
    return f"{page}{scan}{', also in: ' if copies else ''}{'; '.join(copies)}"


def _context(text: str, start: int, end: int) -> tuple[str, str]:
    """Return ``_CONTEXT`` characters of whole words on either side of a quotation, with ellipses if truncated."""
    before, after = text[max(0, start - _CONTEXT - 1) : start], text[end : end + _CONTEXT + 1]
    if start > _CONTEXT:
        before = f"… {before.partition(' ')[2] or before[1:]}"  # scripts without blanks have no words
    if len(text) - end > _CONTEXT:
        after = f"{after.rpartition(' ')[0] or after[:-1]} …"
    return before, after
