"""The champion of a real local registry: which run becomes it, which does not and why, and how it answers."""

import asyncio
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
from small_project import QUESTIONS, cli, write_json_lines
from small_world import DOCUMENTS

from realmops import artifacts
from realmops.commands.promote import read_run
from realmops.evaluate.predictions import Prediction, read_predictions, write_predictions
from realmops.tracking import sender
from realmops.tracking.client import local_tracking_uri, mlflow_client
from realmops.tracking.registry import CHAMPION, DIGEST_TAG, Registry

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
    assert sender.sync(mlflow_folder(folder)).problems == ()
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


def answered(project: Path, right: int) -> None:
    """Of its ten questions."""
    small_project.answered(project / "root/results", right)


def champion(project: Path, name: str) -> tuple[int, dict[str, str]] | None:
    found = Registry(name, mlflow_folder(project), "realmops").champion()
    return None if found is None else (found.number, dict(found.tags))


def versions(project: Path, name: str) -> int:
    client = mlflow_client(database(project))
    return len(client.search_model_versions(f"name = '{name}'"))


# ---- which run becomes the champion


def test_the_first_run_becomes_the_champion_and_stays_it(project: Path) -> None:
    candidate = read_run(project, project / "root")
    result = promote(project, "first")
    assert result.exit_code == 0, result.output
    assert "models:/first/1 is the champion: EM 0.000 by exact_match on 10 questions" in result.stdout
    assert candidate.corpus_hash[:12] in result.stdout
    found = champion(project, "first")
    assert found == (1, candidate.tags(copy=False))
    assert found[1][DIGEST_TAG] == candidate.digest
    for name in ("ece", "precision_at_30", "answered"):
        assert found[1][f"realmops.{name}"] == f"{candidate.metrics[name]:.4f}"
    again = promote(project, "first")
    assert again.exit_code == 0
    assert "models:/first/1 is already the champion" in again.stdout
    assert champion(project, "first") == found
    assert versions(project, "first") == 1
    files = artifacts.read_json(project / "root/promoted" / candidate.digest[:12] / artifacts.MANIFEST)
    assert files["digest"] == candidate.digest


def test_the_version_belongs_to_the_run_that_was_tracked(project: Path) -> None:
    assert promote(project, "lineage").exit_code == 0
    client = mlflow_client(database(project))
    version = client.get_model_version("lineage", "1")
    logged = client.get_run(version.run_id)
    metrics = artifacts.read_json(project / "root/results/metrics.json")
    assert logged.data.metrics["final/evaluate.em"] == metrics["em"]
    assert logged.data.metrics["final/evaluate.seconds"] == metrics["seconds"]


@pytest.mark.parametrize(
    ("theirs", "ours", "margin", "promoted", "told"),
    [
        (0, 5, "0.5", True, "EM: 0.500 against 0.000, difference +0.500, 95 % interval +0.200 to +0.800"),
        (0, 5, "0.6", False, "EM: 0.500 against 0.000, difference +0.500, 95 % interval +0.200 to +0.800"),
        (0, 1, "0", False, "difference +0.100, 95 % interval +0.000"),
    ],
)
def test_a_run_is_promoted_that_is_better_by_the_margin_and_the_interval(
    project: Path, another: Path, theirs: int, ours: int, margin: str, promoted: bool, told: str
) -> None:
    name = f"duel-{theirs}-{ours}-{margin}".replace(".", "_")
    answered(another, theirs)
    assert promote(another, name).exit_code == 0
    before = champion(project, name)
    answered(another, ours)
    result = promote(another, name, "--margin", margin)
    assert result.exit_code == (0 if promoted else 1), result.output
    assert told in result.output
    assert f"Required: a difference of at least {float(margin):+.3f} and an interval above 0" in result.output
    if promoted:
        assert f"models:/{name}/2 is the champion" in result.stdout
        found = champion(project, name)
        assert found is not None
        assert found[0] == 2
    else:
        assert result.stderr.startswith(f"realmops: not promoted, models:/{name}/1 remains champion")
        assert champion(project, name) == before
        assert versions(project, name) == 1


