"""Python API: search the passages of a trained run and answer questions with it.

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
    from realmops.answering.passage_search import PassageSearch

By = Literal["run", "embeddings", "words"]
T = TypeVar("T")


@dataclass(frozen=True)
class Passage:
    """A retrieved passage; ``start`` and ``end`` are character offsets in its document's text."""

    document_id: str
    passage_id: str
    title: str
    text: str
    uri: str
    start: int | None
    end: int | None
    score: float | None = None  # ranking score; in an answer, the score of the best span
    embeddings: float | None = None  # scaled inner product with the query
    words: float | None = None  # BM25 score
    highlights: Sequence[tuple[int, int]] = ()  # character ranges of query words in ``text``
    extra: Mapping[str, Any] = field(default_factory=dict)  # other fields of the document
    p_z: float | None = None  # p(z|x), of passages of an answer
    p_z_given_y: float | None = None  # p(z|x, y)
    page: int | None = None  # page number, of documents with pages
    last_page: int | None = None  # page on which it ends, if that is another one
    ocr: bool = False  # whether it was read from a scan
    copies: Sequence[Mapping[str, Any]] = ()  # passages of the same text in other places


@dataclass(frozen=True)
class Citation:
    """A quotation that supports an answer; ``start`` and ``end`` are character offsets in the document's text."""

    document_id: str
    passage_id: str
    title: str
    quote: str
    uri: str
    start: int | None
    end: int | None
    p_z: float | None = None  # p(z|x) of its passage
    p_z_given_y: float | None = None
    page: int | None = None
    last_page: int | None = None
    ocr: bool = False


@dataclass(frozen=True)
class AnswerRecord:
    """An answer with its evidence.

    ``text`` is empty if no span was found. ``score`` is p(y|x), by which answers are ranked. ``probability`` is the
    calibrated probability that the answer is right; ``abstained`` is True if it is below ``threshold``. Without a
    calibration on enough questions of people there is no probability, and ``abstained`` is True.
    """

    question: str
    text: str
    score: float
    probability: float | None
    threshold: float | None
    abstained: bool
    citations: Sequence[Citation]
    passages: Sequence[Passage]
    quote: Citation | None = None  # the sentence that contains the answer


class Searcher:
    """Passage search over a run, trained or partly trained, or over a registered model."""

    def __init__(self, search: PassageSearch) -> None:
        self._search = search

    @classmethod
    def open(cls, root: str | Path = ".", *, model: str | None = None) -> Self:
        """Open a run or a registered model.

        Args:
            root: folder of the run.
            model: a model of MLflow's registry, ``models:/NAME@champion``, to open instead.

        Raises:
            ValueError: if the run has no snapshot, or a file does not match its digest.
        """
        from realmops.commands.open_model import open_model
        from realmops.opening import open_search
        from realmops.progress import SilentReport

        return cls(open_model(Path(root), model).passage_search if model else open_search(Path(root), SilentReport()))

    def search(
        self,
        query: str,
        k: int = 10,
        *,
        filters: Mapping[str, Any] | None = None,
        by: By = "run",
    ) -> list[Passage]:
        """Return the top ``k`` passages, best first.

        Args:
            query: text to search for.
            k: number of passages.
            filters: conditions on fields of the documents, applied before ranking: a value, a list of alternative
                values, or a range such as ``{"gte": 1990, "lt": 2000}``.
            by: ranking by the run's retriever, by embeddings only, or by words (BM25) only.

        Raises:
            ValueError: if the query is empty, a filter is malformed, or there are no embeddings to search by.
        """
        return [_build(Passage, record) for record in self._search.search(query, k, [filters or {}], by)["passages"]]

    def embed(self, texts: Sequence[str], *, documents: bool = False) -> NDArray[np.float32]:
        """Embed texts as queries, or as passages with ``documents``.

        Returns:
            Embeddings in fp32, shape [N, E]; f(x, z) is the scaled inner product of a query's and a passage's.
        """
        embeddings: NDArray[np.float32] = self._search.embed(list(texts), documents=documents).numpy()
        return embeddings


class Answerer:
    """Question answering with a fine-tuned run or a registered model."""

    def __init__(self, opened: OpenedModel) -> None:
        self._opened = opened

    @classmethod
    def open(cls, root: str | Path = ".", *, model: str | None = None) -> Self:
        """Open the run in a folder, or the registered model ``models:/NAME@champion``.

        Raises:
            ValueError: if there is no fine-tuned model that reads passages.
        """
        from realmops.commands.open_model import open_model

        return cls(open_model(Path(root), model))

    def answer(self, question: str, *, without: Sequence[str] = ()) -> AnswerRecord:
        """Answer a question, with citations and the passages read.

        Args:
            question: text of the question.
            without: ids of passages to exclude.

        Raises:
            ValueError: if the question is empty or too long.
        """
        from realmops.answering.opened_model import Query

        [record] = self._opened.answer([Query(question, frozenset(without))])
        return AnswerRecord(
            question=question,
            text=record["answer"],
            score=record["score"],
            probability=record["probability"],
            threshold=record["threshold"],
            abstained=record["abstained"],
            citations=[_build(Citation, citation) for citation in record["citations"]],
            passages=[_build(Passage, passage) for passage in record["passages"]],
            quote=_build(Citation, record["quote"]) if record["quote"] else None,
        )

    def searcher(self) -> Searcher:
        """Return a searcher over the same model."""
        return Searcher(self._opened.passage_search)


def _build(kind: type[T], record: Mapping[str, Any]) -> T:
    """Build a dataclass from the fields of a record that it declares."""
    return kind(**{item.name: record[item.name] for item in fields(kind) if item.name in record})  # type: ignore[arg-type]
