"""A fine-tuned model loaded with its corpus and index, which answers questions with records."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from realmops.answering.answer import InvalidRequest, RetrievedPassages, check_unicode
from realmops.answering.confidence import Confidence
from realmops.answering.passage_search import PassageSearch
from realmops.answering.record import Record, answer_record, sources_record
from realmops.answering.retrieval import RetrieveAndRead
from realmops.model.reader import SPAN_WIDTH
from realmops.questions.question_sets import Question
from realmops.search.bm25 import Bm25
from realmops.search.exact import prepare_for_serving

PROBE = "Where?"  # test question for a model before it serves
SPANS_TOGETHER = 64 << 20  # bytes of span representations per batch; larger batches are slower
EXAMPLES = 6  # questions or titles to try


@dataclass(frozen=True)
class Query:
    """A question, the ids of passages to exclude, and an answer y whose p(y|x) is requested, if any."""

    question: str
    without: Collection[str] = field(default=())
    y: str | None = None


@dataclass(frozen=True, eq=False)
class OpenedModel:
    """A model with its corpus and index: all that determines an answer.

    ``number`` is the number of the corpus update; 0 is the corpus of the pipeline run.
    """

    model: RetrieveAndRead
    version: str
    weights_step: int | None
    number: int
    confidence: Confidence | None  # None if no questions of people were its measure
    content: str = ""  # digest of all files of the model, for models outside a registry
    folder: Path = Path()  # of the model's files
    resources: Any = None  # resources with the model's lifetime, such as a temporary folder of downloads

    @property
    def about(self) -> Record:
        """Kind of the reader, and versions of model, corpus and index, for records."""
        return {
            "version": self.version,
            "reader": self.model.kind,
            "snapshot": self.model.snapshot.corpus_hash,
            "weights_step": self.weights_step,
            "index_generation": self.number,
        }

    def check(self, query: Query) -> None:
        """Raise InvalidRequest if the question is empty or too long, y is blank, or either is invalid Unicode."""
        check_unicode(query.question, "question")
        check_unicode(query.y or "", "answer")
        if query.y is not None and not query.y.strip():
            raise InvalidRequest(f"the answer {query.y!r} is blank; pass the answer to evaluate, or omit it")
        self.model.check(query.question)

    def find(self, queries: Sequence[Query]) -> list[RetrievedPassages]:
        return self.model.find([Question("", query.question, (), not_in=tuple(query.without)) for query in queries])

    def sources(self, retrieved: RetrievedPassages) -> Record:
        return sources_record(self.model.snapshot, retrieved, self.about)

    def read(self, retrieved: Sequence[RetrievedPassages], ys: Sequence[str | None] = ()) -> list[Record]:
        """Read all passages in one packed batch and return the records of the answers; ``ys`` as ``Query.y``."""
        ys = ys or [None] * len(retrieved)
        answers = zip(self.model.read(retrieved, ys), retrieved, ys, strict=True)
        about, snapshot = self.about, self.model.snapshot
        return [answer_record(snapshot, answer, found, about, self.confidence, y) for answer, found, y in answers]

    def answer(self, queries: Sequence[Query]) -> list[Record]:
        for query in queries:
            self.check(query)
        pairs = zip(self.find(queries), queries, strict=True)
        return [self.read([retrieved], [query.y])[0] for retrieved, query in pairs]

    def probe(self, query: Query = Query(PROBE)) -> Record:
        """Answer a question, by default a test question; raise ValueError if the model cannot serve."""
        snapshot = self.model.snapshot
        _ = snapshot.places, snapshot.continues_word  # cached properties, loaded before the first request
        [record] = self.answer([query])
        if not 0 <= record["score"] <= 1:  # also false for NaN
            raise ValueError(f"p(y|x) of a first answer is {record['score']}: the weights are damaged")
        return record

    def warm_up(self) -> None:
        """Repack the embeddings in place: questions then take a quarter less time, with the same answers."""
        if self.model.passages is not None:
            self.model.passages = prepare_for_serving(self.model.passages)

    @property
    def batch_size(self) -> int:
        """Number of questions of a batch with the highest throughput."""
        options = self.model.options
        spans = options.reader_candidates * options.reader_wordpieces * options.answer_wordpieces
        return max(1, SPANS_TOGETHER // (4 * spans * SPAN_WIDTH))

    @cached_property
    def document_titles(self) -> list[str]:
        """Titles of up to ``EXAMPLES`` documents, spread over the corpus."""
        snapshot = self.model.snapshot
        rows = [len(snapshot) * n // EXAMPLES for n in range(EXAMPLES)]
        return list(dict.fromkeys(title for title in map(snapshot.title, rows) if title.strip()))

    @cached_property
    def passage_search(self) -> PassageSearch:
        """Thread-safe search of the model's corpus."""
        model = self.model
        words = model.bm25 if isinstance(model.bm25, Bm25) else Bm25.of(model.snapshot)
        retriever = model.retriever if model.passages is not None else None
        limit = model.options.query_wordpieces
        return PassageSearch(
            model.snapshot, words, retriever, model.passages, limit, model.dtype, self.about, self.resources
        )
