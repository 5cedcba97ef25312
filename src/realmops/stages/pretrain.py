"""Stage ``pretrain``: REALM, with the index builder beside it over the exchange."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from realmops import artifacts
from realmops.artifacts import seed_for
from realmops.config import Pretrain
from realmops.corpus.cloze import Sources
from realmops.corpus.questions import answers_are_expressions, read_questions
from realmops.corpus.snapshot import Snapshot
from realmops.corpus.wordpieces import contains
from realmops.evaluate.retrieval import first_hit_ranks, hits_at
from realmops.index.approximate import QUERIES, Approximate, index_type
from realmops.index.embed import embed, query_sequences
from realmops.index.lexical import Bm25
from realmops.index.mips import Exact, PassageIndex
from realmops.index.trainer import Policy
from realmops.model.files import load_models, save_models
from realmops.model.reader import Reader
from realmops.model.retriever import Retriever
from realmops.stages import Job
from realmops.stages.common import (
    JournalValues,
    context,
    embed_corpus,
    open_snapshot,
    open_spans,
    prepare,
    question_queries,
    rank,
    searchable,
)
from realmops.stages.exchange import ExchangeSource, Refresh, exchange
from realmops.train.loop import Context
from realmops.train.pretrain import (
    Candidates,
    Example,
    Examples,
    Index,
    IndexSource,
    Realm,
    SharedSource,
    depth,
    pretrain,
)

FIGURES = "figures.json"
START = "start_hit_at_5"  # of the models that pre-training began with
WATCHED = 64  # held-out masked sentences that are also read with every index: reading takes longer than finding


def run(job: Job) -> dict[str, Any]:
    """Pre-train and write both models; returns utility, staleness, refreshes and recall before and after."""
    options: Pretrain = job.sections["pretrain"]
    device, dtype = prepare(job.sections["run"])
    snapshot = open_snapshot(job)
    examples = _examples(job, snapshot)
    salient = _examples(job, snapshot, masking="salient", exclude_trivial=True)
    held_out = _held_out_rows(salient, job)
    examples.hold_out(held_out)
    retriever, reader = load_models(job.inputs["ict"], snapshot.vocabulary_hash)
    retriever.to(device).train()
    reader.to(device).train()
    surroundings = context(job, "pretrain", options.steps, "pre-training")
    words = Bm25.of(snapshot) if retriever.mixture.lexical else None
    realm = Realm(retriever, reader, snapshot, options, dtype, words)
    asked = _drawn(examples, job.sections["run"].seed)
    rng = np.random.default_rng(seed_for(job.sections["run"].seed, "evaluate", "masked", "words"))
    fixed = [salient.example(int(row), rng) for row in held_out]

    def passages(embedding_PE: Tensor, searcher: Retriever) -> PassageIndex:
        return searchable(job, embedding_PE, searcher.query, realm.queries(asked), depth(options))

    def train(surroundings: Context, source: IndexSource, evaluate: Callable[[Index], dict[str, float]]) -> None:
        pretrain(
            surroundings,
            retriever,
            reader,
            snapshot,
            examples,
            job.sections["optimiser"],
            source,
            evaluate=evaluate,
            warn=job.report.warn,
            words=words,
        )

    team = surroundings.team
    if not team.leads:
        train(surroundings, SharedSource(team, None, passages, device), lambda index: {})
        return {}
    best = Best(job.work / "best", snapshot.vocabulary_hash)
    width = retriever.query.width
    index_type(job.sections["index"], len(snapshot), width, device)  # what is wrong with it is said before training
    measure = _measure(job, snapshot, fixed, realm, best)
    refresh = Refresh(
        options.steps,
        options.refresh_every,
        options.lag,
        options.adopt,
        delay=options.retriever_delay,
        builder=options.builder,
        exchange=options.exchange,
        shard_rows=options.shard_rows,
    )
    policy = Policy(options.adopt, options.max_staleness_steps, options.on_stale, options.builder_timeout)
    with exchange(job, snapshot, retriever, refresh, policy, device, dtype, passages) as source:
        surroundings = replace(surroundings, checkpoints=source)
        train(surroundings, SharedSource(team, source, passages, device) if team.size > 1 else source, measure)
    final = _final_index(retriever, snapshot, dtype, options.steps)
    after = measure(final)
    if best.step != options.steps:
        job.report.say(best.told(after))
        retriever, reader = best.models()
        realm = Realm(retriever.to(device), reader.to(device), snapshot, options, dtype, words)
        final, after = _final_index(retriever, snapshot, dtype, best.step), best.figures
    save_models(job.out, retriever, reader, snapshot.vocabulary_hash)
    chosen = {"best_step": best.step}
    return _metrics(job, after, source) | chosen | _masked_words(job, fixed, realm, final)


def _examples(job: Job, corpus: Snapshot, **changes: Any) -> Examples:
    """Masked sentences of the corpus or, with ``pretrain.examples: warmup``, of the warm-up text."""
    options: Pretrain = replace(job.sections["pretrain"], **changes)
    if options.examples == "warmup" and not (job.inputs["snapshot"] / "warmup").is_dir():
        raise ValueError(
            f"pretrain.examples is warmup, and {job.inputs['snapshot']} holds no warm-up text; name one with "
            "snapshot.warmup and set snapshot.use_warmup to true, or set pretrain.examples to corpus"
        )
    text = corpus if options.examples == "corpus" else open_snapshot(job, "warmup")
    spans = open_spans(job, text, options.examples)
    return Examples(text, spans, options, elsewhere=text is not corpus)


def _metrics(job: Job, after: Mapping[str, float], source: ExchangeSource) -> dict[str, Any]:
    logged = JournalValues(job)
    names = ("loss", "retrieval_utility", "retrieval_utility_top", "retrieval_utility_best", "marginal_gain", "p_null")
    metrics: dict[str, Any] = {name: logged.mean(name, last=50) for name in names}
    for name in (name for name in ("recall_at_5", "hit_at_5") if name in after):
        metrics |= {f"{name}_before": (logged.of(name) or [after[name]])[0], f"{name}_after": after[name]}
    spent = sum(logged.of("between_seconds")) + sum(logged.of("step_seconds"))
    return metrics | {
        "refreshes": source.refreshes,
        "index_staleness_steps": logged.mean("staleness_steps"),
        "index_staleness_seconds": logged.mean("staleness_seconds"),
        "top_k_change": logged.mean("top_k_change"),
        **({"index_recall": min(recalls)} if (recalls := logged.of("index_recall")) else {}),
        "wait_share": source.waited / max(spent, 1e-9),
        "collapsed": max(logged.of("collapsed"), default=0.0),
        "dropped_own": sum(logged.of("dropped_own")),
        "dropped_containing": sum(logged.of("dropped_containing")),
        "step_seconds": logged.mean("step_seconds"),
    }


def _held_out_rows(examples: Examples, job: Job) -> np.ndarray:
    """The masked sentences that every index and, at the end, the reader are measured with; training never sees them.

    At most a tenth of all, so that small corpora are left something to learn from.
    """
    rng = np.random.default_rng(seed_for(job.sections["run"].seed, "evaluate", "masked"))
    rows: np.ndarray = rng.permutation(len(examples.rows))
    return rows[: min(examples.options.masked_sentences, max(1, len(rows) // 10))]


class Best:
    """The models under which held-out masked sentences are likeliest, of those that find no less than the start.

    Likely by p(y|x) (equation 1), and what is found is hit@5.  The retriever is that of the index which was measured,
    the reader the one of the step at which it came into use.  The start is the first.  Where no sentence is held out
    nothing can be compared, and the last ones count as the best.

    Each has a folder of its own, and the old one goes when the new one is whole: a kill between the two leaves both.
    """

    def __init__(self, folder: Path, vocabulary_hash: str) -> None:
        self.folder, self.vocabulary_hash = folder, vocabulary_hash

    def _all(self) -> list[Path]:
        """The folders, the best one last; a killed process may leave two."""
        found = [path.parent for path in self.folder.glob(f"step-*/{FIGURES}")]
        return sorted(found, key=lambda path: (_rank_of(artifacts.read_json(path / FIGURES)), -_step_of(path)))

    @property
    def figures(self) -> dict[str, float]:
        """What was measured with them."""
        figures: dict[str, float] = artifacts.read_json(self._all()[-1] / FIGURES)
        return figures

    @property
    def step(self) -> int:
        """The retriever's step."""
        return _step_of(self._all()[-1])

    def offer(self, step: int, figures: Mapping[str, float], retriever: Retriever, reader: Reader) -> None:
        """Keep them if they are better than the best, and the first ones."""
        before = self._all()
        start = self.figures[START] if before else figures.get("hit_at_5", 0.0)
        worse = before and (figures.get("hit_at_5", start) < start or _rank_of(figures) <= _rank_of(self.figures))
        if worse and "hit_at_5" in figures:
            return
        mine = self.folder / f"step-{step:08d}"
        with artifacts.atomic_folder(mine) as stage:
            save_models(stage, retriever, reader, self.vocabulary_hash)
            artifacts.write_json(stage / FIGURES, {**figures, START: start})
        for old in before:
            if old != mine:
                shutil.rmtree(old)

    def models(self) -> tuple[Retriever, Reader]:
        """Both, as they were kept."""
        return load_models(self._all()[-1], self.vocabulary_hash)

    def told(self, last: Mapping[str, float]) -> str:
        """Which step's models are handed on instead of the last ones, and why."""
        figures = self.figures
        which = "the start's models are" if self.step == 0 else f"the models of step {self.step} are"
        return (
            f"{which} handed on: held-out masked sentences have hit@5 {figures['hit_at_5']:.3f} and log p(y|x) "
            f"{figures['held_out_log_p']:.3f} with them, {last['hit_at_5']:.3f} and {last['held_out_log_p']:.3f} at "
            "the end"
        )


