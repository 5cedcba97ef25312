"""The pods of a compiled pipeline on a real cluster, as Kubeflow Pipelines 2.17.0 makes them, without its server.

KFP's local runner decides which task comes when, and resolves its inputs; each task is then a pod. What is in the pod
follows the sources under backend/src/v2: compiler/argocompiler/container.go (addContainerExecutorTemplate: volumes, the
init container, and what is mounted), security_context.go (who they run as), driver/driver.go (initPodSpecPatch: image,
command, resources) and driver/k8s.go (extendPodSpecPatch: what the platform document says). The launcher is a shell
script here, which the init container puts where the real one is: it runs the command, and sends the outputs to the log.
Argo's own containers, init and wait, are not there.
"""

import base64
import io
import json
import re
import tarfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from manifests import Object

ROOT = "/minio/outputs"  # of all outputs, in a pod
SCRATCH = {"gcs-scratch": "/gcs", "s3-scratch": "/s3", "minio-scratch": "/minio", "dot-local-scratch": "/.local"} | {
    "dot-cache-scratch": "/.cache", "dot-config-scratch": "/.config"
}  # fmt: skip
LAUNCHER = "kfp-launcher"
SENT = "outputs-of-the-task "
LAUNCH = f"""#!/bin/sh
shift
"$@"; code=$?
cd /; mkdir -p {ROOT}; echo; echo "{SENT}$(tar -cz .{ROOT} | base64 | tr -d '\\n')"
exit $code
"""
NON_ROOT = {  # security_context.go, defaultContainerSecurityContext
    "allowPrivilegeEscalation": False,
    "runAsNonRoot": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


class PodRunner:
    """Runs the tasks of one pipeline as pods of a namespace; ``made`` has each with the phase that it ended in.

    ``at_start`` is told of each pod when it is made, by the name of its component.
    """

    def __init__(
        self, pipeline: Path, arguments: Mapping[str, Any], namespace: str, account: str, folder: Path
    ) -> None:
        from kubernetes import client

        self.spec, self.platform = yaml.safe_load_all(pipeline.read_text(encoding="utf-8"))
        declared = self.spec["root"]["inputDefinitions"]["parameters"]
        self.values = {name: one.get("defaultValue") for name, one in declared.items()} | dict(arguments)
        self.pipeline, self.arguments = pipeline, dict(arguments)
        self.namespace, self.account, self.folder = namespace, account, folder
        self.made: list[tuple[str, str]] = []
        self.logs: dict[str, str] = {}
        self.at_start: Callable[[str, str], None] = lambda component, pod: None
        self._core = client.CoreV1Api()

    def run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """To the end; RuntimeError when a task fails for good."""
        from kfp import components, local
        from kfp.local import status, subprocess_task_handler
        from kfp.local.orchestrator import task_executor

        runner = self

        class Handler:
            def __init__(self, full_command: list[str], **_: Any) -> None:
                self.command = full_command

            def run(self) -> Any:
                return status.Status.SUCCESS if runner.ends_well(self.command) else status.Status.FAILURE

        monkeypatch.setattr(subprocess_task_handler, "SubprocessTaskHandler", Handler)
        monkeypatch.setattr(task_executor.time, "sleep", lambda seconds: None)
        local.init(runner=local.SubprocessRunner(use_venv=False), pipeline_root=str(self.folder))
        components.load_component_from_file(str(self.pipeline))(**self.arguments)

    def resolved(self, parameter: Mapping[str, str]) -> Any:
        """An input of the pipeline, which its groups of tasks hand on under a longer name."""
        return self.values[parameter["componentInputParameter"].removeprefix("pipelinechannel--")]

    def filled(self, text: str) -> str:
        """A field of the pod with the pipeline's inputs in it."""
        return re.sub(r"\{\{\$\.inputs\.parameters\['(?:pipelinechannel--)?([\w-]+)'\]\}\}", self._value, text)

    def _value(self, found: re.Match[str]) -> str:
        return str(self.values[found[1]])

    def pod(self, component: str, command: list[str]) -> Object:
        """The pod of one task."""
        executors = self.spec["deploymentSpec"]["executors"]
        [label] = [name for name, one in executors.items() if one["container"]["args"][-1] == component]
        container, extra = executors[label]["container"], self.platform["platforms"]["kubernetes"]
        extra = extra["deploymentSpec"]["executors"].get(label, {})
        image = self.filled(container["image"])
        mounts = [{"name": LAUNCHER, "mountPath": f"/{LAUNCHER}"}]
        mounts += [{"name": name, "mountPath": place} for name, place in SCRATCH.items()]
        volumes: list[Object] = [{"name": name, "emptyDir": {}} for name in (LAUNCHER, *SCRATCH)]
        for one in extra.get("pvcMount", []):  # makeVolumeMountPatch
            claim = self.resolved(one["pvcNameParameter"])
            volumes.append({"name": claim, "persistentVolumeClaim": {"claimName": claim}})
            mounts.append({"name": claim, "mountPath": one["mountPath"]})
        for one in extra.get("emptyDirMounts", []):
            volumes.append({"name": one["volumeName"], "emptyDir": {}})
            mounts.append({"name": one["volumeName"], "mountPath": one["mountPath"]})
        environment: list[Object] = []
        for kind, key, reference in (
            ("configMap", "configMapKey", "configMapKeyRef"),
            ("secret", "secretKey", "secretKeyRef"),
        ):
            for one in extra.get(f"{kind}AsEnv", []):
                name = self.resolved(one[f"{kind}NameParameter"])
                for pair in one["keyToEnv"]:
                    source = {"name": name, "key": pair[key], "optional": one.get("optional")}
                    environment.append({"name": pair["envVar"], "valueFrom": {reference: source}})
        user = {
            name: value if name == "runAsNonRoot" else int(value)
            for name, value in extra.get("securityContext", {}).items()
        }
        main = {
            "name": "main",
            "image": image,
            "command": [f"/{LAUNCHER}/launch"],
            "args": ["--", *(word.replace(str(self.folder), ROOT) for word in command)],
            "env": environment,
            "volumeMounts": mounts,
            "resources": self._resources(container.get("resources", {})),
            "securityContext": {name: value for name, value in NON_ROOT.items() if name != "runAsNonRoot"} | user,
        }
        places = [self.resolved(one["nodeAffinityJson"]) for one in extra.get("nodeAffinity", [])]
        tolerations = [self.resolved(one["tolerationJson"]) for one in extra.get("tolerations", [])]
        selector = extra.get("nodeSelector", {}).get("nodeSelectorJson")
        spec = {
            "serviceAccountName": self.account,
            "restartPolicy": "Never",
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},  # applyPodSeccompProfileOnly
            "initContainers": [
                {
                    "name": LAUNCHER,
                    "image": image,
                    "command": ["sh", "-c", 'printf "%s" "$0" > /kfp-launcher/launch; chmod 755 /kfp-launcher/launch'],
                    "args": [LAUNCH],
                    "volumeMounts": mounts[:1],
                    "securityContext": NON_ROOT | {"runAsUser": 65532},  # of the launcher's image
                }
            ],
            "containers": [main],
            "volumes": volumes,
            "nodeSelector": self.resolved(selector) if selector else {},
            "tolerations": [one for some in tolerations for one in (some if isinstance(some, list) else [some])],
            "activeDeadlineSeconds": int(extra["activeDeadlineSeconds"]),
            "affinity": {"nodeAffinity": places[0]} if any(places) else {},
        }
        about = {"generateName": f"train-{component.replace('_', '-')}-", **extra.get("podMetadata", {})}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": spec}

    def _resources(self, wanted: Mapping[str, Any]) -> dict[str, dict[str, str]]:
        """initPodSpecPatch: an accelerator is a limit too, also a number of 0."""
        found = {
            kind: {
                name: self.filled(value)
                for name in ("cpu", "memory")
                if (value := wanted.get(f"resource{name.title()}{kind[:-1].title()}"))
            }
            for kind in ("limits", "requests")
        }
        if accelerator := wanted.get("accelerator"):
            found["limits"][self.filled(accelerator["resourceType"])] = self.filled(accelerator["resourceCount"])
        return found

    def ends_well(self, command: list[str]) -> bool:
        """Make the pod of a task, wait for it, and bring its outputs here."""
        component = command[command.index("--function_to_execute") + 1]
        pod = self._core.create_namespaced_pod(
            self.namespace, self.pod(component, command), field_validation="Strict"
        ).metadata.name
        self.at_start(component, pod)
        phase = self._phase_at_end(pod)
        self.made.append((component, phase))
        if phase == "Deleted":
            return False
        self.logs[pod] = self._log(pod)
        print(self.logs[pod].partition(SENT)[0])
        if found := re.search(f"^{SENT}(.*)$", self.logs[pod], re.MULTILINE):
            with tarfile.open(fileobj=io.BytesIO(base64.b64decode(found[1]))) as archive:
                for member in archive.getmembers():
                    if member.isfile():
                        place = self.folder / Path(member.name).relative_to(f".{ROOT}")
                        place.parent.mkdir(parents=True, exist_ok=True)
                        content = archive.extractfile(member)
                        assert content is not None
                        place.write_bytes(content.read())
        return phase == "Succeeded"

    def _log(self, pod: str) -> str:
        """What the user's container wrote; an error with what the launcher's said where that failed."""
        found = self._core.read_namespaced_pod_status(pod, self.namespace)
        [first] = found.status.init_container_statuses
        if first.state.terminated is None or first.state.terminated.exit_code:
            said = self._core.read_namespaced_pod_log(pod, self.namespace, container=LAUNCHER)
            raise RuntimeError(f"{pod}: {first.state}: {said}")
        written: str = self._core.read_namespaced_pod_log(pod, self.namespace, container="main")
        return written

    def _phase_at_end(self, pod: str) -> str:
        from kubernetes.client.exceptions import ApiException

        while True:
            try:
                status = self._core.read_namespaced_pod_status(pod, self.namespace).status
            except ApiException as error:
                if error.status == 404:
                    return "Deleted"
                raise
            if status.phase in ("Succeeded", "Failed"):
                return str(status.phase)
            waits = [one.state.waiting for one in status.container_statuses or [] if one.state.waiting]
            if any(
                one.reason in ("CreateContainerConfigError", "ErrImageNeverPull", "ImagePullBackOff") for one in waits
            ):
                raise RuntimeError(f"{pod} does not start: {json.dumps([one.to_dict() for one in waits])}")
            time.sleep(0.2)
