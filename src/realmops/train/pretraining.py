"""REALM pre-training of retriever and reader by masked language modelling (paper, sections 3.1 to 3.4).

One step runs through ``masked_sentences``, the candidates of this module, ``realm`` (likelihood and loss) and ``loop``
(gradient, optimiser, checkpoint).
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from torch import Tensor

from realmops.corpus.snapshot_reader import Snapshot
from realmops.options import Pretrain
from realmops.search.bm25 import Bm25
from realmops.search.embed import embed, embed_on_device, query_sequences
from realmops.search.exact import exact_index
from realmops.search.hybrid import HybridSearch
from realmops.train.index_source import Index, IndexSource
from realmops.train.loop import DeferredMetrics, TrainingContext, fit
from realmops.train.masked_sentences import NULL, Example, Examples
from realmops.train.optimiser import Group
from realmops.train.realm import Realm

COLLAPSE_WINDOW = 50  # steps
COLLAPSE_SHARE = 0.9  # of p(z|x), of the null document or of one passage
STALENESS_QUERIES = 64  # whose top k of an old and a new index are compared


def retrieval_depth(options: Pretrain) -> int:
    """Return how many passages to retrieve per sentence: some of them are trivial and dropped."""
    return options.documents + 8


def find_run(body: np.ndarray, run: np.ndarray) -> Iterator[int]:
    """Yield the positions of ``run`` as a contiguous part of ``body``, both int64; an empty run is everywhere."""
    haystack, needle, offset = body.tobytes(), run.tobytes(), -1
    while (offset := haystack.find(needle, offset + 1)) >= 0:
        if offset % body.itemsize == 0:
            yield offset // body.itemsize


class Candidates:
    """The top passages of an index for masked sentences, trivial ones excluded (section 3.4)."""

    def __init__(self, snapshot: Snapshot, options: Pretrain, bm25: Bm25 | None = None) -> None:
        self.snapshot, self.options, self.bm25 = snapshot, options, bm25
        self.counts = Counter[str]()  # passages that each rule dropped, and examples short of candidates

    def retrieve(self, examples: Sequence[Example], query_BE: Tensor, index: Index) -> list[list[int]]:
        """Return up to ``options.documents`` passage ids for each example, best first.

        Drops the passage of x itself and every passage that contains the unmasked sentence. If too few are left, the
        search is repeated 16 times deeper; a list is shorter than ``options.documents`` only if that is not enough.
        """
        limit = self.options.documents
        search = HybridSearch(index.passages, self.bm25, index.retriever.mixture, index.retriever.scale)
        id_QK = search.search(query_BE, [e.visible_text for e in examples], retrieval_depth(self.options)).id_QK
        result = []
        for row, example in enumerate(examples):
            passages, dropped = self._filter(example, id_QK[row].tolist(), limit)
            if len(passages) < limit and id_QK.shape[1] < len(self.snapshot):
                query_1E = query_BE[row : row + 1]
                deeper_1K = search.search(query_1E, [example.visible_text], 16 * retrieval_depth(self.options)).id_QK
                passages, dropped = self._filter(example, deeper_1K[0].tolist(), limit)
            self.counts.update(dropped)
            self.counts["short"] += len(passages) < limit
            result.append(passages)
        return result

    def shared(self, examples: Sequence[Example], candidates: Sequence[Sequence[int]]) -> list[list[int]]:
        """Extend each example's candidates by those of the batch and the passages of its sentences, but trivial ones.

        For a late-interaction reader, which encodes each passage of a batch once in any case.
        """
        if not self.options.documents:
            return [list(row) for row in candidates]
        pool = sorted({p for row in candidates for p in row} | {e.passage for e in examples if e.passage != NULL})
        result = []
        for example, own in zip(examples, candidates, strict=True):
            own_set = set(own)
            added, dropped = self._filter(example, [p for p in pool if p not in own_set], len(pool))
            self.counts.update(dropped)
            result.append([*own, *added])
        return result

    def _filter(self, example: Example, ids: list[int], limit: int) -> tuple[list[int], Counter[str]]:
        dropped = Counter[str]()
        if not self.options.exclude_trivial:
            return [passage for passage in ids[:limit] if passage >= 0], dropped
        passages: list[int] = []
        for passage in ids:
            if len(passages) == limit or passage < 0:
                break
            if passage == example.passage:
                dropped["dropped_own"] += 1
            elif any(True for _ in find_run(self.snapshot.body(passage), example.original)):
                dropped["dropped_containing"] += 1
            else:
                passages.append(passage)
        return passages, dropped


class CollapseAlarm:
    """Detector of the vicious cycle of section 3.4: p(z|x) collapses to the null document or to one passage.

    That is, to more than ``COLLAPSE_SHARE`` of p(z|x), or of the queries by their first passage, over the last
    ``COLLAPSE_WINDOW`` steps. ``warn`` is called at the first collapse.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self.warn, self.raised = warn, False
        self.window: deque[tuple[float, Sequence[int]]] = deque(maxlen=COLLAPSE_WINDOW)

    def watch(self, step: int, p_null: float, first_choices: Sequence[int]) -> bool:
        """Record one step; return whether the retriever has collapsed."""
        self.window.append((p_null, first_choices))
        if len(self.window) < COLLAPSE_WINDOW:
            return False
        null = float(np.mean([p for p, _ in self.window]))
        counts = Counter(passage for _, first in self.window for passage in first)
        passage, count = max(counts.items(), key=lambda pair: (pair[1], -pair[0]), default=(NULL, 0))
        top = count / max(counts.total(), 1)
        cause = ""
        if top > COLLAPSE_SHARE:
            cause = f"passage {passage} ranks first for {top:.0%} of the queries"
        if null > COLLAPSE_SHARE:
            cause = f"the null document has {null:.0%} of p(z|x)"
        if cause and not self.raised:
            self.raised = True
            self.warn(
                f"step {step}: the retriever has collapsed: {cause} over the last {COLLAPSE_WINDOW} steps, so its "
                "gradient vanishes. Train ict longer, raise pretrain.retriever_delay or lower "
                "pretrain.retriever_learning_rate"
            )
        return bool(cause)


