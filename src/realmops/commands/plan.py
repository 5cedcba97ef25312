"""What a corpus takes: a minute of measuring here, at the shapes of a params file; the rest is proportion.

Shape suffixes: P passages, Q queries, E embedding width.
"""

import json
import math
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.table import Table

from realmops.artifacts import MANIFEST, seed_for
from realmops.commands.duration import seconds_of, sizes_of, told, work_of
from realmops.config import Pretrain, Values, parse_section
from realmops.corpus.masking import mask_positions
from realmops.corpus.sample import build_world
from realmops.corpus.snapshot import Snapshot
from realmops.encoders.devices import PRECISIONS, autocast, device_and_dtype, tune_process
from realmops.encoders.packed import Packed
from realmops.index import lexical
from realmops.index.approximate import TYPES, fitting_type, memory_of, searches_on_gpu
from realmops.index.embed import document_embedding, document_sequences, no_progress
from realmops.index.exchange import KEPT
from realmops.index.mips import exact
from realmops.model.files import build_models
from realmops.model.reader import Masked, Reader
from realmops.model.retriever import Retriever
from realmops.stages import STAGES, Report
from realmops.stages.runner import run_stage
from realmops.train.candidates import Candidates, depth
from realmops.train.examples import Example
from realmops.train.optimiser import BertAdamW, Group, Schedule
from realmops.train.realm import Realm

Figures = dict[str, Any]
PASSAGES = (1_000_000, 13_000_000, 100_000_000, 1_000_000_000)
REFRESH_STEPS = 500  # the paper's
STATES = 3  # of each parameter in a checkpoint: itself and Adam's two moments
LINK_BYTES = 256  # of a passage in hnsw's graph
ROWS = 2048  # passages of a snapshot that are looked at
TOGETHER = 8192  # wordpieces that are embedded at a time
LEARNED = 2048  # wordpieces that a model learns from at a time
SEARCHED = 1 << 18  # passages
_COUNTS = ((1e9, 1e9, " B"), (1e6, 1e6, " M"), (1e4, 1e3, " k"), (0, 1, ""))  # from, unit, name
_SECONDS = ((2 * 86400, 86400, " days"), (2 * 3600, 3600, " h"), (2 * 60, 60, " min"), (0, 1, " s"))
_BYTES = ((1e12, 1e12, " TB"), (1e9, 1e9, " GB"), (0, 1e6, " MB"))


def calibrate(values: Values, root: Path, seconds: float, report: Report) -> Figures:
    """Measure for about so many seconds, longer where two steps take longer.

    Lengths are those of the snapshot under ``root`` or, where there is none, of invented text that is cut into passages
    of ``snapshot.block_wordpieces``. Raises ValueError when the encoder cannot be loaded or does not fit the snapshot.
    """
    run, options, bert, retriever_options, reader_options = (
        parse_section(name, values[name]) for name in ("run", "pretrain", "bert", "retriever", "reader")
    )
    tune_process(run.threads)
    device, dtype = device_and_dtype(run)
    with tempfile.TemporaryDirectory(prefix="realmops-plan-") as work:
        corpus = root / STAGES["snapshot"].folder / "corpus"
        there = (corpus / MANIFEST).is_file()
        snapshot = Snapshot.open(corpus if there else _invented(values, Path(work), report), verify=False)
        vocabulary = snapshot.tokenizer.get_vocab_size()
        if bert.init == "small" and not there:
            vocabulary = max(vocabulary, bert.vocabulary)  # invented text has few words
        retriever, reader = build_models(bert, retriever_options, reader_options, vocabulary, run.seed)
        retriever.to(device)
        reader.to(device)
        told = report.progress("calibration", 3)

        rng = np.random.default_rng(seed_for(run.seed, "plan"))
        rows = rng.choice(len(snapshot), min(ROWS, len(snapshot)), replace=False).tolist()
        wordpieces = float(np.mean([len(tokens) for tokens, _ in document_sequences(snapshot, rows)]))
        some = rows[: max(1, round(TOGETHER / wordpieces))]
        embedded = document_embedding(retriever, snapshot, dtype, many=True)
        embedded(some[:4], no_progress)
        embedding = _seconds_of(lambda: embedded(some, no_progress), 0.4 * seconds, uncounted=0)
        builder_bytes = _peak_bytes()  # before anything is trained: a peak never falls
        told(1)

        groups = [Group("retriever", retriever, 1e-5), Group("reader", reader, 1e-5)]
        optimiser = BertAdamW(groups, weight_decay=0.01, clip=1.0)

        def steps(batch_size: int, budget: float) -> float:
            realm = Realm(retriever.train(), reader.train(), snapshot, replace(options, batch_size=batch_size), dtype)
            return _seconds_of(lambda: training_step(realm, optimiser, rows, rng), budget)

        started = time.perf_counter()
        one = steps(1, 0.0)
        left = 0.5 * seconds - (time.perf_counter() - started)
        batch_size = max(1, min(options.batch_size, int(left / (3 * one))))
        step = steps(batch_size, left) if batch_size > 1 else one
        trainer_bytes = _peak_bytes()
        told(1)

        learning = _learning_rates(retriever, reader, snapshot, options, dtype, rows, 0.1 * seconds)
        passages = exact(torch.randn(SEARCHED, retriever.width).to(device), retriever.vectors)
        query_QE = torch.randn(options.batch_size, retriever.query.width).to(device)
        search = _seconds_of(lambda: passages.search(query_QE, depth(options))[1].cpu(), 0.1 * seconds)
        told(1)
        folders = (snapshot.folder, snapshot.folder.with_name(lexical.FOLDER))
        size = sum(path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file())
        assumed = f"assumed: invented text in passages of up to snapshot.block_wordpieces={snapshot.block_wordpieces}"
        return {
            "device": device.type,
            "types_on_gpu": [kind for kind in TYPES if searches_on_gpu(kind, retriever.query.width, device)],
            "threads": run.threads,
            "precision": PRECISIONS[dtype],
            "lengths": f"those of {corpus}" if there else assumed,
            "passage_wordpieces": wordpieces,  # mean, with title and special tokens
            "documents_per_second": len(some) / embedding,
            "batch_size": options.batch_size,
            "measured_batch_size": batch_size,  # of the steps that were timed; others in proportion
            "step_seconds": step * options.batch_size / batch_size,  # of a whole batch, search left out
            **learning,
            "search_seconds_per_million": search * 1e6 / SEARCHED,  # a batch's queries, exact
            "passage_bytes": size / len(snapshot),  # of a snapshot
            "embedding_width": retriever.width,
            "parameter_bytes": sum(4 * parameter.numel() for parameter in optimiser.parameters),
            "trainer_bytes": trainer_bytes,  # host memory of a process that trains, without an index
            "builder_bytes": builder_bytes,  # and of one that embeds
            "host_memory": memory_of(torch.device("cpu")),
            "device_memory": memory_of(device),  # of the GPU, or the host's
        }


