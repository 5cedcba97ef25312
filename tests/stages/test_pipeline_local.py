"""The whole chain on one machine: run, run again, changed, killed, and each option that takes another way."""

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lives
import pyarrow.parquet as pq
import pytest
import small_project
import torch
from forked import Forked, run_program
from small_project import (
    Quiet,
    builder_beside,
    cli,
    command,
    journal,
    litter,
    model_files,
    model_tensors,
    run_command,
    stage,
    toy_values,
    wait_for,
    without_clock,
    write_project,
)
from small_world import PARAMS
from torch import Tensor

from realmops.artifacts import read_manifest
from realmops.baselines.links import LinkedBm25, PassageLinks
from realmops.baselines.tfidf import TfIdf
from realmops.config import load_params
from realmops.corpus.snapshot_reader import Snapshot
from realmops.evaluate.predictions import read_predictions
from realmops.evaluate.recall import first_hit_ranks
from realmops.model.reader_files import load_models
from realmops.options import Options
from realmops.questions.question_sets import Question
from realmops.refresh import child_processes
from realmops.search.bm25 import Bm25, rank, titled_texts
from realmops.search.embed import embed, query_sequences
from realmops.search.embeddings import embed_corpus, load_index
from realmops.stages import HEADLINE_METRICS, STAGES, Job, fingerprint, ict
from realmops.stages.common import question_queries
from realmops.stages.runner import stage_inputs

HERE = Path(__file__).parents[1]
# What other stages, the report and people compare runs by; recall@k comes under both match rules.
METRICS = {
    "sample": {"documents", "facts", "questions", "relations", "subjects", "warmup_documents", "ner_sentences"},
    "snapshot": {"documents", "passages", "sentences", "tokens", "vocabulary", "warmup_passages"},
    "tag": {"f1", "f1_PER", "spans", "spans_dropped", "warmup_spans"},
    "ict": {"accuracy_removed", "accuracy_kept", "reader_loss"},
    "pretrain": {
        "loss", "retrieval_utility", "retrieval_utility_top", "retrieval_utility_best", "marginal_gain", "p_null",
        "recall_at_5_before", "recall_at_5_after", "hit_at_5_before", "hit_at_5_after", "refreshes",
        "index_staleness_steps", "index_staleness_seconds", "top_k_change", "wait_share", "collapsed",
        "masked_log_p", "masked_accuracy", "masked_log_p_without", "masked_accuracy_without",
    },
    "finetune": {
        "dev_em", "dev_f1", "dev_ece", "dev_precision_at_30", "dev_answered", "span_loss", "early_loss",
        "no_correct_span", "questions",
    },
    "evaluate": {
        "em", "em_low", "em_high", "f1", "f1_low", "f1_high", "closed_book_em", "questions", "recall_at_5",
        "ece", "ece_uncalibrated", "ece_if_perfect", "precision_at_30", "precision_at_30_low", "answered",
        *(f"{name}_{measure}" for name in ("bm25", "rule") for measure in ("em", "em_low", "f1", "f1_high")),
        "ceiling_in_corpus", "ceiling_short_answer", "ceiling_in_top_5",
        "ceiling_passages", "ceiling_wordpieces",
        *(f"{when}recall_at_{k}_{rule}" for when in ("", "before_realm_", "zero_shot_", "bm25_")
          for k in (1, 5, 20, 100) for rule in ("substring", "token_boundary")),
    },
}  # fmt: skip


FP32 = torch.float32
TEST = [Question(f"test-{n}", asked, (answer,)) for n, (asked, answer) in enumerate(small_project.QUESTIONS["test"])]


def settings(values: Mapping[str, Mapping[str, Any]]) -> list[str]:
    pairs = [f"{section}.{key}={value}" for section, keys in values.items() for key, value in keys.items()]
    return [word for pair in pairs for word in ("--set", pair)]


