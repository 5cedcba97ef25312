"""Component ``promote``: the champion of MLflow's registry, if the run is better."""

from kfp import dsl

from realmops.cluster import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def promote(
    options: str,
    root: str,
    model: str,
    margin: float,
    champion: dsl.Output[dsl.Model],
    metrics: dsl.Output[dsl.Metrics],
    after: dsl.Input[dsl.Artifact] = None,
):
    """Register the run as the champion if it is better than the present one, else say why not.

    Args:
        options: params as JSON, sections with what differs from the defaults.
        root: folder of the run on the shared volume.
        model: the registered model in MLflow; nothing is done where it is empty.
        margin: by how much exact match must be higher than the champion's, 0 to 1.
        champion: what became of it, and the run's figures.
        metrics: whether the run is the champion (1 or 0), and by how much it is better.
        after: the manifest of the evaluation; it decides the order, nothing else.
    """
    from realmops.cluster import tasks

    tasks.promote(options, root, model, margin, champion, metrics)
