"""Fine-tune both towers of the retriever on questions, with DPR's in-batch negatives and every question of a passage.

REALM and ORQA freeze the passage embeddings during fine-tuning.

Shape suffixes: Q questions, N passages of all processes, E embedding width.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from realmops.corpus.snapshot_reader import Snapshot
from realmops.devices import autocast, to_device
from realmops.model.likelihood import in_batch_loss
from realmops.model.packed import PackedBatch
from realmops.model.retriever import Retriever
from realmops.options import Finetune, epoch_steps
from realmops.questions.question_sets import Question
from realmops.questions.relevance import RelevantPassages
from realmops.search.embed import document_sequences, text_queries
from realmops.train.loop import DeferredMetrics, LossAndMetrics, TrainingContext, fit
from realmops.train.optimiser import Group

NEIGHBOURS = 8  # consecutive passages that share a batch: hard negatives
MOST_QUESTIONS = 8  # of one passage in one step


Positives = dict[int, list[int]]
"""Training passages in ascending order, and for each the rows of the questions that it answers."""


def group_by_passage(passages_of_question: Sequence[Sequence[int]]) -> Positives:
    """Group questions by their relevant passages, of which a question may have several or none."""
    rows = defaultdict(list)
    for row, passages in enumerate(passages_of_question):
        for passage in passages:
            rows[passage].append(row)
    return {passage: rows[passage] for passage in sorted(rows)}


def passage_batches(context: TrainingContext, count: int, batch_size: int) -> Callable[[int], list[int]]:
    """Return a function from a step to its batch of passages: shuffled runs of neighbours, each once per epoch."""
    per_epoch = math.ceil(count / batch_size)

    def batch(step: int) -> list[int]:
        epoch, number = divmod(step, per_epoch)
        rng = context.rng("order", epoch)
        shift = int(rng.integers(NEIGHBOURS))
        runs = np.split(np.arange(count), range(shift, count, NEIGHBOURS))
        order: list[int] = np.concatenate([runs[i] for i in rng.permutation(len(runs))]).tolist()
        return order[number * batch_size : (number + 1) * batch_size]

    return batch


def train_by_passages(
    context: TrainingContext,
    retriever: Retriever,
    snapshot: Snapshot,
    questions: Sequence[Question],
    positives: Positives,
    options: Finetune,
) -> None:
    """Train the retriever by softmax of each question's passage among all passages of the batch.

    Passages of all processes are negatives, except those that are relevant too. The result does not depend on the
    number of processes: all draw the questions of the whole batch, and each question has the same weight.
    """
    relevant = RelevantPassages(snapshot)
    processes = context.processes
    passages = list(positives)
    batch_of = passage_batches(context, len(passages), options.retriever_batch_size)

    def step_loss(step: int) -> LossAndMetrics:
        retriever.train()
        rng = context.rng("questions", step)
        batch = [passages[row] for row in batch_of(step)]
        drawn = [(p, rng.permutation(positives[p])[:MOST_QUESTIONS].tolist()) for p in batch]
        local, weight = processes.split_batch(drawn, [float(len(rows)) for _, rows in drawn])
        part_size = math.ceil(len(drawn) / processes.size)
        embedded = [passage for passage, _ in local]
        embedded += embedded[:1] * (part_size - len(embedded))  # padding for equal sizes; masked below
        local_questions = [questions[i] for _, rows in local for i in rows]
        queries = text_queries(snapshot, [q.question for q in local_questions], options.query_wordpieces)
        documents = document_sequences(snapshot, embedded)
        with autocast(context.device, context.dtype):
            query_QE = retriever.query(PackedBatch(queries))
            document_NE = retriever.documents(PackedBatch([d[0] for d in documents], [d[1] for d in documents]))
        relevance_QN = retriever.scores(query_QE, processes.gather(document_NE))
        own = np.repeat(np.arange(len(local)), [len(rows) for _, rows in local]) + processes.rank * part_size
        columns = processes.gathered_order(batch, part_size)
        ignored_QN = torch.tensor([[p is None or relevant.is_relevant(q, p) for p in columns] for q in local_questions])
        ignored_QN[torch.arange(len(own)), torch.from_numpy(own)] = False
        own_Q, ignored_QN = to_device(relevance_QN.device, torch.from_numpy(own), ignored_QN)
        relevance_QN = relevance_QN.masked_fill(ignored_QN, -torch.inf)

        def metrics(hit_Q: Tensor) -> dict[str, float]:
            return {"accuracy": float(hit_Q.float().mean())}

        deferred = DeferredMetrics([relevance_QN.argmax(-1) == own_Q], metrics)
        return weight * in_batch_loss(relevance_QN, own_Q).mean(), deferred

    groups = [Group("retriever", retriever, options.retriever_learning_rate)]
    steps = epoch_steps(len(passages), options.retriever_batch_size, options.retriever_epochs)
    fit(context, groups, step_loss, steps=steps)
