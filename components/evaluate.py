"""Component ``evaluate``: that stage in a pod."""

from kfp import dsl


@dsl.component(base_image="realmops", install_kfp_package=False)
def evaluate(
    options: str,
    root: str,
    after: dsl.Input[dsl.Artifact],
    manifest: dsl.Output[dsl.Artifact],
    report: dsl.Output[dsl.HTML],
    summary: dsl.Output[dsl.Markdown],
    metrics: dsl.Output[dsl.Metrics],
):
    """Measure exact match, recall, ceilings and intervals; write predictions, plots and the report.

    Args:
        options: all sections of params.yaml as JSON.
        root: folder of the run on the shared volume.
        after: the manifest of the stage before.
        manifest: what was made, and where.
        report: the page of the run.
        summary: its tables.
        metrics: its figures.
    """
    from realmops.cluster import tasks

    tasks.evaluate(options, root, manifest, report, summary, metrics)
