"""Component ``ict``: that stage in a pod."""

from kfp import dsl

from realmops.cluster import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def ict(
    options: str,
    root: str,
    processes: int,
    model: dsl.Output[dsl.Model],
    metrics: dsl.Output[dsl.Metrics],
    after: dsl.Input[dsl.Artifact] = None,
):
    """Warm up the retriever by the inverse cloze task and the reader by masked words.

    Args:
        options: params as JSON, sections with what differs from the defaults.
        root: folder of the run on the shared volume.
        processes: that train together in this pod, one for each of its GPUs.
        model: where it lies, digests and figures.
        metrics: its figures.
        after: the manifest of the stage before; it decides the order, nothing else.
    """
    from realmops.cluster import tasks

    tasks.run_stage("ict", options, root, model, metrics, processes)
