"""Component ``guard``: the first task, which ends a run that is one too many."""

from kfp import dsl

from realmops.cluster import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def guard(key: str, run: str, endpoint: str):
    """End the pipeline's run when an older one with the same key lives.

    Args:
        key: of the submission; nothing is done where it is empty.
        run: id of the pipeline's run.
        endpoint: of the Kubeflow Pipelines API; nothing is done where it is empty.
    """
    from realmops.cluster import tasks

    tasks.guard(key, run, endpoint)
