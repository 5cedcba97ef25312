"""The pipelines as Kubernetes objects, as ``python -m pipelines`` writes them."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import custom_resources
import pytest
from compiled import ROOT, documents, file_of
from manifests import OLDEST, name, render

PIPELINES = ("train", "ablations", "refresh")
# of client-side kubectl apply: TotalAnnotationSizeLimitB in apimachinery's pkg/api/validation/objectmeta.go; etcd's
# own limit for a request is six times as much
LARGEST = 256 * 1024


def built(folder: Path, *words: str) -> Path:
    subprocess.run([sys.executable, "-m", "pipelines", folder, *words], check=True, cwd=ROOT)
    return folder / "objects"


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("objects"))


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_the_objects_are_the_compiled_pipeline_and_what_the_server_takes(pipeline: str, objects: Path) -> None:
    parent, version = found = documents((objects / f"{pipeline}.yaml").read_text())
    assert [one["kind"] for one in found] == ["Pipeline", "PipelineVersion"]
    for one in found:
        assert not [*custom_resources.faults_of(one, OLDEST)]
        named = one["metadata"]["name"]
        assert re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", named)
        assert len(named) <= 63
        # the server's filter compares an absent display name as an empty text: pipeline_types.go, GetField
        assert one["spec"]["displayName"] == named
        assert len(json.dumps(one)) < LARGEST
    spec = version["spec"]
    assert [spec["pipelineSpec"], spec["platformSpec"]] == documents(file_of(pipeline).read_text())
    # backend/src/apiserver/webhook/pipelineversion_webhook.go refuses a version without its pipeline
    assert spec["pipelineName"] == parent["metadata"]["name"] == spec["pipelineSpec"]["pipelineInfo"]["name"]


def test_a_version_is_named_by_its_content_because_its_spec_cannot_be_changed(objects: Path, tmp_path: Path) -> None:
    def names(folder: Path) -> list[str]:
        return [documents((folder / f"{file}.yaml").read_text())[1]["metadata"]["name"] for file in PIPELINES]

    assert names(built(tmp_path / "again")) == names(objects)
    assert not {*names(built(tmp_path / "other", "--image", "registry.test/ours:7"))} & {*names(objects)}


def test_an_object_with_an_unknown_field_is_refused(objects: Path) -> None:
    _, version = documents((objects / "train.yaml").read_text())
    version["spec"]["pipelineID"] = "1"
    assert [*custom_resources.faults_of(version, OLDEST)]


def test_a_kustomization_adds_the_objects_in_its_namespace(objects: Path, tmp_path: Path) -> None:
    shutil.copytree(objects, tmp_path / "objects")
    (tmp_path / "kustomization.yaml").write_text("namespace: team\ncomponents: [objects]\n")
    wanted = [one for file in PIPELINES for one in documents((objects / f"{file}.yaml").read_text())]
    for one in wanted:
        one["metadata"]["namespace"] = "team"
    assert {name(one): one for one in render(tmp_path)} == {name(one): one for one in wanted}
