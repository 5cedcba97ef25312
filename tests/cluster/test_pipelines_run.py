"""The compiled pipelines, run here: tasks as processes, the Deployment's replica as a process that follows."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cluster_lab
import component_pages
import local_pipelines
import pytest
import small_project
from cluster_lab import DEPLOYMENT, Lab, Output
from compiled import compiled, file_of, options
from forked import Forked

from realmops.cluster import ablation_tasks, tasks
from realmops.stages import HEADLINE_METRICS, METRICS, STAGES, STEPS, planned_steps


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, mlflow_database: Path) -> Path:
    folder = tmp_path_factory.mktemp("pipeline")
    small_project.write_project(folder)
    shutil.copy(mlflow_database, folder / "mlflow.db")
    return folder


def run_pipeline(
    pipeline: str, folder: Path, *, forks: bool = True, **arguments: Any
) -> subprocess.CompletedProcess[str]:
    """Exit code and output of the local runner; without ``forks`` each task starts a Python, as in a pod."""
    arguments |= {"runs": str(folder / "runs")}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    environment |= {
        "KUBECONFIG": str(folder / "kubeconfig"),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "MLFLOW_TRACKING_URI": mlflow_of(folder),
    }
    work = partial(local_pipelines.run, file_of(pipeline), folder / "outputs", arguments, forks=forks)
    with tempfile.NamedTemporaryFile() as log:
        code = Forked(work, log=Path(log.name), cwd=folder, env=environment).wait()
        return subprocess.CompletedProcess([], code, Path(log.name).read_text(), "")


def mlflow_of(project: Path) -> str:
    return f"sqlite:///{project / 'mlflow.db'}"


def outputs(project: Path, task: str, artifact: str) -> list[str]:
    """What tasks of that name wrote for an artifact, oldest first."""
    found = [path for path in (project / "outputs").rglob(artifact) if path.parent.name == task]
    return [path.read_text() for path in sorted(found, key=lambda path: path.stat().st_mtime_ns)]


@pytest.fixture(scope="module")
def deployment(project: Path) -> Iterator[Lab]:
    """The builders' Deployment; a replica is a process."""
    replica = cluster_lab.follower(project / "builder" / "assignment.json")
    with cluster_lab.serve(Lab(replica), project / "kubeconfig") as lab:
        yield lab


def train(project: Path, **arguments: Any) -> subprocess.CompletedProcess[str]:
    return run_pipeline("train", project, run="one", deployment=DEPLOYMENT, wait_seconds=120, **arguments)


@pytest.fixture(scope="module")
def failed(project: Path, deployment: Lab) -> Path:
    """A run whose last stage cannot write its folder."""
    results = project / "runs/one/results"
    results.parent.mkdir(parents=True)
    results.symlink_to("/dev/null/results")
    told = train(project, options=options(project))
    results.unlink()
    assert told.returncode != 0
    tries = re.findall(r"realmops: .*/dev/null", told.stdout + told.stderr)
    assert len(tries) == 3, "what fails is tried again, twice"
    return project / "runs" / "one"


@pytest.fixture(scope="module")
def run(project: Path, failed: Path) -> Path:
    """The same run, started again with all files and with a model to promote."""
    made = {path: path.stat().st_mtime_ns for path in (failed / "models").glob("*/manifest.json")}
    done = train(project, options=options(project, tracking={"enabled": True}), model="toy")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path: path.stat().st_mtime_ns for path in made} == made, "nothing is trained again"
    return failed


def test_train_that_fails_gives_the_builders_back(deployment: Lab, failed: Path) -> None:
    assert deployment.replicas == [1, 0], "raised for pretrain, and given back although evaluate failed"
    assert not (failed / "results").exists()
    assert [*(failed / "exchange").iterdir()] == [], "pre-training is done"


