"""Sources of the served model: a run's folder, or MLflow's model registry."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

from realmops.answering.confidence import Confidence
from realmops.answering.corpus_states import pipeline_state
from realmops.answering.opened_model import EXAMPLES, OpenedModel
from realmops.commands.open_model import Champion
from realmops.evaluate.predictions import read_results
from realmops.opening import manifest_stats, open_run


@dataclass(frozen=True)
class RunFolder:
    """Source of models: the output of a run's stages, or its newest update."""

    root: Path  # feedback is stored in its work folder
    name: str = "realmops"  # of the model, for clients

    def mark(self) -> Hashable:
        """Return a cheap value that changes with the model: the manifests' inodes, times and sizes."""
        return manifest_stats(self.root)

    def open(self) -> OpenedModel:
        return open_run(self.root)

    def before_updates(self, served: OpenedModel) -> OpenedModel | None:
        """Open the same model over the corpus before all updates; return None if the model has changed."""
        opened = open_run(self.root, pipeline_state(self.root))
        return opened if opened.version == served.version else None

    def examples(self) -> Sequence[str]:
        """Return up to ``EXAMPLES`` test questions of people that are answered correctly, spread over their file."""
        try:
            rows = read_results(self.root)
            confidence = Confidence.load(pipeline_state(self.root).finetune)
        except (OSError, ValueError):  # the run has no results
            return ()
        threshold = confidence.threshold if confidence else 0.0  # the current one: results may be older
        correct = [row for row in rows if row.em and not row.abstained and (row.confidence or 0.0) >= threshold]
        questions = list(dict.fromkeys(row.question for row in correct if not row.is_generated))
        return questions[:: max(1, len(questions) // EXAMPLES)][:EXAMPLES]


ModelSource = RunFolder | Champion
