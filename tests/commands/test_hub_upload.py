"""``realmops export --push``: uploads to the hub, and refusals before anything is sent."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import Result
from huggingface_hub import ModelCard
from huggingface_hub.errors import RepositoryNotFoundError
from serving import tuned
from small_project import cli

from realmops import artifacts
from realmops.evaluate.model_index import reader_results, retriever_results

NAME, TOKEN = "ann/towns", "hf_of_the_test"


class Hub:
    """The methods of ``HfApi`` that an export calls, over files of repositories in memory."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.commits = 0
        self.token = ""

    def __call__(self, *, token: str, **_: str) -> Hub:
        self.token = token
        return self

    def model_info(self, name: str) -> SimpleNamespace:
        if self.token != TOKEN:
            raise OSError(f"Invalid credentials: http://user:{self.token}@hub")
        if name not in self.repositories:
            response = SimpleNamespace(headers={}, request=None)
            raise RepositoryNotFoundError("not found", response=response)  # type: ignore[arg-type]
        files = self.repositories[name]
        siblings = [SimpleNamespace(rfilename=file) for file in files]
        return SimpleNamespace(siblings=siblings, card_data=card(files).data if "README.md" in files else None)

    def hf_hub_download(self, name: str, file: str, local_dir: str) -> str:
        path = Path(local_dir) / file
        path.write_bytes(self.repositories[name][file])
        return str(path)

    def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> None:
        assert private
        assert exist_ok
        if not name.startswith("ann/"):
            raise OSError("403 Forbidden")
        self.repositories.setdefault(name, {".gitattributes": b""})

    def upload_folder(
        self, *, repo_id: str, folder_path: Path, delete_patterns: list[str] | None, commit_message: str
    ) -> SimpleNamespace:
        files = self.repositories[repo_id]
        for name in delete_patterns or ():
            del files[name]
        files |= contents(folder_path)
        self.commits += 1
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/{self.commits}")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    found = Hub()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.HfApi", found)
    return found


def push(folder: Path, project: Path, *options: str, name: str = NAME) -> Result:
    return cli("export", folder, "--root", project / "root", "--push", name, *options)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def evaluated(project: Path) -> dict[str, Any]:
    metrics: dict[str, Any] = json.loads((project / "root/results/metrics.json").read_text())
    return metrics


def card(files: dict[str, bytes]) -> ModelCard:
    return ModelCard(files["README.md"].decode())


def test_a_push_uploads_the_folder_with_measured_figures(hub: Hub, answering: Path, tmp_path: Path) -> None:
    result = push(tmp_path / "out", answering)
    assert result.exit_code == 0, result.output
    assert f"https://hub/{NAME}/commit/1: uploaded to {NAME}" in result.stdout
    files = hub.repositories[NAME]
    assert files == {".gitattributes": b""} | contents(tmp_path / "out")
    metrics = evaluated(answering)
    figures = {row.metric_type: row for row in card(files).data.eval_results}
    assert [*figures] == ["recall_at_1", "recall_at_5", "recall_at_20"]
    for kind, row in figures.items():
        assert row.metric_value == round(metrics[f"{kind}_token_boundary"], 4)
        assert (row.dataset_name, row.dataset_args) == ("questions.test.jsonl", {"questions": metrics["questions"]})
    assert f'SentenceTransformer("{NAME}")' in str(card(files))
    assert TOKEN not in str(card(files)) + result.output


def test_a_later_push_replaces_its_files_and_keeps_licence_and_files_of_people(
    hub: Hub, answering: Path, tmp_path: Path
) -> None:
    licensed = b"---\nlicense: apache-2.0\n---\n"
    hub.repositories[NAME] = {".gitattributes": b"", "README.md": licensed, "LICENSE": b"Apache"}
    assert push(tmp_path / "first", answering, "--format", "onnx").exit_code == 0
    files = hub.repositories[NAME]
    files["photo.txt"] = b"of the towns"
    assert push(tmp_path / "second", answering).exit_code == 0
    of_people = {".gitattributes": b"", "LICENSE": b"Apache", "photo.txt": b"of the towns"}
    assert files == of_people | contents(tmp_path / "second")
    assert card(files).data.license == "apache-2.0"
    assert "Unknown to realmops" not in str(card(files))


@pytest.mark.parametrize("manifest", [None, b"[1]"])
def test_a_repository_with_files_of_others_is_left_alone(
    manifest: bytes | None, hub: Hub, answering: Path, tmp_path: Path
) -> None:
    hub.repositories[NAME] = {"config.json": b"{}"} | ({"manifest.json": manifest} if manifest else {})
    result = push(tmp_path / "out", answering)
    assert result.exit_code == 2
    assert "the repository has config.json, which 'realmops export' did not write" in result.stderr
    assert not hub.commits


def test_a_refusal_of_the_hub_is_reported_and_the_folder_stays(
    hub: Hub, answering: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = push(tmp_path / "out", answering, name="others/towns")
    assert result.exit_code == 2
    assert "403 Forbidden" in result.stderr
    assert f"hf upload others/towns {tmp_path / 'out'}" in " ".join(result.stderr.split())
    artifacts.read_manifest(tmp_path / "out", "export")
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    result = push(tmp_path / "other", answering)
    assert (result.exit_code, "Invalid credentials" in result.stderr) == (2, True)
    assert "hf_expired" not in result.output
    assert not (tmp_path / "other").exists()


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
