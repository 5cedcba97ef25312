"""Component ``snapshot``: that stage in a pod."""

from kfp import dsl


@dsl.component(base_image="realmops", install_kfp_package=False)
def snapshot(
    options: str,
    root: str,
    after: dsl.Input[dsl.Artifact],
    corpus: dsl.Output[dsl.Dataset],
    metrics: dsl.Output[dsl.Metrics],
):
    """Cut documents into passages, tokenise and hash them.

    Args:
        options: all sections of params.yaml as JSON.
        root: folder of the run on the shared volume.
        after: the manifest of the stage before.
        corpus: where it lies, digests and figures.
        metrics: its figures.
    """
    from realmops.cluster import tasks

    tasks.run_stage("snapshot", options, root, corpus, metrics)
