"""A learned retriever of reasoning paths, after PathRetriever (Asai et al. 2020): BM25 finds where a path starts, links
where it may go on, and a recurrent scorer says at each step which passage comes next or that the path ends.

Shape suffixes: N pairs of question and passage, D width, B questions, C choices of one step.
"""

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from realmops.artifacts import seed_for
from realmops.baselines.links import Links
from realmops.config import Finetune, Optimiser
from realmops.corpus.cloze import Sources
from realmops.corpus.question_sets import Question
from realmops.corpus.snapshot_reader import Snapshot
from realmops.devices import autocast
from realmops.model.checkpoint_files import cpu_state
from realmops.model.encoder import Encoder
from realmops.model.encoder_files import described_encoder
from realmops.model.likelihood import marginal_span_loss
from realmops.model.packed import Packed
from realmops.model.sequences import SpecialTokens, join_reader
from realmops.search.bm25 import Bm25, Rows, rank, top
from realmops.text.answer_matching import contains_answer
from realmops.train.fine_tuning import finetune_steps
from realmops.train.loop import Context, epoch_rows, fit
from realmops.train.optimiser import Group

STARTS = 10  # passages that a path may start from
LINKED = 5  # passages that it may go on to, the best by BM25
BEAM = 3  # starts that are followed
WEIGHTS, SHAPE = "path.safetensors", "path.json"


