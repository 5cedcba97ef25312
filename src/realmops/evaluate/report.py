"""One page about a run that opens without a network, the same charts as files, and the closing table.

Input are what the stages leave behind: journals (metrics.jsonl: one JSON object a line with "stage", "step",
"time" and numbers by name), metrics.json files and the predictions. A figure that no stage wrote is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from realmops.artifacts import write_bytes
from realmops.corpus.answers import REGEX_RULES, WORD_RULES
from realmops.evaluate.charts import STYLE, Series, line_chart, number, standalone
from realmops.evaluate.openqa import Prediction, read_predictions
from realmops.evaluate.retrieval import SHOWN_AT

if TYPE_CHECKING:
    from rich.table import Table

REFRESHED = "refreshed"
SAMPLES = 12


@dataclass(frozen=True)
class Chart:
    """A chart of one stage's step metrics; ``metrics`` are their names in the journal."""

    name: str
    stage: str
    title: str
    unit: str
    metrics: tuple[str, ...]
    refreshes: bool = False
    smooth: bool = True


CHARTS = (
    Chart("pretrain_loss", "pretrain", "REALM pre-training loss", "nats", ("loss",)),
    Chart(
        "retrieval_utility",
        "pretrain",
        "What retrieval is worth to the reader",
        "nats over no document",
        ("retrieval_utility", "retrieval_utility_best", "marginal_gain"),
        refreshes=True,
    ),
    Chart(
        "recall",
        "pretrain",
        "Retrieval while it learns",
        "share of questions or sentences",
        ("recall_at_5", "hit_at_5"),
        refreshes=True,
    ),
    Chart(
        "staleness",
        "pretrain",
        "Age of the index in use",
        "steps",
        ("staleness_steps",),
        refreshes=True,
        smooth=False,
    ),
    Chart(
        "top_k_change",
        "pretrain",
        "What a fresh index would change",
        "share of the top k",
        ("top_k_change",),
        refreshes=True,
    ),
    Chart("p_null", "pretrain", "Probability of the null document", "mean p(null|x)", ("p_null",)),
    Chart("ict_loss", "ict", "Inverse cloze loss", "nats", ("loss",)),
    Chart("reader_loss", "ict", "Masked words: the reader's warm start", "nats", ("reader_loss",)),
    Chart(
        "ict_accuracy",
        "ict",
        "Inverse cloze accuracy in the batch",
        "share",
        ("accuracy_removed", "accuracy_kept"),
    ),
    Chart(
        "finetune_loss",
        "finetune",
        "Open-QA fine-tuning loss",
        "nats",
        ("loss", "span_loss", "early_loss"),
    ),
)


@dataclass(frozen=True)
class Headline:
    """One row of the closing table: a figure of a stage's metrics.json, its interval under _low and _high."""

    label: str
    stage: str
    metric: str


HEADLINES = (
    Headline("EM (test questions)", "evaluate", "em"),
    Headline("F1 (test questions)", "evaluate", "f1"),
    Headline("EM, expression found anywhere in the answer", "evaluate", "em_regex_search"),
    Headline("EM of the closed-book floor", "evaluate", "closed_book_em"),
    Headline("ceiling: an answer is in the corpus", "evaluate", "ceiling_in_corpus"),
    Headline("ceiling: as a short span in the 5 passages read", "evaluate", "ceiling_in_top_5"),
    Headline("hit@5 of masked sentences before REALM", "pretrain", "hit_at_5_before"),
    Headline("hit@5 of masked sentences after REALM", "pretrain", "hit_at_5_after"),
    Headline("retrieval utility at the end (nats)", "pretrain", "retrieval_utility"),
    Headline("index refreshes", "pretrain", "refreshes"),
    Headline("mean staleness (steps)", "pretrain", "index_staleness_steps"),
)

