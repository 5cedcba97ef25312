"""The champion of a real local registry: which run becomes it, which does not and why, and how it answers."""

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import small_project
import yaml
from click.testing import Result
from serving import QUESTION, tuned, watching
from small_project import QUESTIONS, cli, write_json_lines

from realmops import Answerer, Searcher, artifacts
from realmops.answering.opened_model import OpenedModel, Query
from realmops.commands.export import export
from realmops.commands.open_model import Champion
from realmops.commands.promote import read_run
from realmops.evaluate.predictions import Prediction, read_predictions, write_predictions
from realmops.tracking import sender
from realmops.tracking.client import local_tracking_uri, mlflow_client
from realmops.tracking.registry import CHAMPION, Registry

UNTRACKED = ("--set", "tracking.enabled=false")
TEST = [{"id": f"t{n}", "question": q, "answers": [a]} for n, (q, a) in enumerate(QUESTIONS["test"] * 5)]


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_ENABLE_ASYNC_TRACE_LOGGING", "false")  # each flush of its queue takes one or two seconds


@pytest.fixture(scope="module")
def project(trained: Path, mlflow_database: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with results, of which MLflow was sent the figures."""
    folder = Path(shutil.copytree(trained, tmp_path_factory.mktemp("promote") / "project"))
    values = yaml.safe_load((folder / "params.yaml").read_text())
    (folder / "params.yaml").write_text(yaml.safe_dump({**values, "tracking": {**values["tracking"], "enabled": True}}))
    write_json_lines(folder / "questions.test.jsonl", TEST)
    mlflow_folder(folder).mkdir(parents=True, exist_ok=True)
    shutil.copy(mlflow_database, mlflow_folder(folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/true")  # the child process that sends ends at once
        for name in ("finetune", "evaluate"):
            assert run(folder, "run", name).exit_code == 0
    assert sender.sync(mlflow_folder(folder))[1] == []
    return folder


def mlflow_folder(project: Path) -> Path:
    return project / "root/.realmops/mlflow"


def database(project: Path) -> str:
    return local_tracking_uri(mlflow_folder(project))


def run(project: Path, *words: str | Path) -> Result:
    return cli(*words, "--params", project / "params.yaml", "--root", project / "root")


def promote(project: Path, name: str, *options: str) -> Result:
    return run(project, "promote", "--name", name, *options)


@pytest.fixture
def another(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the project elsewhere; both use the database of the first as their server."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", database(project))
    shutil.copytree(project, tmp_path / "another", ignore=shutil.ignore_patterns(".realmops", "promoted"))
    return tmp_path / "another"


def promoted(project: Path, name: str, right: int | None = None, *options: str) -> Result:
    """Promote a run, as if it had answered the first ``right`` of its ten questions."""
    if right is not None:
        small_project.answered(project / "root/results", right)
    result = promote(project, name, *options)
    assert result.exit_code == 0, result.output
    return result


def refused(project: Path, name: str, message: str, code: int = 2, *options: str) -> None:
    """Check that a promotion ends with a message, and that the champion stays."""
    before = champion(project, name)
    result = promote(project, name, *options)
    assert (result.exit_code, message in result.stderr) == (code, True), result.output
    assert champion(project, name) == before


def champion(project: Path, name: str) -> tuple[int, dict[str, str]]:
    found = Registry(name, mlflow_folder(project), "realmops").champion()
    return (0, {}) if found is None else (found.number, dict(found.tags))


def versions(project: Path, name: str) -> int:
    return len(mlflow_client(database(project)).search_model_versions(f"name = '{name}'"))


# ---- which run becomes the champion


def test_the_first_run_becomes_the_champion_and_stays_it(project: Path) -> None:
    candidate = read_run(project, project / "root")
    assert "models:/first/1 is the champion: EM 0.000 by exact_match on 10" in promoted(project, "first").stdout
    found = champion(project, "first")
    assert found == (1, candidate.tags(copy=False))
    assert found[1]["realmops.ece"] == f"{candidate.metrics['ece']:.4f}"
    assert "models:/first/1 is already the champion" in promoted(project, "first").stdout
    assert (champion(project, "first"), versions(project, "first")) == (found, 1)
    files = artifacts.read_json(project / "root/promoted" / candidate.digest[:12] / artifacts.MANIFEST)
    assert files["digest"] == candidate.digest
    client = mlflow_client(database(project))
    logged = client.get_run(client.get_model_version("first", "1").run_id)
    assert logged.data.metrics["final/evaluate.em"] == candidate.metrics["em"], "the version belongs to the tracked run"


@pytest.mark.parametrize(
    ("ours", "margin", "is_better", "interval"),
    [(5, 0.5, True, "+0.200 to +0.800"), (5, 0.6, False, "+0.200 to +0.800"), (1, 0.0, False, "+0.000")],
)
def test_a_run_is_promoted_that_is_better_by_the_margin_and_the_interval(
    project: Path, another: Path, ours: int, margin: float, is_better: bool, interval: str
) -> None:
    name = f"duel-{ours}-{margin}".replace(".", "_")
    promoted(another, name, 0)
    small_project.answered(another / "root/results", ours)
    result = promote(another, name, "--margin", str(margin))
    assert result.exit_code == (0 if is_better else 1), result.output
    assert f"difference +{ours / 10:.3f}, 95 % interval {interval}" in result.output
    assert f"Required: a difference of at least {margin:+.3f} and an interval above 0" in result.output
    assert champion(project, name)[0] == versions(project, name) == (2 if is_better else 1)
    assert is_better or f"not promoted, models:/{name}/1 remains champion" in result.stderr


def test_runs_on_other_questions_are_not_compared(another: Path) -> None:
    promoted(another, "questions", 0)
    before = read_run(another, another / "root").evaluation
    for change, is_same in (({}, True), ({"not_in": ["0" * 32]}, False), ({"answers": ["Oslo"]}, False)):
        records = [dict(reversed(record.items())) | change for record in reversed(TEST)]
        write_json_lines(another / "questions.test.jsonl", records)
        refused(another, "questions", "question files have changed since; run 'realmops run evaluate' first")
        assert run(another, "run", "evaluate", *UNTRACKED).exit_code == 0
        assert (read_run(another, another / "root").evaluation == before) is is_same, change
    small_project.answered(another / "root/results", 10)
    refused(another, "questions", f"evaluated on other questions or languages (evaluation {before[:12]}: 10", 1)


def generated(project: Path, hits: int) -> None:
    """Evaluate on generated questions, as if the first passages of the first ``hits`` had an answer."""
    write_json_lines(project / "questions.test.jsonl", [{**record, "not_in": ["0" * 32]} for record in TEST])
    assert run(project, "run", "evaluate", *UNTRACKED).exit_code == 0
    results = project / "root/results"
    manifest, metrics = (artifacts.read_json(results / file) for file in ("manifest.json", "metrics.json"))
    rows = read_predictions(results / "predictions.parquet")
    rows = [replace(row, first_hit=0 if n < hits else -1) for n, row in enumerate(rows)]
    write_predictions(results / "predictions.parquet", rows)
    artifacts.write_json(results / "metrics.json", {**metrics, "recall_at_5": hits / 10})
    artifacts.write_manifest(results, "evaluate", **{key: manifest[key] for key in ("fingerprint", "sections")})


def test_runs_on_generated_questions_compete_by_recall_among_themselves(project: Path, another: Path) -> None:
    promoted(another, "of_people")
    generated(another, 0)
    assert "recall@5 0.000 on 10 generated questions" in promoted(another, "retrieval").stdout
    generated(another, 10)
    assert "1.000 against 0.000" in promoted(another, "retrieval", None, "--margin", "0.9").stdout
    number, tags = champion(project, "retrieval")
    assert (number, tags["realmops.recall_at_5"], "realmops.em" in tags) == (2, "1.0000", False)
    refused(another, "of_people", "models:/of_people/1 was evaluated on questions of people and")
    refused(project, "retrieval", "models:/retrieval/2 was evaluated on generated questions and")


def test_a_champion_of_another_call_or_program_stays(
    project: Path, another: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    client = mlflow_client(database(project))

    def other_champion(name: str) -> None:
        theirs = client.create_model_version(name, (project / "root").as_uri())
        client.set_registered_model_alias(name, CHAMPION, str(theirs.version))

    client.create_registered_model("theirs")
    other_champion("theirs")
    refused(project, "theirs", "models:/theirs/1 has the alias champion but was not registered by 'realmops promote'")

    promoted(another, "loading", 0)
    small_project.answered(another / "root/results", 10)
    load = mlflow.pyfunc.load_model

    def slowly(uri: str) -> Any:
        model = load(uri)
        other_champion("loading")
        return model

    monkeypatch.setattr(mlflow.pyfunc, "load_model", slowly)
    result = promote(another, "loading")
    assert (result.exit_code, "the champion of loading changed during this call" in result.stderr) == (1, True)
    assert champion(project, "loading")[0] == 3


def test_a_champion_with_changed_predictions_is_refused(project: Path, another: Path) -> None:
    promoted(another, "forged", 0)
    stored = Path(mlflow_client(database(project)).get_model_version_download_uri("forged", "1")[len("file://") :])
    (stored / "artifacts/predictions.parquet").write_bytes(b"PAR1")
    small_project.answered(another / "root/results", 10)
    refused(another, "forged", "models:/forged/1: predictions.parquet has changed since registration")


def test_without_a_registry_there_is_one_message(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(project, "none", "tracking.enabled is false", 2, *UNTRACKED)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    for uri in ("http://127.0.0.1:9", f"sqlite:///{project / 'params.yaml'}/mlflow.db"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        result = promote(project, "none")
        assert (result.exit_code, len(result.stderr.splitlines())) == (2, 2)
        assert "\nrealmops: the model registry at MLFLOW_TRACKING_URI failed: " in result.stderr


# ---- the registered model


@pytest.fixture
def server(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The local database as MLflow's current server; traces go to the experiment of the runs."""
    import mlflow

    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "realmops")
    mlflow.set_tracking_uri(database(project))
    yield database(project)
    mlflow.flush_trace_async_logging()
    mlflow.set_tracking_uri(None)


