"""Component ``scale_builder``: the last task, whatever became of the others."""

from kfp import dsl


@dsl.component(base_image="realmops", install_kfp_package=False)
def scale_builder(deployment: str):
    """Lower the index builders' Deployment to 0.

    Args:
        deployment: its name; nothing is done where it is empty.
    """
    from realmops import kfp_entry

    kfp_entry.lower_builders(deployment)
