"""What is found for a question, what is read, and the answer with what it rests on.

p(z|x) is the retriever's, before reading. p(y|x) is the sum over all that a reader may say with the normal form of y,
p(y, z|x) the part of it that lies in z, and p(z|x, y) that part's share (paper, section 3).
"""

import math
from dataclasses import dataclass, field

from realmops.corpus.question_sets import Question


class InvalidRequest(ValueError):
    """A question, query, filter or text that cannot be processed.

    The message names nothing but what the caller sent: a server repeats it, and no other error's.
    """


@dataclass(frozen=True)
class Span:
    """A span that the reader could choose: the text between two characters of a passage.

    ``score`` is the reader's plus the retriever's f(x, z); one softmax goes over all spans of a question.
    """

    text: str
    passage: int
    characters: tuple[int, int]
    score: float


@dataclass(frozen=True)
class Found:
    """What the retriever found for a question: passages to read, best first, and those that count for recall."""

    question: Question
    passages: tuple[int, ...]
    relevance: tuple[float, ...]  # f(x, z)
    log_prior: tuple[float, ...]  # log p(z|x), over the passages to read
    ranked: tuple[int, ...]  # the top passages of the whole corpus; -1 where there are fewer

    @property
    def p_z(self) -> tuple[float, ...]:
        """p(z|x), over the passages to read."""
        return tuple(map(math.exp, self.log_prior))


@dataclass(frozen=True)
class Read:
    """One passage z that was read."""

    passage: int
    log_prior: float  # log p(z|x)
    p_y_z: float  # p(y, z|x)
    p_z_given_y: float | None  # p(z|x, y); None where no span that was read is y
    best: Span | None  # of all spans in it; None where it has none
    best_of_y: Span | None  # of those that are y

    @property
    def p_z(self) -> float:
        """p(z|x)."""
        return math.exp(self.log_prior)


@dataclass(frozen=True)
class Answer:
    """A question answered, and what that rests on. ``y`` is the answer that was asked about, or else the text."""

    question: str
    best: Span | None  # the answer; None where there was no span to choose
    log_p: float = -math.inf  # log p(y|x) of the text; 0 has none
    y: str = ""
    p_y: float = 0.0  # p(y|x) of y
    read: tuple[Read, ...] = ()  # by p(z|x)
    best_gold: Span | None = None  # of the spans that match a reference answer
    ranked: list[int] = field(default_factory=list)  # the top passages of the whole corpus, for recall
    said: str = ""  # by a model that reads nothing

    @property
    def text(self) -> str:
        """The answer, empty when there was no span to choose."""
        return self.best.text if self.best else self.said

    @property
    def passages(self) -> list[int]:
        """Those that were read, best first."""
        return [one.passage for one in self.read]

    @property
    def log_prior(self) -> list[float]:
        """log p(z|x) over the passages that were read."""
        return [one.log_prior for one in self.read]

    @property
    def best_of_passage(self) -> list[Span | None]:
        """The best span of each passage that was read."""
        return [one.best for one in self.read]

    @property
    def probability(self) -> float:
        """p(y|x) of the text."""
        return math.exp(self.log_p)