def test_train_goes_on_where_it_failed(project: Path, deployment: Lab, run: Path) -> None:
    assert deployment.replicas == [1, 0], "pretrain had nothing left to do"
    measured = json.loads((run / "results/metrics.json").read_text())
    (figures,) = outputs(project, "evaluate", "metrics")
    assert json.loads(figures)["em"] == measured["em"]
    pretrained = json.loads((run / "models/pretrain/manifest.json").read_text())
    assert pretrained["sections"]["pretrain"]["builder"] == "external"
    assert json.loads((run / "models/pretrain/metrics.json").read_text())["refreshes"] > 0


def artifact_of(project: Path, task: str, name: str) -> dict[str, Any]:
    """What Kubeflow is told of the last artifact of a task: its type, its metadata."""
    found = [*(project / "outputs").rglob(f"{task}/executor_output.json")]
    last = max(found, key=lambda path: path.stat().st_mtime_ns)
    (entry,) = json.loads(last.read_text())["artifacts"][name]["artifacts"]
    made = compiled("train")["components"][f"comp-{task}"]["outputDefinitions"]["artifacts"][name]
    return {"type": made["artifactType"]["schemaTitle"], **entry.get("metadata", {})}


def test_people_see_corpus_models_and_report_of_a_run_in_kubeflow(project: Path, run: Path) -> None:
    folders = {name: run / STAGES[name].folder for name in ("snapshot", "ict", "pretrain", "finetune", "evaluate")}
    for task, kind in (("snapshot", "Dataset"), ("ict", "Model"), ("pretrain", "Model"), ("finetune", "Model")):
        artifact = artifact_of(project, task, "corpus" if kind == "Dataset" else "model")
        manifest, measured = (json.loads((folders[task] / file).read_text()) for file in ("manifest.json", METRICS))
        assert artifact.pop("type") == f"system.{kind}"
        assert artifact.pop("folder") == folders[task].as_uri()
        assert artifact.pop("digest") == manifest["manifest_digest"]
        assert artifact.pop("fingerprint") == manifest["fingerprint"]
        assert artifact == {name: value for name, value in measured.items() if isinstance(value, int | float)}
    results = json.loads((folders["evaluate"] / METRICS).read_text())
    champion = artifact_of(project, "promote", "champion")
    assert champion["type"] == "system.Model"
    assert champion["promoted"] == 1.0
    assert champion["name"] == "toy"
    assert champion["em"] == results["em"]
    assert champion["recall_at_5"] == results["recall_at_5"]
    assert artifact_of(project, "evaluate", "report")["type"] == "system.HTML"
    assert artifact_of(project, "evaluate", "summary")["type"] == "system.Markdown"
    assert outputs(project, "evaluate", "report")[-1] == (folders["evaluate"] / "report.html").read_text()
    rows = {row[0]: row[1] for row in rows_of(outputs(project, "evaluate", "summary")[-1])}
    assert rows["EM (test questions)"] == f"{results['em']:.3f}"
    metrics = artifact_of(project, "evaluate", "metrics")
    assert metrics["em"] == results["em"]


def test_artifacts_have_the_metadata_that_the_pages_on_components_say(project: Path, run: Path) -> None:
    """By the same names in each run: Kubeflow's page that compares runs has a row for each name."""
    known = {name: compiled("train")["components"].get(f"comp-{name}") for name in [*STEPS, "promote"]}
    planned = planned_steps(json.loads(options(project)))
    for (task, name), (keys, more) in component_pages.METADATA.items():
        made = (known.get(task) or {}).get("outputDefinitions", {}).get("artifacts", {})
        if name not in made:
            continue
        artifact = artifact_of(project, task, name)
        if task in STEPS and task not in planned:
            assert artifact.keys() <= {"type", "message"}, (task, name)
            continue
        assert artifact.keys() >= set(keys), (task, name)
        if more in (component_pages.OF_THE_STAGE, component_pages.CHIEF_ONES):
            measured = json.loads((run / STAGES[task].folder / METRICS).read_text())
            numbers = {key for key, value in measured.items() if isinstance(value, int | float)}
            if more == component_pages.CHIEF_ONES:
                numbers &= set(HEADLINE_METRICS.get(task, numbers))
                assert len(numbers) <= 10 or task == "pretrain", "Kubeflow's page shows ten at once"
            assert artifact.keys() == {"type", *keys} | numbers, (task, name)


