"""The pipeline ``refresh``: a changed corpus under a trained model, without training.

python -m pipelines        compiles it into pipelines/refresh.yaml
"""

from kfp import dsl

from components import refresh as component
from pipelines.pods import RUNS, Pods
from pipelines.realm import OPTIONS
from realmops.cluster import IMAGE


@dsl.pipeline(name="realmops-refresh", description="New documents under a trained REALM, and the answers that change.")
def refresh(
    run: str = "first",
    options: str = OPTIONS,
    runs: str = RUNS,
    image: str = IMAGE,
    volume: str = "realmops-data",
    cpu: str = "2",
    cpu_request: str = "1",
    memory: str = "8Gi",
    memory_request: str = "2Gi",
    accelerator: str = "nvidia.com/gpu",
    accelerators: str = "0",
    node_selector: dict = {},  # noqa: B006  # a pipeline's default
    tolerations: list = [],  # noqa: B006
    affinity: dict = {},  # noqa: B006
    settings: str = "realmops-tracking",
    secret: str = "realmops-secrets",
):
    """Embed what changed, answer again, compare.

    Args:
        run: the name of the trained run's folder.
        options: params as JSON, sections with what differs from the defaults: those that the run was trained with,
            snapshot.documents naming the corpus as it is now.
        runs: the folder of all runs on the volume, which is mounted at /realmops.
        image: of the pod.
        volume: the claim that holds the run.
        cpu: limit of the pod.
        cpu_request: what a node must have left for one; at most cpu.
        memory: its limit.
        memory_request: what a node must have left for one; at most memory.
        accelerator: the kind of accelerator of the pod.
        accelerators: how many.
        node_selector: labels of the nodes for it.
        tolerations: of the pod.
        affinity: its node affinity, as Kubernetes writes it.
        settings: a ConfigMap with keys as MLFLOW_TRACKING_URI; it may be missing.
        secret: a Secret with keys as MLFLOW_TRACKING_TOKEN; it may be missing.
    """
    limits = cpu, cpu_request, memory, memory_request, accelerator, accelerators
    pods = Pods(image, volume, settings, secret, *limits, node_selector, tolerations, affinity)
    pods.placed(component.refresh(options=options, root=f"{runs}/{run}"), trains=True)
