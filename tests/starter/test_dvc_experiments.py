"""A new project under DVC: experiments by ``-S``, and a table of few figures."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import small_project
from small_project import cli

from realmops import config
from realmops.stages import HEADLINE_METRICS
from realmops.starter.project_files import VARIED

ENVIRONMENT = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    **{f"GIT_{who}_{what}": "a@b.test" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
}


def call(folder: Path, *words: str) -> str:
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def table(project: Path) -> list[dict[str, str]]:
    return [*csv.DictReader(call(project, "dvc", "exp", "show", "--csv", "--drop", ".*/.*").splitlines())]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with documents alone in a git repository, committed."""
    folder = tmp_path_factory.mktemp("repository")
    small_project.write_documents(folder / "documents.jsonl")
    project = folder / "mine"
    words = ("--documents", folder / "documents.jsonl", "--encoder", "small", "--no-reader")
    assert cli("init", project, *words).exit_code == 0
    call(folder, "git", "init", "--quiet")
    call(project, "dvc", "init", "--subdir", "--quiet")
    call(folder, "git", "add", "--all")
    call(folder, "git", "commit", "--quiet", "--message", "one")
    return project


def other_value(key: str, value: Any) -> str:
    names = {"retriever.init": "some/encoder", "reader.init": "encoder", "pretrain.masking": "random_span"}
    if isinstance(value, bool):
        return json.dumps(not value)
    return names.get(key) or str(value * 2 or 1)


def test_an_experiment_sets_each_option_that_is_listed_and_any_other(project: Path) -> None:
    """The command of the README that init writes, for every key; queued, so that nothing is trained."""
    values = config.load_params(project / "params.yaml")
    changes = {key: other_value(key, values.get(key)) for key in VARIED}
    others = {"++pretrain.lag": "5", "++optimiser.ramp_share": "0.2", "++pretrain.steps": "50"}
    words = [word for key, value in {**changes, **others}.items() for word in ("-S", f"{key}={value}")]
    call(project, "dvc", "exp", "run", "--queue", "--name", "all", *words)
    [queued] = [row for row in table(project) if row["Experiment"] == "all"]
    for key, value in {**changes, **{key.lstrip("+"): value for key, value in others.items()}}.items():
        assert queued[key].lower() == value.lower(), key
    call(project, "dvc", "queue", "remove", "--all")


def test_an_experiment_runs_with_its_change_and_the_table_has_few_columns(project: Path) -> None:
    """The stage snapshot alone; figures as the stage evaluate writes them."""
    call(project, "dvc", "exp", "run", "-S", "snapshot.block_wordpieces=60", "snapshot")
    manifest = json.loads((project / "data/snapshot/manifest.json").read_text())
    assert manifest["sections"]["snapshot"]["block_wordpieces"] == 60
    figures = dict.fromkeys(HEADLINE_METRICS["evaluate"], 0.5)
    (project / "results").mkdir(exist_ok=True)
    (project / "results/headline.json").write_text(json.dumps(figures))
    (project / "results/metrics.json").write_text(json.dumps({f"figure_{n}": n for n in range(200)}))
    [shown] = json.loads(call(project, "dvc", "metrics", "show", "--json"))[""]["data"].values()
    assert shown["data"] == figures
    header = [name for name in table(project)[0] if name[:1].islower()]
    own = {"rev", "typ", "parent", "presets", "snapshot.documents", "tracking.experiment"}
    assert {*header} - own == {*figures, *VARIED}
