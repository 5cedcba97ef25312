"""Component ``promote``: registers the run as champion in MLflow if it is better."""

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
    """Register the run as the champion if it is better than the current one; report the decision.

    Args:
        options: params as JSON, only the differences from the defaults.
        root: folder of the run on the shared volume.
        model: name of the registered model in MLflow; empty to skip promotion.
        margin: required improvement of exact match over the champion, 0 to 1.
        champion: the decision, and the run's metrics.
        metrics: whether the run is the champion (1 or 0), and the difference of exact match.
        after: manifest of the evaluation; it only determines the order.
    """
    from realmops.cluster import tasks

    tasks.promote(options, root, model, margin, champion, metrics)
