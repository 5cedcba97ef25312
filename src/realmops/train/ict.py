"""Warm starts: the retriever by the inverse cloze task, the reader by masked words (paper, section 3.4).

Shape suffixes: B passages of a batch (of one process, N those of all), E embedding width, M masked wordpieces.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from realmops.artifacts import seed_for
from realmops.bert import Packed, autocast
from realmops.config import Ict, Optimiser
from realmops.corpus.snapshot import Snapshot
from realmops.corpus.spans import Spans
from realmops.model.joins import SpecialTokens, join_document, join_query, join_reader
from realmops.model.likelihood import in_batch_loss
from realmops.model.reader import Reader
from realmops.model.retriever import Retriever
from realmops.train.loop import Context, fit
from realmops.train.optimiser import Group


@dataclass(frozen=True)
class Cloze:
    """One inverse cloze example: a sentence as the query, its passage without it (or with it)."""

    query: np.ndarray
    document: tuple[np.ndarray, np.ndarray]
    removed: bool


def cloze(snapshot: Snapshot, passage: int, rng: np.random.Generator, options: Ict, special: SpecialTokens) -> Cloze:
    """A uniform sentence of the passage; it is taken out with probability ``removal``.

    A passage of one sentence keeps it: nothing else would be left.
    """
    body, sentences = snapshot.body(passage), snapshot.sentences(passage)
    first, end = sentences[rng.integers(len(sentences))]
    removed = bool(rng.random() < options.removal) and len(sentences) > 1
    rest = np.concatenate([body[:first], body[end:]]) if removed else body
    document = join_document(snapshot.title_tokens(passage), rest, special, snapshot.block_wordpieces)
    return Cloze(join_query(body[first:end], special, options.query_wordpieces), document, removed)


def cloze_batch(count: int, batch_size: int, neighbours: int, rng: np.random.Generator) -> np.ndarray:
    """Passages of a batch: runs of ``neighbours`` consecutive ones, at random places, without repetition.

    Neighbouring passages come from one article or from articles next to each other: hard negatives.
    """
    batch_size = min(batch_size, count)
    runs = -(-count // neighbours)
    chosen = rng.permutation(runs)[: -(-batch_size // neighbours) + 1]
    passages = (chosen[:, None] * neighbours + np.arange(neighbours)).ravel()
    return passages[passages < count][:batch_size]


def train_retriever(
    context: Context, retriever: Retriever, snapshot: Snapshot, options: Ict, optimiser: Optimiser
) -> int:
    """The inverse cloze task: softmax of the own passage among all passages of the batch, those of all processes.

    Logs the accuracy for queries that were removed from their passage and for those that were kept.
    Returns the journal's length at the end.
    """
    special, team = SpecialTokens.of(snapshot.tokenizer), context.team
    if min(options.batch_size, len(snapshot)) < team.size:
        raise ValueError(
            f"ict.batch_size is {options.batch_size} and the corpus has {len(snapshot)} passages: {team.size} "
            "processes cannot share that; start fewer"
        )

    def step_loss(step: int) -> tuple[Tensor, dict[str, float]]:
        rng = np.random.default_rng(seed_for(context.seed, context.stream, "batch", step))
        passages = cloze_batch(len(snapshot), options.batch_size, options.neighbours, rng)
        drawn = [cloze(snapshot, int(p), rng, options, special) for p in passages]
        examples, _ = team.share(drawn[: len(drawn) // team.size * team.size])
        queries = Packed([e.query for e in examples])
        documents = Packed([e.document[0] for e in examples], [e.document[1] for e in examples])
        with autocast(context.device, context.dtype):
            query_BE, document_BE = retriever.query(queries), retriever.document(documents)
        relevance_BN = retriever.scale * query_BE @ team.gather(document_BE).T
        own_B = torch.arange(len(examples), device=relevance_BN.device) + team.rank * len(examples)
        hit_B = (relevance_BN.argmax(-1) == own_B).cpu().numpy()
        removed_B = np.array([e.removed for e in examples])
        metrics = {}
        for name, chosen_B in (("removed", removed_B), ("kept", ~removed_B)):
            if chosen_B.any():
                metrics[f"accuracy_{name}"] = float(hit_B[chosen_B].mean())
        return in_batch_loss(relevance_BN, own_B).mean(), metrics

    return fit(
        context,
        [Group("retriever", retriever, options.learning_rate)],
        optimiser,
        step_loss,
        steps=options.steps,
        checkpoint_every=options.checkpoint_every,
    )


def sentences_with_spans(snapshot: Snapshot, spans: Spans) -> np.ndarray:
    """All spans as rows (passage, sentence start, sentence end, span start, span end), in wordpieces of the body."""
    if not len(spans.rows):
        raise ValueError(
            f"{spans.folder} holds no salient span: nothing can be masked; see the tag section of params.yaml"
        )
    sentences = snapshot.sentence_rows[spans.rows[:, 1], 1:]
    return np.column_stack([spans.rows[:, 0], sentences, spans.rows[:, 2:4]]).astype(np.int64)


Z_SHARES = {"own": 0.3, "neighbour": 0.35, "random": 0.2, "null": 0.15}
NEAREST = 4


class Neighbours:
    """Passages near to a sentence by words: BM25 over wordpieces."""

    def __init__(self, snapshot: Snapshot) -> None:
        import bm25s

        self.index = bm25s.BM25()
        bodies = [list(map(str, snapshot.body(i).tolist())) for i in range(len(snapshot))]
        self.index.index(bodies, show_progress=False)

    def draw(self, sentence: np.ndarray, own: int, rng: np.random.Generator) -> int:
        """One of the four nearest passages, x's own left out."""
        score_P = self.index.get_scores(list(map(str, sentence.tolist())))
        score_P[own] = -np.inf
        count = min(NEAREST, len(score_P))
        nearest = np.argpartition(-score_P, count - 1)[:count]
        return int(rng.choice(np.sort(nearest)))