# The sample corpus with everything on, by the command line as people call it
EMBEDDED = {name: keys for name, keys in small_project.SMALL.items() if name not in ("snapshot", "questions", "tag")}
EMBEDDED |= {"tag": {"steps": 10}, "bert": {**small_project.SMALL["bert"], "vocabulary": 600}}
EMBEDDED |= {"pretrain": {**small_project.SMALL["pretrain"], "shard_rows": 200, "retriever_delay": 0}}


def run_embedded(root: Path) -> subprocess.CompletedProcess[str]:
    return run_command("run", "all", "--params", PARAMS, "--root", root, *settings(EMBEDDED))


def embedded(root: Path, name: str, *more: str) -> str:
    """Run a stage in this process; what it printed."""
    result = cli("run", name, "--params", PARAMS, "--root", root, *settings(EMBEDDED), *more)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("embedded")
    process = run_embedded(root)
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == list(STAGES)
    for line, one in zip(lines, STAGES.values(), strict=True):
        assert f"seconds={json.loads((root / one.folder / 'metrics.json').read_text())['seconds']:.4g}" in line
    return root


@pytest.mark.parametrize("name", STAGES)
def test_each_stage_leaves_a_whole_folder_with_its_metrics(finished: Path, name: str) -> None:
    folder = finished / STAGES[name].folder
    manifest = read_manifest(folder, name)
    one = STAGES[name]
    assert set(manifest["sections"]) == {*one.sections, *(key.partition(".")[0] for key in one.options)}
    for section, _, option in (key.partition(".") for key in one.options):
        assert option in manifest["sections"][section]
        assert len(manifest["sections"][section]) == sum(key.startswith(f"{section}.") for key in one.options)
    metrics = json.loads((folder / "metrics.json").read_text())
    assert METRICS[name] <= set(metrics), METRICS[name] - set(metrics)
    assert all(math.isfinite(v) for v in metrics.values() if isinstance(v, float))


def test_a_finished_run_leaves_nothing_else(finished: Path) -> None:
    assert litter(finished) == []
    assert sorted(p.name for p in finished.iterdir()) == [".realmops", "data", "models", "results"]
    assert list((finished / ".realmops" / "work").iterdir()) == []


def test_pretraining_refreshes_its_index_while_it_runs(finished: Path) -> None:
    lines = journal(finished / "models/pretrain")
    assert [line["step"] for line in lines] == list(range(12))
    assert [line["step"] for line in lines if "refreshed" in line] == [0, 6, 10]  # published at 0, 4, 8; lag 2
    assert [line["staleness_steps"] for line in lines] == [0, 1, 2, 3, 4, 5, 2, 3, 4, 5, 2, 3]
    assert json.loads((finished / "models/pretrain/metrics.json").read_text())["refreshes"] == 2


def test_evaluate_can_do_without_bm25(finished: Path, tmp_path: Path) -> None:
    for name in ("data", "models"):
        (tmp_path / name).symlink_to(finished / name)
    (tmp_path / "lean.yaml").write_text("evaluate: {bm25: false}\n")
    embedded(tmp_path, "evaluate", "--preset", str(tmp_path / "lean.yaml"))
    without, beside = (json.loads((root / "results/metrics.json").read_text()) for root in (tmp_path, finished))
    assert not [name for name in without if name.startswith(("bm25", "rule"))]
    assert without["em"] == beside["em"]
    said = f"presets {tmp_path / 'lean.yaml'}"
    assert said in (tmp_path / "results/report.html").read_text(), "the page names them"
    assert said.replace("presets", "Presets: ") in " ".join(cli("report", "--root", tmp_path).output.split("\n"))
    assert read_manifest(tmp_path / "results", "evaluate")["presets"] == [str(tmp_path / "lean.yaml")]


def times(root: Path) -> dict[Path, int]:
    return {p: p.stat().st_mtime_ns for p in root.rglob("*") if p.is_file()}


