"""``realmops explain``: the evidence of an answer as text, JSON or an HTML page."""

from __future__ import annotations

import json as js
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from realmops.answering.opened_model import Query
from realmops.answering.record import Record, format_probability
from realmops.artifacts import write_new
from realmops.commands.masked import explain_sentence
from realmops.evaluate.predictions import FAILED_AT, Prediction, read_results, results_file
from realmops.evaluate.report_page import render_page, render_table
from realmops.opening import open_run

LIVE_OPTIONS = "--answer, --json and --html"  # these query the current model, not stored results
GENERATED = "generated from the documents, to measure retrieval only"
UNANSWERED = "not answered: the run has no reader"
_ID_CHARACTERS = 12  # of a hash, enough to distinguish passages


class Sheet(NamedTuple):
    """An explanation as text: a title, summary lines, and a table of candidates."""

    title: str
    summary: Sequence[str]
    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __str__(self) -> str:
        table = [self.head, *self.rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)][:-1]
        rows = ("  ".join([*map(str.rjust, row, widths), row[-1]]) for row in table)
        return "\n".join([self.title, *(f"  {line}" for line in (*self.summary, *rows))])

    def page(self) -> str:
        summary = "".join(f"<p>{escape(line)}</p>" for line in self.summary)
        table = f'<div class="card scroll">{render_table(self.head, self.rows)}</div>'
        return render_page(self.title, [f'<div class="card">{summary}</div>', table])


def explain(
    root: Path,
    *,
    sentence: str | None,
    questions: Sequence[str],
    failures: Sequence[str],
    limit: int,
    answer: str | None,
    json: bool,
    html: Path | None,
) -> Iterator[str]:
    """Yield texts for a masked sentence, for questions (or ids of stored answers) or, without both, for results/."""
    live = answer is not None or json or html is not None
    about_results = sentence is None and not questions
    if sentence is not None and (questions or failures):
        raise ValueError("--question and --failed-at conflict with SENTENCE: they select questions; leave SENTENCE out")
    if about_results and live:
        raise ValueError(f"{LIVE_OPTIONS} need a SENTENCE with [MASK] or a --question: give one")
    has_results = bool(questions) and results_file(root).is_file()
    stored = {p.question_id: p.question for p in read_results(root)} if has_results else {}
    ids = () if live else tuple(value for value in questions if value in stored)
    texts = [stored.get(value, value) for value in questions if value not in ids]
    if texts and failures:
        raise ValueError("--failed-at selects answers in results/: leave it out, or give --question an id from there")
    if len(texts) > 1 and live:
        raise ValueError(f"{LIVE_OPTIONS} take one question: explain one at a time")
    if ids or about_results:
        yield format_stored_answers(read_results(root), ids, failures, limit)
    records, to_sheet = list[Record](), _question_sheet
    if sentence is not None:
        records, to_sheet = [explain_sentence(sentence, root, answer)], _sentence_sheet
    elif texts:
        records = open_run(root).answer([Query(text, y=answer) for text in texts])
    for number, record in enumerate(records):
        if ids or number:
            yield ""
        sheet = to_sheet(record)
        if html is not None:
            write_new(html, sheet.page().encode())
        yield js.dumps(record, ensure_ascii=False, indent=1) if json else str(sheet)


def _row(z: Mapping[str, Any], text: str | None, **formats: str) -> tuple[str, ...]:
    figures = ("-" if z[name] is None else f"{z[name]:{format}}" for name, format in formats.items())
    return (*figures, f"{_passage_label(z)}: {text or '(none)'}")


def _passage_label(z: Mapping[str, Any]) -> str:
    return f"{z['title']} [{z['passage_id'][:_ID_CHARACTERS]}]" if z["passage_id"] else str(z["title"])


def _question_sheet(record: Mapping[str, Any]) -> Sheet:
    about = record["model"]
    summary = (
        f"answer: {record['answer'] or '(none)'}  ({format_probability(record)})",
        f"y = {record.get('y', record['answer'])}: p(y|x) = {record.get('p_y', record['score']):.3g}",
        f"model: {about['version']}, corpus {about['snapshot'][:_ID_CHARACTERS]}, index {about['index_generation']}",
    )
    rows = [_row(z, z["span"], p_z=".3f", p_z_given_y=".3f", score=".2f") for z in record["passages"]]
    return Sheet(record["question"], summary, ("p(z|x)", "p(z|x,y)", "score", "passage: its best span"), rows)


