"""The pipeline ``refresh``: updates the corpus of a trained model without training.

python -m pipelines        compiles it into pipelines/refresh.yaml
"""

from kfp import dsl

from components import refresh as component
from components.inputs import inputs
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
    node_selector: dict = {},  # noqa: B006  # default of a pipeline parameter
    tolerations: list = [],  # noqa: B006
    affinity: dict = {},  # noqa: B006
    settings: str = "realmops-tracking",
    secret: str = "realmops-secrets",
):
    """Embed changed passages, answer the test questions again and compare.

    Args:
        run: name of the trained run's folder.
        options: params as JSON, only the differences from the defaults: those of the training, with
            snapshot.documents set to the changed corpus.
        runs: folder of all runs on the volume, which is mounted at /realmops.
        image: image of the pod.
        volume: PersistentVolumeClaim with the run.
        cpu: CPU limit of the pod.
        cpu_request: CPU request of such a pod; at most cpu.
        memory: memory limit of the pod.
        memory_request: memory request of such a pod; at most memory.
        accelerator: resource name of the pod's accelerators.
        accelerators: number of accelerators per pod.
        node_selector: node labels for the pod.
        tolerations: tolerations of the pod.
        affinity: node affinity of the pod, in Kubernetes' format.
        settings: ConfigMap with keys such as MLFLOW_TRACKING_URI; optional.
        secret: Secret with keys such as MLFLOW_TRACKING_TOKEN; optional.
    """
    limits = cpu, cpu_request, memory, memory_request, accelerator, accelerators
    pods = Pods(image, volume, settings, secret, *limits, node_selector, tolerations, affinity)
    common = {"options": options, "root": f"{runs}/{run}"}
    first = pods.configure(inputs(**common), reads_store=True)
    pods.configure(component.refresh(**common).after(first), trains=True)