# Promotion


def promoted(root: Path, project: Path, margin: float = 0.0) -> dict[str, float]:
    """What the component shows of a promotion."""
    metrics, champion = Output(root / "shown.json"), Output(root / "champion.json")
    tasks.promote(options(project, tracking={"enabled": True}), str(root), "toy", margin, champion, metrics)
    assert metrics.shown == json.loads((root / "shown.json").read_text())
    return metrics.shown


def copied(run: Path, name: str, *, right: bool) -> Path:
    """The run under another name, with results as if it had answered every question right or wrong."""
    root = run.with_name(name)
    shutil.copytree(run, root, ignore=shutil.ignore_patterns(".realmops", "promoted"))
    small_project.answered(root / "results", 100 if right else 0)
    return root


def test_the_last_task_of_train_promotes_and_not_being_better_is_no_failure(
    project: Path, run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert [json.loads(text) for text in outputs(project, "promote", "metrics")] == [{"promoted": 1.0}]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_of(project))
    em = json.loads((run / "results/metrics.json").read_text())["em"]
    better, worse = copied(run, "better", right=True), copied(run, "worse", right=False)
    assert promoted(better, project) == {"promoted": 1.0, "em_difference": 1.0 - em}
    assert promoted(worse, project) == {"promoted": 0.0, "em_difference": -1.0}
    assert "not promoted, models:/toy/2 remains champion" in capfd.readouterr().err
    assert len(list((run.parent / ".realmops/promote").iterdir())) == 3, "one after another, whatever their roots"


def test_a_promotion_that_cannot_be_is_one_line(
    project: Path, run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def told(margin: float = 0.0) -> str:
        with pytest.raises(SystemExit) as caught:
            promoted(run, project, margin)
        assert caught.value.code == 2
        (line,) = capfd.readouterr().err.splitlines()
        return line

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert told().startswith("realmops: MLFLOW_TRACKING_URI is not set")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_of(project))
    assert told(3.0) == "realmops: margin is 3.0; expected a number from 0 to 1"


# Refresh


def test_refresh_embeds_what_changed_and_shows_the_answers(project: Path, run: Path) -> None:
    _, *kept = (project / "documents.jsonl").read_text().splitlines()
    (project / "new.jsonl").write_text("\n".join([*kept, '{"title": "New", "text": "Fresh."}']))
    values = json.loads(options(project))
    values["snapshot"]["documents"] = str(project / "new.jsonl")
    trained = {path: path.read_bytes() for path in sorted((run / "models").rglob("*")) if path.is_file()}
    done = run_pipeline("refresh", project, run="one", options=json.dumps(values), forks=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path: path.read_bytes() for path in trained} == trained
    [folder] = (run / "updates").iterdir()
    measured = json.loads((folder / "metrics.json").read_text())
    assert (measured["passages_new"], measured["passages_removed"]) == (1, 1)
    (figures,) = outputs(project, "refresh", "metrics")
    answered = json.loads((folder / "results/metrics.json").read_text())
    shown_figures = json.loads(figures)
    assert measured.items() <= shown_figures.items()
    assert shown_figures["answers_changed"] == answered["answers_changed"]
    changed = [json.loads(line) for line in (folder / "results/changed_answers.jsonl").read_text().splitlines()]
    (shown,) = outputs(project, "refresh", "changes")
    assert [row[0] for row in rows_of(shown)] == [change["question"] for change in changed]
    again = project / "again.md"
    tasks.refresh(json.dumps(values), str(run), Output(again), Output(project / "none.json"))
    assert again.read_text() == "The passages are unchanged.\n"


# Ablations


