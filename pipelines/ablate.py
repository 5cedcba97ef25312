"""The pipeline ``ablations``: the reference, then the variants in parallel, then their table.

    python -m pipelines        compiles it into pipelines/ablations.yaml

The reference runs first and alone, so that the variants find the stages that they share with it.
"""

from kfp import dsl

from components.inputs import inputs
from components.table import table
from components.variant import variant
from pipelines.pods import OPTIONS, RUNS, Pods
from realmops.cluster import IMAGE
from realmops.config import PACKAGE
from realmops.config_yaml import read_yaml

REFERENCE, *VARIANTS = read_yaml(PACKAGE / "variants.yaml")["variants"]
PODS = 4  # variants in parallel; KFP accepts no parameter for it


@dsl.pipeline(name="realmops-ablations", description="Variants of REALM over seeds, and their table.")
def ablations(
    run: str = "ablations",
    variants: list = VARIANTS,
    seeds: int = 1,
    presets: list = ["ablation"],  # noqa: B006  # default of a pipeline parameter
    overrides: list = [],  # noqa: B006
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
    node_selector: dict = {},  # noqa: B006
    tolerations: list = [],  # noqa: B006
    affinity: dict = {},  # noqa: B006
    settings: str = "realmops-tracking",
    secret: str = "realmops-secrets",
):
    """Train and compare variants; the table covers those that succeeded.

    Args:
        run: name of the ablation's folder; the same name resumes a stopped ablation.
        variants: keys of variants.yaml; the reference realm is always trained.
        seeds: number of seeds to train each with.
        presets: names of presets that override the options of all variants.
        overrides: section.key=value for all variants.
        options: params as JSON, only the differences from the defaults.
        runs: folder of all runs on the volume, which is mounted at /realmops.
        image: image of all pods.
        volume: PersistentVolumeClaim shared by all pods.
        cpu: CPU limit of the training pods.
        cpu_request: CPU request of such a pod; at most cpu.
        memory: memory limit of the training pods.
        memory_request: memory request of such a pod; at most memory.
        accelerator: resource name of the accelerators of the training pods.
        accelerators: number of accelerators per pod.
        node_selector: node labels for the training pods.
        tolerations: tolerations of the training pods.
        affinity: node affinity of all pods, in Kubernetes' format.
        settings: ConfigMap with keys such as MLFLOW_TRACKING_URI; optional.
        secret: Secret with keys such as MLFLOW_TRACKING_TOKEN; optional.
    """
    limits = cpu, cpu_request, memory, memory_request, accelerator, accelerators
    pods = Pods(image, volume, settings, secret, *limits, node_selector, tolerations, affinity)
    shared = {"options": options, "presets": presets, "settings": overrides, "seeds": seeds, "out": f"{runs}/{run}"}
    # An exit task also runs if a variant fails, which a task that collects their outputs would not.
    last = pods.configure(table(variants=variants, **shared))
    with dsl.ExitHandler(last, name="variants-compared"):
        fetched = pods.configure(inputs(options=options, root=shared["out"]), reads_store=True)
        first = pods.configure(variant(name=REFERENCE, limits=pods.limits, **shared).after(fetched), trains=True)
        with dsl.ParallelFor(variants, name="variants", parallelism=PODS) as name:
            pods.configure(variant(name=name, limits=pods.limits, **shared).after(first), trains=True)
