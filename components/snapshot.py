"""Component ``snapshot``: that stage in a pod."""

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
    """Cut documents into passages, tokenise and hash them.

    Args:
        options: params as JSON, sections with what differs from the defaults.
        root: folder of the run on the shared volume.
        corpus: where it lies, digests and figures.
        metrics: its figures.
        after: the manifest of the stage before; it decides the order, nothing else.
    """
    from realmops.cluster import tasks

    tasks.run_stage("snapshot", options, root, corpus, metrics)
