"""Retrieved passages, passages that were read, and the answer with its evidence.

p(z|x) is the retriever's probability, before reading. p(y|x) sums the probabilities of all spans with the normal form
of y; p(y, z|x) is the part of this sum from spans in z, and p(z|x, y) its share of the sum (paper, section 3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from realmops.questions.question_sets import Question

QUESTION_LIMIT = 2000  # characters of a question, an answer or a query that a server reads


class InvalidRequest(ValueError):
    """An invalid question, query, filter or text; the only error whose message a server returns."""


def check_unicode(text: str, name: str) -> None:
    """Raise InvalidRequest for an unpaired surrogate, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"the {name} contains an unpaired surrogate; send valid Unicode") from None


@dataclass(frozen=True)
class Span:
    """A candidate answer: the text between two character offsets of a passage.

    ``score`` is the reader's score plus the retriever's f(x, z), a logit of the softmax over all spans of a question.
    """

    text: str
    passage: int
    characters: tuple[int, int]
    score: float


@dataclass(frozen=True)
class RetrievedPassages:
    """Retrieved passages of a question: those to read, best first, and the ranking for recall."""

    question: Question
    passages: tuple[int, ...]
    relevance: tuple[float, ...]  # f(x, z)
    log_prior: tuple[float, ...]  # log p(z|x), over the passages to read
    ranked: tuple[int, ...]  # top passages of the whole corpus, padded with -1
    copies: Mapping[int, Sequence[int]]  # passages with the text of one to read

    @property
    def p_z(self) -> tuple[float, ...]:
        return tuple(map(math.exp, self.log_prior))


@dataclass(frozen=True)
class ReadPassage:
    """Passage z that was read for a question."""

    passage: int
    log_prior: float  # log p(z|x)
    p_y_z: float  # p(y, z|x)
    p_z_given_y: float | None  # p(z|x, y); None if no span is y
    best: Span | None  # best span in z
    best_of_y: Span | None  # best span in z that is y

    @property
    def p_z(self) -> float:
        return math.exp(self.log_prior)


@dataclass(frozen=True)
class Answer:
    """Answer to a question with its evidence; ``y`` is the answer that was evaluated, by default the text."""

    question: str
    best: Span | None  # the answer; None if there are no spans
    log_p: float = -math.inf  # log p(y|x) of the text; -inf is a probability of 0
    y: str = ""
    p_y: float = 0.0  # p(y|x) of y
    read: tuple[ReadPassage, ...] = ()  # in order of p(z|x)
    best_gold: Span | None = None  # best span that matches a reference answer
    ranked: list[int] = field(default_factory=list)  # top passages of the whole corpus, for recall
    generated: str = ""  # answer of a model that reads no passages

    @staticmethod
    def unread(retrieved: RetrievedPassages) -> Answer:
        places = zip(retrieved.passages, retrieved.log_prior, strict=True)
        read = tuple(ReadPassage(passage, prior, 0.0, None, None, None) for passage, prior in places)
        return Answer(retrieved.question.question, None, read=read, ranked=list(retrieved.ranked))

    @property
    def text(self) -> str:
        return self.best.text if self.best else self.generated

    @property
    def passages(self) -> list[int]:
        return [read.passage for read in self.read]

    @property
    def log_prior(self) -> list[float]:
        return [read.log_prior for read in self.read]

    @property
    def best_of_passage(self) -> list[Span | None]:
        return [read.best for read in self.read]

    @property
    def probability(self) -> float:
        """p(y|x) of the text."""
        return math.exp(self.log_p)
