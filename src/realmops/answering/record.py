"""The record of an answer: every word of it with its source. Commands, servers and the registered model all show it."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from realmops.answering.answer import Answer, Found, Span
from realmops.answering.confidence import Confidence
from realmops.corpus.snapshot_reader import Snapshot

Record = dict[str, Any]
_AROUND = 60  # characters shown on either side of a quotation
_WORD = 30  # characters without a blank from which on they are no word, but a script without blanks


def answer_record(
    snapshot: Snapshot, found: Answer, about: Record, confidence: Confidence | None, y: str | None = None
) -> Record:
    """Return the record of one answer.

    Args:
        about: which model, corpus and index it comes from.
        confidence: None of a model that was imported; then the probability is p(y|x).
        y: the answer that was asked about: p(y|x), citations and p(z|x, y) are then those of y, and the record names y.
    """
    best, p_y = found.best, min(found.probability, 1.0)
    citing = [(one, one.best_of_y) for one in found.read if one.best_of_y is not None] if best else []
    citing.sort(key=lambda pair: (pair[1] != best, -pair[0].p_y_z))  # the one that was chosen first
    return {
        "question": found.question,
        "answer": found.text,
        "probability": confidence.probability(found) if confidence else p_y,
        **({} if y is None else {"y": y}),
        "p_y": p_y if y is None else found.p_y,
        "threshold": confidence.threshold if confidence else None,
        "abstained": confidence.abstains(found) if confidence else not found.text,
        "citations": [
            {**cited(snapshot, one.passage, span.characters), "p_z": one.p_z, "p_z_given_y": one.p_z_given_y}
            for one, span in citing
        ],
        "quote": cited(snapshot, best.passage, sentence(snapshot, best)) if best else None,
        "passages": [
            {
                **passage_record(snapshot, one.passage),
                "p_z": one.p_z,
                "p_z_given_y": one.p_z_given_y,
                "span": one.best.text if one.best else None,
                "score": one.best.score if one.best else None,
            }
            for one in found.read
        ],
        "model": about,
    }


def sources_record(snapshot: Snapshot, found: Found, about: Record) -> Record:
    """What is known of an answer before anything was read: its passages, and what they come from."""
    return {
        "question": found.question.question,
        "passages": [
            passage_record(snapshot, p) | {"p_z": p_z} for p, p_z in zip(found.passages, found.p_z, strict=True)
        ],
        "model": about,
    }


def passage_record(snapshot: Snapshot, passage: int) -> Record:
    """Return where a whole passage stands, and its text."""
    place = cited(snapshot, passage, (0, len(snapshot.text(passage))))
    return place | {"text": place.pop("quote")}


def sentence(snapshot: Snapshot, span: Span) -> tuple[int, int]:
    """The characters of the sentence that a span stands in, or of those that it goes over."""
    chars, (begin_N, end_N) = snapshot.chars(span.passage), snapshot.sentences(span.passage).T
    starts = chars[begin_N, 0]
    first, last = np.searchsorted(starts, [span.characters[0], span.characters[1] - 1], side="right") - 1
    return int(starts[first]), int(chars[end_N[last] - 1, 1])


def cited(snapshot: Snapshot, passage: int, characters: tuple[int, int]) -> Record:
    """Where a part of a passage stands: document, passage, and characters of the document's text as it was read.

    ``page`` is None of a document without pages.
    """
    first = snapshot.start(passage)
    start, end = characters
    return {
        "uri": snapshot.uri(passage),
        "document_id": snapshot.document_id(passage),
        "passage_id": snapshot.passage_id(passage),
        "title": snapshot.title(passage),
        "start": first + start,
        "end": first + end,
        "page": snapshot.page(passage, start),
        "quote": snapshot.text(passage)[start:end],
    }


def holds_all(record: Mapping[str, Any]) -> bool:
    """Whether the model holds back every answer: none was sure enough on the dev questions."""
    return record["threshold"] is not None and record["threshold"] > 1


def sureness(record: Mapping[str, Any]) -> str:
    """How sure an answer is, and why it is held back, if it is."""
    said = f"p = {record['probability']:.3g}"
    if not record["answer"] or not record["abstained"]:
        return said
    if holds_all(record):
        return f"{said}, held back as every answer is: none reached wanted_precision at the calibration"
    return f"{said}, held back below {record['threshold']:.3g}"


def short(record: Record) -> list[str]:
    """A record in a few lines: the answer, how sure it is, and each source with the quotation marked."""
    if "error" in record:
        return [f"error: {record['error']}"]
    if not record["answer"]:
        return ["no answer"]
    lines = [f"{record['answer']}  ({sureness(record)})"]
    if record["abstained"] and record["quote"]:
        lines.append(f"  in: {' '.join(record['quote']['quote'].split())}")
    texts = {passage["passage_id"]: passage for passage in record["passages"]}
    for one in record["citations"]:
        passage: Record = texts[one["passage_id"]]
        start, end = one["start"] - passage["start"], one["end"] - passage["start"]
        before, after = _around(passage["text"], start, end)
        shown = " ".join(f"{before}[{one['quote']}]{after}".split())
        page = f", page {one['page']}" if one.get("page") else ""
        lines += [
            f"  {one['title'] or one['document_id']}: {shown}",
            f"    document {one['document_id']}, {one['uri']}{page}, characters {one['start']} to {one['end']}, "
            f"p(z|x) {one['p_z']:.2f}",
        ]
    return lines


def _around(text: str, start: int, end: int) -> tuple[str, str]:
    """Whole words on both sides of a quotation, about ``_AROUND`` characters, and an ellipsis where there are more."""
    before, after = text[:start], text[end:]
    if len(before) > _AROUND:
        kept = before[-_AROUND:]
        part, blank, others = kept.partition(" ")
        cut = not before[-_AROUND - 1].isspace() and blank and len(part) < _WORD  # within a word
        before = "… " + (others if cut else kept).lstrip()
    if len(after) > _AROUND:
        kept = after[:_AROUND]
        others, blank, part = kept.rpartition(" ")
        cut = not after[_AROUND].isspace() and blank and len(part) < _WORD
        after = (others if cut else kept).rstrip() + " …"
    return before, after
