"""REALM pre-training: retrieve, read, and learn both from masked words (paper, sections 3.1 to 3.4).

One step goes down through these: ``examples`` (masked sentences), ``candidates`` (what an index finds for them),
``realm`` (their likelihood and its loss), ``loop`` (gradient, optimiser, checkpoint).
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from realmops.config import Optimiser
from realmops.search.embed import embed, embed_there, query_sequences
from realmops.search.exact import exact
from realmops.train.candidates import Candidates
from realmops.train.examples import Examples
from realmops.train.index_source import Index, IndexSource, top_k_change
from realmops.train.loop import Context, DeferredMetrics, fit
from realmops.train.optimiser import Group
from realmops.train.realm import Realm

COLLAPSE_WINDOW = 50


class CollapseAlarm:
    """The vicious cycle of section 3.4: null, or one passage for everybody, takes all mass and gradients die."""

    def __init__(self, share: float, warn: Callable[[str], None]) -> None:
        self.share, self.warn = share, warn
        self.null: deque[float] = deque(maxlen=COLLAPSE_WINDOW)
        self.first: deque[Sequence[int]] = deque(maxlen=COLLAPSE_WINDOW)  # of each step
        self.raised = False

    def watch(self, step: int, p_null: float, first_choices: Sequence[int]) -> bool:
        """Take one step's numbers; warns once, and returns whether the retriever has collapsed."""
        self.null.append(p_null)
        self.first.append(first_choices)
        if len(self.null) < COLLAPSE_WINDOW:
            return False
        null = float(np.mean(self.null))
        values, counts = np.unique([p for step in self.first for p in step], return_counts=True)
        one = float(counts.max() / counts.sum()) if len(counts) else 0.0
        collapsed = null > self.share or one > self.share
        if collapsed and not self.raised:
            what = (
                f"the null document has {null:.0%} of p(z|x)"
                if null > self.share
                else f"passage {values[counts.argmax()]} comes first for {one:.0%} of the queries"
            )
            self.warn(
                f"step {step}: the retriever has collapsed: {what} over the last {COLLAPSE_WINDOW} steps, "
                "and its gradient dies. "
                "Train ict longer, raise pretrain.retriever_delay or lower pretrain.retriever_learning_rate"
            )
        self.raised = self.raised or collapsed
        return collapsed


def pretrain(
    context: Context,
    realm: Realm,
    examples: Examples,
    optimiser: Optimiser,
    source: IndexSource,
    *,
    evaluate: Callable[[Index], dict[str, float]],
    warn: Callable[[str], None],
) -> None:
    """Run REALM pre-training: the examples' words are guessed with passages of the realm's snapshot.

    ``evaluate`` gives metrics of every adopted index, logged at its step.  The weights of words and embeddings of a
    hybrid retriever stay as they are.
    """
    options, retriever, reader = realm.options, realm.retriever, realm.reader
    candidates = Candidates(realm.snapshot, options, realm.words)
    alarm = CollapseAlarm(options.collapse_share, warn)
    current: list[Index] = []
    adopted: dict[str, float] = {}

    def at_step(step: int) -> None:
        new = source.at_step(step, retriever)
        if new is None:
            assert current, "the first step needs an index"
            return
        if current and options.staleness_queries and context.team.leads:
            adopted["top_k_change"] = _change(current[0], new, examples, realm, context)
        current[:] = [new]
        if new.new and context.team.leads:
            adopted.update(evaluate(new), refreshed=1.0)

    def step_loss(step: int) -> tuple[Tensor, DeferredMetrics]:
        index = current[0]
        rng = context.rng("batch", step)
        drawn = [examples.draw(rng) for _ in range(options.batch_size)]
        counts = [len(e.positions) for e in drawn] if options.marginal == "per_token" else None
        batch, weight = context.team.share(drawn, counts)
        searcher = index.retriever if options.query_encoder == "snapshot" else retriever
        asked = drawn if reader.apart else batch  # then what is found for one sentence is a candidate of all
        query_BE = embed_there(searcher.query, query_sequences(realm.queries(asked)), realm.dtype)
        found = candidates.retrieve(asked, query_BE, index)
        if reader.apart:
            found = list(context.team.share(candidates.shared(drawn, found))[0])
        crops = context.rng("crops", step)
        learns = step >= options.retriever_delay
        loss, later = realm.loss(batch, found, retriever_learns=learns, weight=weight, crops=crops, team=context.team)
        learned_from = max(index.step, min(step, options.retriever_delay))  # it stands still during the delay
        known = {"staleness_steps": float(step - learned_from), "staleness_seconds": time.time() - index.published}
        known |= {name: float(count) for name, count in candidates.counts.items()} | adopted
        candidates.counts.clear()
        adopted.clear()

        def metrics(*tensors: Tensor) -> dict[str, float]:
            said = later.metrics(*tensors) | known
            collapsed = alarm.watch(step, said.get("p_null", 0.0), [row[0] for row in found if row])
            return said | {"collapsed": float(collapsed)}

        return loss, DeferredMetrics(later.tensors, metrics)

    groups = [
        Group("retriever", retriever, options.retriever_learning_rate, options.retriever_delay),
        Group("reader", reader, options.reader_learning_rate),
    ]
    every = options.refresh_every
    fit(context, groups, optimiser, step_loss, steps=options.steps, checkpoint_every=every, at_step=at_step)


def _change(old: Index, new: Index, examples: Examples, realm: Realm, context: Context) -> float:
    """Share of the top k of sampled queries that the new generation changes."""
    rng = context.rng("staleness")
    queries = query_sequences(realm.queries([examples.draw(rng) for _ in range(realm.options.staleness_queries)]))
    ids: list[Any] = []
    for index in (old, new):
        query_QE = embed(index.retriever.query, queries, realm.dtype)
        all_of_them = exact(index.passages.vectors(slice(None)), index.retriever.vectors)
        ids.append(all_of_them.search(query_QE, realm.options.candidates)[1].cpu().numpy())
    return top_k_change(ids[0], ids[1])
