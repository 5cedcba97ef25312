"""Learned retriever of reasoning paths, after PathRetriever (Asai et al. 2020).

BM25 proposes the first passage of a path and links its successors; at each step a recurrent scorer chooses the next
passage or the end of the path.

Shape suffixes: N pairs of question and passage, D width, B questions, C choices of one step.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from realmops.artifacts import read_json, seed_for, write_json
from realmops.baselines.links import PassageLinks
from realmops.corpus.snapshot_reader import Snapshot
from realmops.devices import autocast
from realmops.model.encoder import Encoder
from realmops.model.encoder_files import cpu_state, encoder_from_description
from realmops.model.likelihood import marginal_span_loss
from realmops.model.packed import PackedBatch
from realmops.model.sequences import SpecialTokens, join_reader
from realmops.options import Finetune
from realmops.questions.answer_matching import contains_answer
from realmops.questions.cloze import SourcePassages
from realmops.questions.question_sets import Question
from realmops.search.bm25 import Bm25, Rows, rank, top_k
from realmops.train.loop import DeferredMetrics, LossAndMetrics, TrainingContext, fit_epochs
from realmops.train.optimiser import Group

STARTS = 10  # candidates for the first passage, the best by BM25
LINKED = 5  # candidates for the second passage, the best linked ones by BM25
BEAM = 3  # first passages that are expanded
WEIGHTS, SHAPE = "path.safetensors", "path.json"


class PathScorer(nn.Module):
    """Encoder of question and passage, and recurrent state of the path; the logit of a choice is state . passage."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.bert = encoder
        width = encoder.width
        self.step = nn.GRUCell(width, width)
        self.begin = nn.Parameter(torch.zeros(width))
        self.end = nn.Parameter(torch.zeros(width))


@dataclass(frozen=True)
class PathExample:
    """Training example of one question: candidates and targets of both steps."""

    question: np.ndarray  # wordpieces
    starts: list[int]  # candidates of the first step
    is_right_start: np.ndarray  # targets of the first step, bool
    first: int  # index in ``starts`` of the passage that the second step continues
    linked: list[int]  # candidates of the second step
    is_right_next: np.ndarray  # targets of the second step, bool: the end of the path, then ``linked``


