"""The report: charts, tables and answers in one page that needs no network."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console
from test_predictions import PREDICTION as ANSWERED

from realmops.evaluate.charts import line_chart, ticks
from realmops.evaluate.predictions import write_predictions
from realmops.evaluate.run_report import (
    compared_rows,
    confidence_charts,
    figure_tables,
    headline_rows,
    seconds_rows,
    write_report,
)
from realmops.journal import Series

RECORDS = [
    {"stage": "pretrain", "step": 0, "time": 1.0, "loss": 4.0, "refreshed": 1.0, "recall_at_5": 0.5},
    {"stage": "pretrain", "step": 1, "time": 2.0, "loss": None},
    {"stage": "pretrain", "step": 2, "time": 3.0, "loss": 2.0, "refreshed": 1.0, "recall_at_5": 0.75},
    {"stage": "ict", "step": 1, "time": 4.0, "loss": 9.0},
]
METRICS: Mapping[str, Mapping[str, Any]] = {
    "pretrain": {"refreshes": 2, "retrieval_utility": -0.25, "index_staleness_steps": 31.25, "seconds": 90.4},
    "evaluate": {"em": 0.5, "em_low": 0.25, "em_high": 0.75, "seconds": 9.7},
}

PREDICTION = replace(
    ANSWERED, question="Where did <Ada> live?", prediction="Tor & Hollow", em=False, titles=("Ada <Vell>", "Tor"),
    evidence="In Tor & Hollow, <b>north</b>.", char_start=3, char_end=15, failed_at="not_in_corpus",
    confidence=0.25, abstained=True,
)  # fmt: skip


def journal(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_points_are_placed_by_the_axes() -> None:
    svg = ElementTree.fromstring(line_chart("Loss", "nats", [Series("loss", [0, 10], [0.0, 1.0])]))
    circles = [(float(dot.get("cx", "")), float(dot.get("cy", ""))) for dot in svg.iter() if "circle" in dot.tag]
    # 560 x 300 with margins left 56, right 16, top 64, bottom 44.
    assert circles == [(56, 256), (544, 64)]
    assert ticks(-1.5, 0.3) == [-1.5, -1, -0.5, 0, 0.5]
    assert ticks(3, 3) == [1, 2, 3, 4, 5]
    assert ticks(0, 200_000) == [0, 50_000, 100_000, 150_000, 200_000]
    zigzag = Series("age", list(range(100)), [float(step % 2) for step in range(100)])
    assert line_chart("Age", "steps", [zigzag]).count("<polyline") == 2
    assert line_chart("Age", "steps", [zigzag], smooth=False).count("<polyline") == 1


def test_report_needs_no_network_and_shows_everything(tmp_path: Path) -> None:
    write_predictions(tmp_path / "predictions.parquet", [PREDICTION])
    page = write_report(
        tmp_path / "out",
        journals=[journal(tmp_path / "metrics.jsonl", RECORDS)],
        metrics=METRICS,
        predictions=tmp_path / "predictions.parquet",
    )
    text = page.read_text()
    assert page == tmp_path / "out" / "report.html"
    assert not re.search(r"(src|href)\s*=|@import|url\(|<script|<link", text)
    assert text.count("<svg") == 5  # pre-training loss, recall, inverse cloze loss, reliability, precision by coverage
    assert "; confidence 0.25, abstained" in text
    assert text.count('class="refresh"') == 3  # two refreshes and the legend's sample
    assert "0.250 to 0.750" in text
    assert "&lt;Ada&gt; live?" in text
    assert "In <mark>Tor &amp; Hollow</mark>, &lt;b&gt;north&lt;/b&gt;." in text


@pytest.mark.parametrize(("answers", "shown"), [(1, "1"), (12, "12"), (25, "9")])
def test_at_most_twelve_answers_are_shown(answers: int, shown: str, tmp_path: Path) -> None:
    named = [replace(PREDICTION, question=f"Question {n}.") for n in range(answers)]
    write_predictions(tmp_path / "predictions.parquet", named)
    page = write_report(tmp_path, journals=[], metrics={}, predictions=tmp_path / "predictions.parquet").read_text()
    assert f"{shown} of {answers} questions, evenly spaced" in page
    assert len(re.findall(r"Question \d+\.", page)) == int(shown)


def test_points_are_files_and_index_refreshes_are_marked(tmp_path: Path) -> None:
    page = write_report(tmp_path, journals=[journal(tmp_path / "metrics.jsonl", RECORDS)], metrics={})
    plots = tmp_path / "plots"
    names = ["ict_loss.csv", "pretrain_loss.csv", "pretrain_recall_at_5.csv"]
    assert sorted(path.name for path in plots.iterdir()) == names
    assert (plots / "pretrain_loss.csv").read_text() == "step,loss\n0,4.0\n2,2.0\n"
    recall = next(svg for svg in re.findall("<svg.*?</svg>", page.read_text(), re.S) if "recall_at_5" in svg)
    svg = ElementTree.fromstring(recall)
    assert [line.text for line in svg.iter("{http://www.w3.org/2000/svg}title")][:2] == [
        "new index at step 0",
        "new index at step 2",
    ]


def test_reliability_and_precision_by_coverage_are_drawn() -> None:
    """Three tenths have answers: .25 (none right), .62 to .68 (one of two), .9 (right); 1, 2, 3, 4 answers given."""
    given = [(0.25, False), (0.62, True), (0.68, False), (0.9, True)]
    answers = [replace(PREDICTION, confidence=confidence, em=right) for confidence, right in given]
    reliability, by_coverage = (
        [title.text for title in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}title")]
        for svg in confidence_charts(answers)
    )
    assert reliability[:3] == [
        "answers in 10 bins, confidence 0.25: 0",
        "answers in 10 bins, confidence 0.65: 0.5",
        "answers in 10 bins, confidence 0.9: 1",
    ]
    across = "most confident answers, share of questions answered"
    assert by_coverage == [f"{across} {at}" for at in ("0.25: 1", "0.5: 0.5", "0.75: 0.6667", "1: 0.5")]
    assert confidence_charts([replace(PREDICTION, confidence=None, abstained=None)]) == []


def test_headlines_omit_missing_metrics() -> None:
    assert headline_rows(METRICS) == [
        ("EM (test questions)", "0.500", "0.250 to 0.750"),
        ("retrieval utility at the end (nats)", "-0.250", ""),
        ("index refreshes", "2", ""),
        ("mean staleness (steps)", "31.2", ""),
    ]
    assert seconds_rows(METRICS) == [
        ("seconds, pretrain", "90", ""),
        ("seconds, evaluate", "10", ""),
        ("seconds, all stages", "100", ""),
    ]
    assert headline_rows({}) == []
    limits = {"ceiling_in_top_7": 0.25, "ceiling_passages": 7, "ceiling_wordpieces": 16}
    label = "ceiling: as a span of at most 16 wordpieces in the 7 passages read"
    assert headline_rows({"evaluate": limits}) == [(label, "0.250", "")]
    assert seconds_rows({}) == []


COMPARED: Mapping[str, Mapping[str, Any]] = {
    "evaluate": {
        "em": 0.25,
        "em_low": 0.125,
        "em_high": 0.375,
        "f1": 0.5,
        **{f"recall_at_5_token_boundary{end}": value for end, value in (("", 0.75), ("_low", 0.5), ("_high", 1.0))},
        "recall_at_5_substring": 1.0,
        "bm25_recall_at_20_token_boundary": 0.875,
        "zero_shot_hybrid_recall_at_1_token_boundary": 0.5,
        "rule_em": 0.125,
    }
}


def test_retrievers_and_readers_are_in_one_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert compared_rows(COMPARED) == [
        ["a rule over BM25's first passage", "", "", "", "0.125", ""],
        ["BM25 (and the model's reader)", "", "", "0.875", "", ""],
        ["embeddings after REALM with BM25, zero-shot", "0.500", "", "", "", ""],
        ["the model", "", "0.750\n0.50 to 1.00", "", "0.250\n0.12 to 0.38", "0.500"],
    ]
    _, table = figure_tables(COMPARED)
    Console(width=100).print(table.to_rich_table())
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("a rule over BM25's first passage", "0.50 to 1.00", "recall@20"))
    about, options = {"corpus": "ab<12", "documents": "3 in 5 passages"}, {"retriever.init": "some/encoder"}
    page = write_report(tmp_path, journals=[], metrics=COMPARED, about=about, options=options).read_text()
    assert "corpus ab&lt;12; documents 3 in 5 passages" in page
    assert "<td>retriever.init</td><td>&#34;some/encoder&#34;</td>" in page
    assert "<td>BM25 (and the model&#x27;s reader)</td><td></td><td></td><td>0.875</td>" in page
    assert compared_rows(METRICS) == []
    assert len(figure_tables(METRICS)) == 1


def test_without_steps_of_realm_no_row_has_its_name() -> None:
    """A stage without steps measures nothing, as one that was imported; only the first has the stage ict before it."""
    figures = COMPARED["evaluate"] | {
        f"{prefix}recall_at_5_token_boundary": 0.5 for prefix in ("before_realm_", "zero_shot_")
    }
    trained = {"ict": {"loss": 1.0}, "pretrain": {"seconds": 0.1}}
    labels = [row[0] for row in compared_rows({"evaluate": figures, **trained})]
    assert labels[2:4] == [
        "embeddings before fine-tuning, zero-shot",
        "embeddings before fine-tuning with BM25, zero-shot",
    ]
    assert not any("REALM" in label for label in labels)
    imported = {"pretrain": {"seconds": 0.1}}
    for stages in ({}, imported, trained | {"pretrain": {"seconds": 9.0, "refreshes": 2}}):
        labels = [row[0] for row in compared_rows({"evaluate": figures, **stages})]
        assert labels[2:4] == ["embeddings before REALM", "embeddings after REALM, zero-shot"]
