"""`realmops submit` and the first task of the pipeline, against a stand-in for Kubeflow Pipelines' server."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cluster_lab
import kfp_lab
import kubernetes_validate
import pytest
import small_project
import yaml
from click.testing import Result
from cluster_lab import DEPLOYMENT, Lab
from compiled import documents, file_of, project_with_pipeline
from kfp_lab import KfpLab, RefusedError, arguments_of, recorded
from manifests import OLDEST
from test_key import key

from realmops.cluster import kfp_client as server
from realmops.cluster import submit
from realmops.cluster.kfp_client import KfpClient
from realmops.cluster.packed_options import unpack_options
from realmops.cluster.pod_namespace import place_of
from realmops.config import load_params

COMPILED = file_of("train")
ROOT = COMPILED.parents[1]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return project_with_pipeline(tmp_path)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KfpLab]:
    """A server whose runs are RUNNING."""
    yield from kfp_lab.named_by_environment(tmp_path, monkeypatch)


@pytest.fixture
def kube_lab(tmp_path: Path, lab: KfpLab) -> Iterator[Lab]:
    """The cluster of that server, at hand, with what runs want in the server's namespace."""
    with cluster_lab.serve(Lab(), tmp_path / "kubeconfig") as found:
        found.put("persistentvolumeclaims", "kubeflow", "realmops-data")
        found.put("serviceaccounts", "kubeflow", "pipeline-runner")
        found.put("deployments", "kubeflow", DEPLOYMENT)
        yield found


def submitted(project: Path, *words: str) -> Result:
    """By the project's own copy of the compiled pipeline, unless ``words`` name another."""
    compiled = project / "pipelines" / "train.yaml"
    return small_project.cli("submit", "--params", project / "params.yaml", "--pipeline", compiled, *words)


# What is submitted


def test_a_file_without_a_digest_is_said(project: Path, lab: KfpLab) -> None:
    result = submitted(project, "--set", "snapshot.documents=hf:wiki")
    assert result.exit_code == 0
    assert "snapshot.documents is 'hf:wiki', which is on the hub: the key contains its name" in result.stderr


def test_a_submission_carries_options_run_and_key(project: Path, lab: KfpLab) -> None:
    result = submitted(
        project, "--set", "pretrain.steps=13", "--argument", "image=realmops:1", "--argument", "builders=3",
        "--argument", 'tolerations=[{"key": "gpu"}]', "--argument", "cpu=4",
    )  # fmt: skip
    wanted = key(project, "realmops:1", "pretrain.steps=13")
    [run] = lab.runs
    arguments = arguments_of(run)
    sent = unpack_options(arguments.pop("options"))
    expected = load_params(project / "params.yaml", settings=["pretrain.steps=13"])
    assert sent == expected
    assert arguments == {
        "run": wanted[:16],
        "key": wanted,
        "image": "realmops:1",
        "builders": 3,
        "tolerations": [{"key": "gpu"}],
        "cpu": "4",
    }
    assert run["display_name"] == f"realmops-train-{wanted[:16]}"
    assert result.stdout.splitlines()[-2:] == [
        f"submitted: the run realmops-train-{wanted[:16]} ({run['run_id']}, RUNNING) with the key {wanted[:16]}",
        f"run page: {lab.url}/#/runs/details/{run['run_id']}",
    ]
    [version] = lab.kept["versions"]
    assert version["name"] == wanted
    sent, platform = documents(lab.specs[version["pipeline_version_id"]])
    assert [sent, platform] == documents(COMPILED.read_text())
    assert [one["display_name"] for one in lab.kept["experiments"]] == ["realmops"]