class PathRetriever:
    """Retriever that ranks passages by the most probable path of one or two that ends in them, then by BM25."""

    def __init__(self, scorer: PathScorer, snapshot: Snapshot, options: Finetune, dtype: torch.dtype) -> None:
        self.scorer, self.snapshot, self.options, self.dtype = scorer, snapshot, options, dtype
        self.bm25, self.links, self.sources = Bm25.of(snapshot), PassageLinks(snapshot), SourcePassages(snapshot)
        self.special = SpecialTokens.of(snapshot.tokenizer)
        self.device = scorer.begin.device

    @classmethod
    def start(cls, encoder: Encoder, snapshot: Snapshot, options: Finetune, dtype: torch.dtype, seed: int) -> Self:
        """Initialise from a copy of an encoder, with recurrent weights ~ N(0, 0.02^2) as in BERT."""
        scorer, generator = PathScorer(copy.deepcopy(encoder)), torch.Generator().manual_seed(seed_for(seed, "path"))
        with torch.no_grad():
            for name, parameter in scorer.named_parameters():
                if not name.startswith("bert."):
                    parameter.normal_(0.0, 0.02, generator=generator)
        return cls(scorer.to(encoder.device), snapshot, options, dtype)

    @classmethod
    def load(
        cls, folder: Path, snapshot: Snapshot, options: Finetune, device: torch.device, dtype: torch.dtype
    ) -> Self:
        scorer = PathScorer(encoder_from_description(read_json(folder / SHAPE)))
        scorer.load_state_dict(load_tensors((folder / WEIGHTS).read_bytes()))
        return cls(scorer.to(device), snapshot, options, dtype)

    def save(self, folder: Path) -> None:
        """Write the scorer; all other state is derived from the snapshot."""
        write_json(folder / SHAPE, self.scorer.bert.describe())
        (folder / WEIGHTS).write_bytes(save_tensors(cpu_state(self.scorer)))

    def _wordpieces(self, question: str) -> np.ndarray:
        ids = self.snapshot.tokenizer.encode(question, add_special_tokens=False).ids
        return np.array(ids[: self.options.query_wordpieces - 2], dtype=np.int64)

    def _encode(self, pairs: Sequence[tuple[np.ndarray, int]]) -> Tensor:
        """Return the [CLS] state of question, title and text for each pair of question and passage, float32 [N, D]."""
        sequences, segments = [], []
        for x, passage in pairs:
            document = np.concatenate([self.snapshot.title_tokens(passage), self.snapshot.body(passage)])
            sequence, segment, _ = join_reader(x, document, self.special, self.options.reader_wordpieces)
            sequences.append(sequence)
            segments.append(segment)
        batch = PackedBatch(sequences, segments)
        with autocast(self.device, self.dtype):
            hidden_TD = self.scorer.bert(batch)
        hidden_ND: Tensor = hidden_TD.index_select(0, torch.from_numpy(batch.starts[:-1]).to(self.device))
        return hidden_ND.float()

    def _lexical(self, question: str, k: int) -> list[int]:
        best: list[int] = rank(self.bm25, [question], min(k, len(self.bm25)))[0].tolist()
        return best

    def _linked(self, question: str, passage: int) -> list[int]:
        linked = self.links.of(passage)
        if not len(linked):
            return []
        best: list[int] = linked[top_k(self.bm25.score_passages(question, linked), LINKED)].tolist()
        return best

    def training_example(self, question: Question) -> PathExample | None:
        """Build the training example of a question, or None if no path of up to two passages leads to an answer."""
        starts = self._lexical(question.question, STARTS)

        def is_right(passages: list[int]) -> np.ndarray:
            texts = map(self.snapshot.text, passages)
            has_answer = [contains_answer(text, question.answers, question.match_rule) for text in texts]
            return np.array(has_answer, dtype=bool) & ~np.isin(passages, self.sources.of(question))

        has_answer = is_right(starts)
        for first in np.argsort(~has_answer, kind="stable").tolist():  # starts with the answer first
            linked = self._linked(question.question, starts[first])
            is_right_next = np.array([has_answer[first], *is_right(linked)])
            if is_right_next.any():
                is_right_start = has_answer if has_answer.any() else np.arange(len(starts)) == first
                x = self._wordpieces(question.question)
                return PathExample(x, starts, is_right_start, first, linked, is_right_next)
        return None

    def loss(self, lessons: Sequence[PathExample]) -> Tensor:
        """Return the negative log likelihood of correct first and second steps, averaged over questions."""
        pairs = [(lesson.question, passage) for lesson in lessons for passage in (*lesson.starts, *lesson.linked)]
        encoded_ND = self._encode(pairs)
        losses = []
        row = 0
        for lesson in lessons:
            start_CD = encoded_ND[row : row + len(lesson.starts)]
            row += len(lesson.starts)
            next_CD = torch.cat([self.scorer.end[None], encoded_ND[row : row + len(lesson.linked)]])
            row += len(lesson.linked)
            state_D = self.scorer.step(start_CD[lesson.first], self.scorer.begin)
            for choice_CD, state, is_right in (
                (start_CD, self.scorer.begin, lesson.is_right_start),
                (next_CD, state_D, lesson.is_right_next),
            ):
                is_right_C = torch.from_numpy(is_right).to(self.device)
                losses.append(marginal_span_loss((choice_CD @ state)[None], is_right_C[None]))
        return torch.cat(losses).sum() / len(lessons)

    @torch.no_grad()
    def rank(self, questions: Sequence[str], k: int) -> Rows:
        """Return the k best passages of each question, best first, int64 [Q, k], padded with -1."""
        self.scorer.eval()
        ranking = np.full((len(questions), k), -1, np.int64)
        for row, question in enumerate(questions):
            paths = self._paths(question)
            by_path = sorted(paths, key=lambda p: -paths[p])
            best = list(dict.fromkeys([*by_path, *self._lexical(question, k)]))[:k]
            ranking[row, : len(best)] = best
        return ranking

    def _paths(self, question: str) -> dict[int, float]:
        """Return the log probability of the most probable path that ends in each passage."""
        x, starts = self._wordpieces(question), self._lexical(question, STARTS)
        start_CD = self._encode([(x, passage) for passage in starts])
        log_start_C = (start_CD @ self.scorer.begin).log_softmax(0)
        beam = log_start_C.topk(min(BEAM, len(starts))).indices.tolist()
        linked = [self._linked(question, starts[i]) for i in beam]
        pairs = [(x, passage) for passages in linked for passage in passages]
        next_ND = self._encode(pairs) if pairs else start_CD[:0]
        best: dict[int, float] = {}
        row = 0
        for i, passages in zip(beam, linked, strict=True):
            choice_CD = torch.cat([self.scorer.end[None], next_ND[row : row + len(passages)]])
            row += len(passages)
            log_next_C = (choice_CD @ self.scorer.step(start_CD[i], self.scorer.begin)).log_softmax(0)
            for passage, value in zip([starts[i], *passages], (log_start_C[i] + log_next_C).tolist(), strict=True):
                best[passage] = max(value, best.get(passage, -np.inf))
        return best


def train_paths(
    context: TrainingContext,
    retriever: PathRetriever,
    lessons: Sequence[PathExample],
    options: Finetune,
) -> None:

    def loss(batch: Sequence[PathExample]) -> LossAndMetrics:
        retriever.scorer.train()
        return retriever.loss(batch), DeferredMetrics((), dict)

    groups = [Group("scorer", retriever.scorer, options.reader_learning_rate)]
    fit_epochs(
        context, groups, lessons, lambda batch, step: batch, loss,
        batch_size=options.batch_size, epochs=options.epochs,
    )  # fmt: skip
