"""Component ``refresh``: updates the corpus of a trained model (appendix C of the paper)."""

from kfp import dsl

from realmops.cluster import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def refresh(
    options: str,
    root: str,
    changes: dsl.Output[dsl.Markdown],
    metrics: dsl.Output[dsl.Metrics],
):
    """Embed changed passages, answer the test questions again and compare; nothing is trained.

    Args:
        options: params as JSON, only the differences from the defaults; snapshot.documents is the changed
            corpus.
        root: folder of the trained run on the shared volume.
        changes: the answers that changed.
        metrics: numbers of changed passages and answers, and exact match before and after.
    """
    from realmops.cluster import tasks

    tasks.refresh(options, root, changes, metrics)
