"""Warm starts: inverse cloze task for the retriever, masked language modelling for the reader (section 3.4).

Shape suffixes: B passages of a batch (of one process, N those of all), Q queries, E embedding width, M masked
wordpieces.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from realmops.corpus.masking import SentencesWithSpans
from realmops.corpus.snapshot_reader import Snapshot
from realmops.corpus.spans import Spans
from realmops.devices import autocast, to_device
from realmops.model.likelihood import in_batch_loss
from realmops.model.packed import PackedBatch
from realmops.model.reader import MaskedSentences, Reader
from realmops.model.retriever import Retriever
from realmops.model.sequences import SpecialTokens, join_document, join_query
from realmops.options import Ict
from realmops.search.bm25 import Bm25
from realmops.search.bm25_writer import write_bm25
from realmops.train.loop import DeferredMetrics, LossAndMetrics, TrainingContext, fit
from realmops.train.masked_sentences import outside_sentences
from realmops.train.optimiser import Group

QUERY_WORDPIECES = 64  # as in the paper
CROP_WORDS = (4, 16)  # minimum and maximum
CROP_DROPPED = 0.3  # probability of dropping a word of a crop, so that a query is no literal copy


def ict_steps(passages: int, options: Ict) -> tuple[int, int]:
    """Return the steps of retriever and reader, each limited to ``ict.epochs`` passes over the passages."""
    if not options.epochs:
        return options.steps, options.reader_steps
    examples = options.epochs * passages
    retriever = min(options.steps, math.ceil(examples / min(options.batch_size, passages)))
    return retriever, min(options.reader_steps, math.ceil(examples / options.reader_batch_size))


@dataclass(frozen=True)
class Cloze:
    """A passage and the queries drawn from it: a sentence, or crops."""

    queries: list[np.ndarray]
    document: tuple[np.ndarray, np.ndarray]  # wordpieces and segments
    removed: bool  # whether the queries are cut out of the document


def draw_cloze(
    snapshot: Snapshot, passage: int, rng: np.random.Generator, options: Ict, special: SpecialTokens
) -> Cloze:
    """Draw the queries of a passage, and cut them out of it with probability ``ict.removal`` unless nothing is left.

    The paper's task draws one uniform sentence; with ``ict.crops``, queries are runs of words.
    """
    body, continues = snapshot.body(passage), snapshot.continues(passage)
    if options.crops:
        runs = [crop_run(continues, rng) for _ in range(options.crops)]
    else:
        sentences = snapshot.sentences(passage)
        runs = [tuple(sentences[rng.integers(len(sentences))])]
    in_query = np.zeros(len(body), dtype=bool)
    for first, end in runs:
        in_query[first:end] = True
    removed = bool(rng.random() < options.removal) and not in_query.all()
    queries = [body[first:end] for first, end in runs]
    if options.crops:
        queries = [drop_words(body[first:end], continues[first:end], rng) for first, end in runs]
    context = body[~in_query] if removed else body
    document = join_document(snapshot.title_tokens(passage), context, special, snapshot.block_wordpieces)
    return Cloze([join_query(query, special, QUERY_WORDPIECES) for query in queries], document, removed)


def crop_run(continues: np.ndarray, rng: np.random.Generator) -> tuple[int, int]:
    """Draw a uniform run of ``CROP_WORDS`` words, at most the whole passage; return its first and end wordpiece."""
    starts = np.append(np.flatnonzero(~continues), len(continues))
    starts = starts if starts[0] == 0 else np.append(0, starts)  # a passage that begins inside a word
    words = len(starts) - 1
    length = min(int(rng.integers(CROP_WORDS[0], CROP_WORDS[1] + 1)), words)
    first = int(rng.integers(words - length + 1))
    return int(starts[first]), int(starts[first + length])


def drop_words(query: np.ndarray, continues: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Drop each word of a query with probability ``CROP_DROPPED``, but never all; ``continues`` marks later pieces."""
    word = np.cumsum(~continues)
    keep = rng.random(int(word.max(initial=0)) + 1)[word] >= CROP_DROPPED
    return query[keep] if keep.any() else query