def _learning_rates(
    retriever: Retriever,
    reader: Reader,
    snapshot: Snapshot,
    options: Pretrain,
    dtype: torch.dtype,
    rows: Sequence[int],
    budget: float,
) -> Figures:
    """How many wordpieces a second each model learns from: passages, and masked sentences with one passage each."""
    rng = np.random.default_rng(0)
    realm = Realm(retriever.train(), reader.train(), snapshot, options, dtype)
    examples = [_example(realm, passage, rng) for passage in rng.choice(rows, len(rows)).tolist()]
    documents = document_sequences(snapshot, [example.passage for example in examples])
    limit = options.reader_wordpieces
    sizes = np.cumsum([len(tokens) + len(one.x) for (tokens, _), one in zip(documents, examples, strict=True)])
    count = max(1, int(np.searchsorted(sizes, LEARNED)))
    examples, documents = examples[:count], documents[:count]
    batch = Packed([tokens for tokens, _ in documents], [segments for _, segments in documents])
    sentences, at, targets = zip(*((one.x, one.positions, one.targets) for one in examples), strict=True)
    masked = Masked(sentences, at, targets, realm.special, limit)
    bodies = [reader.document(snapshot, one.passage) for one in examples]
    read = sum(len(x) for x in sentences) + sum(min(len(body), limit) for body in bodies)

    def seconds_of(model: torch.nn.Module, loss: Callable[[], torch.Tensor]) -> float:
        optimiser = BertAdamW([Group("model", model, 1e-5)], weight_decay=0.01, clip=1.0)

        def step() -> None:
            with autocast(retriever.query.device, dtype):
                value = loss().float().sum()
            optimiser.zero_grad()
            value.backward()  # type: ignore[no-untyped-call]
            optimiser.step(0, Schedule(1, 0))
            value.item()  # waits for a GPU

        return _seconds_of(step, budget / 2)

    embedded = sum(len(tokens) for tokens, _ in documents)
    return {
        "retriever_wordpieces_per_second": embedded / seconds_of(retriever, lambda: retriever.documents(batch)),
        "reader_wordpieces_per_second": read / seconds_of(reader, lambda: reader.log_masked_pairs(masked, bodies)),
    }


