"""``realmops explain``: what an answer rests on, in a terminal, as JSON or as a page."""

from __future__ import annotations

import json as js
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from html import escape
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from realmops.answering.opened_model import Query
from realmops.answering.record import sureness
from realmops.artifacts import write_bytes
from realmops.commands.masked import explain_sentence
from realmops.evaluate.predictions import FAILED_AT, Prediction, read_results, results_file
from realmops.evaluate.report_page import page_of, table_of
from realmops.stages.corpus_states import CorpusState, before_and_after, pipeline_state
from realmops.stages.open_run import open_run

if TYPE_CHECKING:
    from rich.table import Table

ASKED_NOW = "--answer, --json, --html and --before-after"  # options that want an answer of the model of now
SIDES = ("before", "after")
_ID_SHOWN = 12


class Sheet(NamedTuple):
    """An explanation as text: what is asked, lines about it, and a table of its candidates."""

    title: str
    said: Sequence[str]
    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def lines(self) -> list[str]:
        table = [self.head, *self.rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)][:-1]
        rows = ("  ".join([*map(str.rjust, row, widths), row[-1]]) for row in table)
        return [self.title, *(f"  {line}" for line in (*self.said, *rows))]

    def cards(self) -> str:
        said = "".join(f"<p>{escape(line)}</p>" for line in self.said)
        return f'<div class="card">{said}</div><div class="card scroll">{table_of(self.head, self.rows)}</div>'


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
    """Texts and tables for a masked sentence, for questions or, without both, for the answers under results/.

    Args:
        questions: ids of answers under results/, or questions to ask now.
        failures: keys of ``FAILED_AT``; only answers that failed there are shown.
        limit: so many answers of results/ are shown at most.
        answer: y, if not the prediction.
        before_after: over the corpus of before and of after the newest update.
        json: everything as JSON.
        html: the page to write.

    Raises ValueError for options that do not belong together.
    """
    anew = answer is not None or json or html is not None or before_after
    about_results = sentence is None and not questions
    if sentence is not None and (questions or failures):
        raise ValueError("--question and --failed-at are about questions: leave the sentence out")
    if about_results and anew:
        raise ValueError(f"{ASKED_NOW} are about a sentence with [MASK] or a --question: give one")
    texts, ids = sorted_out(questions, root, anew=anew)
    if texts and failures:
        raise ValueError("--failed-at is about the answers under results/: leave it out, or name --question by id")
    if len(texts) > 1 and anew:
        raise ValueError(f"{ASKED_NOW} take one question: ask the others apart")
    if ids or about_results:
        yield stored_answers(read_results(root), ids, failures, limit)
    if sentence is None and not texts:
        return

    def explained(state: CorpusState) -> list[dict[str, Any]]:
        if sentence is not None:
            return [explain_sentence(sentence, root, state, answer)]
        return open_run(root, state).answer([Query(text, y=answer) for text in texts])

    sides = before_and_after(root) if before_after else (pipeline_state(root),)
    for number, records in enumerate(zip(*map(explained, sides), strict=True)):
        if ids or number:
            yield ""
        sheets = [_of_question(one) if sentence is None else _of_sentence(one) for one in records]
        if html is not None:
            write_bytes(html, _page(sheets).encode())
        if json:
            shown = records[0] if len(records) == 1 else dict(zip(SIDES, records, strict=True))
            yield js.dumps(shown, ensure_ascii=False, indent=1)
        else:
            yield "\n".join(sheets[0].lines()) if len(sheets) == 1 else _side_by_side(*sheets)


def _row(z: Mapping[str, Any], said: str | None, **forms: str) -> tuple[str, ...]:
    """A candidate with the figures of these names, and what it says; the null document has no id."""
    figures = ("-" if z[name] is None else f"{z[name]:{form}}" for name, form in forms.items())
    return (*figures, f"{_passage(z)}: {said or '(none)'}")


def _passage(z: Mapping[str, Any]) -> str:
    return f"{z['title']} [{z['passage_id'][:_ID_SHOWN]}]" if z["passage_id"] else str(z["title"])


def _of_question(record: Mapping[str, Any]) -> Sheet:
    about = record["model"]
    said = (
        f"answer: {record['answer'] or '(none)'}  ({sureness(record)})",
        f"y = {record.get('y', record['answer'])}: p(y|x) = {record['p_y']:.3g}",
        f"model: {about['version']}, corpus {about['snapshot'][:_ID_SHOWN]}, index {about['index_generation']}",
    )
    rows = [_row(z, z["span"], p_z=".3f", p_z_given_y=".3f", score=".2f") for z in record["passages"]]
    return Sheet(record["question"], said, ("p(z|x)", "p(z|x,y)", "score", "passage: its best span"), rows)


