"""Component ``table``: the last task of the ablations, over the variants that succeeded."""

from kfp import dsl

from realmops.cluster import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def table(
    variants: list,
    options: str,
    presets: list,
    settings: list,
    seeds: int,
    out: str,
    rows: dsl.Output[dsl.Markdown],
    page: dsl.Output[dsl.HTML],
    metrics: dsl.Output[dsl.Metrics],
):
    """Write the table of an ablation, its report, and its runs in MLflow; nothing is trained.

    Args:
        variants: names of the variants, without the reference.
        options: params as JSON, only the differences from the defaults.
        presets: names of presets for all variants.
        settings: section.key=value for all variants.
        seeds: number of seeds each was trained with.
        out: folder of the ablation on the shared volume.
        rows: the table, and the missing variants.
        page: the table with learning curves.
        metrics: exact match, recall and the difference from the reference, for each variant.
    """
    from realmops.cluster import ablation_tasks

    ablation_tasks.table(variants, options, presets, settings, seeds, out, rows, page, metrics)
