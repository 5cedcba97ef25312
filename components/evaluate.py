"""Component ``evaluate``: runs the stage of that name in a pod."""

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
        options: params as JSON, only the differences from the defaults.
        root: folder of the run on the shared volume.
        manifest: folder, digests and metrics of the output.
        report: the report of the run.
        summary: the tables of the report.
        metrics: chief metrics of the stage.
        owner: id of the pipeline run; only the same run scales the builders down.
        deployment: the index builders' Deployment; empty for none.
        shard_pods: number of pods that tag and embed the corpus; all but this one are replicas of the Deployment.
        after: manifest of the previous stage; it only determines the order.
    """
    from realmops.cluster import tasks

    shared = {"owner": owner, "deployment": deployment, "shard_pods": shard_pods}
    tasks.evaluate(options, root, manifest, report, summary, metrics, **shared)