def test_a_second_run_does_nothing(finished: Path) -> None:
    before = times(finished)
    process = run_embedded(finished)
    assert process.returncode == 0, process.stderr
    assert process.stderr.count("nothing to do") == len(STAGES)
    assert times(finished) == before


def test_a_stage_of_a_new_version_runs_again(tmp_path: Path) -> None:
    values, root = load_params(write_project(tmp_path)), tmp_path / "root"
    snapshot = STAGES["snapshot"]
    inputs = stage_inputs(snapshot, values, tmp_path, root)
    keys = {fingerprint(replace(snapshot, version=version), values, inputs) for version in (1, 2, 3)}
    assert len(keys) == 3


def test_force_runs_again_and_gives_the_same(finished: Path) -> None:
    corpus = finished / "data/sample/corpus.jsonl.gz"
    before = corpus.read_bytes(), corpus.stat().st_mtime_ns
    assert "nothing to do" not in embedded(finished, "sample", "--force")
    assert corpus.read_bytes() == before[0]
    assert corpus.stat().st_mtime_ns != before[1]
    assert "nothing to do" in embedded(finished, "snapshot")  # its input has the same content


@pytest.mark.parametrize(
    ("setting", "again"),
    [
        ("tracking.experiment=other", []),
        ("finetune.epochs=1", ["finetune", "evaluate"]),
        ("optimiser.ramp_share=0.5", ["tag", "ict", "pretrain", "finetune"]),
        ("sample.seed=1", ["sample"]),
        ("questions.train=data/sample/questions.dev.jsonl.gz", ["finetune", "evaluate"]),
        ("questions.dev=data/sample/questions.test.jsonl.gz", ["pretrain", "finetune"]),
        ("questions.test=data/sample/questions.dev.jsonl.gz", ["evaluate"]),
    ],
)
def test_a_changed_option_runs_again_what_it_touches(
    finished: Path, monkeypatch: pytest.MonkeyPatch, setting: str, again: list[str]
) -> None:
    """Only asked, not done: a stage that would run raises, and what comes after it reads its old output."""

    class Runs(Exception):
        pass

    def refuse(*_: Any) -> Any:
        raise Runs

    monkeypatch.setattr("realmops.stages.Stage.run", refuse)
    started = []
    for name in STAGES:
        try:
            embedded(finished, name, "--set", setting)
        except Runs:
            started.append(name)
    assert started == again


# Options that take another way, on the documents of ``small_world``; the index builder is a forked process


@pytest.fixture(scope="module")
def project(trained: Path) -> Path:
    """A project whose stages up to ict are done, in its folder ``root``."""
    return trained


def pretrain_beside(project: Path, root: Path, options: Options, report: Quiet | None = None) -> dict[str, Any]:
    options = options.replace({"pretrain.builder": "external", "pretrain.exchange": str(root / "exchange")})
    with builder_beside(root / "exchange", root / "data/snapshot/corpus"):
        return stage("pretrain", options, project, root, report)


def test_another_text_than_the_corpus_can_be_masked(project: Path, tmp_path: Path) -> None:
    """The paper's CC-News setting: X is masked, Z is read."""
    news = [{"title": "News", "text": f"The mayor of {town} spoke in 1961."} for town in ("Oslo", "Bergen", "Fjell")]
    small_project.write_json_lines(tmp_path / "news.jsonl", news)
    root = tmp_path / "root"
    changes = {"snapshot": {"warmup": str(tmp_path / "news.jsonl")}, "tag": {"method": "dates"}}
    values = toy_values(**changes, pretrain={"examples": "warmup", "masked_sentences": 3})
    for name in ("snapshot", "tag", "ict"):
        stage(name, values, project, root)
    metrics = pretrain_beside(project, root, values)
    assert metrics["dropped_own"] == 0
    assert metrics["hit_at_5_after"] == 0, "no passage of the corpus holds 1961"


