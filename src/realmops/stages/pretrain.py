"""Stage ``pretrain``: REALM, with the index builder beside it over the exchange."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from realmops.artifacts import seed_for
from realmops.config import Pretrain
from realmops.corpus.questions import answers_are_expressions, read_questions
from realmops.corpus.snapshot import Snapshot
from realmops.corpus.wordpieces import contains
from realmops.evaluate.retrieval import first_hit_ranks, hits_at
from realmops.index.approximate import QUERIES, Approximate, index_type
from realmops.index.builder import MISCONFIGURED
from realmops.index.embed import embed, query_sequences
from realmops.index.exchange import Exchange, Fenced
from realmops.index.mips import Exact, PassageIndex
from realmops.index.staleness import generation_in_use
from realmops.index.trainer import Policy, Trainer
from realmops.index.versions import Version
from realmops.model.files import load_models, retriever_files, retriever_from_files, save_models
from realmops.model.retriever import Retriever
from realmops.stages import Job
from realmops.stages.builder import EMBEDDINGS, identity
from realmops.stages.common import (
    JournalValues,
    context,
    embed_corpus,
    embeddings_in,
    open_snapshot,
    open_spans,
    prepare,
    question_queries,
    rank,
    searchable,
)
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

BUILDER_LOG = "index-builder.log"
QUIET_SECONDS = 5.0  # a shorter wait is not worth a line


def run(job: Job) -> dict[str, Any]:
    """Pre-train and write both models; returns utility, staleness, refreshes and recall before and after."""
    options: Pretrain = job.sections["pretrain"]
    device, dtype = prepare(job.sections["run"])
    snapshot = open_snapshot(job)
    examples = _examples(job, snapshot)
    retriever, reader = load_models(job.inputs["ict"], snapshot.vocabulary_hash)
    retriever.to(device).train()
    reader.to(device).train()
    surroundings = context(job, "pretrain", options.steps, "pre-training")
    realm = Realm(retriever, reader, snapshot, options, dtype)
    asked = _drawn(examples, job.sections["run"].seed)

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
        )

    team = surroundings.team
    if not team.leads:
        train(surroundings, SharedSource(team, None, passages, device), lambda index: {})
        return {}
    width = retriever.query.projection.out_features
    index_type(job.sections["index"], len(snapshot), width, device)  # what is wrong with it is said before training
    fixed = _fixed_examples(_examples(job, snapshot, masking="salient", exclude_trivial=True), job)
    measure = _measure(job, snapshot, fixed, realm)
    root = job.work / "exchange" if options.exchange == "auto" else Path(options.exchange)
    card = identity(
        snapshot,
        run_key=job.work.name,
        embedding_width=width,
        precision={torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype],
        threads=job.sections["run"].threads,
        part_rows=options.shard_rows,
    )
    policy = Policy(options.adopt, options.max_staleness_steps, options.on_stale, options.builder_timeout)
    child = ChildBuilder(root, snapshot.folder, job.work / BUILDER_LOG) if options.builder == "child" else None

    def on_wait(message: str, seconds: float) -> None:
        if child is not None:
            child.keep_alive()
        if seconds >= QUIET_SECONDS:
            job.report.say(message)

    trainer = Trainer(Exchange.open(root, card, grace=0.0 if options.builder == "child" else 120.0), policy, on_wait)
    source = ExchangeSource(trainer, options, snapshot.vocabulary_hash, device, passages)
    surroundings = replace(surroundings, checkpoints=source)
    try:
        with child or nullcontext():
            train(surroundings, SharedSource(team, source, passages, device) if team.size > 1 else source, measure)
            trainer.finish("done")
    except (ValueError, TimeoutError, ChildProcessError, RuntimeError) as error:
        with suppress(Fenced):  # the last word is the successor's
            trainer.finish("failed", str(error))
        raise
    save_models(job.out, retriever, reader, snapshot.vocabulary_hash)
    final = _final_index(retriever, snapshot, dtype, options.steps)
    return _metrics(job, measure(final), source) | _masked_words(job, fixed, realm, final)


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
    for name in ("recall_at_5", "hit_at_5"):
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


class ExchangeSource:
    """The trainer's side of the exchange as the training loop wants it: checkpoints, and an index for each step."""

    def __init__(
        self,
        trainer: Trainer,
        options: Pretrain,
        vocabulary_hash: str,
        device: torch.device,
        passages: Callable[[Tensor, Retriever], PassageIndex],
    ) -> None:
        self.trainer, self.options, self.vocabulary_hash, self.device = trainer, options, vocabulary_hash, device
        self.passages = passages  # from the embeddings of a generation and its retriever
        self.waited = 0.0  # seconds, in all lives of the run
        self.refreshes = 0
        self._step: int | None = None  # of the index in use

    def restore(self) -> dict[str, bytes] | None:
        """The newest checkpoint's files."""
        version = self.trainer.restore()
        if version is None:
            return None
        self.refreshes = version.meta["trainer"]["refreshes"]
        self.waited = version.meta["trainer"]["waited"]
        return version.files

    def save(self, step: int, files: Mapping[str, bytes]) -> None:
        """Commit a checkpoint to the exchange."""
        self.trainer.save_checkpoint(step, files, {"refreshes": self.refreshes, "waited": self.waited})

    def at_step(self, step: int, retriever: Retriever) -> Index | None:
        """Publish the weights when it is time, and adopt an index when one is due."""
        self.trainer.beat(step)
        if self._publishes(step):
            files = retriever_files(retriever, self.vocabulary_hash)
            self.trainer.publish_weights(step, files, {"published": time.time()})
        used = self.trainer.index_step
        started = time.perf_counter()
        version = self._due(step)
        if self.options.adopt == "as_soon_as_ready":
            new = step == 0 or (version is not None and version.step != used)
        else:
            new = step == 0 or self._generation(step) != self._generation(step - 1)
        self.waited += time.perf_counter() - started
        if version is None:
            return None
        self._step = version.step
        self.refreshes += int(new and step > 0)
        embedding_PE = embeddings_in(version.files[EMBEDDINGS])
        searcher = retriever_from_files(version.files).to(self.device).eval()
        passages = self.passages(embedding_PE, searcher)
        return Index(version.step, passages, searcher, float(version.meta["published"]), new)

    def _due(self, step: int) -> Version | None:
        if self.options.adopt == "as_soon_as_ready":
            return self.trainer.newest_index(step)
        wanted = self._generation(step)
        return None if wanted == self._step else self.trainer.index_for(wanted)

    def _publishes(self, step: int) -> bool:
        """At step 0 and every ``refresh_every`` steps; not while the retriever stands still, nor what nobody adopts."""
        if step == 0 or self.trainer.lacks_index:
            return True
        in_time = self.options.adopt != "fixed_lag" or step + self.options.lag < self.options.steps
        return step % self.options.refresh_every == 0 and step > self.options.retriever_delay and in_time

    def _generation(self, step: int) -> int:
        """The step whose weights the index of ``step`` is made from, under ``fixed_lag``."""
        wanted = generation_in_use(step, refresh_every=self.options.refresh_every, lag=self.options.lag)
        return wanted if wanted > self.options.retriever_delay else 0