def test_other_questions_are_refused_by_their_digest(project: Path, another: Path) -> None:
    answered(another, 0)
    assert promote(another, "questions").exit_code == 0
    before = champion(project, "questions")
    write_json_lines(another / "questions.test.jsonl", [{**record, "answers": ["Oslo"]} for record in TEST])
    stale = promote(another, "questions")
    assert stale.exit_code == 2
    assert "models, corpus or question files have changed since; run 'realmops run evaluate' first" in stale.stderr
    assert run(another, "run", "evaluate", *UNTRACKED).exit_code == 0
    answered(another, 10)
    result = promote(another, "questions")
    assert result.exit_code == 1
    assert "evaluated on other questions" in result.stderr
    assert before is not None
    for digest in (before[1]["realmops.evaluation_digest"], read_run(another, another / "root").evaluation):
        assert f"evaluation {digest[:12]}: 10 by exact_match" in result.stderr
    assert champion(project, "questions") == before


def test_an_evaluation_is_questions_and_what_does_not_count_in_any_form(another: Path) -> None:
    before = read_run(another, another / "root").evaluation
    records = [dict(reversed(record.items())) for record in reversed(TEST)]
    for more, same in (
        ({}, True),
        ({"not_in": ["0" * 32]}, False),
        ({"language": "en"}, True),  # as questions without one are taken here
        ({"language": "de"}, False),
    ):
        write_json_lines(another / "questions.test.jsonl", [record | more for record in records])
        assert run(another, "run", "evaluate", *UNTRACKED).exit_code == 0
        assert (read_run(another, another / "root").evaluation == before) is same


def generated(project: Path, hits: int) -> None:
    """Evaluate on generated questions; make the results as if the first passages of so many had an answer."""
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
    assert promote(another, "of_people").exit_code == 0
    generated(another, 0)
    first = promote(another, "retrieval")
    assert first.exit_code == 0, first.output
    assert "models:/retrieval/1 is the champion: recall@5 0.000 on 10 generated questions" in first.stdout
    assert "EM" not in first.stdout
    generated(another, 10)
    better = promote(another, "retrieval", "--margin", "0.9")
    assert better.exit_code == 0, better.output
    assert "recall@5 (retrieval: all questions were generated from the documents): 1.000 against 0.000" in better.stdout
    found = champion(project, "retrieval")
    assert found is not None
    assert (found[0], found[1]["realmops.recall_at_5"]) == (2, "1.0000")
    assert "realmops.em" not in found[1]
    refused = promote(another, "of_people")
    assert refused.exit_code == 2
    assert "models:/of_people/1 was evaluated on questions of people and" in refused.stderr
    refused = promote(project, "retrieval")
    assert refused.exit_code == 2
    assert "models:/retrieval/2 was evaluated on generated questions and" in refused.stderr
    assert champion(project, "retrieval") == found


def test_a_model_that_was_trained_since_is_not_promoted_with_old_results(another: Path) -> None:
    assert run(another, "run", "finetune", "--set", "finetune.epochs=1", *UNTRACKED).exit_code == 0
    result = promote(another, "stale")
    assert result.exit_code == 2
    assert "is out of date: models" in result.stderr


