"""REALM pre-training of retriever and reader by masked language modelling (paper, sections 3.1 to 3.4).

One step runs through these modules: ``examples`` (masked sentences), ``candidates`` (retrieved passages), ``realm``
(likelihood and loss), ``loop`` (gradient, optimiser, checkpoint).
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from realmops.options import Optimiser
from realmops.search.embed import embed, embed_on_device, query_sequences
from realmops.search.exact import exact_index
from realmops.train.candidates import Candidates
from realmops.train.examples import Examples
from realmops.train.index_source import Index, IndexSource, top_k_change
from realmops.train.loop import DeferredMetrics, TrainingContext, fit
from realmops.train.optimiser import Group
from realmops.train.realm import Realm

COLLAPSE_WINDOW = 50  # steps
COLLAPSE_SHARE = 0.9  # of p(z|x), of the null document or of one passage
STALENESS_QUERIES = 64  # whose top k of an old and a new index are compared


class CollapseAlarm:
    """Detector of the vicious cycle of section 3.4: p(z|x) collapses to the null document or to one passage.

    It has collapsed if the null document has more of p(z|x) than ``COLLAPSE_SHARE``, or if more of the queries rank the
    same passage first. ``warn`` is called once, at the first collapse.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self.warn = warn
        self.null: deque[float] = deque(maxlen=COLLAPSE_WINDOW)
        self.first: deque[Sequence[int]] = deque(maxlen=COLLAPSE_WINDOW)  # of each step
        self.raised = False

    def watch(self, step: int, p_null: float, first_choices: Sequence[int]) -> bool:
        """Record one step; return whether the retriever has collapsed over the last ``COLLAPSE_WINDOW`` steps."""
        self.null.append(p_null)
        self.first.append(first_choices)
        if len(self.null) < COLLAPSE_WINDOW:
            return False
        null = float(np.mean(self.null))
        values, counts = np.unique([p for step in self.first for p in step], return_counts=True)
        top = float(counts.max() / counts.sum()) if len(counts) else 0.0
        collapsed = null > COLLAPSE_SHARE or top > COLLAPSE_SHARE
        if collapsed and not self.raised:
            cause = (
                f"the null document has {null:.0%} of p(z|x)"
                if null > COLLAPSE_SHARE
                else f"passage {values[counts.argmax()]} ranks first for {top:.0%} of the queries"
            )
            self.warn(
                f"step {step}: the retriever has collapsed: {cause} over the last {COLLAPSE_WINDOW} steps, "
                "so its gradient vanishes. "
                "Train ict longer, raise pretrain.retriever_delay or lower pretrain.retriever_learning_rate"
            )
        self.raised = self.raised or collapsed
        return collapsed


def pretrain(
    context: TrainingContext,
    realm: Realm,
    examples: Examples,
    optimiser: Optimiser,
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
        new = source.at_step(step, retriever)
        if new is None:
            assert current, "the first step needs an index"
            return
        if current and context.processes.is_main_process:
            adopted["top_k_change"] = _change(current[0], new, examples, realm, context)
        current[:] = [new]
        if new.new and context.processes.is_main_process:
            adopted.update(evaluate(new), refreshed=1.0)

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
    every = options.refresh_every
    fit(context, groups, optimiser, step_loss, steps=options.steps, checkpoint_every=every, at_step=at_step)


def _change(old: Index, new: Index, examples: Examples, realm: Realm, context: TrainingContext) -> float:
    """Return the fraction of the top k of sampled queries that the new index changes."""
    rng = context.rng("staleness")
    queries = query_sequences(realm.queries([examples.draw(rng) for _ in range(STALENESS_QUERIES)]))
    ids: list[Any] = []
    for index in (old, new):
        query_QE = embed(index.retriever.query, queries, realm.dtype)
        exhaustive = exact_index(index.passages.vectors(slice(None)), index.retriever.vectors)
        ids.append(exhaustive.search(query_QE, realm.options.candidates)[1].cpu().numpy())
    return top_k_change(ids[0], ids[1])
