"""A fine-tuned model opened with its corpus and index: questions in, records of answers out."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from realmops.answering.answer import Found, InvalidRequest
from realmops.answering.confidence import Confidence
from realmops.answering.passage_search import Search
from realmops.answering.record import Record, answer_record, sources_record
from realmops.answering.retrieval import RetrieveAndRead
from realmops.corpus.question_sets import Question
from realmops.search.bm25 import Bm25

PROBE = "Where?"  # answered by a model before it serves


@dataclass(frozen=True)
class Query:
    """A question, the ids of passages that must not be read for it, and y where p(y|x) of an answer is requested."""

    question: str
    without: Collection[str] = field(default=())
    y: str | None = None


@dataclass(frozen=True, eq=False)
class OpenedModel:
    """A model over a corpus with its index: everything that one answer comes from.

    ``number`` counts the updates of the corpus; 0 is the corpus of the stages.
    """

    model: RetrieveAndRead
    version: str
    weights_step: int | None
    number: int
    confidence: Confidence | None  # None for an imported model, which is not calibrated
    content: str = ""  # digest of every file that is read, for a model without a version in a registry
    folder: Path = Path()  # of the model's files
    held: Any = None  # kept alive with the model, such as a folder of downloaded files

    @property
    def about(self) -> Record:
        """Which model, corpus and index these are."""
        return {
            "version": self.version,
            "snapshot": self.model.snapshot.corpus_hash,
            "weights_step": self.weights_step,
            "index_generation": self.number,
        }

    def check(self, query: Query) -> None:
        """Raise InvalidRequest when the question is empty, too long or no text, or y is blank or no text."""
        for name, text in (("question", query.question), ("answer", query.y or "")):
            try:
                text.encode()
            except UnicodeEncodeError:
                raise InvalidRequest(f"the {name} holds half a surrogate pair; write it whole") from None
        if query.y is not None and not query.y.strip():
            raise InvalidRequest(f"the answer {query.y!r} is blank: give the one to ask about, or none")
        self.model.check(query.question)

    def find(self, queries: Sequence[Query]) -> list[Found]:
        """Return what is read for each question."""
        return self.model.find([Question("", one.question, (), not_in=tuple(one.without)) for one in queries])

    def sources(self, found: Found) -> Record:
        """Return the part of an answer's record that is known before anything is read."""
        return sources_record(self.model.snapshot, found, self.about)

    def read(self, found: Sequence[Found], ys: Sequence[str | None] = ()) -> list[Record]:
        """Read all passages in one packed batch and return the records of the answers; ``ys`` as ``Query.y``."""
        ys = ys or [None] * len(found)
        answers = zip(self.model.read(found, ys), ys, strict=True)
        return [answer_record(self.model.snapshot, one, self.about, self.confidence, y) for one, y in answers]

    def answer(self, queries: Sequence[Query]) -> list[Record]:
        """Find and read for one question after another. Raises InvalidRequest before the first one is answered."""
        for one in queries:
            self.check(one)
        pairs = zip(self.find(queries), queries, strict=True)
        return [self.read([found], [one.y])[0] for found, one in pairs]

    def probe(self) -> None:
        """Answer one question. Raises ValueError when the model cannot serve."""
        snapshot = self.model.snapshot
        _ = snapshot.places, snapshot.continues_word  # read now what is read but once
        [record] = self.answer([Query(PROBE)])
        if not 0 <= record["p_y"] <= 1 + 1e-6:  # NaN is no number between, and calibrated it counts as 0
            raise ValueError(f"p(y|x) of a first answer is {record['p_y']}: the weights are damaged")

    def passage_search(self) -> Search:
        """Return a search of the model's corpus."""
        model = self.model
        words = model.words if isinstance(model.words, Bm25) else Bm25.of(model.snapshot)
        retriever = model.retriever if model.passages is not None else None
        limit = model.options.query_wordpieces
        return Search(model.snapshot, words, retriever, model.passages, limit, model.dtype, self.about, self.held)
