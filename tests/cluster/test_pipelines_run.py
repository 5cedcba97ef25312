"""The compiled pipelines on this machine: each task and each replica of the Deployment is a process."""

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
from realmops.cluster.packed_options import unpack_options
from realmops.stages import HEADLINE_METRICS, METRICS, STAGES, STEPS, planned_steps


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, mlflow_database: Path) -> Path:
    folder = tmp_path_factory.mktemp("pipeline")
    small_project.write_project(folder)
    shutil.copy(mlflow_database, folder / "mlflow.db")
    return folder


def run_pipeline(pipeline: str, folder: Path, **arguments: Any) -> subprocess.CompletedProcess[str]:
    """Run a pipeline by KFP's local runner."""
    arguments |= {"runs": str(folder / "runs")}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    environment |= {
        "KUBECONFIG": str(folder / "kubeconfig"),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "MLFLOW_TRACKING_URI": mlflow_of(folder),
    }
    work = partial(local_pipelines.run, file_of(pipeline), folder / "outputs", arguments)
    with tempfile.NamedTemporaryFile() as log:
        code = Forked(work, log=Path(log.name), cwd=folder, env=environment).wait()
        return subprocess.CompletedProcess([], code, Path(log.name).read_text(), "")


def mlflow_of(project: Path) -> str:
    return f"sqlite:///{project / 'mlflow.db'}"


def outputs(project: Path, task: str, artifact: str) -> list[str]:
    """Return what tasks of that name wrote for an artifact, oldest first."""
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
    done = train(project, options=options(project))
    results.unlink()
    assert done.returncode != 0
    tries = re.findall(r"realmops: .*/dev/null", done.stdout)
    assert len(tries) == 3, "a failed task is retried twice"
    return project / "runs" / "one"


@pytest.fixture(scope="module")
def run(project: Path, failed: Path) -> Path:
    """Return the run, started again with all files and with a model to promote."""
    made = {path: path.stat().st_mtime_ns for path in (failed / "models").glob("*/manifest.json")}
    done = train(project, options=options(project, tracking={"enabled": True}), model="toy")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path: path.stat().st_mtime_ns for path in made} == made, "no stage is trained again"
    return failed


def test_a_failed_run_scales_down_the_builders_and_removes_the_exchange(deployment: Lab, failed: Path) -> None:
    assert deployment.replicas == [1, 0], "scaled up for pretrain, and down although evaluate failed"
    assert not (failed / "results").exists()
    assert [*(failed / "exchange").iterdir()] == [], "pre-training is done"


def test_a_run_resumes_where_it_failed(project: Path, deployment: Lab, run: Path) -> None:
    assert deployment.replicas == [1, 0], "pretrain is not run again"
    pretrained = json.loads((run / "models/pretrain/manifest.json").read_text())
    assert pretrained["sections"]["pretrain"]["builder"] == "external"
    assert json.loads((run / "models/pretrain/metrics.json").read_text())["refreshes"] > 0


def artifact_of(project: Path, task: str, name: str) -> dict[str, Any]:
    """Type and metadata of the last artifact of a task."""
    found = [*(project / "outputs").rglob(f"{task}/executor_output.json")]
    last = max(found, key=lambda path: path.stat().st_mtime_ns)
    (entry,) = json.loads(last.read_text())["artifacts"][name]["artifacts"]
    made = compiled("train")["components"][f"comp-{task}"]["outputDefinitions"]["artifacts"][name]
    return {"type": made["artifactType"]["schemaTitle"], **entry.get("metadata", {})}


def test_artifacts_have_the_folder_the_metrics_and_the_report_of_their_stage(project: Path, run: Path) -> None:
    for task, kind in (("snapshot", "Dataset"), ("ict", "Model"), ("pretrain", "Model"), ("finetune", "Model")):
        artifact, folder = artifact_of(project, task, "corpus" if kind == "Dataset" else "model"), STAGES[task].folder
        manifest, measured = (json.loads((run / folder / file).read_text()) for file in ("manifest.json", METRICS))
        numbers = {name: value for name, value in measured.items() if isinstance(value, int | float)}
        place = {"folder": (run / folder).as_uri(), "digest": manifest["manifest_digest"]}
        assert artifact == {"type": f"system.{kind}", "fingerprint": manifest["fingerprint"], **place, **numbers}
    folder = run / STAGES["evaluate"].folder
    results = json.loads((folder / METRICS).read_text())
    champion = {"type": "system.Model", "promoted": 1.0, "name": "toy"}
    champion |= {name: results[name] for name in ("em", "recall_at_5")}
    assert artifact_of(project, "promote", "champion").items() >= champion.items()
    assert outputs(project, "evaluate", "report")[-1] == (folder / "report.html").read_text()
    rows = {row[0]: row[1] for row in rows_of(outputs(project, "evaluate", "summary")[-1])}
    assert rows["EM (test questions)"] == f"{results['em']:.3f}"
    assert artifact_of(project, "evaluate", "metrics")["em"] == results["em"]


def test_artifacts_have_the_metadata_that_the_pages_on_components_list(project: Path, run: Path) -> None:
    """With the same names in each run: Kubeflow's page that compares runs has a row for each name."""
    known = {name: compiled("train")["components"].get(f"comp-{name}") for name in [*STEPS, "promote"]}
    planned = planned_steps(unpack_options(options(project)))
    for (task, name), (keys, more) in component_pages.METADATA.items():
        if name not in (known.get(task) or {}).get("outputDefinitions", {}).get("artifacts", {}):
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
    """Metrics of a promotion."""
    metrics, champion = Output(root / "shown.json"), Output(root / "champion.json")
    tasks.promote(options(project, tracking={"enabled": True}), str(root), "toy", margin, champion, metrics)
    return metrics.shown


