"""Ablations: the table's arithmetic by hand, and three variants trained through the command line."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import math
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import small_project

from realmops.evaluate.ablation import (
    VariantOutcome,
    figure_table,
    render_report,
    staleness_chart,
    table_rows,
    to_csv,
    utility_chart,
)
from realmops.journal import Series
from realmops.stages import STAGES
from realmops.tracking.client import local_tracking_uri, mlflow_client
from realmops.tracking.runs import tracking_folder

if TYPE_CHECKING:
    from mlflow.entities import Run

NAMES = {"realm": "REALM", "baseline": "Baseline", "never_run": "Never run"}
NOTHING = [math.nan] * 4  # was retrieved
VARIANTS = {name: {"title": title, "uses": "words"} for name, title in NAMES.items()}


def outcome(variant: str, seed: int, correct: str, hit: str | list[float], age: float = 1.0) -> VariantOutcome:
    """``correct`` has a 1 for each question that was answered, ``hit`` for each whose answer was found."""
    utility = Series("retrieval_utility", [0, 1, 2], [seed, 2.0 * seed, 3.0])
    right, found = (np.array([float(c) for c in given]) for given in (correct, hit))
    staleness = {"index_staleness_steps": age, "index_staleness_seconds": 2.0, "top_k_change": 0.5}
    asked = [(f"q{i}", f"world {seed}?", ("a",), "en") for i in range(len(correct))]
    return VariantOutcome(variant, seed, asked, right, found, staleness, utility)


OUTCOMES = [
    outcome("realm", 0, "1110", "1010"),
    outcome("realm", 1, "1000", "1110"),
    outcome("baseline", 0, "1100", "1010", 30.0),
    outcome("baseline", 1, "0000", "0000", 30.0),
]


def test_means_and_differences_by_hand() -> None:
    realm, baseline = table_rows(OUTCOMES, VARIANTS)
    assert (realm["em"], realm["recall_at_5"], realm["em_difference"], realm["seeds"]) == (0.5, 0.625, 0.0, 2)
    assert (baseline["em"], baseline["recall_at_5"], baseline["questions"]) == (0.25, 0.25, 8)
    assert baseline["em_difference"] == pytest.approx(-0.25), "two of eight questions"
    assert baseline["recall_difference"] == pytest.approx(-0.375), "three of eight questions"
    recall = baseline["recall_difference_low"], baseline["recall_difference_high"]
    assert recall == (-1.0, 1.0), "0 and -.75 of two seeds"
    assert (realm["em_low"], realm["em_high"]) == (0.0, 1.0), "of two seeds next to nothing is known"
    assert baseline["em_difference_low"] < -0.25 < baseline["em_difference_high"] <= 0.0, "the same in both seeds"
    assert baseline["p_better"] == pytest.approx(0.5 * (3 / 4) ** 8, abs=0.01), "half of the ties"


def test_shared_questions_add_their_variance() -> None:
    """One of 4 questions differs, by the same in both seeds: of other questions the second seed shows nothing."""
    right = {"realm": "0000", "baseline": "1000"}
    pairs = [outcome(name, seed, right[name], NOTHING) for name in right for seed in (0, 1)]
    own = table_rows(pairs, VARIANTS)[1]
    shared = table_rows([replace(one, asked=pairs[0].asked) for one in pairs], VARIANTS)[1]
    alone = table_rows([pairs[0], pairs[2]], VARIANTS)[1]
    assert [row["questions"] for row in (own, shared, alone)] == [8, 4, 4]
    assert own["em_difference"] == shared["em_difference"] == alone["em_difference"] == 0.25
    assert own["em_difference_high"] < shared["em_difference_high"]
    for measure in ("em", "em_difference"):  # standard error sqrt(3 / 16 / 3) / 2 = .25 * .5, times t(3): 3.1824
        assert shared[f"{measure}_high"] == pytest.approx(min(0.25 + 3.1824 * 0.25, 1.0), abs=1e-4)
    assert (alone["em_low"], alone["em_high"]) == (0.0, 0.75), "of one seed the bootstrap over its four questions"


def test_other_questions_are_not_paired() -> None:
    other = replace(OUTCOMES[2], asked=OUTCOMES[3].asked)
    with pytest.raises(ValueError, match="baseline and realm answer other questions with seed 0"):
        table_rows([*OUTCOMES[:2], other], VARIANTS)


def test_a_difference_takes_the_seeds_that_both_have() -> None:
    _, baseline = table_rows([*OUTCOMES, outcome("baseline", 2, "1111", "1111")], VARIANTS)
    assert (baseline["seeds"], baseline["questions"]) == (3, 8)
    assert baseline["em_difference"] == pytest.approx(-0.25)
    with pytest.raises(ValueError, match="baseline and realm have no seed in common"):
        table_rows([OUTCOMES[0], outcome("baseline", 5, "1", "1")], VARIANTS)


def test_the_table_is_formatted_for_readers() -> None:
    rows = table_rows(OUTCOMES, VARIANTS)
    lines = figure_table(rows).to_markdown().splitlines()
    assert len(lines) == 4
    assert lines[2] == (
        "| REALM | words | 0.500 (0.000 to 1.000) | 0.625 (0.000 to 1.000) | – | – | 1; 2; 0.50 "
        "| +0.000 (+0.000 to +0.000) | +0.000 (+0.000 to +0.000) | 2 |"
    )
    assert lines[3].startswith(
        "| Baseline | words | 0.250 (0.000 to 1.000) | 0.250 (0.000 to 1.000) | – | – | 30; 2; 0.50 | -0.250 ("
    )
    (_, read) = csv.DictReader(io.StringIO(to_csv(rows)))
    assert (read["variant"], float(read["em"])) == ("baseline", 0.25)


def test_the_page_needs_no_network_and_escapes() -> None:
    titled = {"realm": {"title": "<b>REALM</b>", "uses": "a & b"}, "stale_30x": {"title": "B", "uses": "words"}}
    outcomes = [*OUTCOMES[:2], *(replace(one, variant="stale_30x") for one in OUTCOMES[2:])]
    rows = table_rows(outcomes, titled)
    assert utility_chart(rows, outcomes)
    assert staleness_chart(rows)
    assert staleness_chart(rows[:1]) == ""
    text = render_report(rows, outcomes, 2)
    assert text.count("&lt;b&gt;REALM") == 6  # in the table, in the note, in the legend and three points of a chart
    assert "a &amp; b" in text
    assert "2 seeds; each has its own sample world" in text
    assert "mean staleness of the index, steps" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


# Trained


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, mlflow_database: Path) -> Path:
    folder = tmp_path_factory.mktemp("ablated")
    small_project.write_project(folder, tracking={"enabled": True})
    (folder / "nothing.yaml").write_text("{}\n")
    tracking = tracking_folder(folder / "out")
    tracking.mkdir(parents=True)
    shutil.copy(mlflow_database, tracking / "mlflow.db")
    return folder


def words_of(project: Path, *more: str | Path) -> list[str | Path]:
    return ["ablate", "--params", project / "params.yaml", "--preset", project / "nothing.yaml", *more]


def ablate(project: Path, *more: str | Path) -> tuple[int, str, str]:
    with small_project.forked_builders():
        done = small_project.cli(*words_of(project, "--out", project / "out", *more))
    return done.exit_code, done.stdout, done.stderr


CHOSEN = ("--variant", "realm", "--variant", "baseline", "--variant", "random_token")


def test_a_table_of_the_user_is_not_replaced(project: Path, tmp_path: Path) -> None:
    (tmp_path / "table.md").write_text("mine")
    refused = small_project.cli(*words_of(project, "--out", tmp_path))
    assert (refused.exit_code, os.listdir(tmp_path)) == (2, ["table.md"])
    assert f"{tmp_path} has a file table.md and no ablation; set another --out" in refused.stderr


def test_stages_that_variants_share_are_trained_once(project: Path) -> None:
    status, printed, told = ablate(project, *CHOSEN)
    assert status == 0, told
    assert printed.splitlines()[2].startswith("| REALM | ")
    out = project / "out"
    made = sorted(path.name.rpartition("-")[0] for path in (out / "store").iterdir())
    once, twice, each = ["ict", "snapshot", "tag"], ["pretrain"], ["evaluate", "finetune"]
    assert made == sorted(once + 2 * twice + 3 * each)
    for variant in ("realm", "baseline", "random_token"):
        root = out / variant / "seed-0"
        assert all((root / STAGES[name].folder / "metrics.json").is_file() for name in made)
    same = [(out / name / "seed-0/models/pretrain").resolve() for name in ("realm", "baseline", "random_token")]
    assert same[0] == same[1] != same[2]
    baseline = json.loads((out / "baseline/seed-0/models/finetune/manifest.json").read_text())
    assert baseline["sections"]["finetune"]["retriever"] == "ict"
    assert (out / "table.md").read_text() in printed
    assert f"ui --backend-store-uri sqlite:///{out}/.realmops/mlflow/mlflow.db" in printed
    assert (out / "report.html").stat().st_size
    assert (out / "table.csv").read_text().count("\n") == 4


def mlflow_runs(project: Path) -> dict[str, Run]:
    """The runs as MLflow gives them, by name."""
    client = mlflow_client(local_tracking_uri(tracking_folder(project / "out")))
    return {run.info.run_name.partition(" corpus ")[0]: run for run in client.search_runs(["1"])}


def points(project: Path) -> list[tuple[str, str, float, int, int]]:
    with contextlib.closing(sqlite3.connect(tracking_folder(project / "out") / "mlflow.db")) as connection:
        return sorted(connection.execute("SELECT run_uuid, key, value, timestamp, step FROM metrics").fetchall())


def test_mlflow_has_the_datasets_and_the_tables_of_each_variant(project: Path) -> None:
    runs = mlflow_runs(project)
    parent, realm, baseline = (runs[name] for name in ("ablation", "realm seed 0", "baseline seed 0"))
    view = project / "out" / "realm" / "seed-0"
    corpus = json.loads((view / "data/snapshot/corpus/manifest.json").read_text())["corpus_hash"]
    questions = hashlib.sha256((project / "questions.test.jsonl").read_bytes()).hexdigest()
    for run in (realm, baseline):
        read = {found.dataset.name: found.dataset.digest for found in run.inputs.dataset_inputs}
        assert (read["corpus"], read["questions.test"]) == (corpus[:36], questions[:36])
        assert run.data.params["ablation.variant"] == run.data.tags["realmops.variant"]
        assert run.info.run_name == f"{run.data.tags['realmops.variant']} seed 0 corpus {corpus[:8]}"
    shown = Path(realm.info.artifact_uri.removeprefix("file://"))
    for name in ("predictions.parquet", "report.html"):
        assert (shown / name).read_bytes() == (view / "results" / name).read_bytes()
    assert parent.data.metrics == {name: realm.data.metrics[name] for name in parent.data.metrics}
    assert {"em", "recall_at_5", "zero_shot_recall_at_5", "index_staleness_steps"} <= parent.data.metrics.keys()
    assert parent.data.tags["mlflow.note.content"] == (project / "out" / "table.md").read_text()
    pretrained = {"index_staleness_steps", "retrieval_utility", "p_null", "masked_accuracy", "pretrain/loss"}
    for run, expected in ((realm, pretrained), (baseline, set())):
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert run.data.metrics.keys() & pretrained == expected
    written = Path(parent.info.artifact_uri.removeprefix("file://"))
    for name in ("table.md", "table.csv", "report.html"):
        assert (written / name).read_bytes() == (project / "out" / name).read_bytes()


def test_a_second_call_trains_nothing_but_a_lost_stage(project: Path) -> None:
    store = project / "out" / "store"
    made = {path: path.stat().st_mtime_ns for path in store.glob("*/log.txt")}
    table = (project / "out" / "table.csv").read_bytes()
    sent = points(project)
    for words in (["init"], ["add", "params.yaml"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "a"]):
        subprocess.run(["git", "-C", str(project), *words], check=True, stdout=subprocess.DEVNULL)
    assert ablate(project, *CHOSEN)[0] == 0
    assert {path: path.stat().st_mtime_ns for path in store.glob("*/log.txt")} == made
    assert points(project) == sent
    assert {run.info.status for run in mlflow_runs(project).values()} == {"FINISHED"}
    assert ablate(project, "--variant", "baseline")[:2] == (
        0, f"no table: the reference realm did not complete; metrics are in the runs in {project / 'out'}\n"
    )  # fmt: skip
    lost = (project / "out" / "random_token" / "seed-0" / "results").resolve()
    shutil.rmtree(lost)
    assert ablate(project, *CHOSEN)[0] == 0
    again = {path for path in made if path.stat().st_mtime_ns != made[path]}
    assert again == {lost.parent / "log.txt"}
    assert (project / "out" / "table.csv").read_bytes() == table


def test_ctrl_c_ends_all_jobs(project: Path, tmp_path: Path) -> None:
    """A terminal sends SIGINT to the whole process group."""
    words = words_of(project, "--out", tmp_path, "--variant", "realm", "--seeds", "2", "--jobs", "2")
    reset = "import os, signal, sys; signal.signal(2, signal.default_int_handler); os.execv(sys.argv[1], sys.argv[1:])"
    process = subprocess.Popen(
        [sys.executable, "-c", reset, *small_project.command(*words)],
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    small_project.wait_for(lambda: process.poll() is not None or [*tmp_path.glob("store/*/log.txt")], 60)
    os.killpg(process.pid, signal.SIGINT)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 130, printed
    assert printed.splitlines()[-1].startswith("realmops: stopped; run the same command again")
    assert "Traceback" not in printed
    small_project.wait_for(lambda: not small_project.group_exists(process.pid), 10)  # a tracker of Python ends last


def test_a_failed_variant_is_named_and_the_others_continue(project: Path) -> None:
    preset = project / "presets" / "ablations" / "per_token.yaml"
    preset.parent.mkdir(parents=True)
    preset.write_text("pretrain: {marginal: per_token, masked_sentences: 6, builder: external, builder_timeout: 1}\n")
    status, printed, told = ablate(project, *CHOSEN, "--variant", "per_token")
    assert status == 1
    assert "per_token, seed 0: the stage pretrain is not complete" in told
    assert "TimeoutError: " in told
    assert "| REALM | " in printed
    assert "per token" not in printed