# Rows of the table of what retrieves and what reads, with the prefixes of recall and of EM and F1; None has none.
COMPARED: tuple[tuple[str, str | None, str | None], ...] = (
    ("a rule over BM25's first passage", None, "rule_"),
    ("BM25 (and the model's reader)", "bm25_", "bm25_"),
    ("embeddings before REALM", "before_realm_", None),
    ("embeddings after REALM, zero-shot", "zero_shot_", None),
    ("the same with words", "zero_shot_hybrid_", None),
    ("embeddings after fine-tuning", "dense_", None),
    ("the model", "", ""),
)
COMPARED_HEAD = ("test questions", *(f"recall@{k}" for k in SHOWN_AT), "EM", "F1")


def read_journal(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl; an unfinished last line of a running stage is left out."""
    records = []
    lines = path.read_bytes().split(b"\n")
    for line_number, line in enumerate(lines[:-1], 1):
        try:
            record = json.loads(line)
            record["stage"], record["step"] = str(record["stage"]), int(record["step"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(
                f"{path}, line {line_number}: {error!r}; "
                'a line is {"stage": ..., "step": ..., name: number}; it is damaged: run its stage again'
            ) from None
        records.append(record)
    return records


def series_of(records: Iterable[Mapping[str, Any]], stage: str, metric: str) -> Series:
    """The steps at which a stage logged a finite value of one metric, with the values."""
    found = [(r["step"], r[metric]) for r in records if r["stage"] == stage and r.get(metric) is not None]
    return Series(metric, [step for step, _ in found], [float(value) for _, value in found])


def refresh_steps(records: Iterable[Mapping[str, Any]], stage: str = "pretrain") -> list[int]:
    """The steps at which the stage logged ``refreshed``: a new index was taken into use."""
    adopted = series_of(records, stage, REFRESHED)
    return [step for step, value in zip(adopted.steps, adopted.values, strict=True) if value]


def write_report(
    folder: Path,
    *,
    journals: Sequence[Path],
    metrics: Mapping[str, Mapping[str, Any]],
    predictions: Path | None = None,
    title: str = "REALM run",
) -> Path:
    """Write report.html, plots/NAME.svg and plots/STAGE_METRIC.csv (for ``dvc plots``); the page's path.

    ``metrics`` is the content of metrics.json by stage.
    """
    records = [record for path in journals for record in read_journal(path)]
    (folder / "plots").mkdir(parents=True, exist_ok=True)
    charts = {}
    for chart in CHARTS:
        lines = [series_of(records, chart.stage, metric) for metric in chart.metrics]
        lines = [line for line in lines if line.steps]
        for line in lines:
            write_bytes(folder / "plots" / f"{chart.stage}_{line.name}.csv", _csv(line))
        if lines:
            marks = refresh_steps(records, chart.stage) if chart.refreshes else []
            charts[chart.name] = line_chart(chart.title, chart.unit, lines, marks, smooth=chart.smooth)
            write_bytes(folder / "plots" / f"{chart.name}.svg", standalone(charts[chart.name]).encode())
    answers = read_predictions(predictions) if predictions else []
    page = folder / "report.html"
    write_bytes(page, _page(title, metrics, list(charts.values()), answers).encode())
    return page


def headline_rows(metrics: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """Label, figure and 95 % interval of what the stages measured."""
    rows = []
    for headline in HEADLINES:
        found = metrics.get(headline.stage, {})
        if headline.metric in found:
            interval = ""
            low, high = f"{headline.metric}_low", f"{headline.metric}_high"
            if low in found and high in found:
                interval = f"{found[low]:.3f} to {found[high]:.3f}"
            rows.append((headline.label, _figure(found[headline.metric]), interval))
    return rows


def compared_rows(metrics: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Rows under ``COMPARED_HEAD`` of what ``evaluate`` measured, each figure with its 95 % interval below it."""
    found = metrics.get("evaluate", {})
    rule = next((rule for rule in (*WORD_RULES, *REGEX_RULES) if f"recall_at_5_{rule}_low" in found), "")
    rows = []
    for label, recall, answer in COMPARED:
        names = [None if recall is None else f"{recall}recall_at_{k}_{rule}" for k in SHOWN_AT]
        names += [None if answer is None else f"{answer}{measure}" for measure in ("em", "f1")]
        cells = [_cell(found, name) if name else "" for name in names]
        rows += [[label, *cells]] if any(cells) else []
    return rows if rule else []


def _cell(found: Mapping[str, Any], name: str) -> str:
    if name not in found:
        return ""
    low, high = found.get(f"{name}_low"), found.get(f"{name}_high")
    interval = "" if low is None or high is None else f"\n{low:.2f} to {high:.2f}"
    return f"{found[name]:.3f}{interval}"


def seconds_rows(metrics: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The seconds that each stage took, and their sum."""
    seconds = {stage: found["seconds"] for stage, found in metrics.items() if "seconds" in found}
    rows = [(f"seconds, {stage}", f"{value:.0f}") for stage, value in seconds.items()]
    return [*rows, ("seconds, all stages", f"{sum(seconds.values()):.0f}")] if rows else []


def compared_table(metrics: Mapping[str, Mapping[str, Any]]) -> Table | None:
    """``compared_rows`` for rich's console, None without any."""
    from rich.table import Table

    table = Table(title="What retrieves and what reads, with 95 % intervals", show_lines=True)
    for name in COMPARED_HEAD:
        table.add_column(name, justify="left" if name == COMPARED_HEAD[0] else "right")
    for row in compared_rows(metrics):
        table.add_row(*row)
    return table if table.row_count else None


def summary_table(metrics: Mapping[str, Mapping[str, Any]]) -> Table:
    """The closing table of ``make run``, for rich's console."""
    from rich.table import Table

    table = Table(title="realmops")
    table.add_column("measure")
    table.add_column("value", justify="right")
    table.add_column("95 % interval", justify="right")
    for row in headline_rows(metrics):
        table.add_row(*row)
    table.add_section()
    for label, value in seconds_rows(metrics):
        table.add_row(label, value)
    return table


def _figure(value: Any) -> str:
    if not isinstance(value, float):
        return number(value)
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def _csv(line: Series) -> bytes:
    rows = [f"{step},{value!r}" for step, value in zip(line.steps, line.values, strict=True)]
    return ("\n".join([f"step,{line.name}", *rows]) + "\n").encode()


_PAGE_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5c6675; --edge: #d9dee5; --paper: #ffffff;
  --ground: #f4f6f8; --hit: #cfe8d8; --right: #17694a; --wrong: #a8380a; --bar: #2166c4; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8ebef; --soft: #a3adba; --edge: #363f4b;
  --paper: #1b2027; --ground: #12161b; --hit: #245a43; --right: #6fd0a5; --wrong: #f3a173; --bar: #6ba8f5; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1180px; padding: 24px 20px 64px; font: 15px/1.5 system-ui, sans-serif;
  background: var(--ground); color: var(--ink); }
h1 { font-size: 26px; margin: 0 0 16px; } h2 { font-size: 19px; margin: 36px 0 12px; }
table { border-collapse: collapse; }
td, th { padding: 5px 14px 5px 0; text-align: left; vertical-align: top; }
td + td, th + th { font-variant-numeric: tabular-nums; } tr + tr td { border-top: 1px solid var(--edge); }
th { color: var(--soft); font-weight: 500; } .scroll { overflow-x: auto; } .soft { color: var(--soft); }
.card { background: var(--paper); border: 1px solid var(--edge); border-radius: 8px; padding: 14px 18px; }
.compared { margin-bottom: 16px; } .compared td { white-space: pre-line; }
.tables { display: flex; flex-wrap: wrap; gap: 24px 64px; }
.charts, .sides { display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); }
.charts svg { width: 100%; height: auto; display: block; border: 1px solid var(--edge); border-radius: 8px; }
.answers { display: grid; gap: 14px; } .answers p { margin: 6px 0; overflow-wrap: anywhere; }
.question { font-weight: 600; } .right { color: var(--right); } .wrong { color: var(--wrong); }
mark { background: var(--hit); color: inherit; padding: 0 2px; border-radius: 3px; }
.bar { display: inline-block; height: 9px; min-width: 1px; border-radius: 2px; background: var(--bar); }
.candidates td:nth-child(2) { width: 140px; } summary { cursor: pointer; }
"""


def _page(
    title: str, metrics: Mapping[str, Mapping[str, Any]], charts: Sequence[str], answers: Sequence[Prediction]
) -> str:
    tables = (
        table_of(("measure", "value", "95 % interval"), headline_rows(metrics)),
        table_of(("time", "seconds"), [(label.removeprefix("seconds, "), s) for label, s in seconds_rows(metrics)]),
    )
    sections = ["<h2>Results</h2>"]
    if compared := compared_rows(metrics):
        sections.append(f'<div class="card scroll compared">{table_of(COMPARED_HEAD, compared)}</div>')
    sections.append(f'<div class="card scroll tables">{"".join(tables)}</div>')
    if charts:
        sections += ["<h2>While it trained</h2>", f'<div class="charts">{"".join(charts)}</div>']
    if answers:
        shown = answers[:: -(-len(answers) // SAMPLES)]
        sections += [
            "<h2>Answers and what they rest on</h2>",
            f'<p class="soft">{len(shown)} of {len(answers)} questions, evenly spaced over the file.</p>',
            f'<div class="answers">{"".join(map(_answer, shown))}</div>',
        ]
    sections += ["<h2>Every figure</h2>", *(_all_figures(stage, found) for stage, found in metrics.items())]
    return page_of(title, sections)


def page_of(title: str, sections: Sequence[str]) -> str:
    """An HTML page of its own, with the style of all our pages."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_PAGE_STYLE}{STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n" + "\n".join(sections) + "\n</body></html>\n"
    )