def test_a_call_that_was_stopped_before_the_alias_goes_on(
    project: Path, another: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered(another, 0)
    assert promote(another, "stopped").exit_code == 0
    old = champion(project, "stopped")
    answered(another, 10)
    with monkeypatch.context() as patch:

        def killed(*_: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr(Registry, "make_champion", killed)
        assert promote(another, "stopped").exit_code != 0
    assert champion(project, "stopped") == old
    assert versions(project, "stopped") == 2
    assert promote(another, "stopped").exit_code == 0
    assert versions(project, "stopped") == 2
    new = champion(project, "stopped")
    assert new is not None
    assert new[0] == 2


def test_a_version_whose_folder_is_gone_is_registered_again(project: Path, another: Path) -> None:
    answered(another, 10)
    assert promote(another, "gone").exit_code == 0
    mlflow_client(database(project)).delete_registered_model_alias("gone", CHAMPION)
    moved = another.rename(another.with_name("moved"))
    result = promote(moved, "gone")
    assert result.exit_code == 0, result.output
    new = champion(project, "gone")
    assert new is not None
    assert new[0] == 2


def test_a_champion_that_came_while_the_model_was_loaded_stays(
    project: Path, another: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two promotions from two roots: the second one ends while the first loads its model."""
    import mlflow

    answered(another, 0)
    assert promote(another, "loading").exit_code == 0
    client = mlflow_client(database(project))
    answered(another, 10)
    load = mlflow.pyfunc.load_model

    def slowly(uri: str) -> Any:
        model = load(uri)
        theirs = client.create_model_version("loading", (project / "root").as_uri())
        client.set_registered_model_alias("loading", CHAMPION, str(theirs.version))
        return model

    monkeypatch.setattr(mlflow.pyfunc, "load_model", slowly)
    result = promote(another, "loading")
    assert result.exit_code == 1
    assert "the champion of loading changed during this call" in result.stderr
    theirs = champion(project, "loading")
    assert theirs is not None
    assert theirs[0] == 3


def test_a_champion_of_another_program_is_left_alone(project: Path) -> None:
    client = mlflow_client(database(project))
    client.create_registered_model("theirs")
    client.create_model_version("theirs", (project / "root").as_uri())
    client.set_registered_model_alias("theirs", CHAMPION, "1")
    result = promote(project, "theirs")
    assert result.exit_code == 2
    assert "models:/theirs/1 has the alias champion but was not registered by 'realmops promote'" in result.stderr


def test_changed_predictions_of_the_champion_are_not_compared_with(project: Path, another: Path) -> None:
    answered(another, 0)
    assert promote(another, "forged").exit_code == 0
    client = mlflow_client(database(project))
    stored = Path(client.get_model_version_download_uri("forged", "1").removeprefix("file://"))
    (stored / "artifacts/predictions.parquet").write_bytes(b"PAR1")
    answered(another, 10)
    result = promote(another, "forged")
    assert result.exit_code == 2
    assert "models:/forged/1: predictions.parquet has changed since registration" in result.stderr


def test_without_a_registry_there_is_one_message(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    off = promote(project, "none", *UNTRACKED)
    assert off.exit_code == 2
    assert "tracking.enabled is false" in off.stderr
    bad = promote(project, "v1.0")  # MLflow knows no such names
    assert bad.exit_code == 2
    assert "model name 'v1.0': only letters, digits, - and _ are allowed" in bad.stderr
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    away = promote(project, "none")
    assert away.exit_code == 2
    assert away.stderr.startswith("realmops: the model registry at MLFLOW_TRACKING_URI failed: MlflowException")
    assert len(away.stderr.splitlines()) == 1
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{project / 'params.yaml'}/mlflow.db")
    broken = promote(project, "none")
    assert broken.exit_code == 2
    assert broken.stderr.startswith("realmops: the model registry at MLFLOW_TRACKING_URI failed: ")


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


def test_the_registered_model_answers_as_the_evaluation_did(
    project: Path, server: str, predictions: list[Prediction]
) -> None:
    import mlflow
    from pandas import DataFrame

    assert promote(project, "answers").exit_code == 0
    model = mlflow.pyfunc.load_model("models:/answers@champion")
    found = model.predict([prediction.question for prediction in predictions])
    for ours, theirs in zip(found, predictions, strict=True):
        assert (ours["question"], ours["answer"]) == (theirs.question, theirs.prediction)
        assert ours["probability"] == pytest.approx(theirs.confidence, abs=1e-5)
        assert ours["abstained"] == theirs.abstained
        assert [p["span"] for p in ours["passages"]] == list(theirs.passage_spans)
        assert [p["score"] for p in ours["passages"]] == pytest.approx(list(theirs.passage_scores), abs=1e-5)
        assert [p["passage_id"] for p in ours["passages"]] == list(theirs.passage_ids)
        assert [p["title"] for p in ours["passages"]] == list(theirs.titles)
        assert [p["p_z"] for p in ours["passages"]] == pytest.approx(list(theirs.p_z), abs=1e-6)
        for cited in ours["citations"]:
            [source] = [text for title, text, _ in DOCUMENTS if title == cited["title"]]
            assert source[cited["start"] : cited["end"]] == cited["quote"]
        assert ours["citations"][0]["quote"] == ours["answer"]
        assert ours["quote"]["quote"]
        assert ours["citations"][0]["passage_id"] == theirs.passage_ids[theirs.evidence_rank]
        assert ours["model"]["weights_step"] == 6
    table = DataFrame({"question": [predictions[1].question]})
    assert model.predict(table) == found[1:2]
    with pytest.raises(ValueError, match="the first column is 'id'; expected 'question'"):
        model.predict(DataFrame({"id": ["test-0"], "question": ["Who?"]}))
    with pytest.raises(ValueError, match="a question is ' '; expected a non-empty string"):
        model.predict([" "])
    long, short = model.predict(["Who wrote a novel? " * 99, "Who wrote a novel?"])
    assert (long["answer"] != "", short) == (True, found[1]), "one that is too long is cut and ends nothing for others"
    assert list(found[0]) == model.metadata.signature.outputs.input_names()
    assert model.metadata.load_input_example(model.metadata.artifact_path) == [predictions[0].question]


def test_the_trace_shows_what_was_retrieved(project: Path, server: str, predictions: list[Prediction]) -> None:
    import mlflow

    assert promote(project, "traced").exit_code == 0
    model = mlflow.pyfunc.load_model("models:/traced@champion")
    [found] = model.predict([predictions[0].question])
    mlflow.flush_trace_async_logging()
    trace = mlflow.get_trace(mlflow.get_last_active_trace_id())
    experiment = mlflow.get_experiment_by_name("realmops")
    assert trace.info.experiment_id == experiment.experiment_id
    root, retrieval = trace.data.spans
    assert (root.span_type, root.parent_id) == ("CHAIN", None)
    assert root.inputs == {"question": predictions[0].question}
    assert root.outputs == found
    assert (retrieval.span_type, retrieval.parent_id) == ("RETRIEVER", root.span_id)
    assert [document["id"] for document in retrieval.outputs] == list(predictions[0].passage_ids)
    assert [document["metadata"]["title"] for document in retrieval.outputs] == list(predictions[0].titles)
    scores = [document["metadata"]["score"] for document in retrieval.outputs]
    assert scores == sorted(scores, reverse=True)
    assert [document["page_content"] for document in retrieval.outputs] == [p["text"] for p in found["passages"]]


def test_the_model_is_code_and_holds_no_pickle(project: Path, server: str) -> None:
    assert promote(project, "code").exit_code == 0
    client = mlflow_client(server)
    folder = Path(client.get_model_version_download_uri("code", "1").removeprefix("file://"))
    flavor = yaml.safe_load((folder / "MLmodel").read_text())["flavors"]["python_function"]
    assert Path(flavor["model_code_path"]).name == "pyfunc.py"
    assert "python_model" not in flavor
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    assert {"pyfunc.py", "artifacts/manifest.json", "artifacts/predictions.parquet"} <= set(files)
    assert not [name for name in files if Path(name).suffix in {".pkl", ".pickle", ".joblib", ".pt", ".bin"}]
    assert not [name for name in files if name.endswith((".safetensors", ".npy"))]


def test_the_next_training_takes_nothing_from_the_champion(another: Path, server: str) -> None:
    import mlflow

    assert promote(another, "kept").exit_code == 0
    shutil.rmtree(another / "root/models")
    shutil.rmtree(another / "root/data")
    assert len(mlflow.pyfunc.load_model("models:/kept@champion").predict(["Who wrote a novel?"])) == 1


def test_a_changed_index_is_refused_when_the_model_is_loaded(another: Path, server: str) -> None:
    import mlflow

    assert promote(another, "tampered").exit_code == 0
    [folder] = (another / "root/promoted").iterdir()
    shutil.copytree(folder, another / "moved")
    index = folder / "finetune/index.safetensors"
    content = bytearray(index.read_bytes())
    content[-1] ^= 1
    index.write_bytes(content)
    with pytest.raises(ValueError, match=r"finetune/index\.safetensors has sha256 .*it was changed"):
        mlflow.pyfunc.load_model("models:/tampered@champion")
    whole = {"folder": str(another / "moved")}
    assert mlflow.pyfunc.load_model("models:/tampered@champion", model_config=whole).predict(["Who wrote a novel?"])
    artifacts.write_manifest(folder, "promoted", digest="forged")
    with pytest.raises(ValueError, match="is not the registered manifest"):
        mlflow.pyfunc.load_model("models:/tampered@champion")
    shutil.rmtree(folder)
    with pytest.raises(ValueError, match="does not exist: the model's files were removed"):
        mlflow.pyfunc.load_model("models:/tampered@champion")


def test_a_champion_can_be_copied_later(another: Path, server: str) -> None:
    import mlflow

    assert promote(another, "later").exit_code == 0
    shutil.rmtree(another / "root/promoted")
    with pytest.raises(ValueError, match=r"does not exist.* register a copy with 'realmops promote --copy'"):
        mlflow.pyfunc.load_model("models:/later@champion")
    again = promote(another, "later", "--copy")
    assert "models:/later/2 is the champion" in again.stdout
    assert "models:/later/1 was the same run without copies of its files" in again.stdout
    assert mlflow.pyfunc.load_model("models:/later@champion").predict(["Who wrote a novel?"])
    for options in ((), ("--copy",)):
        assert "models:/later/2 is already the champion" in promote(another, "later", *options).stdout


# ---- the champion served


@pytest.mark.parametrize("copy", [False, True])
def test_the_champion_is_served_with_its_version(
    project: Path, predictions: list[Prediction], copy: bool, tmp_path: Path
) -> None:
    from realmops.answering.opened_model import Query
    from realmops.commands.export import export
    from realmops.commands.open_model import Champion

    name = f"served-{copy}"
    assert promote(project, name, *(["--copy"] if copy else [])).exit_code == 0
    origin = Champion(f"models:/{name}@champion", project / "root")
    generation = origin.open()
    generation.probe()
    [record] = generation.answer([Query(predictions[0].question)])
    assert record["answer"] == predictions[0].prediction
    assert record["model"]["version"] == f"models:/{name}/1"
    assert record["model"]["weights_step"] == 6
    assert origin.mark() == (1, read_run(project, project / "root").digest)
    list(export(tmp_path / "out", "sentence-transformers", lambda: generation, None))
    assert artifacts.read_manifest(tmp_path / "out", "export")["version"] == f"models:/{name}/1"


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose retriever counts words as well as embeddings, up to pretrain."""
    return small_project.trained_project(tmp_path_factory.mktemp("hybrid"), retriever={"hybrid": True})


@pytest.mark.parametrize(
    ("kind", "retriever", "copy"),
    [
        ("plain", "pretrain", True),
        ("hybrid", "pretrain", False),
        ("plain", "tfidf", False),
        ("plain", "path", True),
    ],
)
def test_every_route_of_a_promoted_model_answers(
    project: Path,
    kind: str,
    retriever: str,
    copy: bool,
    server: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the promoted files alone: of the run itself nothing is left."""
    import mlflow
    from mcp import Client
    from serving import QUESTION, client_of, every_call, tuned

    from realmops import Answerer, Searcher
    from realmops.serve.mcp import build_mcp_server
    from realmops.serve.model_sources import RegisteredChampion

    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    trained = request.getfixturevalue("trained" if kind == "plain" else kind)
    mine = tuned(Path(shutil.copytree(trained, tmp_path / "mine")), finetune={"retriever": retriever})
    name = f"routes-{kind}-{retriever}-{copy}"
    done = promote(mine, name, "--set", "tracking.enabled=true", *(["--copy"] if copy else []))
    assert done.exit_code == 0, done.output
    for folder in ("data", "models", "results", *(["promoted"] if copy else [])):
        shutil.rmtree(mine / "root" / folder, ignore_errors=copy)
    model, has_embeddings = f"models:/{name}@champion", retriever == "pretrain"
    origin = RegisteredChampion(model, mine / "root")
    with client_of(mine / "root", origin) as client:
        for call, reply in every_call(client):
            refused = not has_embeddings and '"by": "embeddings"' in call
            assert reply.status_code == (422 if refused else 200), (call, reply.text)
            assert not refused or "there are no embeddings" in reply.json()["error"]["message"]

    async def tools() -> list[Any]:
        generation = origin.open()
        async with Client(build_mcp_server(generation.passage_search, generation)) as assistant:
            calls = ("search", {"query": QUESTION, "k": 2}), ("answer", {"question": QUESTION})
            return [await assistant.call_tool(*call) for call in calls]

    assert [one.is_error for one in asyncio.run(tools())] == [False, False]
    searcher, answerer = (kind.open(mine / "root", model=model) for kind in (Searcher, Answerer))  # type: ignore[attr-defined]
    for by in ("run", "words", *(["embeddings"] if has_embeddings else [])):
        assert searcher.search("Who wrote The Cold Sea?", 2, by=by) == answerer.searcher().search(
            "Who wrote The Cold Sea?", 2, by=by
        )
    assert searcher.search("Who wrote The Cold Sea?", 1, by="words")[0].title == "Anna Berg"
    [record] = mlflow.pyfunc.load_model(model).predict([QUESTION])
    assert record["answer"] == answerer.answer(QUESTION).text


def test_a_closed_book_model_is_not_promoted(closed_book: Path) -> None:
    refused = promote(closed_book, "closed", "--set", "tracking.enabled=true")
    assert refused.exit_code == 2
    assert "finetune.reader is t5, which reads no passages; promote a run with a reader" in refused.stderr


def test_another_champion_takes_over_and_a_bad_one_does_not(
    project: Path, another: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from serving import watching

    from realmops.answering.opened_model import OpenedModel, Query
    from realmops.serve.model_sources import RegisteredChampion

    with pytest.raises(ValueError, match="moves has no version with the alias champion"):
        RegisteredChampion("models:/moves@champion", project / "root").mark()
    answered(another, 0)
    assert promote(another, "moves").exit_code == 0
    origin = RegisteredChampion("models:/moves@champion", another / "root")
    told: list[OpenedModel | None] = []
    with watching(origin, told.append) as (batcher, watcher):
        assert watcher.poll() is False
        [accepted] = batcher.submit([Query("Who wrote a novel?")])
        answered(another, 10)
        assert promote(another, "moves").exit_code == 0
        assert watcher.poll() is True
        assert batcher.served.version == "models:/moves/2"
        assert [one.version for one in told if one] == ["models:/moves/2"]
        assert accepted.record.result(60)["model"]["version"] == "models:/moves/1"
        client = mlflow_client(database(project))
        files = Path(client.get_model_version_download_uri("moves", "1").removeprefix("file://"))
        (files / "artifacts/manifest.json").write_text("{}")
        client.set_registered_model_alias("moves", CHAMPION, "1")
        assert watcher.poll() is False
        assert watcher.refused is not None
        assert "is not the registered manifest" in watcher.refused["reason"]
        assert told[-1] is None
        assert "a new model of moves is rejected; the old one stays" in caplog.text
        monkeypatch.setattr(Registry, "champion", lambda self: (_ for _ in ()).throw(ConnectionError("away")))
        assert watcher.poll() is False
        assert watcher.poll_error == "away"
        assert batcher.served.version == "models:/moves/2"
        [record] = [ticket.record.result(60) for ticket in batcher.submit([Query("Who wrote a novel?")])]
        assert record["model"]["version"] == "models:/moves/2"
