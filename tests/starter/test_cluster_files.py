"""Cluster files of a new project: its own params and presets, its repository, and values to set."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml
from compiled import init_dvc
from manifest_rules import faults
from manifests import find, read_all, render
from small_project import cli

from realmops import config
from realmops.starter.cluster_files import CLUSTERS, PLACEHOLDER
from realmops.starter.git_origin import GitOrigin, cluster_address

DIGEST = f"sha256:{'0' * 64}"


def created(folder: Path, *words: str) -> str:
    result = cli("init", folder, *words)
    assert result.exit_code == 0, result.output
    return result.stdout


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True)


# The Job that submits


def test_the_job_copies_the_project_with_its_presets(tmp_path: Path) -> None:
    """From the ConfigMap, by the command of its container."""
    project, pod = tmp_path / "project", tmp_path / "pod"
    (project / "presets").mkdir(parents=True)
    (project / "presets/mine.yaml").write_text("pretrain: {steps: 7}\n")
    init_dvc(project)
    (project / "documents.dvc").write_text("outs: []\n")
    created(project, "--image", "realmops:local")
    assert cli("params", "--params", project / "params.yaml", "--preset", "mine", "--write").exit_code == 0
    file = project / "kustomization.yaml"
    own = yaml.safe_load(file.read_text())
    own["components"] += read_all(project / "k8s/flux.yaml")[1]["spec"]["components"]
    file.write_text(yaml.safe_dump(own))
    objects = render(project)
    assert faults(objects) == []
    [params] = [one for one in objects if one["metadata"]["name"].startswith("realmops-params")]
    [container] = find(objects, "Job/realmops-retrain")["spec"]["template"]["spec"]["containers"]
    [mount] = [one for one in container["volumeMounts"] if one["name"] == "params"]
    (pod / "config").mkdir(parents=True)
    for key, content in params["data"].items():
        (pod / "config" / key).write_text(content)
    shell, option, script, name = container["command"]
    script = script.replace(mount["mountPath"], f"{pod}/config").replace("/tmp/project", f"{pod}/project")
    subprocess.run([shell, option, script.replace("exec realmops", "echo"), name, *container["args"]], check=True)
    values = config.load_params(pod / "project/params.yaml")
    assert values == config.load_params(project / "params.yaml")
    assert values.pretrain.steps == 7
    copied = {path.relative_to(pod / "project").as_posix() for path in (pod / "project").rglob("*") if path.is_file()}
    assert copied == {"params.yaml", "presets/mine.yaml", ".dvc/config", "documents.dvc"}


# Images and other values to set


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_only_the_listed_values_have_to_be_set(cluster: str, tmp_path: Path) -> None:
    lines = created(tmp_path, "--cluster", cluster)
    assert "set each SET-ME in kustomization.yaml, k8s/argo-cd.yaml, k8s/flux.yaml before you use a cluster" in lines
    objects = render(tmp_path)
    refused = faults(objects)
    assert refused
    assert [fault for fault in refused if PLACEHOLDER not in fault] == []
    assert any(".image is registry.example.org/SET-ME/realmops" in fault for fault in refused)
    assert any("storageClassName is SET-ME" in fault for fault in refused) == (cluster == "production")
    source = read_all(tmp_path / "k8s/flux.yaml")[0]
    [refused_url] = faults([source])
    assert "'SET-ME/realmops.git' does not match" in refused_url


@pytest.mark.parametrize(
    ("image", "cluster"),
    [("host:5000/team/realmops:f2c1a07", "production"), (f"host/realmops:1@{DIGEST}", "local")],
)
def test_all_pods_have_the_named_image(image: str, cluster: str, tmp_path: Path) -> None:
    created(tmp_path, "--cluster", cluster, "--image", image)
    [builder] = find(render(tmp_path), "Deployment/realmops-index-builder")["spec"]["template"]["spec"]["containers"]
    assert builder["image"] == image.replace(":1@", "@")


@pytest.mark.parametrize("image", ["host:5000/realmops", "", f"@{DIGEST}", "realmops@sha256:1", "realmops:"])
def test_an_image_without_a_version_is_refused_and_nothing_is_written(image: str, tmp_path: Path) -> None:
    result = cli("init", tmp_path / "mine", "--image", image)
    assert (result.exit_code, f"--image is {image!r}; expected NAME:TAG" in result.stderr) == (2, True)
    assert not (tmp_path / "mine").exists()


# The repository


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("https://git.test/team/docs.git", "https://git.test/team/docs.git"),
        ("https://me:secret@git.test:8443/team/docs", "https://git.test:8443/team/docs"),
        ("https://token@git.test/team/docs.git?private_token=x#y", "https://git.test/team/docs.git"),
        ("git@git.test:team/docs.git", "ssh://git@git.test/team/docs.git"),
        ("ssh://me:secret@git.test:2222/team/docs.git", "ssh://me@git.test:2222/team/docs.git"),
        *((remote, "") for remote in ("", "../docs", "file:///srv/docs.git", "git://git.test/docs")),
    ],
)
def test_a_remote_is_an_address_for_a_cluster_without_secrets(remote: str, address: str) -> None:
    assert cluster_address(remote) == address


def test_argo_cd_and_flux_get_repository_branch_and_folder(tmp_path: Path) -> None:
    git(tmp_path, "init", "--initial-branch", "release/1")
    git(tmp_path, "remote", "add", "origin", "git@git.test:team/docs.git")
    lines = created(tmp_path / "search" / "it's 1")
    assert "git: ssh://git@git.test/team/docs.git, branch release/1, in k8s/argo-cd.yaml and k8s/flux.yaml" in lines
    folder = tmp_path / "search" / "it's 1"
    [application], [source, sync] = (read_all(folder / f"k8s/{name}.yaml") for name in ("argo-cd", "flux"))
    assert faults([application, source, sync]) == []
    place = application["spec"]["source"]
    assert (place["repoURL"], place["targetRevision"]) == ("ssh://git@git.test/team/docs.git", "release/1")
    assert (place["path"], sync["spec"]["path"]) == ("search/it's 1", "./search/it's 1")
    assert (source["spec"]["url"], source["spec"]["ref"]) == (place["repoURL"], {"branch": "release/1"})
    assert source["spec"]["secretRef"] == {"name": "realmops-git"}, "ssh needs a key"
    workflow = yaml.safe_load((folder / ".github/workflows/retrain.yml").read_text())
    assert workflow[True]["push"]["branches"] == ["release/1"]
    git(tmp_path, "remote", "set-url", "origin", "https://me:secret@git.test/team/docs.git")
    created(tmp_path / "other")
    written = {path: path.read_text() for path in (tmp_path / "other").rglob("*.yaml")}
    assert not [path for path, text in written.items() if "secret@" in text]
    assert "secretRef" not in read_all(tmp_path / "other/k8s/flux.yaml")[0]["spec"]


def test_without_git_or_a_commit_the_branch_is_main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert GitOrigin.of(tmp_path / "new") == GitOrigin("", "main", ".")
    git(tmp_path, "init", "--initial-branch", "trunk")
    assert GitOrigin.of(tmp_path / "new") == GitOrigin("", "trunk", "new")
    git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@b.test", "commit", "--allow-empty", "-m", "one")
    git(tmp_path, "checkout", "--detach")
    assert GitOrigin.of(tmp_path).branch == "main"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert GitOrigin.of(tmp_path) == GitOrigin("", "main", ".")
