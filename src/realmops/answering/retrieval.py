"""Interface of question answering models, and its implementation of retrieval.

Stages, commands and servers use a model as ``AnswerModel``. ``RetrieveAndRead`` retrieves passages by embeddings, BM25
or both, or with a ranker; its subclasses read them. A model without retrieval implements ``AnswerModel`` directly.

Shape suffixes: B questions, P passages, K retrieved passages, E embedding width.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from realmops.answering.answer import Answer, InvalidRequest, RetrievedPassages
from realmops.corpus.snapshot_reader import Snapshot
from realmops.corpus.special_tokens import prompt_separator
from realmops.devices import autocast, to_device
from realmops.model.likelihood import log_prior
from realmops.model.packed import PackedBatch
from realmops.model.reader import Reader
from realmops.model.reader_files import save_models
from realmops.model.retriever import Retriever
from realmops.model.retriever_files import RETRIEVER_FOLDER, TextFormat, passage_tower_digest
from realmops.model.sequences import SpecialTokens, join_query
from realmops.options import Finetune
from realmops.questions.cloze import SourcePassages
from realmops.questions.question_sets import Question
from realmops.questions.relevance import RelevantPassages
from realmops.search.bm25 import Bm25
from realmops.search.embed import Progress, embed, no_progress, query_sequences
from realmops.search.embeddings import save_passages
from realmops.search.exact import PassageIndex
from realmops.search.hybrid import Hits, HybridSearch

HYBRID_DEPTH = 100  # candidates from embeddings and from BM25 each, before fusion
_QUESTIONS_IN_MEMORY = 1024


def group_copies(snapshot: Snapshot, passages: Iterable[int]) -> dict[int, list[int]]:
    """Return ranked passages of different texts, each with those of the same text but for white space."""
    groups: dict[str, list[int]] = {}
    for passage in passages:
        groups.setdefault(" ".join(snapshot.text(passage).split()), []).append(passage)
    return {first: copies for first, *copies in groups.values()}


class Ranker:
    """Retriever without embeddings (``finetune.retriever``: by words, links or paths), with an LRU cache."""

    def __init__(
        self,
        rank: Callable[[Sequence[str], int], np.ndarray],
        cache_size: int | None,
        save: Callable[[Path], None] = lambda folder: None,
    ) -> None:
        self._rank, self.save = lru_cache(cache_size)(lambda question, k: rank([question], k)[0]), save

    def __call__(self, question: str, k: int) -> np.ndarray:
        passages: np.ndarray = self._rank(question, k)
        return passages


class AnswerModel(ABC):
    """Base class of question answering models; ``finetune`` saves one under its ``kind`` (``realmops.opening``)."""

    kind: ClassVar[str]
    batch_size: ClassVar[int]  # default batch size, in questions
    gives_answers: ClassVar[bool] = True  # False for search alone

    @abstractmethod
    def check(self, question: str) -> None:
        """Raise InvalidRequest if a question cannot be answered."""

    @abstractmethod
    def find(self, questions: Sequence[Question], ranked: int = 0) -> list[RetrievedPassages]:
        """Retrieve the passages to read for each question, and the top ``ranked`` passages of the corpus."""

    @abstractmethod
    def read(self, retrieved: Sequence[RetrievedPassages], target_answers: Sequence[str | None] = ()) -> list[Answer]:
        """Read the retrieved passages and answer each question.

        ``target_answers`` has, per question, an answer y to evaluate, or None for the answer that is chosen.
        """

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the model into a stage folder, for ``realmops.opening``."""

    def answer(
        self,
        questions: Sequence[Question],
        *,
        ranked: int = 0,
        batch_size: int | None = None,
        progress: Progress = no_progress,
    ) -> list[Answer]:
        """Answer questions in batches; ``ranked`` passages of each are returned for recall.

        Questions that measure retrieval alone are not read for: generated ones, and those with judgements alone.
        """
        answers: list[Answer] = []
        for start in range(0, len(questions), size := batch_size or self.batch_size):
            retrieved = self.find(questions[start : start + size], ranked)
            read = iter(self.read([item for item in retrieved if item.question.measures_answers]))
            answers += [next(read) if item.question.measures_answers else Answer.unread(item) for item in retrieved]
            progress(len(retrieved))
        return answers


