"""Component ``scale_builder``: the last task, whatever became of the others."""

from kfp import dsl

from realmops.cluster import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def scale_builder(deployment: str, root: str, owner: str):
    """Lower the index builders' Deployment to 0 where this run has raised it.

    Args:
        deployment: its name; nothing is done where it is empty.
        root: folder of the run on the shared volume.
        owner: id of the pipeline's run.
    """
    from realmops.cluster import tasks

    tasks.lower_builders(deployment, root, owner)