def rows_of(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"][2:]


def test_ablations_compare_what_ended_well_and_train_nothing_twice(project: Path) -> None:
    """First with a variant whose pre-training waits in vain for a builder: the pipeline fails, the table is there."""
    preset = project / "runs/compared/presets/ablations/per_token.yaml"
    preset.parent.mkdir(parents=True)
    preset.write_text("pretrain: {marginal: per_token, builder: external, builder_timeout: 1}\n")
    named: dict[str, Any] = {"run": "compared", "options": options(project), "presets": "[]"}
    failed = run_pipeline("ablations", project, variants=["baseline", "per_token"], **named)
    assert failed.returncode != 0
    out = project / "runs" / "compared"
    (shown,) = outputs(project, "table", "rows")
    assert [row[0] for row in rows_of(shown)] == ["REALM", "Baseline (ORQA)"]
    assert "\nper_token, seed 0: the stage pretrain is not complete in " in shown
    measured = [out / name / "seed-0/results/metrics.json" for name in ("realm", "baseline")]
    em = [json.loads(path.read_text())["em"] for path in measured]
    assert [row[2].split(" ")[0] for row in rows_of(shown)] == [f"{value:.3f}" for value in em]
    (figures,) = outputs(project, "table", "metrics")
    rows = {row["variant"]: row for row in csv.DictReader((out / "table.csv").read_text().splitlines())}
    columns = {"em": "em", "zero_shot_recall_at_5": "recall_at_5", "em_difference": "em_difference"}
    assert json.loads(figures) == {
        f"{name}_{shown}": pytest.approx(float(row[column]))
        for name, row in rows.items()
        for shown, column in columns.items()
    }
    assert [json.loads(figures)[f"{name}_em"] for name in ("realm", "baseline")] == em
    compared = {}
    for file in (project / "outputs").rglob("variant*/executor_output.json"):
        [entry] = json.loads(file.read_text())["artifacts"]["metrics"]["artifacts"]
        compared[entry["metadata"].pop("variant")] = entry["metadata"]
    assert compared.keys() == {"realm", "baseline"}, "the names, as all tasks have one: per_token failed"
    for path in measured:
        numbers = {key: value for key, value in json.loads(path.read_text()).items() if isinstance(value, int | float)}
        assert compared[path.parents[2].name] == numbers, "the names and figures of evaluate, so that runs compare"
    made = {path: path.stat().st_mtime_ns for path in (out / "store").glob("*/log.txt")}
    again = run_pipeline("ablations", project, variants=["baseline"], **named)
    assert again.returncode == 0, again.stdout + again.stderr
    assert {path: path.stat().st_mtime_ns for path in (out / "store").glob("*/log.txt")} == made
    _, shown = outputs(project, "table", "rows")
    assert shown == (out / "table.md").read_text()
    assert outputs(project, "table", "page")[1] == (out / "report.html").read_text()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"seeds": 0}, "seeds is 0; it must be at least 1"),
        ({"presets": "ablation"}, "presets is 'ablation'; expected a JSON list of strings"),
        ({"settings": "[1]"}, "overrides is '[1]'; expected a JSON list of strings"),
        ({"settings": '["pretrain.stepz=1"]'}, "stepz"),
        ({"name": "orqa"}, "variants.yaml has realm, "),
    ],
)
def test_a_variant_that_cannot_be_is_one_line(
    project: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], change: dict[str, Any], told: str
) -> None:
    given = {"name": "realm", "options": options(project), "presets": "[]", "settings": "[]", "seeds": 1}
    given |= {"out": str(tmp_path / "out"), "limits": "", "metrics": Output(tmp_path), **change}
    with pytest.raises(SystemExit) as caught:
        ablation_tasks.variant(**given)
    assert caught.value.code == 2
    limits, line = capfd.readouterr().err.splitlines()
    assert limits == "limits of this pod: "
    assert line.startswith("realmops: ")
    assert told in line
    assert not (tmp_path / "out").exists()
