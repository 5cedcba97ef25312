"""``realmops explain``: the evidence of an answer as text, JSON or an HTML page."""

from __future__ import annotations

import json as js
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from html import escape
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from realmops.answering.corpus_states import CorpusState, before_and_after, pipeline_state
from realmops.answering.opened_model import Query
from realmops.answering.record import format_probability
from realmops.artifacts import write_bytes
from realmops.commands.masked import explain_sentence
from realmops.commands.open_model import open_run
from realmops.evaluate.predictions import FAILED_AT, Prediction, read_results, results_file
from realmops.evaluate.report_page import render_page, render_table

if TYPE_CHECKING:
    from rich.table import Table

LIVE_OPTIONS = "--answer, --json, --html and --before-after"  # these query the current model, not stored results
SIDES = ("before", "after")
GENERATED = "generated from the documents, to measure retrieval only"
UNANSWERED = "not answered: the run has no reader"
_ID_CHARACTERS = 12  # of a hash, enough to distinguish passages


class Sheet(NamedTuple):
    """An explanation as text: a title, summary lines, and a table of candidates."""

    title: str
    summary: Sequence[str]
    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def lines(self) -> list[str]:
        """Format the sheet for a terminal, columns aligned."""
        table = [self.head, *self.rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)][:-1]
        rows = ("  ".join([*map(str.rjust, row, widths), row[-1]]) for row in table)
        return [self.title, *(f"  {line}" for line in (*self.summary, *rows))]

    def cards(self) -> str:
        """Format the sheet as HTML."""
        summary = "".join(f"<p>{escape(line)}</p>" for line in self.summary)
        return f'<div class="card">{summary}</div><div class="card scroll">{render_table(self.head, self.rows)}</div>'


def explain(
    root: Path,
    *,
    sentence: str | None,
    questions: Sequence[str],
    failures: Sequence[str],
    limit: int,
    answer: str | None,
    before_after: bool,
    json: bool,
    html: Path | None,
) -> Iterator[str | Table]:
    """Yield texts and tables for a masked sentence, for questions or, without both, for the stored answers in results/.

    ``questions`` are ids of answers in results/, or questions to answer now. ``failures`` are keys of ``FAILED_AT``:
    only answers that failed there are shown, at most ``limit``. ``answer`` is y, by default the prediction.
    ``before_after`` compares the corpus before and after the newest update. ``html`` is a page to write.
    """
    live = answer is not None or json or html is not None or before_after
    about_results = sentence is None and not questions
    if sentence is not None and (questions or failures):
        raise ValueError("--question and --failed-at conflict with SENTENCE: they select questions; leave SENTENCE out")
    if about_results and live:
        raise ValueError(f"{LIVE_OPTIONS} need a SENTENCE with [MASK] or a --question: give one")
    texts, ids = split_questions(questions, root, live=live)
    if texts and failures:
        raise ValueError("--failed-at selects answers in results/: leave it out, or give --question an id from there")
    if len(texts) > 1 and live:
        raise ValueError(f"{LIVE_OPTIONS} take one question: explain one at a time")
    if ids or about_results:
        yield format_stored_answers(read_results(root), ids, failures, limit)
    if sentence is None and not texts:
        return

    def records_over(state: CorpusState) -> list[dict[str, Any]]:
        if sentence is not None:
            return [explain_sentence(sentence, root, state, answer)]
        return open_run(root, state).answer([Query(text, y=answer) for text in texts])

    sides = before_and_after(root) if before_after else (pipeline_state(root),)
    for number, records in enumerate(zip(*map(records_over, sides), strict=True)):
        if ids or number:
            yield ""
        to_sheet = _question_sheet if sentence is None else _sentence_sheet
        sheets = [to_sheet(record) for record in records]
        if html is not None:
            write_bytes(html, _page(sheets).encode())
        if json:
            content = records[0] if len(records) == 1 else dict(zip(SIDES, records, strict=True))
            yield js.dumps(content, ensure_ascii=False, indent=1)
        else:
            yield "\n".join(sheets[0].lines()) if len(sheets) == 1 else _side_by_side(*sheets)


def _row(z: Mapping[str, Any], text: str | None, **formats: str) -> tuple[str, ...]:
    """Return a table row: the candidate's values by format specification, then its title and its span or guess."""
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
    """Return the three lines of the paper's Table 3, and the candidates."""
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


def _side_by_side(before: Sheet, after: Sheet) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(*SIDES)
    for pair in zip_longest(before.lines(), after.lines(), fillvalue=""):
        table.add_row(*map(Text, pair))
    return table


def _page(sheets: Sequence[Sheet]) -> str:
    """Return an HTML page, without external resources, of one explanation or of two in parallel columns."""
    headings = [""] if len(sheets) == 1 else [f"<h2>{side}</h2>" for side in SIDES]
    sides = (f"<div>{heading}{sheet.cards()}</div>" for heading, sheet in zip(headings, sheets, strict=True))
    return render_page(sheets[0].title, [f'<div class="sides">{"".join(sides)}</div>'])


def split_questions(values: Sequence[str], root: Path, *, live: bool) -> tuple[list[str], tuple[str, ...]]:
    """Split the values of ``--question`` into questions to answer now, and ids of stored answers.

    A value is an id if a prediction in results/ has it; with ``live`` the question of that id is answered again. Any
    other value is the text of a question.
    Raises ValueError for a value that is neither an id of the results nor has white space: probably a mistyped id.
    """
    file = results_file(root)
    stored = {p.question_id: p.question for p in read_results(root)} if values and file.is_file() else {}
    for value in values:
        if stored and value not in stored and not any(map(str.isspace, value)):
            raise ValueError(
                f"--question {value!r} is not among the {len(stored)} ids in {file} (the first is "
                f"{next(iter(stored))!r}); the text of a question needs white space, for example a trailing space"
            )
    texts = [stored.get(value, value) for value in values if live or value not in stored]
    return texts, tuple(value for value in values if not live and value in stored)


def format_stored_answers(
    predictions: Sequence[Prediction], ids: Collection[str], failures: Collection[str], limit: int
) -> str:
    """Return the counts of failures as text, then up to ``limit`` answers with these ids and failures (all if empty).

    Questions that were generated from the corpus are not counted: their answers have no failures.

    Raises ValueError if a failure is not a key of ``FAILED_AT``.
    """
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
    lines += ("\n" + "\n".join(_prediction_sheet(prediction).lines()) for prediction in selected[:limit])
    if len(selected) > limit:
        lines.append(f"\n{len(selected) - limit} more; select others with --limit, --question and --failed-at")
    return "\n".join(lines)
