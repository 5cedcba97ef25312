"""Component ``inputs``: fetches documents, questions and models that have an address onto the volume."""

from kfp import dsl

from realmops.cluster import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def inputs(
    options: str,
    root: str,
    fetched: dsl.Output[dsl.Markdown],
    metrics: dsl.Output[dsl.Metrics],
):
    """Fetch the inputs in the options that have an address; without one do nothing.

    Args:
        options: params as JSON, only the differences from the defaults.
        root: folder of the run on the shared volume.
        fetched: address, version and size of each input.
        metrics: numbers of inputs, files and bytes.
    """
    from realmops.cluster import tasks

    tasks.inputs(options, root, fetched, metrics)