def copy_of(project: Path, root: Path, *folders: str) -> Path:
    for folder in folders:
        shutil.copytree(project / "root" / folder, root / folder)
    return root


@pytest.fixture(scope="module")
def usual(project: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The journal of a run with the options of ``small_project``."""
    root = copy_of(project, tmp_path_factory.mktemp("usual"), "data", "models/ict")
    pretrain_beside(project, root, toy_values())
    return without_clock(journal(root / "models/pretrain"))


@pytest.mark.parametrize(
    "change",
    [
        {"marginal": "per_token"},
        {"masking": "matched_span"},
        {"null_document": False},
        {"exclude_trivial": False},
        {"lag": "auto", "retriever_delay": 0},
        {"retriever_delay": 0, "query_encoder": "fresh", "retriever_learning_rate": 0.05},
    ],
    ids=lambda change: ",".join(f"{k}={v}" for k, v in change.items()),
)
def test_an_option_of_pretraining_runs_and_has_an_effect(
    project: Path, tmp_path: Path, usual: list[dict[str, Any]], change: dict[str, Any]
) -> None:
    root = copy_of(project, tmp_path, "data", "models/ict")
    metrics = pretrain_beside(project, root, toy_values(pretrain=change))
    lines = without_clock(journal(root / "models/pretrain"))
    assert [line["step"] for line in lines] == list(range(12))
    assert all(math.isfinite(line["loss"]) for line in lines)
    assert lines != usual
    assert ("p_null" in metrics) == change.get("null_document", True)


def test_a_retriever_that_no_step_trains_is_warned_of(project: Path, tmp_path: Path) -> None:
    root, report = copy_of(project, tmp_path, "data", "models/ict"), Quiet()
    pretrain_beside(project, root, toy_values(pretrain={"retriever_delay": 12}), report)
    [line] = [line for line in report.warned if "the retriever is not trained" in line]
    assert "pretrain.steps is 12, and the first pretrain.retriever_delay=12 steps" in line


def test_the_alarm_of_a_collapsed_retriever_is_heard(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("realmops.train.pretraining.COLLAPSE_SHARE", 0.01)
    report = Quiet()
    root = copy_of(project, tmp_path, "data", "models/ict")
    change = {"steps": 51, "refresh_every": 50}
    metrics = pretrain_beside(project, root, toy_values(pretrain=change), report)
    assert metrics["collapsed"] == 1.0
    assert [line["collapsed"] for line in journal(root / "models/pretrain")] == [0.0] * 49 + [1.0] * 2
    assert len(report.warned) == 1  # once, not at every step
    assert "step 49: the retriever has collapsed" in report.warned[0]


@pytest.mark.parametrize(
    "change",
    [
        {"head": "paper"},
        {"head": "release"},
        {"tower": "bag", "head": "cosine"},
        {"projection": "identity", "embedding_width": 16, "head": "cosine"},
    ],
    ids=lambda value: str(value),
)
def test_a_retriever_of_another_form_goes_through_all_stages(
    project: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    root = copy_of(project, tmp_path, "data")
    values = toy_values(retriever=change)
    stage("ict", values, project, root)
    pretrain_beside(project, root, values)
    stage("finetune", values, project, root)
    stage("evaluate", values, project, root)
    described = json.loads((root / "models/pretrain/retriever/realmops.json").read_text())
    assert {key: described[key] for key in change} == change


def test_stages_without_steps_keep_their_models(project: Path, tmp_path: Path) -> None:
    """Full scale starts the reader as BERT: ``ict.reader_steps`` is 0 in the preset ``paper``."""
    root = copy_of(project, tmp_path, "data/snapshot")  # and no spans, which nothing reads
    values = toy_values(ict={"steps": 0, "reader_steps": 0}, pretrain={"steps": 0}, finetune={"epochs": 0})
    assert "reader_loss" not in stage("ict", values, project, root)  # no step, no loss: left out, not NaN
    assert stage("pretrain", values, project, root).keys() == {"seconds"}, "nothing is measured"
    assert model_files(root / "models/ict") == model_files(root / "models/pretrain")
    stage("finetune", values, project, root)
    assert "em" in stage("evaluate", values, project, root)


def test_fine_tuning_starts_from_the_chosen_models(project: Path, tmp_path: Path) -> None:
    """ORQA, REALM without its retriever or its reader, and REALM: with no step taken, the start is what is saved."""
    root = copy_of(project, tmp_path, "data", "models/ict")
    pretrain_beside(project, root, toy_values(pretrain={"retriever_delay": 0}))
    words = "embeddings.word_embeddings.weight"

    def vectors(name: str) -> list[Tensor]:
        models = root / "models" / name
        query = model_tensors(models, "retriever")
        shared = f"retriever/{words}"
        tower = query[shared if shared in query else f"retriever/query_0_Transformer/{words}"]
        return [model_tensors(models, "reader")[f"reader/bert.{words}"], tower]

    starts = {name: vectors(name) for name in ("ict", "pretrain")}
    assert not any(map(torch.equal, *starts.values()))
    for retriever in starts:
        for reader in starts:
            values = toy_values(finetune={"retriever": retriever, "reader": reader, "epochs": 0})
            stage("finetune", values, project, root)
            assert all(map(torch.equal, vectors("finetune"), (starts[reader][0], starts[retriever][1])))


@pytest.fixture(scope="module")
def warm(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose root holds everything that fine-tuning may start from."""
    folder = tmp_path_factory.mktemp("warm")
    pretrain_beside(project, copy_of(project, folder / "root", "data", "models/ict"), toy_values())
    return folder


@pytest.mark.parametrize("retriever", ["bm25", "tfidf", "graph", "path"])
def test_a_retriever_that_is_none_of_ours_is_read_from_training_to_answers(
    project: Path, warm: Path, tmp_path: Path, retriever: str
) -> None:
    root = copy_of(warm, tmp_path, "data", "models")
    values = toy_values(finetune={"retriever": retriever, "reader": "ict", "reader_candidates": 3})
    tuned = stage("finetune", values, project, root)
    measured = stage("evaluate", values, project, root)
    assert not (root / "models/finetune/index.safetensors").exists()
    snapshot = Snapshot.open(root / "data/snapshot/corpus")
    bm25 = Bm25.of(snapshot)
    words = {"bm25": bm25, "tfidf": TfIdf(titled_texts(snapshot)), "graph": LinkedBm25(bm25, PassageLinks(snapshot))}
    predictions = read_predictions(root / "results/predictions.parquet")
    if retriever in words:
        expected = rank(words[retriever], [p.question for p in predictions], 3)
        assert [p.passage_ids for p in predictions] == [tuple(map(snapshot.passage_id, row)) for row in expected]
    else:
        assert tuned["questions_with_path"] > 0
        steps = journal(root / "models/finetune")
        assert [line["step"] for line in steps] == list(range(len(steps)))
        assert "path_loss" in steps[0]
        assert "span_loss" in steps[-1]
    assert all(p.p_z == pytest.approx((1 / 3,) * 3) for p in predictions)
    assert (measured["recall_at_5"] == measured["bm25_recall_at_5_token_boundary"]) or retriever != "bm25"


def test_every_retriever_of_a_hybrid_is_measured_by_embeddings_and_with_words(project: Path, tmp_path: Path) -> None:
    """Against f(x, z) of every passage, added up here."""
    values = toy_values(retriever={"hybrid": True}, pretrain={"steps": 0, "builder": "external"})
    root = tmp_path / "root"
    for name in ("snapshot", "tag", "ict", "pretrain", "finetune"):
        stage(name, values, project, root)
    measured = stage("evaluate", values, project, root)
    before_tuning = (f"{when}{kind}" for when in ("before_realm_", "zero_shot_") for kind in ("", "hybrid_"))
    prefixes = ("", "dense_", "bm25_", *before_tuning)
    wanted = [
        f"{p}recall_at_{k}_token_boundary{end}" for p in prefixes for k in (1, 5, 20) for end in ("", "_low", "_high")
    ]
    assert set(wanted) <= set(measured)
    headline = json.loads((root / "results/headline.json").read_text())
    assert headline == {
        key: measured[key] for key in HEADLINE_METRICS["evaluate"] if key in measured.keys() - {"seconds"}
    }
    assert {"em", "f1", "recall_at_5"} <= headline.keys()
    hits = pq.read_table(root / "results/first_hits.parquet").to_pydict()
    assert set(hits) == {"question_id", *(f"{prefix}first_hit" for prefix in prefixes)}
    predictions = read_predictions(root / "results/predictions.parquet")
    assert hits["question_id"] == [p.question_id for p in predictions]
    assert hits["first_hit"] == [p.first_hit for p in predictions]
    assert measured["f1"] == pytest.approx(sum(p.f1 for p in predictions) / len(predictions))
    snapshot = Snapshot.open(root / "data/snapshot/corpus")
    bm25 = Bm25.of(snapshot)
    for name, prefix in (("ict", "before_realm_"), ("pretrain", "zero_shot_"), ("finetune", "")):
        folder = root / "models" / name
        retriever = load_models(folder, snapshot.vocabulary_hash)[0]
        assert retriever.mixture.lexical > 0
        embedding_PE = embed_corpus(retriever, snapshot, FP32) if prefix else load_index(folder, snapshot)
        query_QE = embed(retriever.query, query_sequences(question_queries(snapshot, TEST, 64)), FP32)
        dense_QP = retriever.scale * (query_QE @ embedding_PE.T)
        words_QP = torch.stack([torch.from_numpy(bm25.scores(question.question)) for question in TEST])
        both_QP = retriever.mixture.combine(dense_QP, words_QP / words_QP.max(dim=1, keepdim=True).values)
        columns = (prefix or "dense_", dense_QP), (f"{prefix}hybrid_" if prefix else "", both_QP)
        for column, score_QP in columns:
            ranked = score_QP.argsort(dim=1, descending=True).numpy()
            expected = first_hit_ranks(TEST, ranked, snapshot.text, rule="token_boundary")
            assert hits[f"{column}first_hit"] == expected.tolist(), (name, column)


def test_a_closed_book_answers_and_reads_nothing(project: Path, warm: Path, tmp_path: Path) -> None:
    root = copy_of(warm, tmp_path, "data", "models")
    book = {"steps": 3, "epochs": 2}
    values = toy_values(finetune={"reader": "t5"}, closed_book=book)
    tuned = stage("finetune", values, project, root)
    assert tuned["questions"] == len(small_project.QUESTIONS["train"])
    steps = journal(root / "models/finetune")
    assert [line["step"] for line in steps] == list(range(3 + 2))
    assert ["corrupted_loss" in line for line in steps] == [True] * 3 + [False] * 2
    measured = stage("evaluate", values, project, root)
    assert measured["recall_at_5"] == 0.0
    assert not {"ceiling_passages", "ceiling_in_top_5"} & measured.keys(), "it reads none"
    predictions = read_predictions(root / "results/predictions.parquet")
    assert all(p.passage_ids == () and p.evidence_rank == -1 and -math.inf < p.span_score < 0 for p in predictions)
    assert all(p.confidence is not None and 0 < p.confidence < 1 for p in predictions), "of the words that it said"
    shown = cli("explain", "--root", root)
    assert shown.exit_code == 0, shown.output
    params = small_project.write_params(tmp_path / "params.yaml", values)
    refused = cli("update", "--params", params, "--root", root)
    assert refused.exit_code == 2
    assert "finetune.reader is t5" in refused.output


def test_bert_without_retrieval_is_a_pretraining_like_any_other(project: Path, tmp_path: Path) -> None:
    report = Quiet()
    root = copy_of(project, tmp_path, "data", "models/ict")
    metrics = pretrain_beside(project, root, toy_values(pretrain={"candidates": 1}), report)
    assert metrics["masked_log_p"] == metrics["masked_log_p_without"] < 0.0
    assert not {"p_null", "retrieval_utility"} & set(metrics)
    assert report.warned == []


# Killed and started again


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(an undisturbed root, a root whose stages were killed again and again), with equal options."""
    folder = tmp_path_factory.mktemp("lives")
    write_project(folder)
    calm, killed = folder / "calm", folder / "killed"
    log = folder / "lives.log"
    assert Forked(partial(lives.main, folder, calm, killed), log=log).wait(280) == 0, log.read_text()
    undisturbed, disturbed = json.loads(log.read_text().splitlines()[-1])
    assert all(statuses == [0] for statuses in undisturbed.values()), undisturbed
    assert disturbed.pop("index-builder") == [0]
    for name, statuses in disturbed.items():
        assert set(statuses[:-1]) == {-signal.SIGKILL}, (name, statuses)
        assert statuses[-1] == 0, (name, statuses)
    assert len(disturbed["pretrain"]) > 4
    return calm, killed


def assert_same_files(first: Path, second: Path) -> None:
    names = sorted(p.relative_to(first) for p in first.rglob("*") if p.is_file())
    assert names == sorted(p.relative_to(second) for p in second.rglob("*") if p.is_file())
    have_times = {"metrics.json", "metrics.jsonl", "manifest.json", "report.html"}
    compared = [n for n in names if n.name not in have_times or n.parts[:-1]]
    assert compared
    for path in compared:
        assert (first / path).read_bytes() == (second / path).read_bytes(), path
    if (first / "metrics.jsonl").is_file():
        lines = journal(second)
        assert without_clock(lines) == without_clock(journal(first))
        assert [line["step"] for line in lines] == list(range(len(lines)))


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_killed_again_and_again_ends_with_the_same_bytes(lived: tuple[Path, Path], name: str) -> None:
    calm, killed = (root / STAGES[name].folder for root in lived)
    read_manifest(killed, name)
    assert_same_files(calm, killed)
    assert [p for p in litter(lived[1]) if lived[1] / "exchange" not in p.parents] == []
    assert list((lived[1] / ".realmops" / "work").iterdir()) == []


def test_all_stages_in_one_process_write_the_bytes_of_a_process_for_each(
    lived: tuple[Path, Path], tmp_path: Path
) -> None:
    torch.manual_seed(7)
    with small_project.forked_builders():
        done = cli("run", "all", "--params", lived[0].parent / "params.yaml", "--root", tmp_path)
    assert done.exit_code == 0, done.output
    for one in STAGES.values():
        if one.name != "sample":  # nothing reads it
            assert_same_files(lived[0] / one.folder, tmp_path / one.folder)


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="processes are found in /proc")
def test_ctrl_c_ends_all_stages_with_one_line_and_no_orphan(lived: tuple[Path, Path], tmp_path: Path) -> None:
    """A terminal sends SIGINT to the whole process group, with the index builder."""
    project, root = lived[0].parent, tmp_path / "root"
    for folder in ("data", "models/ict"):
        shutil.copytree(lived[0] / folder, root / folder)
    words = command("run", "all", "--params", project / "params.yaml", "--root", root, "--set", "pretrain.steps=5000")
    reset = "import os, signal, sys; signal.signal(2, signal.default_int_handler); os.execv(sys.argv[1], sys.argv[1:])"
    words = [sys.executable, "-c", reset, *words]  # a job in the background ignores SIGINT
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, start_new_session=True)
    steps = root / ".realmops/work"
    wait_for(lambda: process.poll() is not None or any(p.stat().st_size for p in steps.glob("pre*/metrics.jsonl")), 60)
    assert builders(root)
    os.killpg(process.pid, signal.SIGINT)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 130
    lines = [line for line in printed.splitlines() if "nothing to do" not in line]
    assert lines[-1].startswith("realmops: stopped; run the same command again"), printed
    assert not [line for line in lines if "Traceback" in line or line.startswith(" ")], printed
    wait_for(lambda: not small_project.group_exists(process.pid), 10)  # a tracker of Python's pools ends last
    assert litter(root) == []


def test_a_stage_runs_in_one_process_at_a_time(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when only ``dvc`` was killed and is started again while its stage goes on."""
    root = copy_of(project, tmp_path, "data")
    usual = ict.run
    refusals: list[str] = []

    def run_with_another(job: Job) -> dict[str, Any]:
        for force in ((), ("--force",)):
            words = ["--params", project / "params.yaml", "--root", root]
            refusals.append(cli("run", "ict", *words, *force).stderr)
        return usual(job)

    monkeypatch.setattr(ict, "run", run_with_another)
    stage("ict", toy_values(), project, root)
    assert len(refusals) == 2
    for told in refusals:
        assert "another process runs the stage ict; wait for it, or end it, and run again" in told
    assert model_files(root / "models/ict") == model_files(project / "root/models/ict")


def builders(root: Path) -> list[int]:
    """Ids of the index builders that serve an exchange under this root."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            if b"index-builder" in words and any(str(root).encode() in word for word in words) and state != "Z":
                found.append(int(folder.name))
    return found


def run_with_started_builder(words: list[str]) -> None:
    """A process of the command line whose index builder starts as a user's."""
    child_processes.subprocess = subprocess  # type: ignore[attr-defined]
    run_program("realmops", words)


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="processes are found in /proc")
def test_trainer_and_its_child_builder_end_together_or_go_on(lived: tuple[Path, Path], tmp_path: Path) -> None:
    """SIGTERM, SIGKILL in the middle; at last the builder alone is killed."""
    root = tmp_path / "root"
    shutil.copytree(lived[0] / "data", root / "data")
    shutil.copytree(lived[0] / "models/ict", root / "models/ict")
    write_project(tmp_path)
    words = ["run", "pretrain", "--params", str(tmp_path / "params.yaml"), "--root", str(root)]
    log = tmp_path / "log.txt"

    def start_trainer() -> Forked:
        return Forked(partial(run_with_started_builder, words), log=log)

    def await_while_alive(what: Callable[[], Any], trainer: Forked) -> Any:
        found = wait_for(lambda: what() or trainer.poll() is not None, 60)
        assert found is not True, log.read_text()
        return found

    def versions(kind: str) -> list[Path]:
        return list((root / ".realmops" / "work").glob(f"*/exchange/{kind}/v-*"))

    trainer = start_trainer()
    await_while_alive(lambda: versions("indexes"), trainer)
    trainer.terminate()
    assert trainer.wait() == 128 + signal.SIGTERM, log.read_text()
    wait_for(lambda: not builders(root), 60)
    assert not (root / "models/pretrain").exists()
    assert litter(root) == []

    trainer = start_trainer()
    await_while_alive(lambda: versions("checkpoints"), trainer)
    trainer.kill()
    wait_for(lambda: not builders(root), 60)

    trainer = start_trainer()
    os.kill(await_while_alive(lambda: builders(root), trainer)[0], signal.SIGKILL)
    assert trainer.wait() == 0, log.read_text()
    assert not builders(root)
    assert model_files(root / "models/pretrain") == model_files(lived[0] / "models/pretrain")
    steps = [line["step"] for line in journal(root / "models/pretrain")]
    assert steps == list(range(12))
    assert litter(root) == []
