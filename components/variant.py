"""Component ``variant``: all stages of one variant of an ablation, with every seed, in one pod."""

from kfp import dsl

from realmops.cluster import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def variant(
    name: str,
    options: str,
    presets: list,
    settings: list,
    seeds: int,
    out: str,
    limits: str,
    metrics: dsl.Output[dsl.Metrics],
):
    """Train and evaluate a variant; outputs of stages are shared with other variants.

    Args:
        name: name of the variant, a key of variants.yaml.
        options: params as JSON, only the differences from the defaults.
        presets: names of presets for all variants.
        settings: section.key=value for all variants.
        seeds: number of seeds to train with.
        out: folder of the ablation on the shared volume.
        limits: resource limits of this pod, for its log.
        metrics: its name, and the metrics of evaluate as means over seeds.
    """
    from realmops.cluster import ablation_tasks

    ablation_tasks.variant(name, options, presets, settings, seeds, out, limits, metrics)