def _invented(values: Values, work: Path, report: Report) -> Path:
    """A corpus of invented text in long documents, so that nearly every passage is full."""
    texts = build_world(0, 150, 0.3, 0.2).passages
    with open(work / "documents.jsonl", "w", encoding="utf-8") as file:
        for first in range(0, len(texts), 40):
            text = " ".join(one.text for one in texts[first : first + 40])
            file.write(json.dumps({"title": texts[first].title, "text": text}) + "\n")
    own = {"documents": "documents.jsonl", "format": "jsonl", "use_warmup": False, "whole_documents": False}
    sections = {"snapshot": {**values["snapshot"], **own}, "tracking": {**values["tracking"], "enabled": False}}
    run_stage("snapshot", {**values, **sections}, project=work, root=work, report=report)
    return work / STAGES["snapshot"].folder / "corpus"


def training_step(realm: Realm, optimiser: BertAdamW, rows: Sequence[int], rng: np.random.Generator) -> None:
    """One step of training with random passages: a trained retriever, too, finds others for each sentence."""
    options, reader = realm.options, realm.reader
    examples = [_example(realm, passage, rng) for passage in rng.choice(rows, options.batch_size).tolist()]
    found = rng.choice(rows, (options.batch_size, options.documents)).tolist()
    if reader.apart:
        found = Candidates(realm.snapshot, options).shared(examples, found)
    loss, _ = realm.loss(examples, found, retriever_learns=True, crops=rng)
    optimiser.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimiser.step(0, Schedule(1, 0))
    loss.item()  # waits for a GPU


def _example(realm: Realm, passage: int, rng: np.random.Generator) -> Example:
    """A sentence of a passage; which of its words is masked costs nothing."""
    snapshot, options = realm.snapshot, realm.options
    first, end = rng.choice([run for run in snapshot.sentences(passage) if run[0] < run[1]])
    original = snapshot.body(passage)[first:end]
    original = original[: min(options.query_wordpieces - 2, options.reader_wordpieces - 3)]
    continues = snapshot.continues(passage)[first : first + len(original)]
    at = mask_positions(options.masking, rng, (0, 1), continues, options.max_masks)
    x = original.copy()
    x[at] = realm.special.mask
    return Example(passage, original, x, at, original[at], "")


def _seconds_of(call: Callable[[], object], budget: float, uncounted: int = 1) -> float:
    """The median of calls until the budget is used up, the first ones not counted, and of one at least."""
    seconds: list[float] = []
    while len(seconds) <= uncounted or sum(seconds) < budget:
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return median(seconds[uncounted:])


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def scale(passages: int, index_type: str, refresh_every: int, measured: Figures) -> Figures:
    """What so many passages take, with an index of that type or, for ``auto``, of the one that fits.

    Staleness: an index is as old as its refresh took when it is adopted, and grows older until the next one, which
    comes after another refresh, but not before ``refresh_every`` steps. What memory and disk hold is said in ``notes``.
    """
    width, on_gpu = measured["embedding_width"], measured["device"] == "cuda"
    if index_type == "auto":
        index_type = fitting_type(passages, width, measured["device_memory"], on_gpu=on_gpu)
    search = measured["search_seconds_per_million"] * passages / 1e6
    step = measured["step_seconds"] + (search if index_type == "exact" else 0.0)
    refresh = passages / measured["documents_per_second"]
    age = refresh / step
    interval = max(float(refresh_every), age)
    wanted = passages / (REFRESH_STEPS * step)
    embeddings = 4.0 * passages * width
    copies = {  # of the embeddings, in the structure that is searched
        "exact": 1.5 if measured["precision"] == "bf16" and not on_gpu else 1.0,  # a CPU multiplies a copy in bf16
        "ivf": 1.0,
        "hnsw": 1 + LINK_BYTES / (4 * width),
        "pq": 1 / 8,
    }[index_type]
    there = on_gpu and index_type in ("exact", *measured["types_on_gpu"])
    host, gpu = (0.0, 2 * copies) if there else (2 * copies, 0.0)
    checkpoints = (KEPT + 1) * STATES * measured["parameter_bytes"]
    return {
        "passages": passages,
        "index_type": index_type,
        "search_seconds": search,
        "step_seconds": step,  # with search where that is exact; approximate search is not timed
        "refresh_seconds": refresh,  # by one builder
        "staleness_steps_mean": age + interval / 2,  # with that builder
        "staleness_steps_most": age + interval,
        "builders": math.ceil(wanted / measured["documents_per_second"]),  # for a refresh in REFRESH_STEPS steps
        "passages_per_second": wanted,  # that they embed together
        "trainer_bytes": measured["trainer_bytes"] + host * embeddings,
        "gpu_bytes": gpu * embeddings,  # for the index on the trainer's GPU
        "builder_bytes": float(measured["builder_bytes"]),
        "disk_bytes": passages * measured["passage_bytes"] + (KEPT + 6) * embeddings + checkpoints,
    }


