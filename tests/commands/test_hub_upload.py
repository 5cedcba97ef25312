"""``realmops export --push``: what is on the hub afterwards, and what is refused before anything is sent."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from hub_server import TOKEN, Hub, Repository, running_hub
from huggingface_hub import EvalResult, ModelCard
from serving import tuned
from small_project import cli
from small_readers import write_reader

from realmops import artifacts
from realmops.evaluate.model_index import reader_results, retriever_results

NAME = "ann/towns"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with running_hub(tmp_path / "hub") as running:
        yield running


def push(folder: Path, project: Path, *options: str, name: str = NAME) -> Result:
    return cli("export", folder, "--root", project / "root", "--push", name, *options)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def evaluated(project: Path) -> dict[str, Any]:
    metrics: dict[str, Any] = json.loads((project / "root/results/metrics.json").read_text())
    return metrics


def figures(repository: Repository) -> dict[str, EvalResult]:
    """The model-index of a card, by type of metric, as huggingface_hub reads it."""
    results = ModelCard(repository.files["README.md"].decode()).data.eval_results or []
    return {result.metric_type: result for result in results}


@pytest.mark.parametrize("format", ["sentence-transformers", "onnx"])
def test_a_push_makes_a_private_repository_of_the_folder_with_measured_figures(
    format: str, hub: Hub, answering: Path, tmp_path: Path
) -> None:
    result = push(tmp_path / "out", answering, "--format", format)
    assert result.exit_code == 0, result.output
    repository = hub.repositories[NAME]
    assert repository.visibility == "private"
    assert f"{hub.url}/{NAME}/commit/{repository.sha}: uploaded to {NAME}" in result.stdout
    assert repository.files == {".gitattributes": b""} | contents(tmp_path / "out")
    assert len(repository.commits) == 2
    results, metrics = figures(repository), evaluated(answering)
    assert [*results] == ["recall_at_1", "recall_at_5", "recall_at_20"]
    for kind, row in results.items():
        assert row.metric_value == round(metrics[f"{kind}_token_boundary"], 4)
        assert (row.dataset_name, row.dataset_split) == ("questions.test.jsonl", "test")
        assert row.dataset_args == {"questions": metrics["questions"]}
    text = repository.files["README.md"].decode()
    assert f"hf download {NAME} --local-dir FOLDER" in text if format == "onnx" else f'("{NAME}")' in text
    assert TOKEN not in text
    assert TOKEN not in result.output


def test_a_reader_is_pushed_with_exact_match_and_f1(hub: Hub, trained: Path, tmp_path: Path) -> None:
    project = Path(shutil.copytree(trained, tmp_path / "project"))
    init = {"init": str(write_reader(tmp_path / "init", "bert"))}
    tuned(project, reader=init, finetune={"epochs": 0.0}, pretrain={"steps": 0}, ict={"reader_steps": 0})
    result = push(tmp_path / "out", project, "--format", "reader")
    assert result.exit_code == 0, result.output
    repository, metrics = hub.repositories[NAME], evaluated(project)
    assert repository.files == {".gitattributes": b""} | contents(tmp_path / "out")
    values = {kind: row.metric_value for kind, row in figures(repository).items()}
    assert values == {"exact_match": round(metrics["em"], 4), "f1": round(metrics["f1"], 4)}
    text = repository.files["README.md"].decode()
    assert f'from_pretrained("{NAME}")' in text
    assert str(tmp_path) not in text


def test_a_later_push_replaces_the_files_and_keeps_licence_and_files_of_people(
    hub: Hub, answering: Path, tmp_path: Path
) -> None:
    card = b"---\nlicense: apache-2.0\n---\n"
    hub.repositories[NAME] = Repository("public", {".gitattributes": b"", "README.md": card, "LICENSE": b"Apache"})
    assert push(tmp_path / "first", answering, "--format", "onnx").exit_code == 0
    repository = hub.repositories[NAME]
    repository.files["photo.txt"] = b"of the towns"
    assert [name for name in repository.files if name.endswith(".onnx")]
    result = push(tmp_path / "second", answering)
    assert result.exit_code == 0, result.output
    of_people = {".gitattributes": b"", "LICENSE": b"Apache", "photo.txt": b"of the towns"}
    assert repository.files == of_people | contents(tmp_path / "second")
    _, front, text = repository.files["README.md"].decode().split("---\n", 2)
    assert yaml.safe_load(front)["license"] == "apache-2.0"
    assert "Unknown to realmops" not in text
    assert repository.visibility == "public"
    artifacts.read_manifest(tmp_path / "second", "export")
    assert push(tmp_path / "second", answering).exit_code == 0
    assert len(repository.commits) == 3, "nothing changed"


@pytest.mark.parametrize("manifest", [None, b"{}", b"[1]"])
def test_a_repository_with_files_of_others_is_left_alone(
    manifest: bytes | None, hub: Hub, answering: Path, tmp_path: Path
) -> None:
    theirs = {"config.json": b"{}"} | ({"manifest.json": manifest} if manifest else {})
    hub.repositories[NAME] = Repository("public", dict(theirs))
    result = push(tmp_path / "out", answering)
    assert result.exit_code == 2
    assert "the repository has config.json, which 'realmops export' did not write" in result.stderr
    assert not hub.writes
    assert hub.repositories[NAME].files == theirs


def test_what_the_hub_refuses_is_reported_and_the_folder_stays(
    hub: Hub, answering: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = push(tmp_path / "out", answering, name="others/towns")
    assert result.exit_code == 2
    assert "403 Forbidden: You don't have the rights" in " ".join(result.stderr.split())
    assert f"hf upload others/towns {tmp_path / 'out'}" in " ".join(result.stderr.split())
    artifacts.read_manifest(tmp_path / "out", "export")
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    result = push(tmp_path / "other", answering)
    assert result.exit_code == 2
    assert "Invalid credentials" in result.stderr
    assert "hf_expired" not in result.output
    assert not (tmp_path / "other").exists()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in push(tmp_path / "other", answering).stderr
    assert not hub.repositories


def test_figures_of_another_model_are_left_out(copy: Path, tmp_path: Path) -> None:
    results = copy / "root/results"
    shutil.move(results, tmp_path / "results")
    tuned(copy, finetune={"reader_learning_rate": 3e-3})
    shutil.rmtree(results)
    shutil.move(tmp_path / "results", results)
    result = cli("export", tmp_path / "out", "--root", copy / "root")
    assert result.exit_code == 0, result.output
    assert "The card has no figures of 'evaluate'" in result.stdout
    text = (tmp_path / "out/README.md").read_text()
    assert "model-index" not in text
    assert "EM (test questions)" not in text


def test_an_index_has_the_figures_of_this_retriever_and_of_people() -> None:
    metrics = {"questions": 40, "generated_questions": 10, "em": 0.5, "f1": 0.625, "em_low": 0.375, "em_high": 0.75}
    for k in (1, 5, 20):
        metrics |= {f"{prefix}recall_at_{k}_token_boundary": k / 64 for prefix in ("dense_", "")}
        metrics[f"dense_recall_at_{k}_token_boundary"] += 0.5
    metrics |= {"dense_recall_at_5_token_boundary_low": 0.5, "dense_recall_at_5_token_boundary_high": 0.75}
    results = retriever_results("test.jsonl", metrics, "dense_")
    assert {row.dataset_name for row in results} == {"test.jsonl (10 of 40 questions generated from the documents)"}
    assert [row.metric_value for row in results] == [0.5156, 0.5781, 0.8125]
    assert results[1].metric_args == {"interval_95": [0.5, 0.75]}
    results = reader_results("test.jsonl", metrics)
    assert {row.dataset_args["questions"] for row in results} == {30}, "generated questions measure retrieval only"
    assert [row.metric_value for row in results] == [0.5, 0.625]
    assert retriever_results("test.jsonl", metrics, "zero_shot_") == []
    judged = {"questions": 7, "judged_questions": 6, "ndcg_at_10": 0.625, "ndcg_at_10_low": 0.5, "ndcg_at_10_high": 1.0}
    judged |= {"recall_at_5_judged": 0.75, "recall_at_5_judged_low": 0.5, "recall_at_5_judged_high": 1.0}
    results = retriever_results("test.tsv", judged, "")
    assert [(row.metric_type, row.metric_value) for row in results] == [("ndcg_at_10", 0.625), ("recall_at_5", 0.75)]
    assert results[0].dataset_args == {"questions": 6}
    assert reader_results("test.jsonl", {"questions": 40}) == []