def table_of(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An HTML table of text."""
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    cells = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<div><table><tr>{names}</tr>{cells}</table></div>"


def _all_figures(stage: str, found: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(json.dumps(value))}</td></tr>" for name, value in found.items()
    )
    return f'<details><summary>{escape(stage)}</summary><div class="card scroll"><table>{rows}</table></div></details>'


def _answer(row: Prediction) -> str:
    verdict = '<span class="right">&#10003; right</span>' if row.em else '<span class="wrong">&#10007; wrong</span>'
    source = f"; the answer is from number {row.evidence_rank + 1}" if row.evidence_rank >= 0 else ""
    before, after = row.evidence[: row.char_start], row.evidence[row.char_end :]
    candidates = "".join(
        f'<tr><td>{p:.3f}</td><td><span class="bar" style="width: {130 * min(p, 1):.0f}px"></span></td>'
        f'<td>{escape(title)} <span class="soft">{escape(passage_id)}</span></td></tr>'
        for p, title, passage_id in zip(row.p_z, row.titles, row.passage_ids, strict=True)
    )
    return (
        f'<div class="card"><p class="question">{escape(row.question)}</p>'
        f"<p>{verdict}: <b>{escape(row.prediction) or '(no answer)'}</b> "
        f'<span class="soft">wanted: {escape("; ".join(row.answers))}; F1 {row.f1:.2f}; '
        f"span score {row.span_score:.2f}</span></p>"
        f"<p>{escape(before)}<mark>{escape(row.prediction)}</mark>{escape(after)}</p>"
        f'<details><summary class="soft">p(z|x) of the {len(row.p_z)} passages read{source}</summary>'
        f'<div class="scroll"><table class="candidates">{candidates}</table></div></details></div>'
    )
