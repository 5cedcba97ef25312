"""The pipeline ``train``: every stage as a pod, data on a shared volume, index builders raised for pre-training.

    python -m pipelines.realm        compiles it into pipelines/train.yaml

Everything that differs between clusters is a parameter: one compiled file serves them all.
"""

import json
from pathlib import Path

import yaml
from kfp import compiler, dsl, kubernetes

from components.evaluate import evaluate
from components.finetune import finetune
from components.guard import guard
from components.ict import ict
from components.pretrain import pretrain
from components.sample import sample
from components.scale_builder import scale_builder
from components.snapshot import snapshot
from components.tag import tag

HERE = Path(__file__).parent
VOLUME = "/realmops"
USER = 10001  # of the image
SETTINGS = ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "HF_HUB_OFFLINE")
OPTIONS = json.dumps(yaml.safe_load((HERE.parent / "params.yaml").read_text()), sort_keys=True)


@dsl.pipeline(name="realmops-train", description="REALM from a corpus to exact match and recall@5.")
def train(
    run: str = "first",
    options: str = OPTIONS,
    runs: str = f"{VOLUME}/runs",
    image: str = "realmops",
    volume: str = "realmops-data",
    deployment: str = "realmops-index-builder",
    builders: int = 1,
    wait_seconds: int = 900,
    cpu: str = "2",
    memory: str = "8Gi",
    accelerator: str = "nvidia.com/gpu",
    accelerators: str = "0",
    node_selector: dict = {},  # noqa: B006  # a pipeline's default
    tolerations: list = [],  # noqa: B006
    settings: str = "realmops-tracking",
    key: str = "",
    endpoint: str = "http://ml-pipeline.kubeflow:8888",
):
    """Train and evaluate.

    Args:
        run: the name of the run's folder; the same name goes on where it was stopped.
        options: all sections of params.yaml as JSON, as "realmops params --json" prints them.
        runs: the folder of all runs on the volume, which is mounted at /realmops.
        image: of every pod.
        volume: the claim that trainer and builders share.
        deployment: the index builders' Deployment; empty for a builder inside the trainer's pod.
        builders: its replicas.
        wait_seconds: how long to wait for them.
        cpu: limit of the pods that train.
        memory: their limit.
        accelerator: the kind of accelerator of those pods.
        accelerators: how many.
        node_selector: labels of the nodes for them.
        tolerations: of those pods.
        settings: a ConfigMap whose keys are environment variables, as MLFLOW_TRACKING_URI; it may be missing.
        key: of what is trained, from "realmops submit"; a run ends itself when an older one with the same key lives.
        endpoint: where the pods ask for those; empty to ask nowhere.
    """
    root = f"{runs}/{run}"

    def placed(task: dsl.PipelineTask, *, trains: bool = False) -> dsl.PipelineTask:
        task.set_container_image(image)
        task.set_caching_options(False)  # a stage knows itself whether there is anything to do
        kubernetes.mount_pvc(task, pvc_name=volume, mount_path=VOLUME)
        kubernetes.empty_dir_mount(task, volume_name="tmp", mount_path="/tmp")
        kubernetes.set_security_context(task, run_as_user=USER, run_as_group=USER, run_as_non_root=True)
        kubernetes.use_config_map_as_env(task, settings, {name: name for name in SETTINGS}, optional=True)
        if trains:
            task.set_cpu_limit(cpu).set_memory_limit(memory)
            task.set_accelerator_type(accelerator).set_accelerator_limit(accelerators)
            kubernetes.add_node_selector_json(task, node_selector_json=node_selector)
            kubernetes.add_toleration_json(task, toleration_json=tolerations)
        return task

    this = dsl.PIPELINE_JOB_ID_PLACEHOLDER
    alone = placed(guard(key=key, run=this, endpoint=endpoint))
    last = placed(scale_builder(deployment=deployment, root=root, owner=this))
    with dsl.ExitHandler(last, name="builders-are-given-back"):
        made = placed(sample(options=options, root=root)).after(alone)
        made = placed(snapshot(options=options, root=root, after=made.outputs["manifest"]))
        made = placed(tag(options=options, root=root, after=made.outputs["manifest"]), trains=True)
        made = placed(ict(options=options, root=root, after=made.outputs["manifest"]), trains=True)
        made = placed(
            pretrain(
                options=options,
                root=root,
                owner=this,
                deployment=deployment,
                builders=builders,
                wait_seconds=wait_seconds,
                # KFP hands a group of tasks only what one of them takes as an input, and limits are none
                limits=f"cpu {cpu}, memory {memory}, {accelerators} {accelerator}",
                after=made.outputs["manifest"],
            ),
            trains=True,
        )
        made = placed(finetune(options=options, root=root, after=made.outputs["manifest"]), trains=True)
        placed(evaluate(options=options, root=root, after=made.outputs["manifest"]), trains=True)


if __name__ == "__main__":
    compiler.Compiler().compile(train, str(HERE / "train.yaml"))
