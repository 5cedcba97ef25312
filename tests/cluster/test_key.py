"""The key of a training, its inputs for pods, and its options in a submission."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import small_project
import yaml
from compiled import project_with_pipeline
from fsspec.implementations.memory import MemoryFileSystem

from realmops.cluster import IMAGE, submit
from realmops.cluster.input_plan import notes_of, plan_inputs, send_inputs
from realmops.cluster.key import PLACEMENT, SUBMISSION_PARAMETERS, training_key
from realmops.cluster.packed_options import pack_options, packed_pins, unpack_options
from realmops.cluster.submit import Pipeline, Submission
from realmops.config import PACKAGE, load_params
from realmops.inputs.resolve import PinnedInput
from realmops.options import Options

DOCUMENTS = "snapshot.documents=documents"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The toy project with a folder of documents, a project of DVC."""
    (tmp_path / "projects").mkdir()
    project = project_with_pipeline(tmp_path / "projects")
    (project / "documents").mkdir()
    (project / "documents.jsonl").rename(project / "documents" / "a.jsonl")
    (project / "documents" / "b.txt").write_text("The second document.")
    return project


def prepared(project: Path, *settings: str, image: str = "realmops:1") -> tuple[Submission, list[str]]:
    values = load_params(project / "params.yaml", settings=settings)
    arguments = [f"image={image}"] if image else []
    return submit.prepare(values, project, Pipeline.read(str(project / "pipelines/train.yaml")), arguments, "e", None)


def key(project: Path, image: str = "realmops:1", *settings: str) -> str:
    return prepared(project, *settings, image=image)[0].key


def identities(values: Any, project: Path) -> tuple[dict[str, str], list[str]]:
    inputs = plan_inputs(values, project)
    return {item.key: item.identity for item in inputs}, notes_of(inputs)


def sent(project: Path) -> list[str]:
    """Push the inputs of a project, and return what is logged."""
    lines: list[str] = []
    send_inputs(prepared(project, DOCUMENTS)[0].inputs, project, lines.append)
    return lines


# The key


def test_comments_order_and_tracking_do_not_change_the_key(project: Path) -> None:
    before = key(project, "realmops:1", DOCUMENTS)
    params, compiled = project / "params.yaml", project / "pipelines" / "train.yaml"
    params.write_text("# a remark\n" + params.read_text())
    reversed_ = [{name: one[name] for name in reversed(one)} for one in yaml.safe_load_all(compiled.read_text())]
    reversed_[0]["root"]["inputDefinitions"]["parameters"]["options"]["defaultValue"] = "is always given"
    compiled.write_text("# a remark\n" + yaml.safe_dump_all(reversed_, sort_keys=False))
    assert key(project, "realmops:1", DOCUMENTS, "tracking.experiment=other") == before
    assert len(before) == 64


def test_params_files_pipeline_and_image_change_the_key(project: Path) -> None:
    keys = [key(project, image, DOCUMENTS) for image in ("realmops:1", "realmops:2")]
    keys.append(key(project, "realmops:1", DOCUMENTS, "pretrain.steps=13"))
    with (project / "questions.test.jsonl").open("a") as file:
        file.write('{"question": "Who?", "answers": ["Anna Berg"]}\n')
    keys.append(key(project, "realmops:1", DOCUMENTS))
    compiled = project / "pipelines" / "train.yaml"
    assert compiled.read_text().count("defaultValue: 900.0") == compiled.read_text().count("tasks.guard(") == 1
    compiled.write_text(compiled.read_text().replace("defaultValue: 900.0", "defaultValue: 901.0"))
    assert key(project, "realmops:1", DOCUMENTS) == keys[-1], "wait_seconds does not affect the result"
    compiled.write_text(compiled.read_text().replace("tasks.guard(", "tasks.guards("))
    keys.append(key(project, "realmops:1", DOCUMENTS))
    assert len({*keys}) == 5


def test_arguments_of_placement_do_not_change_the_key_and_others_do() -> None:
    def with_arguments(name: str, *arguments: str) -> str:
        pipeline = Pipeline.read(name)
        return training_key(Options(), {}, pipeline.documents, pipeline.parse_arguments(arguments))

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
    known = {name for one in ("train", "ablations", "refresh") for name in Pipeline.read(one).parameters}
    assert known >= PLACEMENT | SUBMISSION_PARAMETERS


