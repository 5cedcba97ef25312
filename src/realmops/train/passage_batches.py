"""The retriever learns from questions by passages: all parameters, in batches of passages and all of their questions.

REALM and ORQA freeze the passages' embeddings while they fine-tune. Here each passage of a batch is embedded once a
step, and all questions whose answer it holds are compared with all passages of the batch (as in DPR, with every
question of a passage at once). With an index that is refreshed while the retriever learns, hard negatives come from it:
passages that it finds for a question and that hold no answer (EMDR2 and RAG-end2end refresh theirs, too). The index has
to be built again afterwards.

Shape suffixes: Q questions, N passages of all processes and the hard negatives, E embedding width.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from realmops.config import Finetune, Optimiser
from realmops.corpus.question_sets import Question
from realmops.corpus.snapshot_reader import Snapshot
from realmops.devices import autocast, send
from realmops.model.likelihood import in_batch_loss
from realmops.model.packed import Packed
from realmops.model.retriever import Retriever
from realmops.search.embed import document_sequences, embed, query_sequences, text_queries
from realmops.text.answer_matching import contains_answer
from realmops.train.index_source import Index, IndexSource
from realmops.train.loop import Context, DeferredMetrics, fit
from realmops.train.optimiser import Group

NEIGHBOURS = 8  # consecutive passages that come into a batch together: hard negatives
MOST_QUESTIONS = 8  # of one passage in one step
HARD_SHARE = 0.25  # hard negatives for each passage of a batch
HARD_DEPTH = 20  # best passages among which a hard negative is looked for


@dataclass(frozen=True)
class Positives:
    """Which passages answer which questions: ``passages`` ascending, and for each the rows of its questions."""

    passages: list[int]
    questions: list[list[int]]

    @staticmethod
    def of(passage_of_question: Sequence[int]) -> Positives:
        """From the passage of each question, -1 where none is known."""
        rows = defaultdict(list)
        for row, passage in enumerate(passage_of_question):
            if passage >= 0:
                rows[passage].append(row)
        return Positives(sorted(rows), [rows[passage] for passage in sorted(rows)])


def passage_steps(passages: int, options: Finetune) -> int:
    """Steps of so many epochs over the passages."""
    return math.ceil(options.retriever_epochs * math.ceil(passages / options.retriever_batch_size))


def passage_batches(context: Context, count: int, batch_size: int) -> Callable[[int], list[int]]:
    """Which passages a step takes: runs of neighbours, each once an epoch, in an order of its own."""
    per_epoch = math.ceil(count / batch_size)

    def batch(step: int) -> list[int]:
        epoch, place = divmod(step, per_epoch)
        rng = context.rng("order", epoch)
        shift = int(rng.integers(NEIGHBOURS))
        runs = np.split(np.arange(count), range(shift, count, NEIGHBOURS))
        order: list[int] = np.concatenate([runs[i] for i in rng.permutation(len(runs))]).tolist()
        return order[place * batch_size : (place + 1) * batch_size]

    return batch


def train_by_passages(
    context: Context,
    retriever: Retriever,
    snapshot: Snapshot,
    questions: Sequence[Question],
    positives: Positives,
    options: Finetune,
    optimiser: Optimiser,
    source: IndexSource | None = None,
) -> int:
    """Softmax of each question's passage among all passages of the batch, those of all processes.

    Another passage of the batch that holds an answer too is no negative. Any number of processes learns the same: all
    draw the questions of the whole batch, and a question counts the same wherever its passage is embedded. Hard
    negatives come from the indexes of ``source``. Returns the journal's length at the end.
    """
    current: list[Index] = []
    team = context.team
    batch_of = passage_batches(context, len(positives.passages), options.retriever_batch_size)

    def step_loss(step: int) -> tuple[Tensor, DeferredMetrics]:
        retriever.train()
        rng = context.rng("questions", step)
        drawn = [
            (positives.passages[row], rng.permutation(positives.questions[row])[:MOST_QUESTIONS].tolist())
            for row in batch_of(step)
        ]
        mine, weight = team.share(drawn, [float(len(rows)) for _, rows in drawn])
        each = math.ceil(len(drawn) / team.size)
        embedded = [passage for passage, _ in mine]
        embedded += embedded[:1] * (each - len(embedded))  # as many as all; hidden
        asked = [questions[i] for _, rows in mine for i in rows]
        queries = text_queries(snapshot, [q.question for q in asked], options.query_wordpieces)
        hard = _hard(step, drawn) if current else []
        documents = document_sequences(snapshot, [*embedded, *hard])
        with autocast(context.device, context.dtype):
            query_QE = retriever.query(Packed(queries))
            document_NE = retriever.documents(Packed([d[0] for d in documents], [d[1] for d in documents]))
        document_NE = torch.cat([team.gather(document_NE[:each]), document_NE[each:]])
        relevance_QN = retriever.scores(query_QE, document_NE)
        own = np.repeat(np.arange(len(mine)), [len(rows) for _, rows in mine]) + team.rank * each
        others = [*team.order([passage for passage, _ in drawn], each), *hard]
        hidden_QN = torch.tensor(
            [[p is None or contains_answer(snapshot.text(p), q.answers, q.match_rule) for p in others] for q in asked]
        )
        hidden_QN[torch.arange(len(own)), torch.from_numpy(own)] = False
        own_Q, hidden_QN = send(relevance_QN.device, torch.from_numpy(own), hidden_QN)
        relevance_QN = relevance_QN.masked_fill(hidden_QN, -torch.inf)

        def metrics(hit_Q: Tensor) -> dict[str, float]:
            return {"accuracy": float(hit_Q.float().mean()), "hard_negatives": float(len(hard))}

        later = DeferredMetrics([relevance_QN.argmax(-1) == own_Q], metrics)
        return weight * in_batch_loss(relevance_QN, own_Q).mean(), later

    def _hard(step: int, drawn: Sequence[tuple[int, list[int]]]) -> list[int]:
        rng = context.rng("hard", step)
        rows = rng.permutation([i for _, some in drawn for i in some])[: math.ceil(HARD_SHARE * len(drawn))].tolist()
        some, beside = [questions[i] for i in rows], [passage for passage, _ in drawn]
        return hard_negatives(current[0], some, beside, snapshot, options.query_wordpieces, context.dtype)

    def at_step(step: int) -> None:
        if source is not None and (new := source.at_step(step, retriever)):
            current[:] = [new]

    groups = [Group("retriever", retriever, options.retriever_learning_rate)]
    steps = passage_steps(len(positives.passages), options)
    every = options.checkpoint_every if source is None else options.retriever_refresh_every
    return fit(context, groups, optimiser, step_loss, steps=steps, checkpoint_every=every, at_step=at_step)


def hard_negatives(
    index: Index,
    questions: Sequence[Question],
    passages: Sequence[int],
    snapshot: Snapshot,
    query_wordpieces: int,
    dtype: torch.dtype,
) -> list[int]:
    """For each question the best passage without an answer that an index finds beside ``passages``; each once."""
    queries = text_queries(snapshot, [q.question for q in questions], query_wordpieces)
    query_QE = embed(index.retriever.query, query_sequences(queries), dtype)
    ids = index.passages.search(query_QE, HARD_DEPTH)[1].cpu().tolist()
    found: list[int] = []
    for question, row in zip(questions, ids, strict=True):
        new = (p for p in row if p not in passages and p not in found)
        wrong = (p for p in new if not contains_answer(snapshot.text(p), question.answers, question.match_rule))
        found += [passage] if (passage := next(wrong, None)) is not None else []
    return found