def test_run_name_experiment_and_folder_may_be_named(project: Path, lab: KfpLab) -> None:
    for _ in range(2):
        submitted(project, "--name", "Tuesday", "--experiment", "50 % + é", "--argument", "run=tuesday")
    (run, _), [experiment] = lab.runs, lab.kept["experiments"]
    assert (run["display_name"], experiment["display_name"]) == ("Tuesday", "50 % + é")
    assert arguments_of(run)["run"] == "tuesday"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (
            "--argument colour=red",
            2,
            r"--argument colour: .*train.yaml; allowed are accelerator, .*builders, .*image, .*run, ",
        ),
        ("--argument key=mine", 2, "--argument key: not a parameter of "),
        ("--argument options={}", 2, "--argument options: not a parameter of "),
        ("--argument image", 2, "expected NAME=VALUE"),
        ("--argument builders=many", 2, "--argument builders=many: expected a whole number"),
        ("--argument builders=2.5", 2, "expected a whole number"),
        ("--argument margin=NaN", 2, "--argument margin=NaN: expected a number"),
        ("--argument tolerations={}", 2, r"expected JSON such as \["),
        ("--argument node_selector=gpu", 2, r"expected JSON such as \{"),
        # a run with an empty name fails at its first task: resolveInputParameterStr of Kubeflow's driver wants a text
        ("--argument volume=", 2, "--argument volume=: Kubeflow Pipelines needs a name for the "),
        ("--argument settings=", 2, "--argument settings=: Kubeflow Pipelines needs a name for the "),
        ("--argument secret=", 2, "--argument secret=: Kubeflow Pipelines needs a name for the "),
        (
            "--pipeline nowhere.yaml",
            2,
            "nowhere.yaml does not exist; --pipeline must be train, ablations, refresh or a compiled file",
        ),
        ("--pipeline PROJECT/params.yaml", 2, "params.yaml is not a compiled pipeline"),
        ("--endpoint ", 2, "it must start with http:// or https://: set --endpoint or KF_PIPELINES_ENDPOINT"),
        ("--endpoint ml-pipeline:8888", 2, "'ml-pipeline:8888'; it must start with http"),
        ("--endpoint http://127.0.0.1:port", 2, "is not a valid URL"),
        ("--endpoint http://127.0.0.1:9", 1, "http://127.0.0.1:9 does not respond: .*Connection refused"),
    ],
)
def test_what_cannot_be_submitted_is_refused_in_one_line(
    words: str, code: int, message: str, project: Path, lab: KfpLab
) -> None:
    result = submitted(project, *words.replace("PROJECT", str(project)).split(" "))
    assert result.exit_code == code
    [line] = result.stderr.splitlines()
    assert re.match(f"realmops: .*{message}", line)
    assert lab.requests == []


def test_parameters_without_a_default_must_be_given(project: Path, lab: KfpLab) -> None:
    compiled = project / "pipelines" / "train.yaml"
    changed = documents(compiled.read_text())
    changed[0]["root"]["inputDefinitions"]["parameters"]["volume"] = {"parameterType": "STRING"}
    compiled.write_text(yaml.safe_dump_all(changed))
    assert "also needs volume: set --argument volume=VALUE" in submitted(project).stderr
    assert submitted(project, "--argument", "volume=data").exit_code == 0


# One run for each key


def test_a_version_that_another_process_creates_is_a_matter_of_a_retry(project: Path, lab: KfpLab) -> None:
    """It has reserved its name, and is not listed yet."""
    submitted(project)
    lab.kept["versions"][0]["status"] = "CREATING"
    result = submitted(project, "--once")
    assert result.exit_code == 1
    assert "another process is creating it: try again" in result.stderr
    lab.kept["versions"][0]["status"] = "READY"
    assert "nothing to submit" in submitted(project, "--once").stdout


def test_a_version_that_is_listed_after_a_conflict_is_taken(
    project: Path, lab: KfpLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(project)
    there, first = KfpClient.call, iter([True])

    def listed_late(server: KfpClient, function: Any, **arguments: Any) -> Any:
        page = there(server, function, **arguments)
        if "list_pipeline_versions" in function.__name__ and next(first, False):
            page.pipeline_versions = []
        return page

    monkeypatch.setattr(KfpClient, "call", listed_late)
    assert "nothing to submit" in submitted(project, "--once").stdout
    assert len(lab.kept["versions"]) == 1


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "PAUSED", "SUCCEEDED"])
def test_a_repeat_finds_the_run(state: str, project: Path, lab: KfpLab) -> None:
    lab.state = state
    first, second = (submitted(project, "--once") for _ in range(2))
    assert (first.exit_code, second.exit_code) == (0, 0)
    [run] = lab.runs
    said, link = second.stdout.splitlines()[-2:]
    assert said.startswith(f"nothing to submit: the run {run['display_name']} ({run['run_id']}")
    assert link == f"run page: {lab.url}/#/runs/details/{run['run_id']}"


