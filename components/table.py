"""Component ``table``: the last task of the ablations, over whatever variants ended well."""

from kfp import dsl

from realmops.cluster import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def table(
    variants: list,
    options: str,
    presets: str,
    settings: str,
    seeds: int,
    out: str,
    rows: dsl.Output[dsl.Markdown],
    page: dsl.Output[dsl.HTML],
    metrics: dsl.Output[dsl.Metrics],
):
    """Write the table of an ablation, its page, and its runs in MLflow; nothing is trained.

    Args:
        variants: their names, without that of the reference.
        options: params as JSON, sections with what differs from the defaults.
        presets: names of presets for every variant, as a JSON list.
        settings: section.key=value for every variant, as a JSON list.
        seeds: how many times each was trained.
        out: folder of the ablation on the shared volume.
        rows: the table, and what is missing in it.
        page: the table with its curves.
        metrics: exact match, recall and difference to the reference of each variant.
    """
    from realmops.cluster import tasks

    tasks.table(variants, options, presets, settings, seeds, out, rows, page, metrics)
