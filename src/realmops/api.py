"""realmops from Python: open what was trained, search it and ask it.

from realmops import Answerer, Searcher

for passage in Searcher.open("runs/mine").search("who built the bridge", k=3):
    print(passage.title, passage.start, passage.text)
answer = Answerer.open("runs/mine").answer("Who built the bridge?")
print(answer.text, answer.probability, [citation.quote for citation in answer.citations])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from realmops.answering.opened_model import OpenedModel
    from realmops.answering.passage_search import Search

By = Literal["run", "embeddings", "words"]
T = TypeVar("T")


@dataclass(frozen=True)
class Passage:
    """A passage that was found or read; ``start`` and ``end`` are characters of its document's text."""

    document_id: str
    passage_id: str
    title: str
    text: str
    uri: str
    start: int | None
    end: int | None
    score: float | None = None  # by which it is ranked; in an answer that of its best span
    embeddings: float | None = None  # the scaled inner product with the query
    words: float | None = None  # BM25
    highlights: Sequence[tuple[int, int]] = ()  # where in ``text`` words of the query stand
    extra: Mapping[str, Any] = field(default_factory=dict)  # the document's own fields
    p_z: float | None = None  # p(z|x), in an answer
    p_z_given_y: float | None = None  # p(z|x, y)
    page: int | None = None  # of a document that has pages


@dataclass(frozen=True)
class Citation:
    """A quotation that an answer rests on; ``start`` and ``end`` are characters of the document's text."""

    document_id: str
    passage_id: str
    title: str
    quote: str
    uri: str
    start: int | None
    end: int | None
    p_z: float | None = None  # of a citation
    p_z_given_y: float | None = None
    page: int | None = None


@dataclass(frozen=True)
class AnswerRecord:
    """An answer: ``text`` is empty where there is none, ``abstained`` says that it is better not believed."""

    question: str
    text: str
    probability: float
    threshold: float | None
    abstained: bool
    citations: Sequence[Citation]
    passages: Sequence[Passage]
    quote: Citation | None = None  # the sentence that the answer stands in


class Searcher:
    """Finds passages of a run, whatever of it is trained so far, or of a registered model."""

    def __init__(self, search: Search) -> None:
        self._search = search

    @classmethod
    def open(cls, root: str | Path = ".", *, model: str | None = None) -> Self:
        """Open the run in a folder, or ``models:/NAME@champion`` of MLflow's registry.

        Raises ValueError where there is no snapshot, and for files that were changed.
        """
        from realmops.commands.open_model import open_model
        from realmops.stages import Silent
        from realmops.stages.open_run import open_search

        return cls(open_model(Path(root), model).passage_search() if model else open_search(Path(root), Silent()))

    def search(
        self,
        query: str,
        k: int = 10,
        *,
        filters: Mapping[str, Any] | None = None,
        by: By = "run",
    ) -> list[Passage]:
        """The best ``k`` passages, best first.

        Args:
            filters: of the documents' own fields: a value, a list of which one is enough, or a range as
                ``{"gte": 1990, "lt": 2000}``; applied before the best are chosen.
            by: as the run's retriever ranks, or by embeddings or words alone.

        Raises ValueError for an empty query, a filter that is none, and for embeddings where there are none.
        """
        return [_of(Passage, one) for one in self._search.search(query, k, [filters or {}], by)["passages"]]

    def embed(self, texts: Sequence[str], *, documents: bool = False) -> NDArray[np.float32]:
        """Vectors of texts, fp32 [N, E]: as queries, or as passages; f(x, z) is their inner product, scaled."""
        found: NDArray[np.float32] = self._search.embed(list(texts), documents=documents).numpy()
        return found


class Answerer:
    """Answers questions from a run that was fine-tuned, or by a registered model."""

    def __init__(self, opened: OpenedModel) -> None:
        self._opened = opened

    @classmethod
    def open(cls, root: str | Path = ".", *, model: str | None = None) -> Self:
        """Open the run in a folder, or ``models:/NAME@champion``; ValueError where no model reads passages."""
        from realmops.commands.open_model import open_model

        return cls(open_model(Path(root), model))

    def answer(self, question: str, *, without: Sequence[str] = ()) -> AnswerRecord:
        """One answer with what it rests on; ``without`` has ids of passages that must not be read.

        Raises ValueError for a question that is empty or too long.
        """
        from realmops.answering.opened_model import Query

        [record] = self._opened.answer([Query(question, frozenset(without))])
        return AnswerRecord(
            question=question,
            text=record["answer"],
            probability=record["probability"],
            threshold=record["threshold"],
            abstained=record["abstained"],
            citations=[_of(Citation, one) for one in record["citations"]],
            passages=[_of(Passage, one) for one in record["passages"]],
            quote=_of(Citation, record["quote"]) if record["quote"] else None,
        )

    def searcher(self) -> Searcher:
        """Return a searcher over the same model."""
        return Searcher(self._opened.passage_search())


def _of(kind: type[T], record: Mapping[str, Any]) -> T:
    """A record's fields that a class has."""
    return kind(**{one.name: record[one.name] for one in fields(kind) if one.name in record})  # type: ignore[arg-type]