@pytest.mark.parametrize("state", ["FAILED", "CANCELED", "CANCELING"])
def test_a_run_that_failed_is_tried_again_in_its_folder(state: str, project: Path, lab: KfpLab) -> None:
    lab.state = state
    submitted(project, "--once")
    lab.state = "RUNNING"
    result = submitted(project, "--once")
    assert f"{state}) has the same key" in result.stdout
    first, second = lab.runs
    assert arguments_of(first) == arguments_of(second)
    assert first["pipeline_version_reference"] == second["pipeline_version_reference"]
    submitted(project, "--once")
    assert len(lab.runs) == 2, "the second one lives"


def test_another_key_gets_its_own_run(project: Path, lab: KfpLab) -> None:
    """Also when the runs come in many pages, and the one that is there is on the last of them."""
    lab.largest_page = 1
    for steps in (13, 14, 15, 15):
        assert submitted(project, "--once", "--set", f"pretrain.steps={steps}").exit_code == 0
    assert len(lab.runs) == 3


def test_a_version_without_a_run_gets_one(project: Path, lab: KfpLab) -> None:
    """Its process was killed before it started the run."""
    submitted(project, "--once")
    lab.runs.clear()
    assert submitted(project, "--once").exit_code == 0
    assert (len(lab.kept["versions"]), len(lab.runs)) == (1, 1)


@pytest.mark.parametrize(("state", "code"), [("SUCCEEDED", 0), ("FAILED", 1), ("CANCELED", 1)])
def test_wait_ends_as_the_run_does(state: str, code: int, project: Path, lab: KfpLab) -> None:
    lab.state = state
    result = submitted(project, "--wait")
    assert result.exit_code == code
    [run] = lab.runs
    told = ["pretrain: SUCCEEDED", f"the run {run['display_name']} ({run['run_id']}, {state})"]
    lines = result.stdout.splitlines()
    assert lines[-2 - code :][:2] == told
    assert lines[-1].startswith("failed pods: 'kubectl -n kubeflow get pods") == bool(code)


def test_wait_outlives_a_server_that_is_away_for_a_while(
    project: Path, lab: KfpLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.state = "SUCCEEDED"
    there, away = KfpClient.run, iter([True, True])

    def sometimes(server: KfpClient, run_id: str) -> Any:
        if next(away, False):
            raise TimeoutError("away")
        return there(server, run_id)

    monkeypatch.setattr(KfpClient, "run", sometimes)
    assert submitted(project, "--wait").exit_code == 0
    away = iter([True])
    monkeypatch.setattr(submit, "UNREACHABLE_SECONDS", -1.0)
    assert submitted(project, "--wait").exit_code == 1


# Servers


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (401, 2, "returned 401 .*set KF_PIPELINES_SA_TOKEN_PATH to a file with a valid token"),
        (403, 2, r"returned 403 .*--namespace to your own \(team is not\), or bind .* kubeflow-pipelines-edit there"),
        (404, 2, "returned 404 .*check that this is the address of the Kubeflow Pipelines API"),
        (400, 2, "returned 400 Bad Request: as the test wants it"),
        (500, 1, "returned 500 .*try again"),
        (503, 1, "returned 503 .*try again"),
    ],
)
def test_a_server_that_refuses_is_explained(status: int, code: int, message: str, project: Path, lab: KfpLab) -> None:
    lab.status = status
    result = submitted(project, "--once", "--namespace", "team")
    assert result.exit_code == code
    assert re.match(f"realmops: {lab.url} {message}", result.stderr)
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("place", ["http://ann:pa55@127.0.0.1:9?s3cret", "http://ann:pa55@h:port", "ann:pa55@h:8888"])
def test_a_password_in_the_endpoint_is_not_shown(place: str, project: Path, lab: KfpLab) -> None:
    told = submitted(project, "--endpoint", place).stderr
    assert told.startswith("realmops: ")
    assert not [secret for secret in ("ann:", "pa55", "s3cret") if secret in told], told


