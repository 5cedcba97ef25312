"""Component ``snapshot``: runs the stage of that name in a pod."""

from kfp import dsl

from realmops.cluster import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def snapshot(
    options: str,
    root: str,
    corpus: dsl.Output[dsl.Dataset],
    metrics: dsl.Output[dsl.Metrics],
    after: dsl.Input[dsl.Artifact] = None,
):
    """Split documents into passages, tokenise and hash them.

    Args:
        options: params as JSON, only the differences from the defaults.
        root: folder of the run on the shared volume.
        corpus: folder, digests and metrics of the snapshot.
        metrics: chief metrics of the stage.
        after: manifest of the previous stage; it only determines the order.
    """
    from realmops.cluster import tasks

    tasks.run_stage("snapshot", options, root, corpus, metrics)