@pytest.mark.parametrize(
    ("image", "note"),
    [
        ("host:5000/realmops", "missing tag does not identify"),
        ("host:5000/realmops:latest", "tag latest does not identify"),
        ("realmops:1", ""),
        (f"realmops:latest@sha256:{'1' * 64}", ""),
        ("", ""),  # the released image
    ],
)
def test_a_mutable_tag_is_noted(image: str, note: str, project: Path) -> None:
    _, notes = prepared(project, DOCUMENTS, image=image)
    assert [note in line for line in notes] == [True] * bool(note)


def test_the_image_is_that_of_the_kustomization(project: Path) -> None:
    file = project / "kustomization.yaml"
    for entry, image in (
        ({"newName": "host/ours", "newTag": "7"}, "host/ours:7"),
        ({"newTag": "8"}, "realmops:8"),
        ({"newName": "host/ours", "digest": f"sha256:{'1' * 64}"}, f"host/ours@sha256:{'1' * 64}"),
    ):
        file.write_text(yaml.safe_dump({"images": [{"name": "mlflow", "newTag": "1"}, {"name": "realmops"} | entry]}))
        assert prepared(project, DOCUMENTS, image="")[0].arguments["image"] == image
    assert prepared(project, DOCUMENTS)[0].arguments["image"] == "realmops:1"
    file.write_text(yaml.safe_dump({"images": [{"name": "realmops", "newName": "registry/SET-ME/realmops"}]}))
    with pytest.raises(ValueError, match=r"kustomization.yaml: the image realmops is .*SET-ME.*placeholder"):
        prepared(project, DOCUMENTS, image="")


# Inputs


def test_content_is_pushed_once(project: Path) -> None:
    names = {"documents", *(f"questions.{split}.jsonl" for split in small_project.QUESTIONS)}
    assert "documents: 3 objects pushed" in sent(project)
    assert {path.stem for path in project.glob("*.dvc") if path.is_file()} == names
    assert sorted(sent(project)) == sorted(f"{name}: was there already" for name in names)


def test_equal_content_has_one_key_with_its_files_and_without(project: Path, tmp_path: Path) -> None:
    """In another folder, in a pod with params.yaml and DVC's files only, and after a change."""
    before, _ = prepared(project, DOCUMENTS)
    sent(project)
    first, _ = prepared(project, DOCUMENTS)
    assert before.key == first.key
    copy, pod = tmp_path / "copy", tmp_path / "pod"
    shutil.copytree(project, copy)
    for path in (".dvc/config", "pipelines/train.yaml", "params.yaml", *(path.name for path in project.glob("*.dvc"))):
        if (project / path).is_file():
            (pod / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(project / path, pod / path)
    assert key(copy, "realmops:1", DOCUMENTS) == first.key
    assert prepared(pod, DOCUMENTS)[0].arguments == first.arguments
    (copy / "documents" / "b.txt").write_text("Another document.")
    assert key(copy, "realmops:1", DOCUMENTS) != first.key


def test_changed_content_at_an_address_is_another_key(project: Path, memory: MemoryFileSystem) -> None:
    keys = []
    for text in (b"one", b"one, and two"):
        memory.pipe_file("/remote/b.txt", text)
        for _ in range(2):
            submission, _ = prepared(project, "snapshot.documents=memory://remote")
            keys.append(submission.key)
        [item] = [item for item in submission.inputs if item.key == "snapshot.documents"]
        assert packed_pins(submission.arguments["options"])["snapshot.documents"].identity == item.identity
    assert keys[0] == keys[1] != keys[2] == keys[3]


def test_a_name_on_the_hub_or_the_volume_is_noted_and_an_unreadable_input_refused(project: Path) -> None:
    for value, place in (("hf:wiki", "is on the hub"), ("/realmops/documents", "is on the volume")):
        submission, [note] = prepared(project, f"snapshot.documents={value}")
        assert f"snapshot.documents is {value!r}, which {place}: the key contains its name" in note
        assert "snapshot.documents" not in packed_pins(submission.arguments["options"])
    with pytest.raises(
        ValueError, match=r"snapshot.documents is 'nowhere': .*/nowhere does not exist, and DVC does not"
    ):
        prepared(project, "snapshot.documents=nowhere")
    shutil.rmtree(project / ".dvc")
    with pytest.raises(ValueError, match=r"snapshot.documents is 'documents': .* in no project of DVC.*dvc remote add"):
        prepared(project, DOCUMENTS)


def test_the_content_of_an_encoder_changes_the_key(project: Path) -> None:
    def inputs(reader: str, init: str = "weights") -> tuple[str, list[str]]:
        values = load_params(project / "params.yaml", settings=[DOCUMENTS])
        models = {"retriever.init": init, "closed_book.init": "google/t5", "finetune.reader": reader}
        files, notes = identities(values.replace(models), project)
        return files["retriever.init"], notes

    for name in ("some/encoder", "hf:encoder"):
        identity, [note] = inputs("pretrain", name)
        assert identity == name
        assert note.startswith(f"retriever.init is '{name}', which is on the hub: the key contains its")
    with pytest.raises(ValueError, match=r"retriever.init is 'weights': weights is a folder that .* does not have"):
        inputs("pretrain")
    (project / "weights").mkdir()
    (project / "weights" / "model.safetensors").write_bytes(b"weights")
    before, notes = inputs("pretrain")
    assert notes == []
    assert [note.split()[0] for note in inputs("t5")[1]] == ["closed_book.init"]
    (project / "weights" / "model.safetensors").write_bytes(b"others")
    assert inputs("pretrain")[0] != before


def test_files_that_the_options_do_not_use_are_not_in_the_key(project: Path) -> None:
    values = load_params(project / "params.yaml", settings=[DOCUMENTS])
    files, _ = identities(values, project)
    assert files.keys() == {"snapshot.documents", "questions.train", "questions.dev", "questions.test"}
    sample = "data/sample/questions.dev.jsonl.gz"  # of the stage sample
    files, _ = identities(values.replace({"tag.method": "tagger", "questions.dev": sample}), project)
    assert files.keys() == {"snapshot.documents", "questions.train", "questions.test", "tag.train", "tag.dev"}


def test_the_output_of_a_stage_of_dvc_is_pushed_and_refused_once_it_differs(project: Path) -> None:
    stage = "stages: {collect: {cmd: mkdir documents && echo One. > documents/a.txt, outs: [documents]}}\n"
    (project / "dvc.yaml").write_text(stage)
    shutil.rmtree(project / "documents")
    subprocess.run(["dvc", "repro", "-q"], cwd=project, check=True)
    assert any(line.startswith("documents: 2 objects") for line in sent(project))
    (project / "documents" / "a.txt").unlink()
    (project / "documents" / "a.txt").write_text("Two.")
    with pytest.raises(ValueError, match=r"differs from its record in .*/dvc.yaml; run 'dvc repro'"):
        sent(project)


def test_a_dry_run_writes_nothing(project: Path) -> None:
    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in project.rglob("*") if path.is_file() and ".dvc/" not in str(path)}

    before = files()
    words = ("--params", project / "params.yaml", "--set", DOCUMENTS, "--argument", "image=realmops:1")
    result = small_project.cli("submit", *words, "--dry-run")
    assert result.exit_code == 0, result.output
    assert "snapshot.documents: documents, md5:" in result.stdout
    assert files() == before
    assert not (project / ".dvc" / "remote").exists()


