"""Component ``guard``: the first task, which stops a duplicate run."""

from kfp import dsl

from realmops.cluster import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def guard(key: str, run: str, endpoint: str):
    """Stop the run if an older run with the same key is active.

    Args:
        key: key of the training; empty to skip the check.
        run: id of the pipeline run.
        endpoint: URL of the Kubeflow Pipelines API; empty to skip the check.
    """
    from realmops.cluster import tasks

    tasks.guard(key, run, endpoint)
