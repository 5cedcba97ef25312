"""Component ``sample``: runs the stage of that name in a pod."""

from kfp import dsl

from realmops.cluster import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def sample(
    options: str,
    root: str,
    manifest: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
):
    """Generate an invented encyclopedia with questions about it.

    Args:
        options: params as JSON, only the differences from the defaults.
        root: folder of the run on the shared volume.
        manifest: folder, digests and metrics of the output.
        metrics: chief metrics of the stage.
    """
    from realmops.cluster import tasks

    tasks.run_stage("sample", options, root, manifest, metrics)
