"""The seam for what answers questions, and its half that finds passages.

``Answering`` is what a stage, a command or a server asks. ``RetrieveAndRead`` finds passages by embeddings, words or
both, or by a ranker; a subclass reads them. A model that reads nothing is an ``Answering`` too.

Shape suffixes: B questions, P passages, K passages that are found, E embedding width.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from realmops.answering.answer import Answer, Found, InvalidRequest
from realmops.config import Finetune
from realmops.corpus.cloze import Sources
from realmops.corpus.question_sets import Question
from realmops.corpus.snapshot_reader import Snapshot
from realmops.devices import autocast, send
from realmops.model.checkpoint_files import save_models
from realmops.model.likelihood import log_prior
from realmops.model.packed import Packed
from realmops.model.reader import Reader
from realmops.model.retriever import Retriever
from realmops.model.sequences import SpecialTokens, join_query
from realmops.search.bm25 import Bm25
from realmops.search.embed import Progress, embed, no_progress, query_sequences
from realmops.search.embeddings import save_passages
from realmops.search.exact import PassageIndex
from realmops.search.hybrid import Hits, Hybrid
from realmops.text.answer_matching import contains_answer
from realmops.text.special import blank_before

HYBRID_DEPTH = 100  # passages that embeddings and words find each, of which the best are taken
_QUESTIONS_IN_MEMORY = 1024


class Ranker:
    """Ranks passages by words, links or paths, without embeddings (``finetune.retriever``), and remembers its answers.

    A training asks the same ``remembered`` questions again and again (all without it), and anything may be asked of a
    server. ``save`` writes what the ranker has learned into a folder.
    """

    def __init__(
        self,
        rank: Callable[[Sequence[str], int], np.ndarray],
        remembered: int | None,
        save: Callable[[Path], None] = lambda folder: None,
    ) -> None:
        self._rank, self.save = lru_cache(remembered)(lambda question, k: rank([question], k)[0]), save

    def __call__(self, question: str, k: int) -> np.ndarray:
        """A question's k best passages, best first, int64 [k]; -1 where there are fewer."""
        found: np.ndarray = self._rank(question, k)
        return found


