"""Component ``pretrain``: that stage in a pod, with the index builders' Deployment beside it."""

from kfp import dsl

from realmops.cluster import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def pretrain(
    options: str,
    root: str,
    owner: str,
    deployment: str,
    builders: int,
    wait_seconds: int,
    processes: int,
    limits: str,
    model: dsl.Output[dsl.Model],
    metrics: dsl.Output[dsl.Metrics],
    after: dsl.Input[dsl.Artifact] = None,
):
    """Pre-train retriever and reader together while the index is refreshed in the background.

    Args:
        options: params as JSON, sections with what differs from the defaults.
        root: folder of the run on the shared volume.
        owner: id of the pipeline's run, which alone gives the builders back.
        deployment: the index builders' Deployment, raised for this task; empty for a builder in this pod.
        builders: its replicas.
        wait_seconds: how long to wait for them.
        processes: that train together in this pod, one for each of its GPUs.
        limits: of this pod, said in its log.
        model: where it lies, digests and figures.
        metrics: its figures.
        after: the manifest of the stage before; it decides the order, nothing else.
    """
    from realmops.cluster import tasks

    tasks.pretrain(
        options,
        root,
        model,
        metrics,
        owner=owner,
        deployment=deployment,
        builders=builders,
        wait_seconds=wait_seconds,
        processes=processes,
        limits=limits,
    )