@contextmanager
def evaluating(realm: Realm) -> Iterator[None]:
    """Both models in evaluation mode, and back as they were."""
    modes = realm.retriever.training, realm.reader.training
    realm.retriever.eval()
    realm.reader.eval()
    try:
        yield
    finally:
        realm.retriever.train(modes[0])
        realm.reader.train(modes[1])


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _rank_of(figures: Mapping[str, float]) -> float:
    return figures.get("held_out_log_p", 0.0)


def _drawn(examples: Examples, seed: int) -> list[Example]:
    """The masked sentences that the recall of an approximate index is measured with."""
    rng = np.random.default_rng(seed_for(seed, "index", "queries"))
    return [examples.draw(rng) for _ in range(QUERIES)]


def _candidates(
    snapshot: Snapshot, masked: Sequence[Example], realm: Realm, index: Index, dtype: torch.dtype
) -> list[list[int]]:
    """What an index finds for masked sentences, at least 5 passages; trivial candidates never count."""
    query = embed(index.retriever.query, query_sequences(realm.queries(masked)), dtype)
    options = replace(realm.options, exclude_trivial=True, candidates=max(6, realm.options.candidates))
    return Candidates(snapshot, options, realm.words).retrieve(masked, query, index)


def _masked_words(job: Job, masked: Sequence[Example], realm: Realm, index: Index) -> dict[str, float]:
    """``Realm.guess`` of the fixed masked sentences, their means."""
    if not masked:
        return {}
    bar = job.report.progress("masked sentences", len(masked))
    read = realm.options.candidates - int(realm.options.null_document)
    realm.retriever.eval()
    realm.reader.eval()
    found: list[dict[str, float]] = []
    for example, row in zip(masked, _candidates(realm.snapshot, masked, realm, index, realm.dtype), strict=True):
        found.append(realm.guess(example, row[:read]))
        bar(1)
    return {name: float(np.mean([one[name] for one in found])) for name in found[0]}


