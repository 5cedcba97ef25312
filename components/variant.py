"""Component ``variant``: one variant of an ablation, all its stages with every seed, in one pod."""

from kfp import dsl

from realmops.cluster import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def variant(
    name: str,
    options: str,
    presets: str,
    settings: str,
    seeds: int,
    out: str,
    limits: str,
    metrics: dsl.Output[dsl.Metrics],
):
    """Train and evaluate a variant; what another variant has made or is making is shared.

    Args:
        name: of the variant, a key of realmops' variants.yaml.
        options: params as JSON, sections with what differs from the defaults.
        presets: names of presets for every variant, as a JSON list.
        settings: section.key=value for every variant, as a JSON list.
        seeds: train it so many times.
        out: folder of the ablation on the shared volume.
        limits: of this pod, said in its log.
        metrics: its name, and the figures of evaluate as means over seeds.
    """
    from realmops.cluster import tasks

    tasks.variant(name, options, presets, settings, seeds, out, limits, metrics)