def test_promotion_compares_with_the_champion_and_fails_only_for_invalid_input(
    project: Path, run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def copied(name: str, percent: int) -> Path:
        """The run under another name, with this share of right answers."""
        root = run.with_name(name)
        shutil.copytree(run, root, ignore=shutil.ignore_patterns(".realmops", "promoted"))
        small_project.answered(root / "results", percent)
        return root

    assert [json.loads(text) for text in outputs(project, "promote", "metrics")] == [{"promoted": 1.0}]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_of(project))
    em = json.loads((run / "results/metrics.json").read_text())["em"]
    assert promoted(copied("better", 100), project) == {"promoted": 1.0, "em_difference": 1.0 - em}
    assert promoted(copied("worse", 0), project) == {"promoted": 0.0, "em_difference": -1.0}
    assert "not promoted, models:/toy/2 remains champion" in capfd.readouterr().err
    assert (run.parent / ".realmops/promotion.lock").is_file(), "serialised by a lease next to the runs"
    for margin, message in ((3.0, "margin is 3.0; expected a number from 0 to 1"), (0.0, "MLFLOW_TRACKING_URI is not")):
        if not margin:
            monkeypatch.delenv("MLFLOW_TRACKING_URI")
        with pytest.raises(SystemExit):
            promoted(run, project, margin)
        assert capfd.readouterr().err.startswith(f"realmops: {message}")


# Refresh


def test_refresh_embeds_changed_passages_and_shows_changed_answers(project: Path, run: Path) -> None:
    _, *kept = (project / "documents.jsonl").read_text().splitlines()
    (project / "new.jsonl").write_text("\n".join([*kept, '{"title": "New", "text": "Fresh."}']))
    values = unpack_options(options(project)).replace({"snapshot.documents": str(project / "new.jsonl")})
    trained = {path: path.read_bytes() for path in sorted((run / "models").rglob("*")) if path.is_file()}
    done = run_pipeline("refresh", project, run="one", options=values.model_dump_json())
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
    tasks.refresh(values.model_dump_json(), str(run), Output(again), Output(project / "none.json"))
    assert again.read_text() == "The passages are unchanged.\n"


# Ablations


def rows_of(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"][2:]


def test_ablations_compare_the_variants_that_succeeded_and_train_none_twice(project: Path) -> None:
    """First with a variant whose pre-training waits in vain for a builder: the pipeline fails, the table is written."""
    preset = project / "runs/compared/presets/ablations/per_token.yaml"
    preset.parent.mkdir(parents=True)
    preset.write_text("pretrain: {marginal: per_token, builder: external, builder_timeout: 1}\n")
    common: dict[str, Any] = {"run": "compared", "options": options(project), "presets": []}
    failed = run_pipeline("ablations", project, variants=["baseline", "per_token"], **common)
    assert failed.returncode != 0
    out = project / "runs" / "compared"
    (table,) = outputs(project, "table", "rows")
    assert "\nper_token, seed 0: the stage pretrain is not complete in " in table
    (figures,) = map(json.loads, outputs(project, "table", "metrics"))
    measured = {name: out / name / "seed-0/results/metrics.json" for name in ("realm", "baseline")}
    results = {name: json.loads(path.read_text()) for name, path in measured.items()}
    assert [row[0] for row in rows_of(table)] == ["REALM", "Baseline (ORQA)"]
    assert [row[2].split(" ")[0] for row in rows_of(table)] == [f"{one['em']:.3f}" for one in results.values()]
    assert {name: figures[f"{name}_em"] for name in results} == {name: one["em"] for name, one in results.items()}
    rows = {row["variant"]: row for row in csv.DictReader((out / "table.csv").read_text().splitlines())}
    assert figures["baseline_em_difference"] == pytest.approx(float(rows["baseline"]["em_difference"]))
    shown = {}
    for file in (project / "outputs").rglob("variant*/executor_output.json"):
        [entry] = json.loads(file.read_text())["artifacts"]["metrics"]["artifacts"]
        shown[entry["metadata"].pop("variant")] = entry["metadata"]
    assert shown == {
        name: {key: value for key, value in one.items() if isinstance(value, int | float)}
        for name, one in results.items()
    }, "the names and figures of evaluate, so that runs compare"
    made = {path: path.stat().st_mtime_ns for path in (out / "store").glob("*/log.txt")}
    again = run_pipeline("ablations", project, variants=["baseline"], **common)
    assert again.returncode == 0, again.stdout
    assert {path: path.stat().st_mtime_ns for path in (out / "store").glob("*/log.txt")} == made
    assert outputs(project, "table", "rows")[1] == (out / "table.md").read_text()
    assert outputs(project, "table", "page")[1] == (out / "report.html").read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seeds": 0}, "seeds is 0; it must be at least 1"),
        ({"settings": ["pretrain.stepz=1"]}, "stepz"),
        ({"name": "orqa"}, "variants.yaml has realm, "),
    ],
)
def test_an_invalid_variant_is_refused_in_one_line(
    project: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], change: dict[str, Any], message: str
) -> None:
    given = {"name": "realm", "options": options(project), "presets": [], "settings": [], "seeds": 1}
    given |= {"out": str(tmp_path / "out"), "limits": "", "metrics": Output(tmp_path), **change}
    with pytest.raises(SystemExit):
        ablation_tasks.variant(**given)
    _, line = capfd.readouterr().err.splitlines()
    assert line.startswith("realmops: ")
    assert message in line
