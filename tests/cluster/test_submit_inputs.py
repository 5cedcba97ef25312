"""What a submission makes of a project's inputs: their upload, addresses and key, and what it refuses."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import small_project
import yaml
from compiled import project_with_pipeline

from realmops.cluster import input_plan, submit
from realmops.cluster.input_plan import plan_inputs, send_inputs
from realmops.cluster.packed_options import packed_versions
from realmops.cluster.submit import Pipeline, Submission
from realmops.config import load_params
from realmops.inputs.lock_file import read_lock

DOCUMENTS = ["snapshot.documents=documents"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "projects").mkdir()
    project = project_with_pipeline(tmp_path / "projects")
    (project / "documents").mkdir()
    (project / "documents.jsonl").rename(project / "documents" / "a.jsonl")
    (project / "documents" / "b.txt").write_text("The second document.")
    return project


def prepared(project: Path, store: str = "", *settings: str, image: str = "image=realmops:1") -> Submission:
    values = load_params(project / "params.yaml", settings=[*DOCUMENTS, *settings])
    values["inputs"]["store"] = store
    arguments = [image] if image else []
    pipeline = Pipeline.read(project / "pipelines" / "train.yaml")
    return submit.prepare(values, project, pipeline, arguments, "e", None)[0]


def quiet(label: str, total: int, unit: str) -> object:
    return lambda units: None


def sent(project: Path, store: str) -> list[str]:
    """Upload the inputs of a project, and return what is logged."""
    lines: list[str] = []
    send_inputs(prepared(project, store).inputs, project, quiet, lines.append)  # type: ignore[arg-type]
    return lines


def files_below(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def dvc(project: Path, *words: str) -> None:
    subprocess.run([sys.executable, "-m", "dvc", *words], cwd=project, check=True, capture_output=True)


def test_a_store_has_what_dvc_pushes(project: Path, tmp_path: Path) -> None:
    """And the second upload sends nothing."""
    store = f"file://{tmp_path / 'store'}"
    lines = sent(project, store)
    assert any(line.startswith("documents: 3 objects") for line in lines)
    assert all(line.endswith(": was there already") for line in sent(project, store))
    inputs = [item.value for item in prepared(project, store).inputs]
    dvc(project, "init", "--no-scm")
    dvc(project, "remote", "add", "--default", "pushed", str(tmp_path / "pushed"))
    dvc(project, "add", *inputs)
    dvc(project, "push")
    assert files_below(tmp_path / "store") == files_below(tmp_path / "pushed")


def test_one_content_is_one_key_with_its_files_and_without(project: Path, tmp_path: Path) -> None:
    """In another folder, in a pod that has params.yaml and inputs.yaml alone, and after a change."""
    store = f"file://{tmp_path / 'store'}"
    sent(project, store)
    first = prepared(project, store)
    shutil.copytree(project, tmp_path / "copy")
    pod = tmp_path / "pod"
    (pod / "pipelines").mkdir(parents=True)
    for name in ("params.yaml", "inputs.yaml", "pipelines/train.yaml"):
        shutil.copy(project / name, pod / name)
    assert prepared(tmp_path / "copy", store).key == prepared(pod).key == first.key
    assert prepared(pod).arguments["options"] == first.arguments["options"]
    assert "file://" in str(first.arguments["options"])
    (tmp_path / "copy" / "documents" / "b.txt").write_text("Another document.")
    assert prepared(tmp_path / "copy", store).key != first.key


def test_an_object_that_changes_behind_an_address_changes_the_key(project: Path, tmp_path: Path) -> None:
    remote = tmp_path / "remote"
    shutil.copytree(project / "documents", remote)
    address = f"snapshot.documents=file://{remote}"
    store = f"file://{tmp_path / 'store'}"
    before = prepared(project, store, address).key
    assert prepared(project, store, address).key == before
    (remote / "b.txt").write_text("Another text")
    assert prepared(project, store, address).key != before


def test_an_address_on_the_hub_counts_by_its_version(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    for version in ("1a", "2b"):
        monkeypatch.setattr(input_plan, "version_of", lambda address, version=version: version)
        submission = prepared(project, "memory://store", "snapshot.documents=hf://datasets/owner/name/documents.jsonl")
        keys.append(submission.key)
        assert packed_versions(submission.arguments["options"]) == {"snapshot.documents": version}
    assert keys[0] != keys[1]


def test_dvcs_remote_serves_as_a_store(project: Path, tmp_path: Path) -> None:
    dvc(project, "init", "--no-scm")
    dvc(project, "remote", "add", "--default", "ours", str(tmp_path / "ours"))
    dvc(project, "add", "documents", *(f"questions.{split}.jsonl" for split in small_project.QUESTIONS))
    with pytest.raises(
        ValueError, match=r"snapshot.documents .* lacks its content; run 'dvc push' where the files are"
    ):
        prepared(project)
    dvc(project, "push")
    pushed = prepared(project)
    assert {item.origin for item in pushed.inputs} == {"the DVC remote ours"}
    (project / "documents" / "b.txt").write_text("Changed")
    with pytest.raises(ValueError, match=r"it differs from .*documents.dvc; run 'dvc add documents' and 'dvc push'"):
        prepared(project)
    shutil.rmtree(project / "documents")
    assert prepared(project).key == pushed.key, "of what DVC has recorded"


def test_a_changed_dvc_file_is_another_key_without_the_files(project: Path, tmp_path: Path) -> None:
    dvc(project, "init", "--no-scm")
    dvc(project, "remote", "add", "--default", "ours", str(tmp_path / "ours"))
    dvc(project, "add", "documents", *(f"questions.{split}.jsonl" for split in small_project.QUESTIONS))
    dvc(project, "push")
    pointer, keys = project / "documents.dvc", []
    earlier = pointer.read_bytes()
    (project / "documents" / "b.txt").write_text("Changed")
    dvc(project, "add", "documents")
    dvc(project, "push")
    shutil.rmtree(project / "documents")
    for content in (pointer.read_bytes(), earlier):
        pointer.write_bytes(content)
        keys.append(prepared(project).key)
    assert keys[0] != keys[1]


def test_a_dry_run_sends_and_writes_nothing(project: Path, tmp_path: Path) -> None:
    before = files_below(tmp_path)
    words = ("submit", "--params", project / "params.yaml", "--set", *DOCUMENTS, "--argument", "image=realmops:1")
    result = small_project.cli(*words, "--dry-run", "--store", f"file://{tmp_path / 'store'}")
    assert result.exit_code == 0
    assert f"file://{tmp_path / 'store'}" in result.stdout
    assert files_below(tmp_path) == before
    assert not (tmp_path / "store").exists()


def test_a_change_while_it_is_uploaded_ends_a_submission_and_an_unreachable_store_does_not(
    project: Path, tmp_path: Path
) -> None:
    """If the same content was uploaded before."""
    store = f"file://{tmp_path / 'store'}"
    sent(project, store)
    shutil.rmtree(tmp_path / "store")
    planned = prepared(project, store).inputs
    (tmp_path / "store").touch()
    lines: list[str] = []
    send_inputs(planned, project, quiet, lines.append)  # type: ignore[arg-type]
    assert any(line.startswith("documents: uploaded before according to inputs.yaml, not checked: ") for line in lines)
    (tmp_path / "store").unlink()
    recorded = (project / "inputs.yaml").read_bytes()
    (project / "documents" / "b.txt").write_text("The changed document")
    with pytest.raises(ValueError, match=r"b.txt was changed while it was uploaded; run the same command again"):
        send_inputs(planned, project, quiet, lines.append)  # type: ignore[arg-type]
    assert (project / "inputs.yaml").read_bytes() == recorded


def test_what_pods_cannot_read_is_refused_with_both_ways(project: Path) -> None:
    with pytest.raises(ValueError, match=r"upload it with --store s3://.*'dvc push'"):
        prepared(project)
    with pytest.raises(ValueError, match=r"nowhere does not exist, and .*inputs.yaml has no address for it"):
        prepared(project, "memory://store", "snapshot.documents=nowhere")
    volume = prepared(project, "memory://store", "snapshot.documents=/realmops/documents")
    [item] = [item for item in volume.inputs if item.key == "snapshot.documents"]
    assert (item.address, item.digest) == ("/realmops/documents", None)
    values = load_params(project / "params.yaml", settings=DOCUMENTS)
    with pytest.raises(ValueError, match="with credentials in it; leave them out"):
        plan_inputs(values | {"inputs": {"store": "s3://me:secret@bucket/x"}}, project, quiet)  # type: ignore[arg-type]


def test_the_image_is_that_of_the_kustomization(project: Path) -> None:
    file = project / "kustomization.yaml"
    for entry, image in (
        ({"newName": "host/ours", "newTag": "7"}, "host/ours:7"),
        ({"newTag": "8"}, "realmops:8"),
        ({"newName": "host/ours", "digest": f"sha256:{'1' * 64}"}, f"host/ours@sha256:{'1' * 64}"),
    ):
        file.write_text(yaml.safe_dump({"images": [{"name": "mlflow", "newTag": "1"}, {"name": "realmops"} | entry]}))
        assert prepared(project, "memory://store", image="").arguments["image"] == image
    assert prepared(project, "memory://store").arguments["image"] == "realmops:1"
    file.write_text(yaml.safe_dump({"images": [{"name": "realmops", "newName": "registry/SET-ME/realmops"}]}))
    with pytest.raises(ValueError, match=r"kustomization.yaml: newName of the image realmops is .*SET-ME.*placeholder"):
        prepared(project, "memory://store", image="")
    with pytest.raises(ValueError, match=r"tracking\.experiment is SET-ME, a placeholder"):
        prepared(project, "memory://store", "tracking.experiment=SET-ME")


def test_upload_saves_addresses_and_the_store_and_keeps_comments(project: Path, tmp_path: Path) -> None:
    params = project / "params.yaml"
    params.write_text(f"# ours\n{params.read_text()}")
    words = ("upload", "--params", params, "--set", *DOCUMENTS, "--store", f"file://{tmp_path / 'store'}")
    assert small_project.cli(*words).exit_code == 0
    assert params.read_text().startswith("# ours\n")
    assert load_params(params)["inputs"]["store"] == f"file://{tmp_path / 'store'}"
    assert {*read_lock(project)} == {"documents", *(f"questions.{split}.jsonl" for split in small_project.QUESTIONS)}