@pytest.fixture
def predictions(project: Path) -> list[Prediction]:
    return read_predictions(project / "root/results/predictions.parquet")


def test_the_registered_model_answers_as_the_evaluation_did_with_a_trace(
    project: Path, server: str, predictions: list[Prediction]
) -> None:
    import mlflow
    from pandas import DataFrame

    promoted(project, "answers")
    model = mlflow.pyfunc.load_model("models:/answers@champion")
    found = model.predict([prediction.question for prediction in predictions])
    for ours, theirs in zip(found, predictions, strict=True):
        assert (ours["question"], ours["answer"]) == (theirs.question, theirs.prediction)
        assert (ours["probability"], ours["abstained"]) == (None, theirs.abstained), "the calibration promises nothing"
        passages = ours["passages"]
        assert [p["passage_id"] for p in passages] == list(theirs.passage_ids)
        assert [p["span"] for p in passages] == list(theirs.passage_spans)
        assert [p["p_z"] for p in passages] == pytest.approx(list(theirs.p_z), abs=1e-6)
        assert ours["citations"][0]["passage_id"] == theirs.passage_ids[theirs.evidence_rank]
    assert model.predict(DataFrame({"question": [predictions[1].question]})) == found[1:2]
    for wrong, message in ((DataFrame({"id": ["test-0"]}), "the first column is 'id'"), ([" "], "a question is ' '")):
        with pytest.raises(ValueError, match=message):
            model.predict(wrong)

    [record] = model.predict([predictions[0].question])
    mlflow.flush_trace_async_logging()
    root, retrieval = mlflow.get_trace(mlflow.get_last_active_trace_id()).data.spans
    assert (root.span_type, root.inputs, root.outputs) == ("CHAIN", {"question": predictions[0].question}, record)
    assert (retrieval.span_type, retrieval.parent_id) == ("RETRIEVER", root.span_id)
    assert [document["id"] for document in retrieval.outputs] == list(predictions[0].passage_ids)
    assert [document["page_content"] for document in retrieval.outputs] == [p["text"] for p in record["passages"]]

    folder = Path(mlflow_client(server).get_model_version_download_uri("answers", "1").removeprefix("file://"))
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {"pyfunc.py", "artifacts/manifest.json", "artifacts/predictions.parquet"} <= files
    assert not [name for name in files if Path(name).suffix in {".pkl", ".pickle", ".joblib", ".pt", ".bin"}]


