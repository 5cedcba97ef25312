"""The key of a training: what changes it and what does not."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from compiled import file_of, project_with_pipeline

from realmops.cluster import IMAGE, submit
from realmops.cluster.input_plan import notes_of, plan_inputs
from realmops.cluster.key import PLACEMENT, SUBMISSION_PARAMETERS, training_key
from realmops.cluster.submit import Pipeline
from realmops.config import load_params


def identities(values: Any, project: Path) -> tuple[dict[str, str], list[str]]:
    inputs = plan_inputs(values, project)
    return {item.key: item.identity for item in inputs}, notes_of(inputs)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return project_with_pipeline(tmp_path)


def key(project: Path, image: str = "realmops:1", *settings: str) -> str:
    pipeline = Pipeline.read(project / "pipelines" / "train.yaml")
    values = load_params(project / "params.yaml", settings=settings)
    found, _ = submit.prepare(values, project, pipeline, [f"image={image}"], "e", None)
    return found.key


def test_comments_order_and_tracking_leave_the_key_as_it_is(project: Path) -> None:
    before = key(project)
    params, compiled = project / "params.yaml", project / "pipelines" / "train.yaml"
    params.write_text("# a remark\n" + params.read_text())
    documents = list(yaml.safe_load_all(compiled.read_text()))
    turned = [{name: one[name] for name in reversed(one)} for one in documents]
    turned[0]["root"]["inputDefinitions"]["parameters"]["options"]["defaultValue"] = "is always given"
    compiled.write_text("# a remark\n" + yaml.safe_dump_all(turned, sort_keys=False))
    assert key(project) == before
    assert key(project, "realmops:1", "tracking.experiment=other") == before
    assert len(before) == 64


def test_params_files_pipeline_and_image_change_the_key(project: Path) -> None:
    keys = [key(project), key(project, "realmops:2"), key(project, "realmops:1", "pretrain.steps=13")]
    with (project / "questions.test.jsonl").open("a") as file:
        file.write('{"question": "Who?", "answers": ["Anna Berg"]}\n')
    keys.append(key(project))
    compiled = project / "pipelines" / "train.yaml"
    assert compiled.read_text().count("defaultValue: 900.0") == compiled.read_text().count("tasks.guard(") == 1
    compiled.write_text(compiled.read_text().replace("defaultValue: 900.0", "defaultValue: 901.0"))
    assert key(project) == keys[-1], "how long to wait is no matter of what is trained"
    compiled.write_text(compiled.read_text().replace("tasks.guard(", "tasks.guards("))
    keys.append(key(project))
    assert len({*keys}) == 5


def test_arguments_change_the_key_and_those_that_say_where_it_runs_do_not() -> None:
    def with_arguments(name: str, *arguments: str) -> str:
        pipeline = Pipeline.read(file_of(name))
        return training_key({}, {}, pipeline.documents, pipeline.parse_arguments(arguments))

    assert len({with_arguments("ablations", *more) for more in ((), ("seeds=5",), ('variants=["realm"]',))}) == 3
    assert with_arguments("refresh", "run=first") != with_arguments("refresh", "run=second")
    plain = with_arguments("train")
    for name in ("accelerators=1", "nproc_per_node=2", "margin=0.1", "model=realm"):
        assert with_arguments("train", name) != plain
    assert with_arguments("train", "accelerators=0", "nproc_per_node=1", "margin=0") == plain, "the defaults"
    assert with_arguments("train", "memory=16Gi", "builders=3", "wait_seconds=60") == plain
    digest = f"@sha256:{'1' * 64}"
    first, second = (with_arguments("train", f"image={name}{digest}") for name in ("realmops", "host/a:2"))
    assert first == second != plain
    assert with_arguments("train", f"image={IMAGE}") == plain != with_arguments("train", "image=other")


@pytest.mark.parametrize(
    ("image", "note"),
    [
        ("realmops", "missing tag does not identify"),
        ("host:5000/realmops", "missing tag does not identify"),
        ("host:5000/realmops:latest", "tag latest does not identify"),
        ("realmops:1", ""),
        (f"realmops:latest@sha256:{'1' * 64}", ""),
    ],
)
def test_a_tag_that_moves_is_warned_of(image: str, note: str, project: Path) -> None:
    pipeline = Pipeline.read(project / "pipelines" / "train.yaml")
    values = load_params(project / "params.yaml")
    _, notes = submit.prepare(values, project, pipeline, [f"image={image}"], "e", None)
    assert [note in line for line in notes] == [True] * bool(note)
    assert submit.prepare(values, project, pipeline, [], "e", None)[1] == [], "the released image has a number"


def test_every_parameter_of_placement_is_one_of_a_pipeline() -> None:
    known = {name for one in ("train", "ablations", "refresh") for name in Pipeline.read(file_of(one)).parameters}
    assert known >= PLACEMENT | SUBMISSION_PARAMETERS


def test_an_empty_lock_of_dvc_records_nothing(project: Path) -> None:
    (project / "dvc.lock").touch()
    assert key(project)
    values = load_params(project / "params.yaml")
    values["snapshot"]["documents"] = "/realmops/documents.jsonl"
    _, [note] = identities(values, project)
    assert "is on the volume: the key contains its name" in note


def test_files_that_other_options_make_superfluous_are_not_in_the_key(project: Path) -> None:
    values = load_params(project / "params.yaml")
    files, notes = identities(values, project)
    assert files.keys() == {"snapshot.documents", "questions.train", "questions.dev", "questions.test"}
    assert notes == []
    values["tag"]["method"] = "tagger"
    values["questions"]["dev"] = "data/sample/questions.dev.jsonl.gz"  # made by a stage
    files, _ = identities(values, project)
    assert files.keys() == {"snapshot.documents", "questions.train", "questions.test", "tag.train", "tag.dev"}


def dvc(project: Path, *words: str) -> None:
    subprocess.run([sys.executable, "-m", "dvc", *words], cwd=project, check=True, capture_output=True)


def test_content_and_what_dvc_recorded_of_it_are_one_key(project: Path) -> None:
    """A file, a folder, and a file in a folder that is tracked as one; on a laptop, and in CI without the data."""
    (project / ".dvcignore").write_text("*.tmp\n")
    documents, questions = project / "documents", project / "questions"
    (documents / "sub").mkdir(parents=True)
    (project / "documents.jsonl").rename(documents / "sub" / "dé.jsonl")
    (documents / "a.txt").write_bytes(b"One.\r\nTwo.\r\n")
    (documents / "left.tmp").write_text("is ignored")
    questions.mkdir()
    for split in ("train", "dev"):
        (project / f"questions.{split}.jsonl").rename(questions / f"{split}.jsonl")
    settings = ["snapshot.documents=documents", "questions.train=questions/train.jsonl"]
    settings.append("questions.dev=questions/dev.jsonl")
    dvc(project, "add", "documents", "questions", "questions.test.jsonl")
    dvc(project, "push")
    laptop = key(project, "realmops:1", *settings)
    away = project / "away"
    away.mkdir()
    for name in ("documents", "questions", "questions.test.jsonl"):
        (project / name).rename(away / name)
    assert key(project, "realmops:1", *settings) == laptop
    for name in ("documents", "questions", "questions.test.jsonl"):
        (away / name).rename(project / name)
    for changed in (documents / "a.txt", questions / "dev.jsonl", project / "questions.test.jsonl"):
        content = changed.read_bytes()
        changed.write_bytes(content + b"\n")
        assert key(project, "realmops:1", *settings) != laptop, "what is here and differs from its record counts"
        changed.write_bytes(content)
    assert key(project, "realmops:1", *settings) == laptop


def test_the_content_of_an_encoder_changes_the_key(project: Path) -> None:
    def of(reader: str) -> tuple[str, list[str]]:
        values = load_params(project / "params.yaml")
        values["retriever"]["init"], values["closed_book"]["init"] = "weights", "google/t5"
        values["finetune"]["reader"] = reader
        files, notes = identities(values, project)
        return files["retriever.init"], notes

    name, [note] = of("pretrain")
    assert name == "weights"
    assert note.startswith("retriever.init is 'weights', which is on the hub: the key contains its")
    (project / "weights").mkdir()
    (project / "weights" / "model.safetensors").write_bytes(b"weights")
    before, notes = of("pretrain")
    assert notes == []
    assert [note.split()[0] for note in of("t5")[1]] == ["closed_book.init"]
    (project / "weights" / "model.safetensors").write_bytes(b"others")
    assert of("pretrain")[0] != before
