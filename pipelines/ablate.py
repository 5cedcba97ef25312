"""The pipeline ``ablations``: the reference, then its variants beside each other, then their table.

    python -m pipelines        compiles it into pipelines/ablations.yaml

The reference comes first and alone, so that the stages that variants share with it are there when they begin.
"""

from kfp import dsl

from components.table import table
from components.variant import variant
from pipelines.pods import OPTIONS, RUNS, Pods
from realmops.cluster import IMAGE
from realmops.config import PACKAGE
from realmops.config_yaml import read_yaml

REFERENCE, *VARIANTS = read_yaml(PACKAGE / "variants.yaml")["variants"]
PODS = 4  # that train at the same time; KFP takes no parameter for it


@dsl.pipeline(name="realmops-ablations", description="Variants of REALM over seeds, and their table.")
def ablations(
    run: str = "ablations",
    variants: list = VARIANTS,
    seeds: int = 1,
    presets: str = '["ablation"]',
    overrides: str = "[]",
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
    """Train and compare variants; the table is written over those that ended well.

    Args:
        run: the name of the ablation's folder; the same name goes on where it was stopped.
        variants: keys of variants.yaml beside realm, which is always trained.
        seeds: train each so many times.
        presets: laid over the options for every variant, as a JSON list of names.
        overrides: section.key=value for every variant, as a JSON list.
        options: params as JSON, sections with what differs from the defaults.
        runs: the folder of all runs on the volume, which is mounted at /realmops.
        image: of every pod.
        volume: the claim that all pods share.
        cpu: limit of the pods that train.
        cpu_request: what a node must have left for one; at most cpu.
        memory: their limit.
        memory_request: what a node must have left for one; at most memory.
        accelerator: the kind of accelerator of those pods.
        accelerators: how many.
        node_selector: labels of the nodes for them.
        tolerations: of those pods.
        affinity: the node affinity of all pods, as Kubernetes writes it.
        settings: a ConfigMap with keys as MLFLOW_TRACKING_URI; it may be missing.
        secret: a Secret with keys as MLFLOW_TRACKING_TOKEN; it may be missing.
    """
    limits = cpu, cpu_request, memory, memory_request, accelerator, accelerators
    pods = Pods(image, volume, settings, secret, *limits, node_selector, tolerations, affinity)
    what = {"options": options, "presets": presets, "settings": overrides, "seeds": seeds, "out": f"{runs}/{run}"}
    # Collected outputs would keep the table from being written where a variant fails; an exit task takes none.
    last = pods.placed(table(variants=variants, **what))
    with dsl.ExitHandler(last, name="variants-compared"):
        first = pods.placed(variant(name=REFERENCE, limits=pods.limits, **what), trains=True)
        with dsl.ParallelFor(variants, name="variants", parallelism=PODS) as name:
            pods.placed(variant(name=name, limits=pods.limits, **what).after(first), trains=True)
