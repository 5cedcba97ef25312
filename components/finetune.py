"""Component ``finetune``: that stage in a pod."""

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
        options: params as JSON, sections with what differs from the defaults.
        root: folder of the run on the shared volume.
        processes: that train together in this pod, one for each of its GPUs.
        model: where it lies, digests and figures.
        metrics: its figures.
        owner: id of the pipeline's run, which alone gives the builders back.
        deployment: the index builders' Deployment; empty for none.
        shard_pods: that tag and embed the corpus together; those beside this one are replicas of the Deployment.
        after: the manifest of the stage before; it decides the order, nothing else.
    """
    from realmops.cluster import tasks

    shared = {"owner": owner, "deployment": deployment, "shard_pods": shard_pods}
    tasks.run_stage("finetune", options, root, model, metrics, processes, **shared)