class Answering(ABC):
    """What answers questions; a folder of ``finetune`` holds one, and says its ``kind`` (``stages.tuned_model``)."""

    kind: ClassVar[str]
    together: ClassVar[int]  # questions that are best answered in one batch

    @abstractmethod
    def check(self, question: str) -> None:
        """InvalidRequest when a question cannot be asked."""

    @abstractmethod
    def find(self, questions: Sequence[Question], ranked: int = 0) -> list[Found]:
        """What is read for each question, and the top ``ranked`` passages of the corpus."""

    @abstractmethod
    def read(self, found: Sequence[Found], asked_about: Sequence[str | None] = ()) -> list[Answer]:
        """The answers from what was found.

        ``asked_about`` has an answer y for each question whose probability is wanted; None is the answer given.
        """

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write all that ``stages.tuned_model`` opens again into a stage folder."""

    def answer(
        self,
        questions: Sequence[Question],
        *,
        ranked: int = 0,
        batch_size: int | None = None,
        progress: Progress = no_progress,
    ) -> list[Answer]:
        """Answer questions; ``ranked`` passages of each are returned for recall."""
        answers: list[Answer] = []
        for start in range(0, len(questions), size := batch_size or self.together):
            batch = questions[start : start + size]
            answers += self.read(self.find(batch, ranked))
            progress(len(batch))
        return answers


@dataclass(eq=False)
class RetrieveAndRead(Answering):
    """Retriever and reader over a corpus whose embeddings are fixed; a subclass reads what is found.

    Where a ``ranker`` is given, it finds the passages of a question, all with the same p(z|x): nothing of the retriever
    is used or learns, and no embeddings are needed.
    """

    together = 4  # the spans of more are tensors of hundreds of MB, slower and no better
    retriever: Retriever
    reader: Reader
    snapshot: Snapshot
    passages: PassageIndex | None
    options: Finetune
    dtype: torch.dtype
    ranker: Callable[[str, int], np.ndarray] | None = None
    words: Bm25 | None = None

    def __post_init__(self) -> None:
        self.device = self.reader.device
        self.special = SpecialTokens.of(self.snapshot.tokenizer)
        self.sources = Sources(self.snapshot)
        self._correct: dict[tuple[tuple[str, ...], str], dict[int, bool]] = {}  # an id is a question's in one file only
        encode, blank = self.snapshot.tokenizer.encode, blank_before(self.snapshot.tokenizer, self.special.query)
        # A question is looked at several times: its length is checked, it is embedded, and it is read (only read).
        self.wordpieces: Callable[[str], np.ndarray] = lru_cache(_QUESTIONS_IN_MEMORY)(
            lambda text: np.array(encode(blank + text, add_special_tokens=False).ids, dtype=np.int64)
        )

    def over(self, ranker: Callable[[str, int], np.ndarray]) -> Self:
        """The same reader over what a ranker finds."""
        other = copy(self)  # with whatever parameters a subclass has
        other.passages, other.ranker, other.words = None, ranker, None
        return other

    def restore(self, folder: Path) -> None:
        """Read what a subclass has written beside both models."""

    def save(self, folder: Path) -> None:
        """Both models, what the ranker has learned, and the index."""
        save_models(folder, self.retriever, self.reader, self.snapshot.vocabulary_hash, self.snapshot.tokenizer)
        if isinstance(self.ranker, Ranker):
            self.ranker.save(folder)
        if self.passages is not None:
            save_passages(folder, self.passages, self.snapshot.corpus_hash)

    def relevance(self, questions: Sequence[str], k: int) -> tuple[Tensor, Tensor]:
        """Scores f(x, z) of the top k passages, best first, B x k, with gradient into the query tower; ids on the CPU.

        A ranker's scores are 0; where it finds fewer passages the id is -1 and the score -inf.
        """
        if self.ranker is not None:
            id_BK = torch.from_numpy(np.stack([self.ranker(question, k) for question in questions]))
            (missing_BK,) = send(self.device, id_BK < 0)
            return torch.zeros(id_BK.shape, device=self.device).masked_fill(missing_BK, -torch.inf), id_BK
        assert self.passages is not None, "without embeddings there must be a ranker"
        with autocast(self.device, self.dtype):
            query_BE = self.retriever.query(Packed(self.queries(questions)))
        if self.hybrid:
            found = self._search(query_BE, questions, k, max(k, HYBRID_DEPTH))
            place_BK, missing_BK = found.id_QK.clamp(min=0), found.id_QK < 0
            place_BK, missing_BK, words_BK = send(self.passages.device, place_BK, missing_BK, found.words_QK.float())
            dense_BK = self.retriever.relevance(query_BE, self.passages.vectors(place_BK).to(self.device))
            relevance_BK = self.retriever.mixture.of(dense_BK, words_BK.to(self.device))
            return relevance_BK.masked_fill(missing_BK.to(self.device), -torch.inf), found.id_QK
        if k >= len(self.passages):
            score_BP: Tensor = self.retriever.scores(query_BE, self.passages.vectors(slice(None)).to(self.device))
            score_BP, id_BP = torch.sort(score_BP, dim=1, descending=True)
            return score_BP, id_BP.cpu()
        with torch.no_grad():
            _, id_BK = self.passages.search(query_BE.detach(), k)
            found_BKE = self.passages.vectors(id_BK).to(self.device)
        return self.retriever.relevance(query_BE, found_BKE), id_BK.cpu()

    def evidence(self, questions: Sequence[Question], k: int) -> tuple[Tensor, Tensor]:
        """``relevance`` without the passages that a question was made from.

        A question of which fewer than k are left has id -1 and score -inf behind them.
        """
        most = max(len(question.not_in) for question in questions)
        relevance_BK, id_BK = self.relevance([question.question for question in questions], k + most)
        if not most:
            return relevance_BK, id_BK
        source_BK = torch.from_numpy(self.sources.among(questions, id_BK.numpy()))
        order_BK = torch.argsort(source_BK.long(), dim=1, stable=True)[:, :k]
        id_BK = id_BK.masked_fill(source_BK, -1).gather(1, order_BK)
        source_BK, order_BK = send(self.device, source_BK, order_BK)
        return relevance_BK.masked_fill(source_BK, -torch.inf).gather(1, order_BK), id_BK

    @property
    def hybrid(self) -> bool:
        """Whether words count beside embeddings."""
        return self.words is not None and self.retriever.mixture.lexical > 0

    def queries(self, questions: Sequence[str]) -> list[np.ndarray]:
        """[CLS] question [SEP] of each question."""
        limit = self.options.query_wordpieces
        return [join_query(self.wordpieces(question), self.special, limit) for question in questions]

    def search(self, questions: Sequence[str], k: int, depth: int) -> Hits:
        """The best k passages of each question among the ``depth`` best of embeddings and words, with both scores."""
        query_QE = embed(self.retriever.query, query_sequences(self.queries(questions)), self.dtype)
        return self._search(query_QE, questions, k, depth)

    def _search(self, query_BE: Tensor, questions: Sequence[str], k: int, depth: int) -> Hits:
        assert self.passages is not None
        search = Hybrid(self.passages, self.words, self.retriever.mixture, self.retriever.scale)
        return search.search(query_BE.detach(), questions, k, depth)

    def is_correct(self, question: Question, passages: Sequence[int]) -> np.ndarray:
        """Whether each passage contains an answer, by the question's rule."""
        known = self._correct.setdefault((question.answers, question.match_rule), {})
        for p in passages:
            if p not in known:
                known[p] = p >= 0 and contains_answer(self.snapshot.text(p), question.answers, question.match_rule)
        return np.array([known[p] for p in passages], dtype=bool)

    def check(self, question: str) -> None:
        """InvalidRequest when a question is empty or longer than what is read of it."""
        tokens = self.wordpieces(question)
        limit = min(self.options.query_wordpieces - 2, self.options.reader_wordpieces - 4)
        if not 0 < len(tokens) <= limit:
            shown = question if len(question) <= 200 else f"{question[:200]}…"
            raise InvalidRequest(
                f"the question {shown!r} has {len(tokens)} wordpieces, 1 to {limit} are read: change it"
            )

    @torch.no_grad()
    def find(self, questions: Sequence[Question], ranked: int = 0) -> list[Found]:
        """What is read for each question, without the passages that it was made from, and the top ``ranked``.

        From here on both models are in evaluation mode.
        """
        for model in (self.retriever, self.reader):
            if model.training:
                model.eval()
        most = self.options.reader_candidates
        relevance_BK, id_BK = self.evidence(questions, max(ranked, most))
        relevance_BK = relevance_BK[:, :most]
        found = []
        columns = zip(questions, id_BK.tolist(), relevance_BK.tolist(), log_prior(relevance_BK).tolist(), strict=True)
        for question, ids, relevance, prior in columns:
            read = tuple(passage for passage in ids[:most] if passage >= 0)  # what is not there is last
            there = len(read)
            found.append(Found(question, read, tuple(relevance[:there]), tuple(prior[:there]), tuple(ids[:ranked])))
        return found
