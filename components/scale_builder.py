"""Component ``scale_builder``: the last task, which runs however the others ended."""

from kfp import dsl

from realmops.cluster import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def scale_builder(deployment: str, root: str, owner: str):
    """Scale the index builders' Deployment down to 0 if this run has scaled it up.

    Args:
        deployment: name of the Deployment; empty to do nothing.
        root: folder of the run on the shared volume.
        owner: id of the pipeline run.
    """
    from realmops.cluster import tasks

    tasks.lower_builders(deployment, root, owner)