def _fixed_examples(examples: Examples, job: Job) -> list[Example]:
    """The masked sentences that every index and, at the end, the reader are measured with."""
    rng = np.random.default_rng(seed_for(job.sections["run"].seed, "evaluate", "masked"))
    rows = rng.permutation(len(examples.rows))[: examples.options.masked_sentences]
    return [examples.example(int(row), rng) for row in rows]


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
    return Candidates(snapshot, options).retrieve(masked, query, index)


def _masked_words(job: Job, masked: Sequence[Example], realm: Realm, index: Index) -> dict[str, float]:
    """``Realm.guess`` of the fixed masked sentences, their means."""
    bar = job.report.progress("masked sentences", len(masked))
    read = realm.options.candidates - int(realm.options.null_document)
    realm.retriever.eval()
    realm.reader.eval()
    found: list[dict[str, float]] = []
    for example, row in zip(masked, _candidates(realm.snapshot, masked, realm, index, realm.dtype), strict=True):
        found.append(realm.guess(example, row[:read]))
        bar(1)
    return {name: float(np.mean([one[name] for one in found])) for name in (found[0] if found else ())}


def _measure(
    job: Job, snapshot: Snapshot, masked: Sequence[Example], realm: Realm
) -> Callable[[Index], dict[str, float]]:
    """recall@5 on the dev questions and hit@5 on fixed masked sentences, for an index with its own query encoder.

    Of an approximate index also ``index_recall``, that of the exact search's results.
    """
    run_options = job.sections["run"]
    questions = read_questions([job.inputs["questions.dev"]], format=job.sections["questions"].format)
    answers_are_expressions(questions)  # one rule for all
    queries = question_queries(snapshot, questions, realm.options.query_wordpieces)
    dtype = prepare(run_options)[1]

    def measure(index: Index) -> dict[str, float]:
        ids = rank(index.retriever, index.passages, queries, 5, dtype)
        hits = hits_at(first_hit_ranks(questions, ids, snapshot.text, rule=questions[0].match_rule), 5)
        hit = [
            any(contains(snapshot.body(p), e.targets) for p in row[:5])
            for e, row in zip(masked, _candidates(snapshot, masked, realm, index, dtype), strict=True)
        ]
        recall = {"index_recall": index.passages.recipe.recall} if isinstance(index.passages, Approximate) else {}
        return {"recall_at_5": float(hits.mean()), "hit_at_5": float(np.mean(hit)), **recall}

    return measure


def _final_index(retriever: Retriever, snapshot: Snapshot, dtype: torch.dtype, step: int) -> Index:
    return Index(step, Exact(embed_corpus(retriever, snapshot, dtype)), retriever, time.time(), True)


class ChildBuilder:
    """The index builder as a child process: ends with this one, and is started again when it was killed."""

    MOST_STARTS = 20

    def __init__(self, root: Path, snapshot: Path, log: Path) -> None:
        self.log, self.starts = log, 0
        arguments = ["--exchange", str(root), "--snapshot", str(snapshot), "--watch-parent", str(os.getpid())]
        self.command = [sys.executable, "-m", "realmops", "index-builder", *arguments]

    def __enter__(self) -> ChildBuilder:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _start(self) -> None:
        self.starts += 1
        with open(self.log, "ab") as file:
            self.process = subprocess.Popen(
                self.command,
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "HOSTNAME": "child"},
            )

    def keep_alive(self) -> None:
        """Start it again when it has ended; ChildProcessError when that is of no use."""
        code = self.process.poll()
        if code is None:
            return
        if code == MISCONFIGURED or self.starts >= self.MOST_STARTS:
            last = self.log.read_text(errors="replace").splitlines()[-5:]
            raise ChildProcessError(
                f"the index builder ended with exit code {code} after {self.starts} starts:\n" + "\n".join(last)
            )
        self._start()
