"""Component ``refresh``: a changed corpus under a trained model (appendix C of the paper)."""

from kfp import dsl

from realmops.cluster import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def refresh(
    options: str,
    root: str,
    changes: dsl.Output[dsl.Markdown],
    metrics: dsl.Output[dsl.Metrics],
):
    """Embed passages that changed, answer the test questions again and compare; nothing is trained.

    Args:
        options: params as JSON, sections with what differs from the defaults; snapshot.documents names the corpus as it
            is now.
        root: folder of the trained run on the shared volume.
        changes: the answers that are others now.
        metrics: passages and answers that changed, and exact match before and after.
    """
    from realmops.cluster import tasks

    tasks.refresh(options, root, changes, metrics)
