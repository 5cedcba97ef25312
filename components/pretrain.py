"""Component ``pretrain``: runs the stage of that name in a pod, with the index builders' Deployment."""

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
        options: params as JSON, only the differences from the defaults.
        root: folder of the run on the shared volume.
        owner: id of the pipeline run; only the same run scales the builders down.
        deployment: the index builders' Deployment, scaled up for this task; empty for a builder in this pod.
        builders: replicas of the Deployment.
        wait_seconds: seconds to wait for the builders.
        processes: number of training processes in this pod, one per GPU.
        limits: resource limits of this pod, for its log.
        model: folder, digests and metrics of the models.
        metrics: chief metrics of the stage.
        after: manifest of the previous stage; it only determines the order.
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