def test_a_champion_is_independent_of_the_next_training_and_refuses_changed_files(another: Path, server: str) -> None:
    import mlflow

    promoted(another, "kept")
    shutil.rmtree(another / "root/models")
    shutil.rmtree(another / "root/data")
    [folder] = (another / "root/promoted").iterdir()
    shutil.copytree(folder, another / "moved")
    index = folder / "finetune/index.safetensors"
    content = index.read_bytes()
    index.unlink()
    index.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    def load(**config: str) -> Any:
        return mlflow.pyfunc.load_model("models:/kept@champion", model_config=config or None)

    with pytest.raises(ValueError, match=r"finetune/index\.safetensors has sha256 .*it was changed"):
        load()
    assert load(folder=str(another / "moved")).predict(["Who wrote a novel?"])
    artifacts.write_manifest(folder, "promoted", digest="forged")
    with pytest.raises(ValueError, match="is not the registered manifest"):
        load()
    shutil.rmtree(folder)
    with pytest.raises(ValueError, match=r"does not exist.* register a copy with 'realmops promote --copy'"):
        load()


def test_a_champion_can_be_copied_later(another: Path, server: str) -> None:
    import mlflow

    promoted(another, "later")
    again = promoted(another, "later", None, "--copy")
    assert "models:/later/2 is the champion" in again.stdout
    assert "models:/later/1 was the same run without copies of its files" in again.stdout
    shutil.rmtree(another / "root/promoted", ignore_errors=True)
    assert mlflow.pyfunc.load_model("models:/later@champion").predict(["Who wrote a novel?"])
    for options in ((), ("--copy",)):
        assert "models:/later/2 is already the champion" in promoted(another, "later", None, *options).stdout