def table(measured: Figures, scales: Sequence[Figures]) -> Table:
    """For rich's console: a column for each size."""
    host, device = measured["host_memory"], measured["device_memory"]
    rows: dict[str, Callable[[Figures], str]] = {
        "index.type": lambda s: s["index_type"],
        "seconds per step": lambda s: "> " * (s["index_type"] != "exact") + _shown(s["step_seconds"], _SECONDS),
        "  exact search of a step": lambda s: _shown(s["search_seconds"], _SECONDS),
        "refresh by one builder": lambda s: _shown(s["refresh_seconds"], _SECONDS),
        "  staleness then, mean, steps": lambda s: _shown(s["staleness_steps_mean"], _COUNTS),
        "  staleness then, at most, steps": lambda s: _shown(s["staleness_steps_most"], _COUNTS),
        f"builders for a refresh in {REFRESH_STEPS} steps": lambda s: f"{s['builders']:,}",
        "  passages/s, all builders": lambda s: _shown(s["passages_per_second"], _COUNTS),
        "host memory, trainer": lambda s: _shown(s["trainer_bytes"], _BYTES, host),
        "host memory, builder": lambda s: _shown(s["builder_bytes"], _BYTES, host),
        "GPUs, trainer and builders": lambda s: f"{s['builders'] + 1:,}",
        "GPU memory, trainer's index": lambda s: _shown(s["gpu_bytes"], _BYTES, device),
        "disk": lambda s: _shown(s["disk_bytes"], _BYTES),
    }
    title = f"One machine like this one ({measured['device']}, {measured['precision']})"
    shown = Table("passages", title=title, title_justify="left")
    for one in scales:
        shown.add_column(_shown(one["passages"], _COUNTS), justify="right")
    for name, value in rows.items():
        if measured["device"] == "cuda" or not name.startswith("GPU"):
            shown.add_row(name, *map(value, scales))
    return shown


def run_of(values: Values, project: Path, root: Path, measured: Figures) -> tuple[Figures, list[str]]:
    """How long the stages of these options take here, as figures and in words."""
    sizes = sizes_of(values, project, root)
    work = {} if sizes is None else work_of(values, sizes)
    seconds = seconds_of(work, measured, values["snapshot"]["workers"])
    counted = {} if sizes is None else {"passages": sizes.passages, "questions": dict(sizes.questions)}
    return {"seconds": seconds, **counted}, told(sizes, seconds, lambda time: _shown(time, _SECONDS))


def notes(measured: Figures, scales: Sequence[Figures]) -> list[str]:
    """What was measured, what was extrapolated, and what is left out."""
    timed, whole = measured["measured_batch_size"], measured["batch_size"]
    found = [
        f"Measured here ({measured['device']}, {measured['precision']}, {measured['threads']} CPU threads), one after "
        f"the other: {measured['documents_per_second']:.3g} passages/s embedded, "
        f"{measured['passage_wordpieces']:.0f} wordpieces each on average ({measured['lengths']}); "
        f"{_shown(measured['step_seconds'], _SECONDS)} per step of {whole} examples without search"
        f"{f', in proportion from steps of {timed}' if timed != whole else ''}; "
        f"{_shown(measured['search_seconds_per_million'], _SECONDS)} of exact search per step and million passages.",
        "Extrapolated: everything in the table, in proportion to the number of passages. A refresh is embedding alone, "
        "without reading and writing; builders are as fast as this machine, and the trainer uses none of their cores.",
        "Staleness is that of pretrain.adopt=as_soon_as_ready; with fixed_lag the trainer waits where a refresh takes "
        "more than pretrain.lag steps.",
        "Memory is that when the trainer has a new generation beside the one in use; embeddings that lie on the disk "
        "are in it for exact search alone, which reads them all. Disk: snapshot, checkpoints, the generations that the "
        "exchange keeps with the one in the making, the fine-tuned model's, and in the folder for temporary files two "
        "of the trainer and one of the builder.",
    ]
    if any(one["index_type"] != "exact" for one in scales):
        found.append(
            "Approximate search was not timed: where index.type is not exact, steps are without any search, and "
            "staleness and builders are upper bounds."
        )
    if any(max(one["trainer_bytes"], one["builder_bytes"]) > measured["host_memory"] for one in scales):
        found.append(f"* more than this machine has ({_shown(measured['host_memory'], _BYTES)}).")
    if measured["device"] == "cpu":
        found.append(
            "For the number of GPUs run this on a machine with one: its steps take another time, and so does the "
            f"refresh in {REFRESH_STEPS} of them."
        )
    return found


def _shown(number: float, units: Sequence[tuple[float, float, str]], there: float = math.inf) -> str:
    """In the first unit that the number is large enough for; with a star where it is more than there is."""
    unit, name = next((unit, name) for least, unit, name in units if number >= least)
    digits = f"{number / unit:,.0f}" if number >= 100 * unit else f"{number / unit:.3g}"
    return digits + name + " *" * (number > there)
