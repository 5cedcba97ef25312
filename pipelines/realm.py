"""The pipeline ``train``: every stage as a pod, data on a shared volume, index builders raised for pre-training.

    python -m pipelines        compiles it into pipelines/train.yaml

Everything that differs between clusters is a parameter: one compiled file serves them all.
"""

from kfp import dsl

from components.evaluate import evaluate
from components.finetune import finetune
from components.guard import guard
from components.ict import ict
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
    node_selector: dict = {},  # noqa: B006  # a pipeline's default
    tolerations: list = [],  # noqa: B006
    affinity: dict = {},  # noqa: B006
    settings: str = "realmops-tracking",
    secret: str = "realmops-secrets",
    key: str = "",
    endpoint: str = "http://ml-pipeline.kubeflow:8888",
):
    """Train and evaluate.

    Args:
        run: the name of the run's folder; the same name goes on where it was stopped.
        options: params as JSON, sections with what differs from the defaults.
        runs: the folder of all runs on the volume, which is mounted at /realmops.
        image: of every pod.
        volume: the claim that trainer and builders share.
        deployment: the index builders' Deployment; empty for a builder inside the trainer's pod.
        builders: its replicas in pre-training.
        shard_pods: that tag and embed the corpus together in tag, finetune and evaluate: the stage's own and replicas
            of the Deployment.
        wait_seconds: how long pre-training waits for its builders.
        model: the registered model in MLflow whose champion the run becomes if it is better; empty for none.
        margin: by how much exact match must be higher than the champion's, 0 to 1.
        cpu: limit of the pods that train.
        cpu_request: what a node must have left for one; at most cpu.
        memory: their limit.
        memory_request: what a node must have left for one; at most memory.
        accelerator: the kind of accelerator of those pods.
        accelerators: how many.
        nproc_per_node: processes that train together in a pod, one for each of its accelerators.
        node_selector: labels of the nodes for them.
        tolerations: of those pods.
        affinity: the node affinity of all pods, as Kubernetes writes it.
        settings: a ConfigMap with keys as MLFLOW_TRACKING_URI; it may be missing.
        secret: a Secret with keys as MLFLOW_TRACKING_TOKEN; it may be missing.
        key: of what is trained, from "realmops submit"; a run ends itself when an older one with the same key lives.
        endpoint: where the pods ask for those; empty to ask nowhere.
    """
    root = f"{runs}/{run}"
    limits = cpu, cpu_request, memory, memory_request, accelerator, accelerators
    pods = Pods(image, volume, settings, secret, *limits, node_selector, tolerations, affinity)
    placed, given = pods.placed, {"options": options, "root": root}
    this = dsl.PIPELINE_JOB_ID_PLACEHOLDER
    alone = placed(guard(key=key, run=this, endpoint=endpoint), asks=True)
    last = placed(scale_builder(deployment=deployment, root=root, owner=this))
    shared = {"owner": this, "deployment": deployment, "shard_pods": shard_pods}
    with dsl.ExitHandler(last, name="stages"):
        made = placed(sample(**given)).after(alone)
        made = placed(snapshot(**given, after=made.outputs["manifest"]))
        made = placed(tag(**given, **shared, after=made.outputs["corpus"]), trains=True)
        made = placed(ict(**given, processes=nproc_per_node, after=made.outputs["manifest"]), trains=True)
        raised = {"owner": this, "deployment": deployment, "builders": builders, "wait_seconds": wait_seconds}
        trained = pretrain(**given, **raised, processes=nproc_per_node, limits=pods.limits, after=made.outputs["model"])
        made = placed(trained, trains=True)
        made = placed(finetune(**given, **shared, processes=nproc_per_node, after=made.outputs["model"]), trains=True)
        made = placed(evaluate(**given, **shared, after=made.outputs["model"]), trains=True)
        placed(promote(**given, model=model, margin=margin, after=made.outputs["manifest"]), trains=True)