def test_upload_pushes_the_inputs(project: Path) -> None:
    result = small_project.cli("upload", "--params", project / "params.yaml", "--set", DOCUMENTS)
    assert result.exit_code == 0, result.output
    assert "documents: 3 objects pushed" in result.stdout


# Options


def test_options_are_the_differences_from_the_defaults(tmp_path: Path) -> None:
    """All 6 kB of them, in forty places of Argo's state, hid the last tasks of a run on a real server."""
    (tmp_path / "params.yaml").write_text("pretrain: {steps: 40}\n")
    values = load_params(tmp_path / "params.yaml", presets=[PACKAGE / "presets/minilm.yaml"])
    text = pack_options(values)
    assert unpack_options(text) == values
    assert len(text) < 2000
    assert unpack_options('{"pretrain": {"steps": 40}}').pretrain.steps == 40, "without the digest of defaults"
    for_kfp = small_project.cli("params", "--kfp", "--params", tmp_path / "params.yaml").stdout
    own = json.loads(json.loads(for_kfp))  # "kfp run create" parses JSON, and the server expects a string
    assert own.keys() == {"defaults", "pretrain"}


def test_options_carry_the_inputs_that_pods_fetch() -> None:
    pins = {
        "snapshot.documents": PinnedInput("md5:1a.dir", "documents", "", {"url": "s3://bucket/store"}),
        "questions.test": PinnedInput("s3://bucket/test.jsonl 2b"),
    }
    text = pack_options(Options(), pins)
    assert (unpack_options(text), packed_pins(text)) == (Options(), pins)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"defaults": "0", "pretrain": {"steps": 40}}', r"refer to the defaults 0, and this image has"),
        ("[]", "expected sections with keys"),
        ("{", "options is not valid JSON"),
    ],
)
def test_options_of_another_version_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        unpack_options(text)