def _measure(
    job: Job, snapshot: Snapshot, masked: Sequence[Example], realm: Realm, best: Best
) -> Callable[[Index], dict[str, float]]:
    """recall@5 on the dev questions, hit@5 and log p(y|x) on held-out masked sentences, for an index as it is adopted.

    recall@5 is that of the embeddings alone.  What is measured is offered to ``best``.
    Of an approximate index also ``index_recall``, that of the exact search's results.
    """
    run_options = job.sections["run"]
    questions = read_questions([job.inputs["questions.dev"]], format=job.sections["questions"].format)
    answers_are_expressions(questions)  # one rule for all
    queries = question_queries(snapshot, questions, realm.options.query_wordpieces)
    dtype = prepare(run_options)[1]
    sources, most = Sources(snapshot), max(len(question.not_in) for question in questions)

    def measure(index: Index) -> dict[str, float]:
        ids = sources.left_out(questions, rank(index.retriever, index.passages, queries, 5 + most, dtype))
        hits = hits_at(first_hit_ranks(questions, ids, snapshot.text, rule=questions[0].match_rule), 5)
        figures = {"recall_at_5": float(hits.mean())}
        if isinstance(index.passages, Approximate):
            figures["index_recall"] = index.passages.recipe.recall
        if masked:
            figures |= _measure_masked(masked, _candidates(snapshot, masked, realm, index, dtype), realm)
        best.offer(index.step, figures, index.retriever, realm.reader)
        return figures

    return measure


def _measure_masked(masked: Sequence[Example], candidates: Sequence[Sequence[int]], realm: Realm) -> dict[str, float]:
    """hit@5, and log p(y|x) of the first ``WATCHED``, of masked sentences with what was found for them."""
    hit = [
        any(contains(realm.snapshot.body(p), e.targets) for p in row[:5])
        for e, row in zip(masked, candidates, strict=True)
    ]
    read = realm.options.candidates - int(realm.options.null_document)
    with evaluating(realm):
        pairs = zip(masked[:WATCHED], candidates, strict=False)
        log_p = [realm.guess(example, row[:read])["masked_log_p"] for example, row in pairs]
    return {"hit_at_5": float(np.mean(hit)), "held_out_log_p": float(np.mean(log_p))}


def _final_index(retriever: Retriever, snapshot: Snapshot, dtype: torch.dtype, step: int) -> Index:
    return Index(step, Exact(embed_corpus(retriever, snapshot, dtype)), retriever, time.time(), True)