def pretrain(
    context: TrainingContext,
    realm: Realm,
    examples: Examples,
    source: IndexSource,
    *,
    evaluate: Callable[[Index], dict[str, float]],
    warn: Callable[[str], None],
) -> None:
    """Run REALM pre-training over the corpus of ``realm``, with the index of each step from ``source``.

    The metrics that ``evaluate`` returns for an adopted index are logged at its step; ``warn`` is called if the
    retriever collapses. The fusion weights of a hybrid retriever are not trained.
    """
    options, retriever, reader = realm.options, realm.retriever, realm.reader
    candidates = Candidates(realm.snapshot, options, realm.bm25)
    alarm = CollapseAlarm(warn)
    current: list[Index] = []
    adopted: dict[str, float] = {}

    def at_step(step: int) -> None:
        for index in source.at_step(step, retriever):
            if current and context.processes.is_main_process:
                adopted["top_k_change"] = _change(current[0], index, examples, realm, context)
            current[:] = [index]
            if index.new and context.processes.is_main_process:
                adopted.update(evaluate(index), refreshed=1.0)
        assert current, "the first step needs an index"

    def step_loss(step: int) -> tuple[Tensor, DeferredMetrics]:
        index = current[0]
        rng = context.rng("batch", step)
        drawn = [examples.draw(rng) for _ in range(options.batch_size)]
        counts = [len(e.positions) for e in drawn] if options.marginal == "per_token" else None
        batch, weight = context.processes.split_batch(drawn, counts)
        searcher = index.retriever if options.query_encoder == "snapshot" else retriever
        queried = drawn if reader.apart else batch  # late interaction: all sentences share their candidates
        query_BE = embed_on_device(searcher.query, query_sequences(realm.queries(queried)), realm.dtype)
        passages = candidates.retrieve(queried, query_BE, index)
        if reader.apart:
            passages = list(context.processes.split_batch(candidates.shared(drawn, passages))[0])
        crops = context.rng("crops", step)
        learns = step >= options.retriever_delay
        loss, deferred = realm.loss(
            batch, passages, retriever_learns=learns, weight=weight, crops=crops, processes=context.processes
        )
        updated_at = max(index.step, min(step, options.retriever_delay))  # the retriever is frozen during the delay
        logged = {"staleness_steps": float(step - updated_at), "staleness_seconds": time.time() - index.published}
        logged |= {name: float(count) for name, count in candidates.counts.items()} | adopted
        candidates.counts.clear()
        adopted.clear()

        def metrics(*tensors: Tensor) -> dict[str, float]:
            values = deferred.metrics(*tensors) | logged
            collapsed = alarm.watch(step, values.get("p_null", 0.0), [row[0] for row in passages if row])
            return values | {"collapsed": float(collapsed)}

        return loss, DeferredMetrics(deferred.tensors, metrics)

    groups = [
        Group("retriever", retriever, options.retriever_learning_rate, options.retriever_delay),
        Group("reader", reader, options.reader_learning_rate),
    ]
    fit(context, groups, step_loss, steps=options.steps, at_step=at_step)


def _change(old: Index, new: Index, examples: Examples, realm: Realm, context: TrainingContext) -> float:
    """Return :func:`top_k_change` of the passages of sampled queries."""
    rng = context.rng("staleness")
    queries = query_sequences(realm.queries([examples.draw(rng) for _ in range(STALENESS_QUERIES)]))
    ids = []
    for index in (old, new):
        query_QE = embed(index.retriever.query, queries, realm.dtype)
        exhaustive = exact_index(index.passages.vectors(slice(None)), index.retriever.vectors)
        ids.append(exhaustive.search(query_QE, realm.options.candidates)[1].cpu().numpy())
    return top_k_change(*ids)


def top_k_change(old_QK: np.ndarray, new_QK: np.ndarray) -> float:
    """Return the fraction of top-k results, over all queries, that differ between two indexes, ignoring order."""
    common = sum(len(set(old) & set(new)) for old, new in zip(old_QK.tolist(), new_QK.tolist(), strict=True))
    return 1 - common / old_QK.size
