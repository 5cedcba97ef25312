"""Component ``ict``: runs the stage of that name in a pod."""

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
    """Warm-start the retriever by the inverse cloze task and the reader by masked words.

    Args:
        options: params as JSON, only the differences from the defaults.
        root: folder of the run on the shared volume.
        processes: number of training processes in this pod, one per GPU.
        model: folder, digests and metrics of the models.
        metrics: chief metrics of the stage.
        after: manifest of the previous stage; it only determines the order.
    """
    from realmops.cluster import tasks

    tasks.run_stage("ict", options, root, model, metrics, processes)
