"""Component ``finetune``: runs the stage of that name in a pod."""

from kfp import dsl

from realmops.cluster import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def finetune(
    options: str,
    root: str,
    processes: int,
    model: dsl.Output[dsl.Model],
    metrics: dsl.Output[dsl.Metrics],
    owner: str = "",
    deployment: str = "",
    shard_pods: int = 1,
    after: dsl.Input[dsl.Artifact] = None,
):
    """Fine-tune retriever and reader to answer questions.

    Args:
        options: params as JSON, only the differences from the defaults.
        root: folder of the run on the shared volume.
        processes: number of training processes in this pod, one per GPU.
        model: folder, digests and metrics of the models.
        metrics: chief metrics of the stage.
        owner: id of the pipeline run; only the same run scales the builders down.
        deployment: the index builders' Deployment; empty for none.
        shard_pods: number of pods that tag and embed the corpus; all but this one are replicas of the Deployment.
        after: manifest of the previous stage; it only determines the order.
    """
    from realmops.cluster import tasks

    shared = {"owner": owner, "deployment": deployment, "shard_pods": shard_pods}
    tasks.run_stage("finetune", options, root, model, metrics, processes, **shared)