class PathScorer(nn.Module):
    """An encoder over question and passage, and a recurrent state of the path; a choice is worth state . passage."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.bert = encoder
        width = encoder.width
        self.step = nn.GRUCell(width, width)
        self.begin = nn.Parameter(torch.zeros(width))
        self.end = nn.Parameter(torch.zeros(width))


@dataclass(frozen=True)
class PathLesson:
    """What one question teaches: the starts, one of them that leads to an answer, and where it may go on."""

    question: np.ndarray  # wordpieces
    starts: list[int]
    right_start: np.ndarray  # bool, of the starts
    first: int  # place in starts
    linked: list[int]
    right_next: np.ndarray  # bool, of the end of the path and then the linked


class PathRetriever:
    """Ranks passages by the likeliest path of one or two that ends in them; behind those comes BM25's order."""

    def __init__(self, scorer: PathScorer, snapshot: Snapshot, options: Finetune, dtype: torch.dtype) -> None:
        self.scorer, self.snapshot, self.options, self.dtype = scorer, snapshot, options, dtype
        self.bm25, self.links, self.sources = Bm25.of(snapshot), Links(snapshot), Sources(snapshot)
        self.special = SpecialTokens.of(snapshot.tokenizer)
        self.device = scorer.begin.device

    @classmethod
    def start(cls, encoder: Encoder, snapshot: Snapshot, options: Finetune, dtype: torch.dtype, seed: int) -> Self:
        """With a copy of an encoder, and recurrent weights that are normal with deviation 0.02 as BERT's."""
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
        scorer = PathScorer(described_encoder(json.loads((folder / SHAPE).read_text())))
        scorer.load_state_dict(load_tensors((folder / WEIGHTS).read_bytes()))
        return cls(scorer.to(device), snapshot, options, dtype)

    def save(self, folder: Path) -> None:
        """Write the scorer; the rest is made of the snapshot."""
        (folder / SHAPE).write_text(json.dumps(self.scorer.bert.describe(), indent=1, sort_keys=True) + "\n")
        (folder / WEIGHTS).write_bytes(save_tensors(cpu_state(self.scorer)))

    def _wordpieces(self, question: str) -> np.ndarray:
        ids = self.snapshot.tokenizer.encode(question, add_special_tokens=False).ids
        return np.array(ids[: self.options.query_wordpieces - 2], dtype=np.int64)

    def _read(self, pairs: Sequence[tuple[np.ndarray, int]]) -> Tensor:
        """[CLS] of a question beside the title and text of a passage, N x D."""
        sequences, segments = [], []
        for x, passage in pairs:
            document = np.concatenate([self.snapshot.title_tokens(passage), self.snapshot.body(passage)])
            sequence, segment, _ = join_reader(x, document, self.special, self.options.reader_wordpieces)
            sequences.append(sequence)
            segments.append(segment)
        batch = Packed(sequences, segments)
        with autocast(self.device, self.dtype):
            hidden_TD = self.scorer.bert(batch)
        hidden_ND: Tensor = hidden_TD.index_select(0, torch.from_numpy(batch.starts[:-1]).to(self.device))
        return hidden_ND.float()

    def _starts(self, question: str) -> list[int]:
        found: list[int] = rank(self.bm25, [question], min(STARTS, len(self.bm25)))[0].tolist()
        return found

    def _linked(self, question: str, passage: int) -> list[int]:
        linked = self.links.of(passage)
        found: list[int] = linked[top(self.bm25.score_of(question, linked), LINKED)].tolist() if len(linked) else []
        return found

    def lesson(self, question: Question) -> PathLesson | None:
        """What a question teaches; None where no path of two leads to an answer."""
        starts = self._starts(question.question)

        def right(passages: list[int]) -> np.ndarray:
            texts = map(self.snapshot.text, passages)
            there = np.array([contains_answer(t, question.answers, question.match_rule) for t in texts], dtype=bool)
            return there & ~np.isin(passages, self.sources.of(question))

        right_start = right(starts)
        order = np.argsort(~right_start, kind="stable").tolist()  # a start with the answer before one that leads to it
        for first in order:
            linked = self._linked(question.question, starts[first])
            right_next = np.array([right_start[first], *right(linked)])
            if right_next.any():
                leads = right_start if right_start.any() else np.arange(len(starts)) == first
                return PathLesson(self._wordpieces(question.question), starts, leads, first, linked, right_next)
        return None

    def loss(self, lessons: Sequence[PathLesson]) -> Tensor:
        """-log p of the right first and second steps, the mean over questions."""
        pairs = [(lesson.question, passage) for lesson in lessons for passage in (*lesson.starts, *lesson.linked)]
        read_ND = self._read(pairs)
        losses = []
        place = 0
        for lesson in lessons:
            start_CD = read_ND[place : place + len(lesson.starts)]
            place += len(lesson.starts)
            next_CD = torch.cat([self.scorer.end[None], read_ND[place : place + len(lesson.linked)]])
            place += len(lesson.linked)
            state_D = self.scorer.step(start_CD[lesson.first], self.scorer.begin)
            for choice_CD, state, right in (
                (start_CD, self.scorer.begin, lesson.right_start),
                (next_CD, state_D, lesson.right_next),
            ):
                right_C = torch.from_numpy(right).to(self.device)
                losses.append(marginal_span_loss((choice_CD @ state)[None], right_C[None]))
        return torch.cat(losses).sum() / len(lessons)

    @torch.no_grad()
    def rank(self, questions: Sequence[str], k: int) -> Rows:
        """The best k passages of each question, best first, int64 [Q, k]; -1 where there are fewer passages."""
        self.scorer.eval()
        ranking = np.full((len(questions), k), -1, np.int64)
        for row, question in enumerate(questions):
            paths = self._paths(question)
            by_words = rank(self.bm25, [question], min(k, len(self.bm25)))[0].tolist()
            best = dict.fromkeys([*sorted(paths, key=lambda p: -paths[p]), *by_words])
            chosen = list(best)[:k]
            ranking[row, : len(chosen)] = chosen
        return ranking

    def _paths(self, question: str) -> dict[int, float]:
        """log p of the likeliest path that ends in a passage, by passage."""
        x, starts = self._wordpieces(question), self._starts(question)
        start_CD = self._read([(x, passage) for passage in starts])
        log_start_C = (start_CD @ self.scorer.begin).log_softmax(0)
        kept = log_start_C.topk(min(BEAM, len(starts))).indices.tolist()
        linked = [self._linked(question, starts[i]) for i in kept]
        pairs = [(x, passage) for passages in linked for passage in passages]
        next_ND = self._read(pairs) if pairs else start_CD[:0]
        found: dict[int, float] = {}
        place = 0
        for i, passages in zip(kept, linked, strict=True):
            choice_CD = torch.cat([self.scorer.end[None], next_ND[place : place + len(passages)]])
            place += len(passages)
            log_next_C = (choice_CD @ self.scorer.step(start_CD[i], self.scorer.begin)).log_softmax(0)
            for passage, value in zip([starts[i], *passages], (log_start_C[i] + log_next_C).tolist(), strict=True):
                found[passage] = max(value, found.get(passage, -np.inf))
        return found


def train_paths(
    context: Context, retriever: PathRetriever, lessons: Sequence[PathLesson], options: Finetune, optimiser: Optimiser
) -> int:
    """Train the scorer; epochs, questions of a batch and learning rate are those of the reader.

    Returns the journal's length at the end.
    """
    rows_of = epoch_rows(context, len(lessons), options.batch_size)

    def step_loss(step: int) -> tuple[Tensor, dict[str, float]]:
        retriever.scorer.train()
        return retriever.loss([lessons[row] for row in rows_of(step)]), {}

    groups = [Group("scorer", retriever.scorer, options.reader_learning_rate)]
    steps, every = finetune_steps(len(lessons), options), options.checkpoint_every
    return fit(context, groups, optimiser, step_loss, steps=steps, checkpoint_every=every)
