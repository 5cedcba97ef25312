"""The key of a training: what changes it and what does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import small_project
import yaml
from compiled import file_of, project_with_pipeline

from realmops.cluster import IMAGE, submit
from realmops.cluster.key import GIVEN, PLACEMENT, digests_of_files, key_of
from realmops.cluster.submit import Pipeline
from realmops.config import load


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return project_with_pipeline(tmp_path)


def key(project: Path, image: str = "realmops:1", *settings: str) -> str:
    pipeline = Pipeline.read(project / "pipelines" / "train.yaml")
    values = load(project / "params.yaml", settings=settings)
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
    assert "defaultValue: 900.0" in compiled.read_text()
    compiled.write_text(compiled.read_text().replace("defaultValue: 900.0", "defaultValue: 901.0"))
    keys.append(key(project))
    assert len({*keys}) == 5


def test_arguments_change_the_key_and_those_that_say_where_it_runs_do_not() -> None:
    def with_arguments(name: str, *arguments: str) -> str:
        pipeline = Pipeline.read(file_of(name))
        return key_of({}, {}, pipeline.documents, pipeline.parsed(arguments))

    assert len({with_arguments("ablations", *more) for more in ((), ("seeds=5",), ('variants=["realm"]',))}) == 3
    assert with_arguments("refresh", "run=first") != with_arguments("refresh", "run=second")
    plain = with_arguments("train")
    assert with_arguments("train", "memory=16Gi", "builders=3", "wait_seconds=60") == plain
    assert with_arguments("train", f"image={IMAGE}") == plain != with_arguments("train", "image=other")


def test_every_parameter_of_placement_is_one_of_a_pipeline() -> None:
    known = {name for one in ("train", "ablations", "refresh") for name in Pipeline.read(file_of(one)).parameters}
    assert known >= PLACEMENT | GIVEN


def test_an_empty_lock_of_dvc_records_nothing(project: Path) -> None:
    (project / "dvc.lock").touch()
    assert key(project)
    values = load(project / "params.yaml")
    values["snapshot"]["documents"] = "/volume/documents.jsonl"
    _, [note] = digests_of_files(values, project)
    assert "is not here, and DVC has no digest of it" in note


def test_files_that_other_options_make_superfluous_are_not_in_the_key(project: Path) -> None:
    values = load(project / "params.yaml")
    files, notes = digests_of_files(values, project)
    assert files.keys() == {"snapshot.documents", "questions.train", "questions.dev", "questions.test"}
    assert notes == []
    values["tag"]["method"] = "tagger"
    values["questions"]["dev"] = "data/sample/questions.dev.jsonl.gz"  # made by a stage
    files, _ = digests_of_files(values, project)
    assert files.keys() == {"snapshot.documents", "questions.train", "questions.test", "tag.train", "tag.dev"}


def test_of_a_file_that_is_elsewhere_dvc_knows_the_digest(project: Path) -> None:
    values = load(project / "params.yaml")
    for split in small_project.QUESTIONS:
        (project / f"questions.{split}.jsonl").unlink()
    values["snapshot"]["documents"] = "/volume/documents.jsonl"
    values["questions"]["dev"] = "questions/dev.jsonl"
    lock = {"stages": {"finetune": {"deps": [{"path": "questions.train.jsonl", "md5": "1" * 32}]}}}
    (project / "dvc.lock").write_text(yaml.safe_dump({"schema": "2.0", **lock}))
    for name, digest in (("documents.jsonl", "2" * 32), ("questions", "3" * 32 + ".dir")):
        (project / f"{name}.dvc").write_text(yaml.safe_dump({"outs": [{"path": name, "md5": digest}]}))
    files, notes = digests_of_files(values, project)
    assert files == {
        "snapshot.documents": "2" * 32,
        "questions.train": "1" * 32,
        "questions.dev": "3" * 32 + ".dir",
        "questions.test": "questions.test.jsonl",
    }
    [note] = notes
    assert note.startswith("questions.test is 'questions.test.jsonl', which is not here, and DVC has no digest of it")
