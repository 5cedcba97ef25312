"""What ten times the corpus costs: seconds of each part of the chain and the trainer's memory, size by size.

    python benchmarks/growth.py --sizes 2000 20000 200000
    python benchmarks/growth.py --sizes 20000 200000 2000000 --last snapshot --repeats 1
    python benchmarks/growth.py --sizes 10000 100000 1000000 --last served --repeats 1 --documents FILE FILE

Generated passages of about 30 wordpieces and encoders of one narrow layer, so that 200,000 passages take minutes.
Each size is a fresh root: the stages snapshot and tag, the embedding of all passages, 10 searches of 64 queries each,
evaluate's ranking of questions with all its match rules; then the fine-tuned model as a server has it: until it opens,
the median of an answer, and an update after one document was edited; at last the stage pretrain with its index builder:
seconds of one step. Snapshot, what is between it and the model, the model, who answers and pretrain have a process
each. The most memory is that of the snapshot, of who answers and of the trainer, what they map from disk included, the
trainer's with and without its embeddings (two generations in fp32, and exact search's copy). With --documents the
passages are those of JSON lines, again and again with other words in them where there are too few, and dates are tagged
alone. Sizes take turns: as many as --repeats, but no more than 60,000 passages allow, and one at least. A row compares
the turns of one size with the median of the size before it; the exponent is that of the size in the time (1: linear).
Seconds are by the clock.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import against
from against import Goal, Row

from realmops.progress import SilentReport

TURNS_OF = 60_000  # passages
QUERIES, SEARCHES, STEPS = 64, 10, 5
TIME, SPACE = 1.1, Goal(1.3, at_most=True)  # of the growth of the corpus; of the memory before
MEMORY, OWN = "trainer's memory", "trainer's memory without its embeddings"
SNAPSHOTS_MEMORY = "snapshot's memory"
ANSWERS_MEMORY = "memory of who answers"
SPACES = (MEMORY, OWN, SNAPSHOTS_MEMORY, ANSWERS_MEMORY)
PROJECT = Path(__file__).parents[1]
SMALL = {
    "run.device": "cpu",
    "bert.layers": 1,
    "bert.heads": 2,
    "sample.subjects": 60,
    "snapshot.warmup": "",
    "snapshot.whole_documents": True,
    "tag.steps": 1,
    "retriever.embedding_width": 128,
    "ict.steps": 1,
    "ict.reader_steps": 1,
    "pretrain.steps": STEPS,
    "pretrain.retriever_delay": 0,
    "pretrain.masked_sentences": 20,
    "finetune.epochs": 0.2,
    "tracking.enabled": False,
}
REAL = {"tag.method": "dates", "snapshot.block_wordpieces": 288}
UNTRAINED = {"pretrain.steps": 0}
ANSWERED = 40
SETTINGS = "settings.json"  # in a root: options of params.yaml beside those of SMALL


def values_of(root: Path, **more: Any) -> Any:
    """params.yaml made small, over the documents of the root."""
    from realmops import config

    small = SMALL | json.loads((root / SETTINGS).read_text()) | more
    settings = [f"{name}={json.dumps(value)}" for name, value in small.items()]
    return config.load_params(
        PROJECT / "params.yaml", settings=[*settings, f"snapshot.documents={root / 'documents.jsonl'}"]
    )


def stage(name: str, root: Path, **more: Any) -> dict[str, Any]:
    """Run one stage in this process."""
    from realmops.stages.runner import run_stage

    return run_stage(name, values_of(root, **more), project=PROJECT, root=root, report=SilentReport())


def seconds_of(call: Callable[[], Any]) -> tuple[float, Any]:
    """By the clock, and what the call gave."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def snapshot(root: Path) -> dict[str, float]:
    """The stage snapshot: its seconds, MiB of this process."""
    stage("sample", root)  # questions; and what it imports is not measured
    seconds, _ = seconds_of(lambda: stage("snapshot", root))
    return {"snapshot": seconds, SNAPSHOTS_MEMORY: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def chain(root: Path) -> dict[str, float]:
    """Everything between the snapshot and the trainer: seconds of each part."""
    import torch

    from realmops.corpus.snapshot_reader import Snapshot
    from realmops.devices import resolve_precision
    from realmops.evaluate.recall import RECALL_AT, hit_ranks_by_rule
    from realmops.model.reader_files import load_models
    from realmops.questions.question_sets import read_questions
    from realmops.search.embeddings import embed_corpus
    from realmops.search.exact import ExactIndex
    from realmops.search.inner_products import search
    from realmops.stages.common import question_queries, rank_passages

    found = {}
    found["tag"], _ = seconds_of(lambda: stage("tag", root))
    stage("ict", root)
    snapshot = Snapshot.open(root / "data" / "snapshot" / "corpus")
    retriever, _ = load_models(root / "models" / "ict", snapshot.vocabulary_hash)
    dtype = resolve_precision("auto", torch.device("cpu"), retriever.query.bert.width)
    found["embedding"], embedding_PE = seconds_of(lambda: embed_corpus(retriever, snapshot, dtype))
    query_QE = embedding_PE[:QUERIES] + 0.1
    found["search"], _ = seconds_of(lambda: [search(query_QE, embedding_PE, 16) for _ in range(SEARCHES)])
    questions = read_questions([root / "data" / "sample" / "questions.test.jsonl.gz"], format="jsonl")

    def retrieve() -> None:
        queries = question_queries(snapshot, questions, QUERIES)
        ranked_QK = rank_passages(retriever, ExactIndex(embedding_PE), queries, max(RECALL_AT), dtype)
        hit_ranks_by_rule(questions, ranked_QK, snapshot.text)

    found["evaluate's retrieval"], _ = seconds_of(retrieve)
    return found


def trainer(root: Path) -> dict[str, float]:
    """The stage pretrain: seconds of a step, MiB of this process."""
    import torch

    from realmops.corpus.snapshot_reader import Snapshot
    from realmops.search.exact import ExactIndex

    stage("pretrain", root)
    lines = map(json.loads, (root / "models" / "pretrain" / "metrics.jsonl").read_text().splitlines())
    step = statistics.median(line["step_seconds"] for line in lines if "step_seconds" in line)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    passages = len(Snapshot.open(root / "data" / "snapshot" / "corpus"))
    width = values_of(root).retriever.embedding_width
    copied = 2 if ExactIndex(torch.zeros(passages, width)).bf16_copy else 0
    return {"pre-training step": step, MEMORY: most, OWN: most - passages * width * (2 * 4 + copied) / 2**20}


def tuned(root: Path) -> dict[str, float]:
    """The stages up to evaluate: seconds of the index and of fine-tuning."""
    stage("pretrain", root, **UNTRAINED)
    found = {"finetune": seconds_of(lambda: stage("finetune", root, **UNTRAINED))[0]}
    stage("evaluate", root, **UNTRAINED)
    return found


def served(root: Path) -> dict[str, float]:
    """What a server does with a fine-tuned model: seconds of each part, MiB of this process."""
    from realmops.answering.opened_model import Query
    from realmops.commands.update import update
    from realmops.opening import open_run
    from realmops.questions.question_sets import read_questions

    def opened() -> Any:
        generation = open_run(root)
        generation.warm_up()
        generation.probe()
        return generation

    found = {}
    found["until a server answers"], generation = seconds_of(opened)
    questions = read_questions([root / "data" / "sample" / "questions.test.jsonl.gz"], format="jsonl")[:ANSWERED]
    each = [seconds_of(lambda one=one: generation.answer([Query(one.question)]))[0] for one in questions]
    found["an answer"] = statistics.median(each)
    found[ANSWERS_MEMORY] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    lines = (root / "documents.jsonl").read_text().splitlines(keepends=True)
    edited = json.loads(lines[0])
    (root / "documents.jsonl").write_text(
        json.dumps({**edited, "text": f"Edited. {edited['text']}"}) + "\n" + "".join(lines[1:])
    )
    values = values_of(root, **UNTRAINED)
    found["update"], _ = seconds_of(lambda: update(values, project=PROJECT, root=root, report=SilentReport()))
    return found


PARTS = {
    "snapshot": snapshot,
    "chain": chain,
    "tuned": tuned,
    "served": served,
    "trainer": trainer,
}  # each needs those before it


def write_repeated(path: Path, documents: Sequence[Path], size: int) -> None:
    """So many real passages; those of later rounds begin elsewhere and have some words of the passage behind them."""
    from encode import read_lines

    real = [line for file in documents for line in read_lines(file)]
    with open(path, "x", encoding="utf-8") as out:
        for number in range(size):
            turn, row = divmod(number, len(real))
            title, words = real[row]["title"], real[row]["text"].split()
            if turn:
                other, begin = real[(row + turn) % len(real)]["text"].split(), 13 * turn % len(words)
                words = words[begin:] + words[:begin]
                words[turn % 5 :: 5] = (other * len(words))[: len(words[turn % 5 :: 5])]
            line = {"id": str(number), "title": f"{title} {turn}" if turn else title, "text": " ".join(words)}
            out.write(json.dumps(line) + "\n")


def run(size: int, parts: Sequence[str], documents: Sequence[Path], width: int) -> dict[str, float]:
    """One size once: seconds of each part, and MiB."""
    import generated

    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        if documents:
            write_repeated(Path(folder) / "documents.jsonl", documents, size)
        else:
            generated.write_documents(Path(folder) / "documents.jsonl", size, 2)
        settings = {"bert.width": width} | (REAL if documents else {})
        (Path(folder) / SETTINGS).write_text(json.dumps(settings))
        for part in parts:
            words = [sys.executable, __file__, "--part", part, folder]
            told = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout
            found |= json.loads(told.splitlines()[-1])
    return found


def compare(size: int, before: int, ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> list[Row]:
    """The rows of two sizes."""
    growth = size / before
    rows = []
    for part in ours[0]:
        turns = tuple(turn[part] for turn in ours)
        base = statistics.median(turn[part] for turn in theirs)
        unit, note = "s", ""
        goal: Goal | None = Goal(round(TIME * growth, 3), at_most=True)
        if part in SPACES:
            unit, goal = "MiB", SPACE if part == OWN else None
        else:
            note = f"exponent {math.log(statistics.median(turns) / base) / math.log(growth):.2f}"
        rows.append(Row(f"{part}, {size:,}", f"{before:,}", unit, turns, (base,) * len(turns), goal, note))
    return rows


def measure(arguments: argparse.Namespace) -> list[Row]:
    """A row for each part and each size but the smallest."""
    sizes = sorted(arguments.sizes)
    turns: dict[int, list[dict[str, float]]] = {size: [] for size in sizes}
    for turn in range(arguments.repeats):
        for size in sizes:
            if turn < max(1, TURNS_OF // size):
                found = run(
                    size, list(PARTS)[: list(PARTS).index(arguments.last) + 1], arguments.documents, arguments.width
                )
                whole = sum(seconds for part, seconds in found.items() if part not in SPACES)
                turns[size].append({**found, "all parts": whole})
                shown = ", ".join(f"{part} {value:.5g}" for part, value in turns[size][-1].items())
                print(f"growth: {size:,} passages: {shown}", file=sys.stderr, flush=True)
    return [
        row for before, size in itertools.pairwise(sizes) for row in compare(size, before, turns[size], turns[before])
    ]


def options(parser: argparse.ArgumentParser) -> None:
    """What this benchmark takes."""
    parser.add_argument("--sizes", type=int, nargs="+", default=[2_000, 20_000, 200_000], help="passages (%(default)s)")
    parser.add_argument("--last", choices=PARTS, default="trainer", help="measure no part behind it (%(default)s)")
    parser.add_argument("--width", type=int, default=32, help="of the encoders (%(default)s)")
    parser.add_argument("--documents", type=Path, nargs="+", default=[], help="JSON lines with title and text")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--part"]:
        against.one_thread()
        print(json.dumps(PARTS[sys.argv[2]](Path(sys.argv[3]))))
    else:
        against.command(__doc__, "growth", measure, options)
