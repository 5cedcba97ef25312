"""The registered MLflow model; no module imports this file, as MLflow runs a copy (models from code)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
from mlflow.entities import Document, SpanType
from mlflow.pyfunc.model import PythonModel, PythonModelContext
from pandas import DataFrame

from realmops.answering.answer import RetrievedPassages
from realmops.answering.opened_model import Query
from realmops.opening import open_promoted

COLUMN = "question"


class RegisteredModel(PythonModel):
    """A pyfunc model that maps questions to answer records."""

    def load_context(self, context: PythonModelContext) -> None:
        """Open the model. Raises ValueError if its files are not those that were registered."""
        registered = Path(context.artifacts["manifest.json"])
        folder = (context.model_config or {}).get("folder", registered.parent)
        self._model = open_promoted(Path(folder), registered)

    def predict(
        self, context: PythonModelContext, model_input: DataFrame, params: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        if model_input.columns[0] not in (COLUMN, 0):  # MLflow passes a list as column 0
            raise ValueError(
                f"the first column is {model_input.columns[0]!r}; expected {COLUMN!r}, or a list of questions"
            )
        return [self._answer(question) for question in model_input.iloc[:, 0]]

    def _answer(self, question: object) -> dict[str, Any]:
        if not isinstance(question, str) or not question.strip():
            raise ValueError(f"a question is {question!r}; expected a non-empty string")
        with mlflow.start_span("answer", SpanType.CHAIN) as span:
            span.set_inputs({COLUMN: question})
            with mlflow.start_span("retrieve", SpanType.RETRIEVER) as retrieval:
                retrieval.set_inputs({"query": question})
                [retrieved] = self._model.find([Query(question)])
                retrieval.set_outputs([document.to_dict() for document in self._documents(retrieved)])
            [record] = self._model.read([retrieved])
            span.set_outputs(record)
        return record

    def _documents(self, retrieved: RetrievedPassages) -> Iterator[Document]:
        snapshot = self._model.model.snapshot
        for passage, score in zip(retrieved.passages, retrieved.relevance, strict=True):
            metadata = {"title": snapshot.title(passage), "doc_uri": snapshot.document_id(passage), "score": score}
            yield Document(page_content=snapshot.text(passage), metadata=metadata, id=snapshot.passage_id(passage))


mlflow.models.set_model(RegisteredModel())
