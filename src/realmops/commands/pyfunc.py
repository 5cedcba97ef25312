"""The registered model: answers questions with their evidence, and traces what it retrieved.

Nothing imports this file: MLflow keeps a copy of it in the registered model, and runs that (models from code).
Shape suffixes: B questions, K passages.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlflow
from mlflow.entities import Document, SpanType
from mlflow.pyfunc.model import PythonModel, PythonModelContext
from pandas import DataFrame
from torch import Tensor

from realmops.commands.promote import open_promoted, reply
from realmops.corpus.questions import Question
from realmops.train.finetune import OpenQa

COLUMN = "question"


class TracedQa(OpenQa):
    """Each retrieval, of one question at a time, is a span with the passages that are read."""

    def relevance(self, questions: Sequence[str], k: int) -> tuple[Tensor, Tensor]:
        """As without a trace."""
        [query] = questions
        with mlflow.start_span("retrieve", SpanType.RETRIEVER) as span:
            span.set_inputs({"query": query})
            score_BK, id_BK = super().relevance(questions, k)
            read = self.options.reader_candidates
            found = zip(id_BK[0, :read].tolist(), score_BK[0, :read].tolist(), strict=True)
            span.set_outputs([self._document(passage, score).to_dict() for passage, score in found if passage >= 0])
        return score_BK, id_BK

    def _document(self, passage: int, score: float) -> Document:
        snapshot = self.snapshot
        about = {"title": snapshot.title(passage), "doc_uri": snapshot.document_id(passage), "score": score}
        return Document(page_content=snapshot.text(passage), metadata=about, id=snapshot.passage_id(passage))


class RegisteredModel(PythonModel):
    """Questions in, for each a dictionary with the columns of ``promote.SIGNATURE`` out."""

    def load_context(self, context: PythonModelContext) -> None:
        """Open the files; ValueError when they are not those that were registered."""
        registered = Path(context.artifacts["manifest.json"])
        folder = (context.model_config or {}).get("folder", registered.parent)
        self._model = open_promoted(Path(folder), registered, TracedQa)

    def predict(
        self, context: PythonModelContext, model_input: DataFrame, params: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """Answer a list of questions, or the column ``question`` of a table."""
        if model_input.columns[0] not in (COLUMN, 0):  # a list comes as column 0
            raise ValueError(
                f"the questions are looked for in the column {COLUMN!r}; found {model_input.columns[0]!r} first: give "
                "that column alone, or a list"
            )
        return [self._answer(question) for question in model_input.iloc[:, 0]]

    def _answer(self, question: object) -> dict[str, Any]:
        if not isinstance(question, str) or not question.strip():
            raise ValueError(f"a question is {question!r}; text is wanted")
        with mlflow.start_span("answer", SpanType.CHAIN) as span:
            span.set_inputs({COLUMN: question})
            [answer] = self._model.answer([Question("", question, ())], ranked=1, batch_size=1)
            found = reply(question, answer, self._model.snapshot)
            span.set_outputs(found)
        return found


mlflow.models.set_model(RegisteredModel())
