"""The served model and its sources: a run's folder or MLflow's model registry."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

from realmops.answering.confidence import Confidence
from realmops.answering.corpus_states import pipeline_state
from realmops.answering.opened_model import OpenedModel
from realmops.answering.opening import manifest_stats
from realmops.answering.passage_search import PassageSearch
from realmops.commands.open_model import Champion, open_run
from realmops.evaluate.predictions import read_results
from realmops.model.reader import SPAN_WIDTH
from realmops.search.exact import prepare_for_serving

SPANS_TOGETHER = 64 << 20  # bytes of span representations per batch; larger batches are slower
EXAMPLES = 6  # questions to try


@dataclass(frozen=True, eq=False)
class ServedModel(OpenedModel):
    """An opened model that serves concurrent requests."""

    @classmethod
    def of(cls, opened: OpenedModel) -> Self:
        """Wrap an opened model for serving."""
        return cls(**vars(opened))

    @property
    def batch_size(self) -> int:
        """Batch size with the highest throughput."""
        options = self.model.options
        spans = options.reader_candidates * options.reader_wordpieces * options.answer_wordpieces
        return max(1, SPANS_TOGETHER // (4 * spans * SPAN_WIDTH))

    def warm_up(self) -> None:
        """Repack embeddings and weights in place, before the first question.

        Questions then take a quarter less time, with the same answers.
        """
        model = self.model
        if model.passages is not None:
            model.passages = prepare_for_serving(model.passages)

    @cached_property
    def document_titles(self) -> list[str]:
        """Titles of up to ``EXAMPLES`` documents, spread over the corpus."""
        snapshot = self.model.snapshot
        rows = [len(snapshot) * n // EXAMPLES for n in range(EXAMPLES)]
        return list(dict.fromkeys(title for title in map(snapshot.title, rows) if title.strip()))

    @cached_property
    def shared_search(self) -> PassageSearch:
        """Thread-safe search of the model's corpus."""
        return self.passage_search()


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
        """Return up to ``EXAMPLES`` test questions that are answered correctly, spread over their file.

        Questions generated from the corpus are not included: they are not natural language.
        """
        try:
            rows = read_results(self.root)
            confidence = Confidence.load(pipeline_state(self.root).finetune)
        except (OSError, ValueError):  # the run has no results
            return ()
        threshold = confidence.threshold if confidence else 0.0  # the current one: results may be older
        correct = [row for row in rows if row.em and not row.abstained and (row.confidence or 0.0) >= threshold]
        questions = list(dict.fromkeys(row.question for row in correct if not row.is_generated))
        return questions[:: max(1, len(questions) // EXAMPLES)][:EXAMPLES]


class RegisteredChampion(Champion):
    """Source of models: the version of a registered model with the alias ``champion``."""

    def before_updates(self, served: OpenedModel) -> None:
        """Return None: a registered model is not updated."""

    def examples(self) -> Sequence[str]:
        """Return no examples: a registered model has none."""
        return ()


ModelSource = RunFolder | RegisteredChampion


def model_source(root: Path, model: str | None) -> ModelSource:
    """Return the source of models: the champion that ``model`` names, by default the run's folder."""
    return RunFolder(root) if model is None else RegisteredChampion(model, root)