def cloze_batch(count: int, batch_size: int, neighbours: int, rng: np.random.Generator) -> np.ndarray:
    """Draw the passages of a batch: random runs of ``neighbours`` consecutive passages, which are hard negatives."""
    batch_size = min(batch_size, count)
    runs = -(-count // neighbours)
    chosen = rng.permutation(runs)[: -(-batch_size // neighbours) + 1]
    passages = (chosen[:, None] * neighbours + np.arange(neighbours)).ravel()
    return passages[passages < count][:batch_size]


def train_retriever(context: TrainingContext, retriever: Retriever, snapshot: Snapshot, options: Ict) -> None:
    """Train the retriever by the inverse cloze task, with the passages of all processes as in-batch negatives.

    Logs the accuracy for queries that were removed from their passage and for those that were kept.

    Raises:
        ValueError: a batch has fewer passages than there are processes.
    """
    special, processes = SpecialTokens.of(snapshot.tokenizer), context.processes
    if (size := min(options.batch_size, len(snapshot))) < processes.size:
        raise ValueError(
            f"batch too small for {processes.size} processes: ict.batch_size is {options.batch_size} and the "
            f"corpus has {len(snapshot)} passages; start at most {size} processes"
        )

    def step_loss(step: int) -> LossAndMetrics:
        rng = context.rng("batch", step)
        passages = cloze_batch(len(snapshot), options.batch_size, options.neighbours, rng)
        drawn = [draw_cloze(snapshot, int(p), rng, options, special) for p in passages]
        examples, _ = processes.split_batch(drawn[: len(drawn) // processes.size * processes.size])
        queries = PackedBatch([query for e in examples for query in e.queries])
        documents = PackedBatch([e.document[0] for e in examples], [e.document[1] for e in examples])
        with autocast(context.device, context.dtype):
            query_QE, document_BE = retriever.query(queries), retriever.documents(documents)
        relevance_QN = retriever.scores(query_QE, processes.gather(document_BE))
        passage_Q = np.repeat(np.arange(len(examples)), [len(e.queries) for e in examples])
        (own_Q,) = to_device(relevance_QN.device, torch.from_numpy(passage_Q) + processes.rank * len(examples))
        removed_Q = np.array([e.removed for e in examples])[passage_Q]

        def metrics(hit_Q: Tensor) -> dict[str, float]:
            parts = (("removed", removed_Q), ("kept", ~removed_Q))
            return {f"accuracy_{name}": float(hit_Q.numpy()[is_Q].mean()) for name, is_Q in parts if is_Q.any()}

        return in_batch_loss(relevance_QN, own_Q).mean(), DeferredMetrics([relevance_QN.argmax(-1) == own_Q], metrics)

    groups = [Group("retriever", retriever, options.learning_rate)]
    fit(context, groups, step_loss, steps=options.steps)


RANDOM_MASKS = 0.15  # fraction of the wordpieces of x that are masked in addition to the salient span
Z_SHARES = {"own": 0.3, "neighbour": 0.35, "random": 0.2, "null": 0.15}  # probability of each kind of passage
NEAREST = 4  # passages that a neighbour is drawn from


class Neighbours:
    """Lexically similar passages by BM25 over wordpieces; the index is written to ``folder`` at the first draw."""

    def __init__(self, snapshot: Snapshot, folder: Path) -> None:
        self.snapshot, self.folder = snapshot, folder

    @cached_property
    def _index(self) -> Bm25:
        write_bm25(self.folder, self.snapshot, wordpieces=True)
        return Bm25.open(self.folder, verify=False)

    def draw(self, sentence: np.ndarray, own: int, rng: np.random.Generator) -> int:
        """Draw one of the ``NEAREST`` other passages; return ``own`` if none shares a wordpiece with the sentence."""
        _, [passages] = self._index.search([sentence.astype(np.uint64)], NEAREST + 1)
        nearest = passages[(passages >= 0) & (passages != own)][:NEAREST]
        return int(rng.choice(np.sort(nearest))) if len(nearest) else own


def train_reader(
    context: TrainingContext,
    reader: Reader,
    snapshot: Snapshot,
    spans: Spans,
    options: Ict,
    limit: int,
    held_out: Sequence[int] = (),
    work: Path | None = None,
) -> None:
    """Train the reader by masked language modelling over join(x, z), so that it learns to use the second segment.

    One salient span of x is masked, and a random share of its other wordpieces. z is x's own passage, one that is
    similar to the unmasked x by BM25, a random passage, or empty, with the probabilities ``Z_SHARES``; x and z have
    at most ``limit`` wordpieces. Sentences of the spans in rows ``held_out`` are not trained on, unless there are no
    others.
    """
    special = SpecialTokens.of(snapshot.tokenizer)
    rows = SentencesWithSpans(snapshot, spans)
    is_usable_N = outside_sentences(spans, held_out)

    def draw_row(rng: np.random.Generator) -> np.ndarray:
        while not is_usable_N[row := int(rng.integers(len(rows)))]:
            pass
        return rows[row]

    def example(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draw (unmasked x, mask of x, z)."""
        passage, first, end, start, stop = draw_row(rng).tolist()
        body = snapshot.body(passage)
        x = body[first:end][: limit - 3]
        masked_x = np.zeros(len(x), dtype=bool)
        masked_x[start - first : stop - first] = True
        kind = rng.choice(list(Z_SHARES), p=list(Z_SHARES.values()))
        if kind == "neighbour":
            passage = neighbours.draw(body[first:end], passage, rng)
        elif kind == "random":
            passage = int(rng.integers(len(snapshot)))
        z = body[:0] if kind == "null" else reader.document(snapshot, passage)
        masked_x |= rng.random(len(x)) < RANDOM_MASKS
        return x, masked_x, z

    def step_loss(step: int) -> LossAndMetrics:
        rng = context.rng("batch", step)
        drawn = [example(rng) for _ in range(options.reader_batch_size)]
        examples, weight = context.processes.split_batch(drawn, [int(masked.sum()) for _, masked, _ in drawn])
        sentences = [np.where(masked, special.mask, x) for x, masked, _ in examples]
        positions = [np.flatnonzero(masked) for _, masked, _ in examples]
        targets = [x[masked] for x, masked, _ in examples]
        masked_batch = MaskedSentences(sentences, positions, targets, special, limit)
        with autocast(context.device, context.dtype):
            log_token_M = reader.log_masked_pairs(masked_batch, [z for _, _, z in examples])
        count = float(len(log_token_M))
        return -weight * log_token_M.mean(), DeferredMetrics((), lambda: {"masked": count})

    groups = [Group("reader", reader, options.reader_learning_rate)]
    with TemporaryDirectory(prefix="realmops-", dir=work) as folder:
        neighbours = Neighbours(snapshot, Path(folder) / "neighbours")
        fit(context, groups, step_loss, steps=options.reader_steps)
