"""Component ``cloze``: generates questions from the corpus."""

from kfp import dsl

from realmops.cluster import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def cloze(
    options: str,
    root: str,
    questions: dsl.Output[dsl.Dataset],
    metrics: dsl.Output[dsl.Metrics],
    after: dsl.Input[dsl.Artifact] = None,
):
    """Generate questions from the corpus and its salient spans, if the options name generated questions.

    Args:
        options: params as JSON, only the differences from the defaults.
        root: folder of the run on the shared volume.
        questions: folder and digest of the question files.
        metrics: number of questions by split.
        after: manifest of the previous stage; it only determines the order.
    """
    from realmops.cluster import tasks

    tasks.cloze(options, root, questions, metrics)