@dataclass(eq=False)
class RetrieveAndRead(AnswerModel):
    """Retriever and reader over a corpus with fixed passage embeddings; subclasses read the retrieved passages.

    With a ``ranker``, it retrieves instead of the embeddings, with equal p(z|x) for all passages; the retriever is then
    neither used nor trained.
    """

    generated_reading_weight: ClassVar[float] = 3.0  # if all dev questions are generated; tuned (benchmarks/LOG.md)
    batch_size = 4  # span tensors of larger batches take hundreds of MB, without a gain in speed
    retriever: Retriever
    reader: Any  # network that the subclass reads with
    snapshot: Snapshot
    passages: PassageIndex | None
    options: Finetune
    dtype: torch.dtype
    ranker: Callable[[str, int], np.ndarray] | None = None
    bm25: Bm25 | None = None

    def __post_init__(self) -> None:
        self.device = self.retriever.query.device
        self.special = SpecialTokens.of(self.snapshot.tokenizer)
        self.sources = SourcePassages(self.snapshot)
        self._relevant = RelevantPassages(self.snapshot)
        self._correct: dict[Question, dict[int, bool]] = {}
        encode, blank = self.snapshot.tokenizer.encode, prompt_separator(self.snapshot.tokenizer, self.special.query)
        # Each question is tokenized for the length check, the embedding and the reader; the arrays are read-only.
        self.wordpieces: Callable[[str], np.ndarray] = lru_cache(_QUESTIONS_IN_MEMORY)(
            lambda text: np.array(encode(blank + text, add_special_tokens=False).ids, dtype=np.int64)
        )

    def with_ranker(self, ranker: Callable[[str, int], np.ndarray]) -> Self:
        other = copy(self)  # keeps the attributes of subclasses
        other.passages, other.ranker, other.bm25 = None, ranker, None
        return other

    @property
    def prior_weight(self) -> float:
        """Weight of f(x, z) in log p(z|x)."""
        return 1.0

    def restore(self, folder: Path) -> None:
        """Load the parameters that a subclass saved in addition to both models."""

    @classmethod
    @abstractmethod
    def load_reader(cls, folder: Path, snapshot: Snapshot) -> Any:
        """Load the reader that ``save`` wrote, on the CPU."""

    def save_reader(self, folder: Path) -> None:
        """Write a reader that is not a ``Reader`` of masked words."""

    def save(self, folder: Path) -> None:
        """Write both models, the ranker's parameters, and the index."""
        reader = self.reader if isinstance(self.reader, Reader) else None
        save_models(folder, self.retriever, reader, TextFormat.of(self.snapshot))
        self.save_reader(folder)
        if isinstance(self.ranker, Ranker):
            self.ranker.save(folder)
        if self.passages is not None:
            tower = passage_tower_digest(folder / RETRIEVER_FOLDER)
            save_passages(folder, self.passages, self.snapshot.corpus_hash, tower)

    def relevance(self, questions: Sequence[str], k: int) -> tuple[Tensor, Tensor]:
        """Retrieve the top k: scores f(x, z) [B, k], with gradients into the query tower, and ids on the CPU.

        A ranker's scores are 0; if it ranks fewer passages, the remaining ids are -1 with score -inf.
        """
        if self.ranker is not None:
            id_BK = torch.from_numpy(np.stack([self.ranker(question, k) for question in questions]))
            (missing_BK,) = to_device(self.device, id_BK < 0)
            return torch.zeros(id_BK.shape, device=self.device).masked_fill(missing_BK, -torch.inf), id_BK
        assert self.passages is not None, "without embeddings a ranker is required"
        with autocast(self.device, self.dtype):
            query_BE = self.retriever.query(PackedBatch(self.queries(questions)))
        if self.hybrid:
            hits = self._search(query_BE, questions, k, max(k, HYBRID_DEPTH))
            row_BK, missing_BK = hits.id_QK.clamp(min=0), hits.id_QK < 0
            row_BK, missing_BK, words_BK = to_device(self.passages.device, row_BK, missing_BK, hits.words_QK.float())
            dense_BK = self.retriever.relevance(query_BE, self.passages.vectors(row_BK).to(self.device))
            relevance_BK = self.retriever.mixture.combine(dense_BK, words_BK.to(self.device))
            return relevance_BK.masked_fill(missing_BK.to(self.device), -torch.inf), hits.id_QK
        if k >= len(self.passages):
            score_BP: Tensor = self.retriever.scores(query_BE, self.passages.vectors(slice(None)).to(self.device))
            score_BP, id_BP = torch.sort(score_BP, dim=1, descending=True)
            return score_BP, id_BP.cpu()
        with torch.no_grad():
            _, id_BK = self.passages.search(query_BE.detach(), k)
            vectors_BKE = self.passages.vectors(id_BK).to(self.device)
        return self.retriever.relevance(query_BE, vectors_BKE), id_BK.cpu()

    def evidence(self, questions: Sequence[Question], k: int) -> tuple[Tensor, Tensor]:
        """Retrieve as ``relevance`` does, without the passages that a question was generated from.

        If fewer than k remain, the remaining ids are -1 with score -inf.
        """
        most = max(len(question.not_in) for question in questions)
        relevance_BK, id_BK = self.relevance([question.question for question in questions], k + most)
        if not most:
            return relevance_BK, id_BK
        source_BK = torch.from_numpy(self.sources.among(questions, id_BK.numpy()))
        order_BK = torch.argsort(source_BK.long(), dim=1, stable=True)[:, :k]
        id_BK = id_BK.masked_fill(source_BK, -1).gather(1, order_BK)
        source_BK, order_BK = to_device(self.device, source_BK, order_BK)
        return relevance_BK.masked_fill(source_BK, -torch.inf).gather(1, order_BK), id_BK

    @property
    def hybrid(self) -> bool:
        return self.bm25 is not None and self.retriever.mixture.lexical > 0

    def queries(self, questions: Sequence[str]) -> list[np.ndarray]:
        limit = self.options.query_wordpieces
        return [join_query(self.wordpieces(question), self.special, limit) for question in questions]

    def search(self, questions: Sequence[str], k: int, depth: int) -> Hits:
        """Retrieve the top k passages of each question among ``depth`` candidates of embeddings and of BM25 each."""
        query_QE = embed(self.retriever.query, query_sequences(self.queries(questions)), self.dtype)
        return self._search(query_QE, questions, k, depth)

    def _search(self, query_BE: Tensor, questions: Sequence[str], k: int, depth: int) -> Hits:
        assert self.passages is not None
        search = HybridSearch(self.passages, self.bm25, self.retriever.mixture, self.retriever.scale)
        return search.search(query_BE.detach(), questions, k, depth)

    def is_correct(self, question: Question, passages: Sequence[int]) -> np.ndarray:
        """Return whether each passage is relevant, by the question's match rule."""
        cache = self._correct.setdefault(question, {})
        for p in passages:
            if p not in cache:
                cache[p] = self._relevant.is_relevant(question, p)
        return np.array([cache[p] for p in passages], dtype=bool)

    def check(self, question: str) -> None:
        """Raise InvalidRequest if a question is empty or longer than the reader's limit."""
        tokens = self.wordpieces(question)
        limit = min(self.options.query_wordpieces - 2, self.options.reader_wordpieces - 4)
        if not 0 < len(tokens) <= limit:
            shown = question if len(question) <= 200 else f"{question[:200]}…"
            raise InvalidRequest(
                f"the question {shown!r} has {len(tokens)} wordpieces, 1 to {limit} are read; rephrase it"
            )

    @torch.no_grad()
    def find(self, questions: Sequence[Question], ranked: int = 0) -> list[RetrievedPassages]:
        """Retrieve passages as ``evidence`` does: different texts to read, and the top ``ranked`` of each question."""
        if len({len(question.not_in) for question in questions}) > 1:  # more are retrieved where more are excluded
            return [self.find([question], ranked)[0] for question in questions]
        for model in (self.retriever, self.reader):
            if model is not None and model.training:
                model.eval()
        most = self.options.reader_candidates
        relevance_BK, id_BK = self.evidence(questions, max(ranked, 4 * most))  # copies are not read
        retrieved = []
        for question, ids, relevance_K in zip(questions, id_BK.tolist(), relevance_BK.cpu(), strict=True):
            copies = group_copies(self.snapshot, [passage for passage in ids if passage >= 0])
            read = tuple(copies)[:most]
            relevance_K = relevance_K[[ids.index(passage) for passage in read]]
            relevance, prior = relevance_K.tolist(), log_prior(self.prior_weight * relevance_K).tolist()
            found = RetrievedPassages(question, read, tuple(relevance), tuple(prior), tuple(ids[:ranked]), copies)
            retrieved.append(found)
        return retrieved


class SearchOnly(RetrieveAndRead):
    """Model that retrieves passages and answers no question (``reader.init: none``)."""

    kind = "search"
    gives_answers = False

    @classmethod
    def load_reader(cls, folder: Path, snapshot: Snapshot) -> None:
        """Return None: there is no reader."""

    def read(self, retrieved: Sequence[RetrievedPassages], target_answers: Sequence[str | None] = ()) -> list[Answer]:
        ys = target_answers or [None] * len(retrieved)
        return [replace(Answer.unread(item), y=y or "") for item, y in zip(retrieved, ys, strict=True)]
