"""Component ``sample``: that stage in a pod."""

from kfp import dsl

from realmops.cluster import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def sample(
    options: str,
    root: str,
    manifest: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
):
    """Make an invented encyclopedia, with questions about it.

    Args:
        options: params as JSON, sections with what differs from the defaults.
        root: folder of the run on the shared volume.
        manifest: what was made, and where.
        metrics: its figures.
    """
    from realmops.cluster import tasks

    tasks.run_stage("sample", options, root, manifest, metrics)