def _sentence_sheet(record: Mapping[str, Any]) -> Sheet:
    guesses = [
        f"{record[name]['words']}  (p = {record[name]['probability']:.3g})"
        for name in ("with_retrieval", "without_retrieval")
    ]
    *passages, _ = record["candidates"]
    best = max(passages, key=lambda z: z["p_y"], default=None)
    with_best_z = [f"{best['p_y']:.3g}  ({_passage_label(best)})"] if best else []
    summary = (
        f"REALM:             {guesses[0]}",
        f"without retrieval: {guesses[1]}",
        f"y = {record['y']}",
        f"  BERT, without retrieval:     p(y|x) = {record['p_y_without']:.3g}  (the reader with the null document)",
        *(f"  REALM given the best z:    p(y|x,z) = {value}" for value in with_best_z),
        f"  REALM, marginal over top {len(passages)}:  p(y|x) = {record['p_y']:.3g}  (and the null document)",
        f"index: {record['index']}",
    )
    formats = {"p_z": ".3f", "p_z_given_y": ".3f", "p_y": ".3g", "utility": "+.2f"}
    head = ("p(z|x)", "p(z|x,y)", "p(y|z,x)", "utility, nats", "document: its guess")
    return Sheet(record["sentence"], summary, head, [_row(z, z["guess"], **formats) for z in record["candidates"]])


def _prediction_sheet(pred: Prediction) -> Sheet:
    abstained = " (abstained)" if pred.abstained else ""
    failure = "" if pred.is_generated or pred.failed_at is None else pred.failed_at
    hit = f"number {pred.first_hit + 1}" if pred.first_hit >= 0 else "none of the retrieved passages"
    summary = [
        f"expected: {'; '.join(pred.answers)}",
        *([] if pred.em is None else [f"answer: {pred.prediction or '(none)'}  (score {pred.span_score:.2f})"]),
        *([] if pred.confidence is None else [f"confidence: {pred.confidence:.2f}{abstained}"]),
        f"failed at: {failure} ({FAILED_AT[failure]})" if failure else GENERATED if pred.is_generated else UNANSWERED,
        *([] if pred.gold_span is None else [f"best correct span: {pred.gold_span}  (score {pred.gold_score:.2f})"]),
        f"first passage with an answer: {hit}",
    ]
    columns = (pred.p_z, pred.passage_scores, pred.titles, pred.passage_ids, pred.passage_spans)
    rows = []
    for number, (p_z, score, title, passage_id, span) in enumerate(zip(*columns, strict=True)):
        z = {"p_z": p_z, "score": score, "title": title, "passage_id": passage_id}
        chosen = ">" if number == pred.evidence_rank else ""
        rows.append((chosen, *_row(z, span, p_z=".3f", score=".2f")))
    head = ("", "p(z|x)", "score", "passage: its best span")
    return Sheet(f"{pred.question_id}  {pred.question}", summary, head, rows)


def format_stored_answers(
    predictions: Sequence[Prediction], ids: Collection[str], failures: Collection[str], limit: int
) -> str:
    """Return the counts of failures of people's questions, then up to ``limit`` answers with these ids and failures."""
    for name in failures:
        if name not in FAILED_AT:
            raise ValueError(f"--failed-at {name!r}: expected one of {', '.join(FAILED_AT)}")
    people = [prediction for prediction in predictions if not prediction.is_generated]
    among = [prediction for prediction in people if prediction.failed_at in failures] if failures else predictions
    selected = [prediction for prediction in among if not ids or prediction.question_id in ids]
    counts = Counter(prediction.failed_at for prediction in people)
    generated = len(predictions) - len(people)
    lines = [f"{len(predictions)} questions{f', {generated} {GENERATED}' if generated else ''}"]
    for name, meaning in FAILED_AT.items() if people else ():
        lines.append(f"{counts[name]:>7} {counts[name] / len(people):6.1%}  {name}: {meaning}")
    lines += (f"\n{_prediction_sheet(prediction)}" for prediction in selected[:limit])
    if len(selected) > limit:
        lines.append(f"\n{len(selected) - limit} more; select others with --limit, --question and --failed-at")
    return "\n".join(lines)
