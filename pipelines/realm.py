"""The pipeline ``train``: each stage in a pod, data on a shared volume, index builders scaled up for pre-training.

    python -m pipelines        compiles it into pipelines/train.yaml

Everything that differs between clusters is a parameter, so that one compiled file serves all of them.
"""

from kfp import dsl

from components.cloze import cloze
from components.evaluate import evaluate
from components.finetune import finetune
from components.guard import guard
from components.ict import ict
from components.inputs import inputs
from components.pretrain import pretrain
from components.promote import promote
from components.sample import sample
from components.scale_builder import scale_builder
from components.snapshot import snapshot
from components.tag import tag
from pipelines.pods import OPTIONS, RUNS, Pods
from realmops.cluster import IMAGE


@dsl.pipeline(name="realmops-train", description="REALM from a corpus to exact match and recall@5.")
def train(
    run: str = "first",
    options: str = OPTIONS,
    runs: str = RUNS,
    image: str = IMAGE,
    volume: str = "realmops-data",
    deployment: str = "realmops-index-builder",
    builders: int = 1,
    shard_pods: int = 1,
    wait_seconds: int = 900,
    model: str = "",
    margin: float = 0.0,
    cpu: str = "2",
    cpu_request: str = "1",
    memory: str = "8Gi",
    memory_request: str = "2Gi",
    accelerator: str = "nvidia.com/gpu",
    accelerators: str = "0",
    nproc_per_node: int = 1,
    node_selector: dict = {},  # noqa: B006  # default of a pipeline parameter
    tolerations: list = [],  # noqa: B006
    affinity: dict = {},  # noqa: B006
    settings: str = "realmops-tracking",
    secret: str = "realmops-secrets",
    key: str = "",
    endpoint: str = "http://ml-pipeline.kubeflow:8888",
):
    """Train and evaluate a run.

    Args:
        run: name of the run's folder; the same name resumes a stopped run.
        options: params as JSON, only the differences from the defaults.
        runs: folder of all runs on the volume, which is mounted at /realmops.
        image: image of all pods.
        volume: PersistentVolumeClaim shared by trainer and builders.
        deployment: the index builders' Deployment; empty for a builder in the trainer's pod.
        builders: replicas of the Deployment in pre-training.
        shard_pods: number of pods that tag and embed the corpus in tag, finetune and evaluate; all but the stage's pod
            are replicas of the Deployment.
        wait_seconds: seconds that pre-training waits for its builders.
        model: registered model in MLflow whose champion the run becomes if it is better; empty for none.
        margin: required improvement of exact match over the champion, 0 to 1.
        cpu: CPU limit of the training pods.
        cpu_request: CPU request of such a pod; at most cpu.
        memory: memory limit of the training pods.
        memory_request: memory request of such a pod; at most memory.
        accelerator: resource name of the accelerators of the training pods.
        accelerators: number of accelerators per pod.
        nproc_per_node: training processes per pod, one per accelerator.
        node_selector: node labels for the training pods.
        tolerations: tolerations of the training pods.
        affinity: node affinity of all pods, in Kubernetes' format.
        settings: ConfigMap with keys such as MLFLOW_TRACKING_URI; optional.
        secret: Secret with keys such as MLFLOW_TRACKING_TOKEN; optional.
        key: key of the training, from "realmops submit"; a run stops if an older one with the same key is active.
        endpoint: URL of the Kubeflow Pipelines API for that check; empty to skip it.
    """
    root = f"{runs}/{run}"
    limits = cpu, cpu_request, memory, memory_request, accelerator, accelerators
    pods = Pods(image, volume, settings, secret, *limits, node_selector, tolerations, affinity)
    place, common = pods.configure, {"options": options, "root": root}
    run_id = dsl.PIPELINE_JOB_ID_PLACEHOLDER
    check = place(guard(key=key, run=run_id, endpoint=endpoint), uses_api=True)
    last = place(scale_builder(deployment=deployment, root=root, owner=run_id))
    shards = {"owner": run_id, "deployment": deployment, "shard_pods": shard_pods}
    with dsl.ExitHandler(last, name="stages"):
        first = place(inputs(**common), reads_store=True).after(check)
        task = place(sample(**common)).after(first)
        task = place(snapshot(**common, after=task.outputs["manifest"]))
        task = place(tag(**common, **shards, after=task.outputs["corpus"]), trains=True)
        task = place(cloze(**common, after=task.outputs["manifest"]))
        task = place(ict(**common, processes=nproc_per_node, after=task.outputs["questions"]), trains=True)
        scaling = {"owner": run_id, "deployment": deployment, "builders": builders, "wait_seconds": wait_seconds}
        scaling |= {"processes": nproc_per_node, "limits": pods.limits}
        task = place(pretrain(**common, **scaling, after=task.outputs["model"]), trains=True)
        task = place(finetune(**common, **shards, processes=nproc_per_node, after=task.outputs["model"]), trains=True)
        task = place(evaluate(**common, **shards, after=task.outputs["model"]), trains=True)
        place(promote(**common, model=model, margin=margin, after=task.outputs["manifest"]), trains=True)