def _of_sentence(found: Mapping[str, Any]) -> Sheet:
    """The three lines of the paper's Table 3, and the candidates."""
    guesses = [
        f"{found[name]['words']}  (p = {found[name]['probability']:.3g})"
        for name in ("with_retrieval", "without_retrieval")
    ]
    *passages, _ = found["candidates"]
    best = max(passages, key=lambda z: z["p_y"], default=None)
    given_z = [f"{best['p_y']:.3g}  ({_passage(best)})"] if best else []
    said = (
        f"REALM:             {guesses[0]}",
        f"without retrieval: {guesses[1]}",
        f"y = {found['y']}",
        f"  BERT, without retrieval:     p(y|x) = {found['p_y_without']:.3g}  (the reader with the null document)",
        *(f"  REALM given the best z:    p(y|x,z) = {value}" for value in given_z),
        f"  REALM, marginal over top {len(passages)}:  p(y|x) = {found['p_y']:.3g}  (and the null document)",
        f"index: {found['index']}",
    )
    forms = {"p_z": ".3f", "p_z_given_y": ".3f", "p_y": ".3g", "utility": "+.2f"}
    head = ("p(z|x)", "p(z|x,y)", "p(y|z,x)", "utility, nats", "document: its own guess")
    return Sheet(found["sentence"], said, head, [_row(z, z["guess"], **forms) for z in found["candidates"]])


def _of_prediction(found: Prediction) -> Sheet:
    held_back = " (abstained)" if found.abstained else ""
    hit = f"number {found.first_hit + 1}" if found.first_hit >= 0 else "none of those retrieved"
    said = [
        f"wanted: {'; '.join(found.answers)}",
        f"answer: {found.prediction or '(none)'}  (score {found.span_score:.2f})",
        *([] if found.confidence is None else [f"confidence: {found.confidence:.2f}{held_back}"]),
        f"failed at: {found.failed_at} ({FAILED_AT[found.failed_at]})",
        *([] if found.gold_span is None else [f"best right span: {found.gold_span}  (score {found.gold_score:.2f})"]),
        f"first passage with an answer: {hit}",
    ]
    columns = (found.p_z, found.passage_scores, found.titles, found.passage_ids, found.passage_spans)
    rows = []
    for number, (p_z, score, title, passage_id, span) in enumerate(zip(*columns, strict=True)):
        z = {"p_z": p_z, "score": score, "title": title, "passage_id": passage_id}
        chosen = ">" if number == found.evidence_rank else ""
        rows.append((chosen, *_row(z, span, p_z=".3f", score=".2f")))
    head = ("", "p(z|x)", "score", "passage: its best span")
    return Sheet(f"{found.question_id}  {found.question}", said, head, rows)


def _side_by_side(before: Sheet, after: Sheet) -> Table:
    """Two explanations for rich's console, line beside line."""
    from rich.table import Table
    from rich.text import Text

    table = Table(*SIDES)
    for pair in zip_longest(before.lines(), after.lines(), fillvalue=""):
        table.add_row(*map(Text, pair))
    return table


def _page(sheets: Sequence[Sheet]) -> str:
    """One explanation, or two beside each other, as an HTML page that opens without a network."""
    headings = [""] if len(sheets) == 1 else [f"<h2>{side}</h2>" for side in SIDES]
    sides = (f"<div>{heading}{sheet.cards()}</div>" for heading, sheet in zip(headings, sheets, strict=True))
    return page_of(sheets[0].title, [f'<div class="sides">{"".join(sides)}</div>'])


def sorted_out(values: Sequence[str], root: Path, *, anew: bool) -> tuple[list[str], tuple[str, ...]]:
    """Of the values of ``--question`` the questions to ask now, and the ids of answers under results/ to show.

    An id among the predictions under results/ is one; ``anew`` asks its question again. Everything else is a question
    of its own, and so is all where there are no results. ValueError for what looks like a mistyped id: no white space.
    """
    file = results_file(root)
    known = {p.question_id: p.question for p in read_results(root)} if values and file.is_file() else {}
    for value in values:
        if known and value not in known and not any(map(str.isspace, value)):
            raise ValueError(
                f"--question {value!r} is no id among the {len(known)} of {file} (the first is {next(iter(known))!r}), "
                "and no question either: that has white space in it, if only at its end"
            )
    texts = [known.get(value, value) for value in values if anew or value not in known]
    return texts, tuple(value for value in values if not anew and value in known)


def stored_answers(
    predictions: Sequence[Prediction], ids: Collection[str], failures: Collection[str], limit: int
) -> str:
    """What failed where, and the answers with these ids and failures, or all, at most so many.

    ValueError for a failure that is none of ``FAILED_AT``.
    """
    for name in failures:
        if name not in FAILED_AT:
            raise ValueError(f"no question fails at {name!r}; choose {', '.join(FAILED_AT)}")
    found = [p for p in predictions if (not ids or p.question_id in ids) and p.failed_at in (failures or FAILED_AT)]
    counts = Counter(prediction.failed_at for prediction in predictions)
    lines = [f"{len(predictions)} questions"]
    for name, meaning in FAILED_AT.items():
        lines.append(f"{counts[name]:>7} {counts[name] / len(predictions):6.1%}  {name}: {meaning}")
    lines += ("\n" + "\n".join(_of_prediction(one).lines()) for one in found[:limit])
    if len(found) > limit:
        lines.append(f"\n{len(found) - limit} more; --limit, --question and --failed-at choose others")
    return "\n".join(lines)
