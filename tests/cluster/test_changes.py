"""What a submission prints of the changes since the last successful run, and of the steps that run again."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import kfp_lab
import pytest
import small_project
from compiled import file_of, project_with_pipeline
from kfp_lab import KfpLab, arguments_of

ALL = "snapshot, tag, ict, pretrain, finetune, evaluate"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return project_with_pipeline(tmp_path)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KfpLab]:
    yield from kfp_lab.named_by_environment(tmp_path, monkeypatch)


def changes(project: Path, *words: str, pipeline: str = "train") -> list[str]:
    """The lines on changes of a submission."""
    image = () if any(word.startswith("image=") for word in words) else ("--argument", "image=realmops:1")
    result = small_project.cli(
        "submit", "--params", project / "params.yaml", "--pipeline", file_of(pipeline), *image, *words
    )
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    shown = [line for line in lines if line.startswith("changed since ")]
    assert not shown or lines.index(shown[0]) < next(
        n for n, line in enumerate(lines) if "uploaded" in line or "was there" in line
    )
    return shown


def test_one_more_document_names_the_steps_and_the_pipeline_that_embeds_only_it(project: Path, lab: KfpLab) -> None:
    lab.state = "SUCCEEDED"
    assert changes(project) == [], "the first run"
    assert changes(project) == [], "the same key"
    [first, _] = lab.runs
    documents = project / "documents.jsonl"
    documents.write_bytes(documents.read_bytes() + b'{"id": "x", "title": "New", "text": "One more document."}\n')
    lab.state = "FAILED"
    for _ in range(2):
        [line] = changes(project)
    assert line.startswith(f"changed since the run {first['display_name']} (")
    assert f"SUCCEEDED): snapshot.documents; these steps read it or each other's output and run again: {ALL}; " in line
    assert line.endswith(f"'realmops submit --pipeline refresh --argument run={arguments_of(first)['run']}'")
    assert changes(project, "--argument", "run=first", pipeline="refresh") == []


@pytest.mark.parametrize(
    ("words", "changed", "steps"),
    [
        (["--set", "evaluate.bootstrap=7"], "evaluate.bootstrap", "evaluate"),
        (["--set", "finetune.epochs=3", "--set", "tracking.experiment=x"], "finetune.epochs", "finetune, evaluate"),
        (["--argument", "image=realmops:2"], "the image", ALL),
    ],
)
def test_only_the_steps_after_a_change_run_again(
    words: list[str], changed: str, steps: str, project: Path, lab: KfpLab
) -> None:
    lab.state = "SUCCEEDED"
    changes(project)
    [line] = changes(project, *words)
    assert (
        line.partition("SUCCEEDED): ")[2]
        == f"{changed}; these steps read it or each other's output and run again: {steps}"
    )


def test_other_content_of_an_address_is_a_change(project: Path, lab: KfpLab, tmp_path: Path) -> None:
    lab.state = "SUCCEEDED"
    remote = tmp_path / "remote.jsonl"
    shutil.copy(project / "documents.jsonl", remote)
    words = "--set", f"snapshot.documents=file://{remote}"
    assert changes(project, *words) == []
    with remote.open("a") as file:
        file.write('{"id": "x", "title": "New", "text": "One more document."}\n')
    [line] = changes(project, *words)
    assert "SUCCEEDED): snapshot.documents; " in line


def test_a_run_of_another_version_is_not_compared(project: Path, lab: KfpLab) -> None:
    lab.state = "SUCCEEDED"
    changes(project)
    arguments = arguments_of(lab.runs[0])
    lab.runs[0]["runtime_config"]["parameters"] = {**arguments, "options": '{"defaults": "00000000"}'}
    assert changes(project, "--set", "finetune.epochs=3") == []
