"""A minute of measuring for ``realmops plan``: the code that trains and embeds, at the shapes of a params file."""

from __future__ import annotations

import json
import resource
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from realmops import artifacts
from realmops.artifacts import seed_for
from realmops.bert import PRECISIONS, device_and_dtype, tune_process
from realmops.commands.plan.scales import Measured
from realmops.config import BertOptions, Optimiser, Pretrain, RunOptions, SnapshotOptions, parse_section
from realmops.corpus.formats import sources
from realmops.corpus.pretrained import read_encoder_vocabulary
from realmops.corpus.sample import build_world
from realmops.corpus.snapshot import Snapshot
from realmops.corpus.snapshot_writer import write_snapshot
from realmops.corpus.spans import Spans, SpansWriter
from realmops.corpus.vocabulary import UNCASED, train_vocabulary
from realmops.encoders import encoder_folder
from realmops.index import lexical
from realmops.index.approximate import memory_of
from realmops.index.embed import document_sequences, embed_documents
from realmops.index.lexical_writer import write_bm25
from realmops.index.mips import exact
from realmops.model.files import build_models
from realmops.model.retriever import Retriever
from realmops.stages import STAGES, Report
from realmops.train.loop import Context
from realmops.train.pretrain import Examples, Index, Realm, depth, pretrain

ROWS = 2048  # passages of a snapshot that are looked at
_TOGETHER = 8192  # wordpieces of a call that is timed
SEARCHED = 1 << 18  # passages
SUBJECTS = 150  # of the invented text
JOINED = 40  # its passages of two sentences that make one document
SHARES = {"documents": 0.4, "steps": 0.5, "search": 0.1}  # of the time
MOST_STEPS = 1000


def calibrate(values: Mapping[str, Mapping[str, Any]], root: Path, seconds: float, report: Report) -> Measured:
    """Measure for about so many seconds, longer where two steps take longer.

    Lengths are those of the snapshot under ``root`` or, where there is none, of invented text that is cut into passages
    of ``snapshot.block_wordpieces``. Raises ValueError when the encoder cannot be loaded or does not fit the snapshot.
    """
    run: RunOptions = parse_section("run", values["run"])
    options: Pretrain = parse_section("pretrain", values["pretrain"])
    bert: BertOptions = parse_section("bert", values["bert"])
    tune_process(run.threads)
    device, dtype = device_and_dtype(run)
    told = report.progress("calibration", len(SHARES) + 2)
    with tempfile.TemporaryDirectory(prefix="realmops-plan-") as name:
        work = Path(name)
        corpus = root / STAGES["snapshot"].folder / "corpus"
        there = (corpus / artifacts.MANIFEST).is_file()
        snapshot = Snapshot.open(corpus if there else _invented(values, bert, work), verify=False)
        vocabulary = snapshot.tokenizer.get_vocab_size()
        if not there and bert.init == "small":
            vocabulary = max(vocabulary, bert.vocabulary)
        projection, reading = (parse_section(section, values[section]) for section in ("retriever", "reader"))
        retriever, reader = build_models(bert, projection, reading, vocabulary, run.seed)
        retriever.to(device)
        reader.to(device)
        told(1)
        rng = np.random.default_rng(seed_for(run.seed, "plan"))
        rows: list[int] = rng.choice(len(snapshot), min(ROWS, len(snapshot)), replace=False).tolist()
        wordpieces = float(np.mean([len(tokens) for tokens, _ in document_sequences(snapshot, rows)]))
        rate = _documents_per_second(retriever, snapshot, rows, wordpieces, dtype, SHARES["documents"] * seconds)
        builder_bytes = _peak_bytes()
        told(1)
        spans = _spans(snapshot, work)
        optimiser: Optimiser = parse_section("optimiser", values["optimiser"])
        width = retriever.width

        def timed(batch_size: int, budget: float) -> float:
            """The median of steps of ``train.pretrain``, the first not counted."""
            generator = torch.Generator().manual_seed(run.seed)
            embedding_PE = torch.randn(min(ROWS, len(snapshot)), width, generator=generator)
            source = _Fixed(Index(0, exact(embedding_PE.to(device), retriever.vectors), retriever, time.time(), False))
            watch = _Watch(budget)
            context = Context("plan", run.seed, device, dtype, _Nowhere(), watch, lambda steps: None)
            steady = _steady(options, batch_size)
            realm = Realm(retriever.train(), reader.train(), snapshot, steady, dtype)
            examples = Examples(snapshot, spans, steady)
            with suppress(_Enough):
                pretrain(
                    context, realm, examples, optimiser, source, evaluate=lambda index: {}, warn=lambda message: None
                )
            return median(watch.seconds[1:])

        budget = SHARES["steps"] * seconds
        started = time.perf_counter()
        one = timed(1, 0.0)
        left = budget - (time.perf_counter() - started)
        batch_size = max(1, min(options.batch_size, int(left / (3 * one))))
        step = timed(batch_size, left) if batch_size > 1 else one
        trainer_bytes = _peak_bytes()
        told(1)
        search = _search_seconds(retriever, options, device, SHARES["search"] * seconds)
        told(1)
        folders = (snapshot.folder, snapshot.folder.with_name(lexical.FOLDER))
        size = sum(path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file())
        told(1)
        towers = [retriever.query] if retriever.shared else [retriever.query, retriever.document]
        return Measured(
            device=device.type,
            threads=run.threads,
            precision=PRECISIONS[dtype],
            lengths=f"those of {corpus}"
            if there
            else f"assumed: invented text in passages of up to snapshot.block_wordpieces={snapshot.block_wordpieces}",
            passage_wordpieces=wordpieces,
            documents_per_second=rate,
            batch_size=options.batch_size,
            measured_batch_size=batch_size,
            step_seconds=step * options.batch_size / batch_size,
            search_seconds_per_million=search * 1e6 / SEARCHED,
            passage_bytes=size / len(snapshot),
            embedding_width=width,
            parameter_bytes=sum(4 * p.numel() for module in (*towers, reader) for p in module.parameters()),
            trainer_bytes=trainer_bytes,
            builder_bytes=builder_bytes,
            host_memory=memory_of(torch.device("cpu")),
            device_memory=memory_of(device),
        )


