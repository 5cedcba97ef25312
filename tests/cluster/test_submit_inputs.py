"""Inputs of a submission: added to DVC, pushed, identified in the key, and what is refused."""

import shutil
import subprocess
from pathlib import Path

import pytest
import small_project
import yaml
from compiled import project_with_pipeline
from fsspec.implementations.memory import MemoryFileSystem

from realmops.cluster import submit
from realmops.cluster.input_plan import send_inputs
from realmops.cluster.packed_options import packed_pins
from realmops.cluster.submit import Pipeline, Submission
from realmops.config import load_params

DOCUMENTS = ["snapshot.documents=documents"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "projects").mkdir()
    project = project_with_pipeline(tmp_path / "projects")
    (project / "documents").mkdir()
    (project / "documents.jsonl").rename(project / "documents" / "a.jsonl")
    (project / "documents" / "b.txt").write_text("The second document.")
    return project


def prepared(project: Path, *settings: str, image: str = "image=realmops:1") -> Submission:
    values = load_params(project / "params.yaml", settings=[*DOCUMENTS, *settings])
    arguments = [image] if image else []
    pipeline = Pipeline.read(project / "pipelines" / "train.yaml")
    return submit.prepare(values, project, pipeline, arguments, "e", None)[0]


def sent(project: Path) -> list[str]:
    """Push the inputs of a project, and return what is logged."""
    lines: list[str] = []
    send_inputs(prepared(project).inputs, project, lines.append)
    return lines


def files_below(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_content_is_pushed_once(project: Path) -> None:
    names = {"documents", *(f"questions.{split}.jsonl" for split in small_project.QUESTIONS)}
    lines = sent(project)
    assert "documents: 3 objects pushed" in lines
    assert {path.stem for path in project.glob("*.dvc") if path.is_file()} == names
    assert sorted(sent(project)) == sorted(f"{name}: was there already" for name in names)


def test_equal_content_has_one_key_with_its_files_and_without(project: Path, tmp_path: Path) -> None:
    """In another folder, in a pod that has params.yaml and DVC's files alone, and after a change."""
    before = prepared(project)
    sent(project)
    first = prepared(project)
    assert before.key == first.key
    shutil.copytree(project, tmp_path / "copy")
    pod = tmp_path / "pod"
    for path in (project / ".dvc" / "config", *project.glob("*.dvc"), *project.glob("p*/train.yaml")):
        if path.is_file():
            (pod / path.relative_to(project)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, pod / path.relative_to(project))
    shutil.copy(project / "params.yaml", pod)
    assert prepared(tmp_path / "copy").key == prepared(pod).key == first.key
    assert prepared(pod).arguments["options"] == first.arguments["options"]
    (tmp_path / "copy" / "documents" / "b.txt").write_text("Another document.")
    assert prepared(tmp_path / "copy").key != first.key


def test_a_changed_dvc_file_is_another_key_without_the_files(project: Path) -> None:
    sent(project)
    pointer, keys = project / "documents.dvc", []
    earlier = pointer.read_bytes()
    (project / "documents" / "b.txt").write_text("Changed")
    sent(project)
    shutil.rmtree(project / "documents")
    for content in (pointer.read_bytes(), earlier):
        pointer.write_bytes(content)
        keys.append(prepared(project).key)
    assert keys[0] != keys[1]


def test_changed_content_of_an_address_is_another_key(project: Path, memory: MemoryFileSystem) -> None:
    keys = []
    for text in (b"one", b"one, and two"):
        memory.pipe_file("/remote/b.txt", text)
        submission = prepared(project, "snapshot.documents=memory://remote")
        keys += [submission.key, prepared(project, "snapshot.documents=memory://remote").key]
        [item] = [item for item in submission.inputs if item.key == "snapshot.documents"]
        assert packed_pins(submission.arguments["options"])["snapshot.documents"].identity == item.identity
        assert item.identity.startswith("memory://remote ")
    assert keys[0] == keys[1] != keys[2] == keys[3]


def test_a_dry_run_sends_and_writes_nothing(project: Path, tmp_path: Path) -> None:
    before = {name: content for name, content in files_below(tmp_path).items() if "/.dvc/" not in name}
    words = ("submit", "--params", project / "params.yaml", "--set", *DOCUMENTS, "--argument", "image=realmops:1")
    result = small_project.cli(*words, "--dry-run")
    assert result.exit_code == 0, result.output
    assert "snapshot.documents: documents, md5:" in result.stdout
    assert {name: content for name, content in files_below(tmp_path).items() if "/.dvc/" not in name} == before
    assert not (project / ".dvc" / "remote").exists()


def test_an_input_in_no_place_for_pods_is_refused(project: Path) -> None:
    with pytest.raises(
        ValueError, match=r"snapshot.documents is 'nowhere': .*/nowhere does not exist, and DVC does not"
    ):
        prepared(project, "snapshot.documents=nowhere")
    [item] = [item for item in prepared(project, "snapshot.documents=/realmops/a").inputs if "documents" in item.key]
    assert (item.identity, packed_pins(prepared(project, "snapshot.documents=/realmops/a").arguments["options"])) == (
        "/realmops/a",
        {key: pin for key, pin in packed_pins(prepared(project).arguments["options"]).items() if "snap" not in key},
    )
    shutil.rmtree(project / ".dvc")
    with pytest.raises(ValueError, match=r"snapshot.documents is 'documents': .* in no project of DVC.*dvc remote add"):
        prepared(project)


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


def test_the_image_is_that_of_the_kustomization(project: Path) -> None:
    file = project / "kustomization.yaml"
    for entry, image in (
        ({"newName": "host/ours", "newTag": "7"}, "host/ours:7"),
        ({"newTag": "8"}, "realmops:8"),
        ({"newName": "host/ours", "digest": f"sha256:{'1' * 64}"}, f"host/ours@sha256:{'1' * 64}"),
    ):
        file.write_text(yaml.safe_dump({"images": [{"name": "mlflow", "newTag": "1"}, {"name": "realmops"} | entry]}))
        assert prepared(project, image="").arguments["image"] == image
    assert prepared(project).arguments["image"] == "realmops:1"
    file.write_text(yaml.safe_dump({"images": [{"name": "realmops", "newName": "registry/SET-ME/realmops"}]}))
    with pytest.raises(ValueError, match=r"kustomization.yaml: newName of the image realmops is .*SET-ME.*placeholder"):
        prepared(project, image="")
    with pytest.raises(ValueError, match=r"tracking\.experiment is SET-ME, a placeholder"):
        prepared(project, "tracking.experiment=SET-ME")


def test_upload_pushes_and_names_the_files_that_the_job_lacks(project: Path) -> None:
    generator = [{"name": "realmops-params", "files": ["params.yaml", ".dvc__config=.dvc/config"]}]
    (project / "kustomization.yaml").write_text(yaml.safe_dump({"configMapGenerator": generator}))
    result = small_project.cli("upload", "--params", project / "params.yaml", "--set", *DOCUMENTS)
    assert result.exit_code == 0, result.output
    assert "documents: 3 objects pushed" in result.stdout
    assert "kustomization.yaml: documents.dvc is not in the files of realmops-params" in result.stderr
    assert ".dvc/config is not" not in result.stderr