def train_reader(
    context: Context,
    reader: Reader,
    snapshot: Snapshot,
    spans: Spans,
    options: Ict,
    optimiser: Optimiser,
) -> None:
    """Masked words over join(x, z), so that the reader starts with a second segment that can be worth reading.

    One salient span of x is masked, and a share of its other wordpieces.  z is x's own passage, a passage
    near to the unmasked x by words (BM25), any other passage, or nothing (``Z_SHARES``).
    """
    special = SpecialTokens.of(snapshot.tokenizer)
    rows = sentences_with_spans(snapshot, spans)
    neighbours = Neighbours(snapshot)

    def example(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        passage, first, end, start, stop = rows[rng.integers(len(rows))]
        body = snapshot.body(int(passage))
        x = body[first:end].copy()
        limit = options.reader_wordpieces - 3
        x = x[:limit]
        salient = (int(start - first), int(stop - first))
        masked_x = np.zeros(len(x), dtype=bool)
        if salient[0] < len(x):
            masked_x[salient[0] : salient[1]] = True
        kind = rng.choice(list(Z_SHARES), p=list(Z_SHARES.values()))
        if kind == "own":
            z = body
        elif kind == "neighbour":
            z = snapshot.body(neighbours.draw(body[first:end], int(passage), rng))
        elif kind == "random":
            z = snapshot.body(int(rng.integers(len(snapshot))))
        else:
            z = body[:0]
        masked_x |= rng.random(len(x)) < options.reader_random_masks
        tokens, segments, _ = join_reader(x, z, special, options.reader_wordpieces)
        masked = np.zeros(len(tokens), dtype=bool)
        masked[1 : 1 + len(x)] = masked_x
        at = np.flatnonzero(masked)
        targets = tokens[at]
        tokens = np.where(masked, special.mask, tokens)
        return tokens, segments, at, targets

    def step_loss(step: int) -> tuple[Tensor, dict[str, float]]:
        rng = np.random.default_rng(seed_for(context.seed, context.stream, "batch", step))
        drawn = [example(rng) for _ in range(options.reader_batch_size)]
        examples, weight = context.team.share(drawn, [len(targets) for *_, targets in drawn])
        batch = Packed([e[0] for e in examples], [e[1] for e in examples])
        rows_M = torch.from_numpy(np.concatenate([s + e[2] for s, e in zip(batch.starts[:-1], examples, strict=True)]))
        targets_M = torch.from_numpy(np.concatenate([e[3] for e in examples]))
        with autocast(context.device, context.dtype):
            log_token_M = reader.log_token(batch, rows_M, targets_M)
        return -weight * log_token_M.mean(), {"masked": float(len(targets_M))}

    fit(
        context,
        [Group("reader", reader, options.reader_learning_rate)],
        optimiser,
        step_loss,
        steps=options.reader_steps,
        checkpoint_every=options.checkpoint_every,
    )