# ---- the champion served


def test_the_champion_is_served_and_exported_with_its_version(project: Path, tmp_path: Path) -> None:
    promoted(project, "served")
    origin = Champion("models:/served@champion", project / "root")
    opened = origin.open()
    [record] = opened.answer([Query("Who wrote a novel?")])
    assert (record["model"]["version"], record["model"]["weights_step"]) == ("models:/served/1", 6)
    assert origin.mark() == (1, read_run(project, project / "root").digest)
    list(export(tmp_path / "out", "sentence-transformers", lambda: opened, None))
    assert artifacts.read_manifest(tmp_path / "out", "export")["version"] == "models:/served/1"


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose retriever counts words as well as embeddings, up to pretrain."""
    return small_project.trained_project(tmp_path_factory.mktemp("hybrid"), retriever={"hybrid": True})


@pytest.mark.parametrize(("kind", "retriever", "copy"), [("hybrid", "pretrain", False), ("trained", "path", True)])
def test_a_promoted_model_searches_and_answers_by_its_files_alone(
    kind: str,
    retriever: str,
    copy: bool,
    server: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    folder = Path(shutil.copytree(request.getfixturevalue(kind), tmp_path / "mine"))
    mine = tuned(folder, finetune={"retriever": retriever})
    name = f"routes-{kind}"
    promoted(mine, name, None, "--set", "tracking.enabled=true", *(["--copy"] if copy else []))
    for part in ("data", "models", "results", *(["promoted"] if copy else [])):
        shutil.rmtree(mine / "root" / part, ignore_errors=copy)
    model = f"models:/{name}@champion"
    searcher, answerer = (kind.open(mine / "root", model=model) for kind in (Searcher, Answerer))  # type: ignore[attr-defined]
    for by in ("run", "words", *(["embeddings"] if retriever == "pretrain" else [])):
        assert searcher.search(QUESTION, 2, by=by) == answerer.searcher().search(QUESTION, 2, by=by)
    assert searcher.search("Who wrote The Cold Sea?", 1, by="words")[0].title == "Anna Berg"
    [record] = mlflow.pyfunc.load_model(model).predict([QUESTION])
    assert record["answer"] == answerer.answer(QUESTION).text


def test_the_server_takes_a_new_champion_and_rejects_a_damaged_one(
    project: Path, another: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match="moves has no version with the alias champion"):
        Champion("models:/moves@champion", project / "root").mark()
    promoted(another, "moves", 0)
    origin = Champion("models:/moves@champion", another / "root")
    changes: list[OpenedModel | None] = []
    with watching(origin, changes.append) as (batcher, watcher):
        assert watcher.poll() is False
        [accepted] = batcher.submit([Query("Who wrote a novel?")])
        promoted(another, "moves", 10)
        assert watcher.poll() is True
        assert batcher.served.version == "models:/moves/2"
        assert [one.version for one in changes if one] == ["models:/moves/2"]
        assert accepted.record.result(60)["model"]["version"] == "models:/moves/1"
        client = mlflow_client(database(project))
        files = Path(client.get_model_version_download_uri("moves", "1").removeprefix("file://"))
        (files / "artifacts/manifest.json").write_text("{}")
        client.set_registered_model_alias("moves", CHAMPION, "1")
        assert watcher.poll() is False
        assert watcher.refused is not None
        assert "is not the registered manifest" in watcher.refused["reason"]
        assert changes[-1] is None
        assert "a new model of moves is rejected; the old one stays" in caplog.text
        monkeypatch.setattr(Registry, "champion", lambda self: (_ for _ in ()).throw(ConnectionError("away")))
        assert watcher.poll() is False
        assert watcher.poll_error == "away"
        assert batcher.served.version == "models:/moves/2"
        [record] = [ticket.record.result(60) for ticket in batcher.submit([Query("Who wrote a novel?")])]
        assert record["model"]["version"] == "models:/moves/2"