def test_a_login_page_in_between_is_no_answer(project: Path, lab: KfpLab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that ends: the page would read as a list of no runs, and as a run without an end."""
    submitted(project, "--once")
    there, run_id = KfpClient(lab.url), lab.runs[0]["run_id"]
    version = there.version(lab.kept["pipelines"][0]["pipeline_id"], lab.kept["versions"][0]["name"], COMPILED)
    experiment = lab.kept["experiments"][0]["experiment_id"]
    lab.page_for_all = "<html>Log in</html>"
    for ask in (lambda: there.runs_of(version), lambda: there.start(experiment, version, "name", {})):
        with pytest.raises(ValueError, match="returned a page, perhaps a login, instead of JSON"):
            ask()
    with pytest.raises(ValueError, match="returned a page"):
        submit.wait(run_id, set(), there, print)
    assert submitted(project).exit_code == 2


def test_the_token_in_the_file_is_shown_to_the_server(
    project: Path, lab: KfpLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.token = "a-token"
    assert submitted(project).exit_code == 2
    (project / "token").write_text("a-token\n")
    monkeypatch.setenv(server.TOKEN_FILE, str(project / "token"))
    assert submitted(project).exit_code == 0
    (project / "token").unlink()
    assert "which is not a file; mount the token there" in submitted(project).stderr


def test_a_server_of_many_users_wants_a_namespace(project: Path, lab: KfpLab) -> None:
    lab.multi_user = True
    assert "set --namespace to the namespace of a profile" in submitted(project).stderr
    assert submitted(project, "--namespace", "team", "--once").exit_code == 0
    assert submitted(project, "--namespace", "team", "--once").exit_code == 0
    assert [one["namespace"] for one in lab.kept["pipelines"]] == ["team"]


def test_the_workflow_submits_with_its_secrets(project: Path, lab: KfpLab) -> None:
    lab.token, lab.multi_user = "a-token", True
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "retrain.yml").read_text())
    *_, step = workflow["jobs"]["submit"]["steps"]
    given = {"KF_PIPELINES_ENDPOINT": lab.url, "TOKEN": "a-token", "NAMESPACE": "team", "IMAGE": "host/realmops:1"}
    assert step["env"].keys() == given.keys()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, **given, "PATH": path, "RUNNER_TEMP": str(project)}
    words = ["bash", "-eo", "pipefail", "-c", step["run"]]
    done = subprocess.run(words, cwd=project, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [run] = lab.runs
    assert arguments_of(run)["image"] == "host/realmops:1"


# Where the pods are


def test_without_profiles_pods_are_in_the_servers_own_namespace(project: Path, lab: KfpLab) -> None:
    lab.namespace = "kfp"
    result = submitted(project, "--namespace", "kfp")
    assert result.exit_code == 0
    [said] = [line for line in result.stdout.splitlines() if line.startswith("pods run")]
    assert said == (
        "pods run in namespace kfp (the server's), which needs PersistentVolumeClaim realmops-data, ConfigMap "
        "realmops-tracking, Secret realmops-secrets, Deployment realmops-index-builder, ServiceAccount pipeline-runner"
        "; 'kubectl apply -k .' with the files of 'realmops init --cluster standalone', with 'namespace: "
        "kfp' in it creates them"
    )
    assert [run["pods_in"] for run in lab.runs] == ["kfp"]
    assert [one["namespace"] for one in lab.kept["pipelines"]] == [""]


def test_with_profiles_pods_are_in_that_of_the_profile(project: Path, lab: KfpLab) -> None:
    lab.multi_user = True
    lines = submitted(project, "--namespace", "team", "--argument", "deployment=").stdout.splitlines()
    [said] = [line for line in lines if line.startswith("pods run")]
    assert said.startswith("pods run in namespace team (the profile's), which needs PersistentVolumeClaim")
    assert "Deployment" not in said
    assert said.endswith(
        "ServiceAccount default-editor; 'kubectl apply -k .' with the files of 'realmops init --cluster "
        "production (or local)', with "
        "'namespace: team' in it creates them"
    )
    assert [run["pods_in"] for run in lab.runs] == ["team"]


@pytest.mark.parametrize(
    ("endpoint", "given", "namespace"),
    [
        ("http://ml-pipeline.kfp:8888", "team", "kfp"), ("http://ml-pipeline.kfp.svc:8888", None, "kfp"),
        ("http://ml-pipeline.kfp.svc.cluster.local:8888", None, "kfp"), ("http://localhost:8888", None, "kubeflow"),
        ("https://example.org/pipeline", None, "kubeflow"), ("http://localhost:8888", "kfp", "kfp"),
    ],
)  # fmt: skip
def test_the_servers_own_namespace_is_in_its_address(endpoint: str, given: str | None, namespace: str) -> None:
    assert place_of(endpoint, given, profiles=False).namespace == namespace


def test_a_pods_own_namespace_is_not_the_servers(project: Path, lab: KfpLab, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "namespace").write_text("team")
    monkeypatch.setattr(server, "NAMESPACE", project / "namespace")
    assert "pods run in namespace kubeflow (the server's)" in submitted(project).stdout


@pytest.mark.parametrize("content", ["", "{", "clusters: []", "current-context: a\ncontexts: []\n"])
def test_a_kubeconfig_of_no_use_keeps_nobody_from_submitting(project: Path, lab: KfpLab, content: str) -> None:
    (project / "kubeconfig").write_text(content)
    assert submitted(project).exit_code == 0


@pytest.mark.parametrize(
    ("resource", "message"),
    [
        (
            "persistentvolumeclaims",
            "PersistentVolumeClaim realmops-data does not exist .*realmops init --cluster standalone",
        ),
        ("deployments", "Deployment realmops-index-builder does not exist .*realmops init --cluster standalone"),
        ("serviceaccounts", "ServiceAccount pipeline-runner does not exist .*created with Kubeflow Pipelines"),
    ],
)
def test_what_is_not_there_is_said_before_a_pod_waits_for_it(
    project: Path, lab: KfpLab, kube_lab: Lab, resource: str, message: str
) -> None:
    assert submitted(project).exit_code == 0
    del kube_lab.objects[resource, "kubeflow"]
    kube_lab.put(resource, "realmops", "realmops-data")
    result = submitted(project)
    assert result.exit_code == 2
    assert re.match(f"realmops: {message}", result.stderr)
    assert "in namespace kubeflow, where the pods run (checked with the kubeconfig's context lab)" in result.stderr
    assert len(lab.runs) == 1
    kube_lab.forbidden.add(resource)
    result = submitted(project)
    assert result.exit_code == 0
    assert "in namespace kubeflow was not checked: the Kubernetes API server returned 403" in result.stdout


def test_a_cluster_that_is_away_keeps_nobody_from_submitting(project: Path, lab: KfpLab, kube_lab: Lab) -> None:
    kube_lab.status = 503
    assert submitted(project).exit_code == 0


# Versions of the server


@pytest.mark.parametrize(
    ("tag", "pipeline"),
    [("2.16.0", "train"), ("2.17.0", "ablations"), ("3.0.0-rc.1", "refresh"), ("unknown", "train"), ("main", "train")],
)
def test_servers_from_2_16_take_our_pipelines(project: Path, lab: KfpLab, tag: str, pipeline: str) -> None:
    lab.tag_name = tag
    assert submitted(project, "--pipeline", str(file_of(pipeline)), "--argument", "run=first").exit_code == 0
    assert len(lab.runs) == 1


def test_an_older_server_is_refused_with_its_version(project: Path, lab: KfpLab) -> None:
    lab.tag_name = "2.15.2"
    result = submitted(project)
    assert result.exit_code == 2
    assert re.match(f"realmops: {lab.url} is Kubeflow Pipelines 2.15.2; .* needs 2.16.0 or later", result.stderr)
    assert lab.kept["versions"] == []


def test_all_pods_of_a_run_can_be_told_to_go_to_the_node_that_has_the_label(project: Path, lab: KfpLab) -> None:
    """For a claim of one node at a time: the file that the page names, as Kubernetes takes it."""
    file = ROOT / "k8s/components/single-node/affinity.json"
    submitted(project, "--argument", f"affinity={file.read_text()}")
    given = arguments_of(lab.runs[0])["affinity"]
    pod = {"containers": [{"name": "one", "image": "one:1"}], "affinity": {"nodeAffinity": given}}
    kubernetes_validate.validate(
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": pod}, OLDEST, strict=True
    )
    [term] = given["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    [wanted] = term["matchExpressions"]
    page = (ROOT / "docs" / "operate.md").read_text()
    assert f"kubectl label node NODE {wanted['key']}={wanted['values'][0]}\n" in page
    file = "k8s/components/single-node/affinity.json"
    assert f'nodes=$(cat {file})\nrealmops submit --argument affinity="$nodes"\n' in page


def test_kfp_run_create_hands_the_options_on(project: Path, lab: KfpLab) -> None:
    """KFP's own command line takes apart what looks like JSON, and its server wants a text."""
    given = small_project.cli("params", "--kfp", "--params", project / "params.yaml").stdout.strip()
    kfp = [sys.executable, "-c", "from kfp.cli.__main__ import main; main()", "--endpoint", lab.url]
    create = ["run", "create", "-e", "realmops", "-r", "by kfp", "-f", str(COMPILED), f"options={given}", "run=one"]
    done = subprocess.run([*kfp, *create], capture_output=True, text=True, env={**os.environ, "HOME": str(project)})
    assert done.returncode == 0, done.stderr
    [run] = lab.runs
    assert run["display_name"] == "by kfp"
    assert unpack_options(arguments_of(run)["options"]) == load_params(project / "params.yaml")


# What a real server answered, and the stand-in


def test_kubeflows_client_lists_and_runs_versions_that_submit_made(project: Path, lab: KfpLab) -> None:
    """PipelinesClient of the PyPI package kubeflow 0.5.0 is that of kfp."""
    from kfp import kubeflow_client

    assert not submitted(project, "--name", "first").exit_code
    client = kubeflow_client.PipelinesClient(kubeflow_client.KubernetesBackendConfig(base_url=lab.url))
    [version] = client.list_pipeline_versions("realmops-train").pipeline_versions
    [first] = client.list_runs(pipeline="realmops-train").runs
    assert first.pipeline_version_reference.pipeline_version_id == version.pipeline_version_id
    arguments = arguments_of(lab.runs[0])
    assert version == client.get_pipeline_version("realmops-train", arguments["key"])
    run = client.run(version, params=arguments, name="second", experiment="realmops")
    [again] = [one for one in lab.runs if one["run_id"] == run.run_id]
    assert arguments_of(again) == arguments


def test_the_stand_in_refuses_what_a_real_server_refused(lab: KfpLab, project: Path) -> None:
    small_project.cli("submit", "--params", project / "params.yaml")
    [run], [version] = lab.runs, lab.kept["versions"]
    pipeline = version["pipeline_id"]
    states = {"predicates": [{"operation": "IN", "key": "state", "stringValues": {"values": ["SUCCEEDED"]}}]}
    reference = {"pipeline_id": pipeline, "pipeline_version_id": version["pipeline_version_id"]}
    unknown = {
        "display_name": "x", "experiment_id": run["experiment_id"], "pipeline_version_reference": reference,
        "runtime_config": {"parameters": {"nosuch": 1}},
    }  # fmt: skip
    form = (
        b'--b\r\nContent-Disposition: form-data; name="uploadfile"; filename="t.yaml"\r\n\r\n' + COMPILED.read_bytes()
    )
    asked: dict[str, tuple[str, str, dict[str, str], dict[str, str], bytes]] = {
        "no such run": ("GET", "/runs/0", {}, {}, b""),
        "no such experiment": ("GET", "/experiments/0", {}, {}, b""),
        "a filter beside a page token": ("GET", "/runs", {"filter": json.dumps(states), "page_token": "e30="}, {}, b""),
        "a parameter that the pipeline does not have": ("POST", "/runs", {}, {}, json.dumps(unknown).encode()),
        "a version of a taken name": (
            "POST", "/pipelines/upload_version", {"name": version["name"], "pipelineid": pipeline},
            {"Content-Type": "multipart/form-data; boundary=b"}, form + b"\r\n--b--\r\n",
        ),
    }  # fmt: skip
    for what, (method, path, query, headers, body) in asked.items():
        with pytest.raises(RefusedError) as refused:
            lab.answer(method, path, query, headers, body)
        assert refused.value.args[0] == recorded()["errors"][what]["status"], what
