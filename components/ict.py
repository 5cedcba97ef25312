"""Component ``ict``: that stage in a pod."""

from kfp import dsl


@dsl.component(base_image="realmops", install_kfp_package=False)
def ict(
    options: str,
    root: str,
    processes: int,
    after: dsl.Input[dsl.Artifact],
    model: dsl.Output[dsl.Model],
    metrics: dsl.Output[dsl.Metrics],
):
    """Warm up the retriever by the inverse cloze task and the reader by masked words.

    Args:
        options: all sections of params.yaml as JSON.
        root: folder of the run on the shared volume.
        processes: that train together in this pod, one for each of its GPUs.
        after: the manifest of the stage before.
        model: where it lies, digests and figures.
        metrics: its figures.
    """
    from realmops.cluster import tasks

    tasks.run_stage("ict", options, root, model, metrics, processes)
