"""Component ``evaluate``: that stage in a pod."""

from kfp import dsl

from realmops.cluster import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def evaluate(
    options: str,
    root: str,
    manifest: dsl.Output[dsl.Artifact],
    report: dsl.Output[dsl.HTML],
    summary: dsl.Output[dsl.Markdown],
    metrics: dsl.Output[dsl.Metrics],
    owner: str = "",
    deployment: str = "",
    shard_pods: int = 1,
    after: dsl.Input[dsl.Artifact] = None,
):
    """Measure exact match, recall, ceilings and intervals; write predictions, plots and the report.

    Args:
        options: params as JSON, sections with what differs from the defaults.
        root: folder of the run on the shared volume.
        manifest: what was made, and where.
        report: the page of the run.
        summary: its tables.
        metrics: its figures.
        owner: id of the pipeline's run, which alone gives the builders back.
        deployment: the index builders' Deployment; empty for none.
        shard_pods: that tag and embed the corpus together; those beside this one are replicas of the Deployment.
        after: the manifest of the stage before; it decides the order, nothing else.
    """
    from realmops.cluster import tasks

    shared = {"owner": owner, "deployment": deployment, "shard_pods": shard_pods}
    tasks.evaluate(options, root, manifest, report, summary, metrics, **shared)
