"""Component ``promote``: the champion of MLflow's registry, if the run is better."""

from kfp import dsl


@dsl.component(base_image="realmops", install_kfp_package=False)
def promote(
    options: str,
    root: str,
    model: str,
    margin: float,
    after: dsl.Input[dsl.Artifact],
    champion: dsl.Output[dsl.Model],
    metrics: dsl.Output[dsl.Metrics],
):
    """Register the run as the champion if it is better than the present one, else say why not.

    Args:
        options: all sections of params.yaml as JSON.
        root: folder of the run on the shared volume.
        model: the registered model in MLflow; nothing is done where it is empty.
        margin: by how much exact match must be higher than the champion's, 0 to 1.
        after: the manifest of the evaluation.
        champion: what became of it, and the run's figures.
        metrics: whether the run is the champion (1 or 0), and by how much it is better.
    """
    from realmops.cluster import tasks

    tasks.promote(options, root, model, margin, champion, metrics)