def _steady(options: Pretrain, batch_size: int) -> Pretrain:
    """The options without what takes time now and then only; the words that are masked here need not recur."""
    steady = replace(options, batch_size=batch_size, steps=MOST_STEPS, refresh_every=MOST_STEPS)
    masking = "salient" if options.masking == "recurring" else options.masking
    return replace(steady, staleness_queries=0, retriever_delay=0, examples="corpus", masking=masking)


def _invented(values: Mapping[str, Mapping[str, Any]], bert: BertOptions, work: Path) -> Path:
    """A snapshot of invented text in long documents, so that nearly every passage is full."""
    options: SnapshotOptions = parse_section("snapshot", values["snapshot"])
    passages = build_world(0, SUBJECTS, 0.3, 0.2).passages
    lines = []
    for first in range(0, len(passages), JOINED):
        joined = passages[first : first + JOINED]
        lines.append(json.dumps({"title": joined[0].title, "text": " ".join(p.text for p in joined)}) + "\n")
    (work / "documents.jsonl").write_text("".join(lines))
    found = sources(work / "documents.jsonl", "jsonl")
    if bert.init == "small":
        vocabulary, casing = train_vocabulary(found, size=bert.vocabulary), UNCASED
    else:
        vocabulary, casing = read_encoder_vocabulary(encoder_folder(bert.init))
    folder = work / "snapshot"
    folder.mkdir()
    write_snapshot(
        found,
        folder,
        work=work / "growing",
        vocabulary=vocabulary,
        casing=casing,
        block_wordpieces=options.block_wordpieces,
    )
    write_bm25(folder.with_name(lexical.FOLDER), Snapshot.open(folder, verify=False))
    return folder


def _documents_per_second(
    retriever: Retriever, snapshot: Snapshot, rows: list[int], wordpieces: float, dtype: torch.dtype, budget: float
) -> float:
    """Some full batches of passages of so many wordpieces at a time; a small call before is not counted."""
    together = min(len(rows), max(1, round(_TOGETHER / wordpieces)))
    done, first, spent = 0, 0, 0.0
    embed_documents(retriever, snapshot, rows[:4], dtype)
    while spent < budget or not done:
        chosen = [rows[(first + i) % len(rows)] for i in range(together)]
        first += together
        started = time.perf_counter()
        embed_documents(retriever, snapshot, chosen, dtype)
        spent += time.perf_counter() - started
        done += together
    return done / spent


def _spans(snapshot: Snapshot, work: Path) -> Spans:
    """One word of every sentence of the first passages: which word is masked costs nothing."""
    folder = work / "spans"
    folder.mkdir()
    some = min(ROWS, len(snapshot))
    with SpansWriter(folder) as writer:
        for passage in range(some):
            chars, sentences = snapshot.chars(passage), snapshot.sentences(passage)
            words = [(int(chars[first, 0]), int(chars[first, 1]), "WORD") for first, end in sentences if first < end]
            writer.add(words, chars, sentences, int(snapshot.sentence_offsets[passage]))
        writer.add_without(len(snapshot) - some)
        writer.close(corpus_hash=snapshot.corpus_hash, vocabulary_hash=snapshot.vocabulary_hash)
    return Spans.open(folder, verify=False)


class _Enough(Exception):
    """The time is used up."""


class _Watch:
    """A journal that ends the training: two steps at least, and no new one when the time is used up."""

    def __init__(self, budget: float) -> None:
        self.budget = budget
        self.seconds: list[float] = []

    def log(self, step: int, **metrics: float) -> None:
        self.seconds.append(metrics["step_seconds"])
        if len(self.seconds) > 1 and sum(self.seconds) >= self.budget:
            raise _Enough

    def position(self) -> int:
        return 0

    def truncate(self, position: int) -> None:
        pass


class _Nowhere:
    """No checkpoints."""

    def restore(self) -> dict[str, bytes] | None:
        return None

    def save(self, step: int, files: Mapping[str, bytes]) -> None:
        pass


class _Fixed:
    """An index of invented embeddings that stays."""

    def __init__(self, index: Index) -> None:
        self.index = index

    def at_step(self, step: int, retriever: Retriever) -> Index | None:
        return self.index if step == 0 else None


def _search_seconds(retriever: Retriever, options: Pretrain, device: torch.device, budget: float) -> float:
    """Exact search of one step's queries in ``SEARCHED`` passages."""
    generator = torch.Generator().manual_seed(0)
    passages = exact(torch.randn(SEARCHED, retriever.width, generator=generator).to(device), retriever.vectors)
    query_QE = torch.randn(options.batch_size, retriever.query.width, generator=generator).to(device)
    found: list[float] = []
    while len(found) < 3 or sum(found) < budget:
        started = time.perf_counter()
        passages.search(query_QE, depth(options))[1].cpu()
        found.append(time.perf_counter() - started)
    return median(found)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
