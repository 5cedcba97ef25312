"""The model that a server holds, and where it comes from: a run's folder or MLflow's registry."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

from realmops.answering.confidence import Confidence
from realmops.answering.opened_model import OpenedModel
from realmops.answering.passage_search import Search
from realmops.commands.open_model import Champion
from realmops.corpus.cloze import CLOZE_ID
from realmops.devices import with_packed_linears
from realmops.evaluate.predictions import read_results
from realmops.search.exact import searched_often
from realmops.stages import CLOZE
from realmops.stages.corpus_states import pipeline_state
from realmops.stages.open_run import manifest_stats, open_run
from realmops.stages.trained import sections_of

SPANS_TOGETHER = 64 << 20  # bytes of the spans of a batch in the reader's last layer; more are slower
EXAMPLES = 6


@dataclass(frozen=True, eq=False)
class ServedModel(OpenedModel):
    """An opened model that many callers ask at once."""

    @classmethod
    def of(cls, opened: OpenedModel) -> Self:
        """Return the same model for serving."""
        return cls(**vars(opened))

    @property
    def batch_size(self) -> int:
        """The number of questions that are answered fastest in one batch."""
        options = self.model.options
        spans = options.reader_candidates * options.reader_wordpieces * options.answer_wordpieces
        return max(1, SPANS_TOGETHER // (4 * spans * options.span_width))

    def warm_up(self) -> None:
        """Copy embeddings and weights into forms that answer a question in a quarter less time; answers stay equal.

        In place, before the first question.
        """
        model = self.model
        if model.passages is not None:
            model.passages = searched_often(model.passages)
            model.retriever.query = with_packed_linears(model.retriever.query, model.dtype)
        model.reader = with_packed_linears(model.reader, model.dtype)

    @cached_property
    def shared_search(self) -> Search:
        """The search of the model's corpus, shared by all threads."""
        return self.passage_search()


@dataclass(frozen=True)
class RunFolder:
    """A run's folder: what its stages made, or the newest update of that."""

    root: Path  # feedback is kept in its work folder
    name: str = "realmops"  # of the model, as clients call it

    def mark(self) -> Hashable:
        """Return a cheap value that differs when there is a newer model: the manifests' inodes, times and sizes."""
        return manifest_stats(self.root)

    def open(self) -> OpenedModel:
        """Open the newest model, every file compared with its digest. Any error means that it cannot serve."""
        return open_run(self.root)

    def before(self, served: OpenedModel) -> OpenedModel | None:
        """Open the same model over the corpus before all updates; None where the model has changed."""
        opened = open_run(self.root, pipeline_state(self.root))
        return opened if opened.version == served.version else None

    def examples(self) -> Sequence[str]:
        """Return questions to try: some test questions that are answered rightly, from all parts of their file.

        None that was made from the corpus: such questions are words in disorder.
        """
        try:
            tested = Path(sections_of(self.root, "evaluate").get("questions", {}).get("test", ""))
            rows = [] if Path(CLOZE) in tested.parents else read_results(self.root)
            confidence = Confidence.load(pipeline_state(self.root).finetune)
        except (OSError, ValueError):  # it was not tested
            return ()
        least = confidence.threshold if confidence else 0.0  # of now: results may be older
        right = [one for one in rows if one.em and not one.abstained and (one.confidence or 0.0) >= least]
        questions = list(dict.fromkeys(one.question for one in right if not one.question_id.startswith(CLOZE_ID)))
        return questions[:: max(1, len(questions) // EXAMPLES)][:EXAMPLES]


class RegisteredChampion(Champion):
    """The version of a registered model that has the alias ``champion``."""

    def before(self, served: OpenedModel) -> None:
        """A registered model is not updated."""

    def examples(self) -> Sequence[str]:
        """None are registered."""
        return ()


ModelSource = RunFolder | RegisteredChampion


def model_source(root: Path, model: str | None) -> ModelSource:
    """Return where models come from: the champion that ``model`` names, else the run's folder."""
    return RunFolder(root) if model is None else RegisteredChampion(model, root)
