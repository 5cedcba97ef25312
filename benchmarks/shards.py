"""Tagging and embedding a corpus by several processes: seconds with helpers against those of a stage alone.

    python benchmarks/shards.py --passages 20000 --processes 2

Generated passages, encoders of BERT-mini's width and depth with random weights, one thread each. The helpers are index
builders that follow the stage's offer; they are there before it begins, and their start at the offer (some seconds,
most of them torch's import) counts. Sides take turns; seconds are by the clock. Both sides must make the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import against
from against import Row

SHAPE = {"width": 256, "layers": 4, "heads": 4}
PARAMS = Path(__file__).parents[1] / "params.yaml"


def corpus(folder: Path, passages: int) -> Any:
    """A snapshot of so many generated documents, each of them a passage of some 40 wordpieces."""
    import generated
    import numpy as np

    from realmops.artifacts import atomic_folder
    from realmops.corpus.snapshot_reader import Snapshot
    from realmops.corpus.snapshot_writer import write_snapshot
    from realmops.readers.sources import list_sources

    rng = np.random.default_rng(0)
    lines = [json.dumps({"title": f"title {n}", "text": generated.text_of(40, rng)}) for n in range(passages)]
    documents = folder / "documents.jsonl"
    documents.write_text("\n".join(lines) + "\n")
    with atomic_folder(folder / "corpus") as stage:
        write_snapshot(
            list_sources(documents, "auto"), stage, vocabulary=generated.vocabulary(),
            block_wordpieces=64,
        )  # fmt: skip
    return Snapshot.open(folder / "corpus")


def models(snapshot: Any) -> dict[str, Mapping[str, bytes]]:
    """By work, the files of a model with random weights."""
    from realmops import config
    from realmops.model.build import build_encoder, build_models
    from realmops.model.retriever_files import TextFormat, retriever_files
    from realmops.options import BertOptions
    from realmops.train.tagger import Tagger, tagger_files

    values = config.load_params(PARAMS)
    bert, retriever, reader = BertOptions(**SHAPE), values.retriever, values.reader
    vocabulary = snapshot.tokenizer.get_vocab_size()
    embedder = build_models(bert, retriever, reader, vocabulary, 0)[0]
    tagger = Tagger(build_encoder(retriever.init, bert, vocabulary, 0)[0], ["O", "B-NAME", "I-NAME"])
    return {"tagging": tagger_files(tagger), "embedding": retriever_files(embedder, TextFormat.of(snapshot))}


def seconds(name: str, snapshot: Any, model: Mapping[str, bytes], helpers: int) -> tuple[float, str, str]:
    """By the clock, with a digest of what was made, and which share of it the helpers have made."""
    import torch

    from realmops.artifacts import read_json
    from realmops.refresh.shards import ShardSettings, compute_in_shards
    from realmops.stages.sharded_work import WORKS

    with tempfile.TemporaryDirectory() as place:
        offer, alive = Path(place) / "offer", [Path(place) / f"alive-{n}" for n in range(helpers)]
        words = [sys.executable, "-m", "realmops", "index-builder", "--follow", offer, "--alive"]
        processes = [subprocess.Popen([*map(str, words), str(one)], stderr=subprocess.DEVNULL) for one in alive]
        try:
            while not all(one.exists() for one in alive):
                time.sleep(0.05)
            start, digest = time.perf_counter(), hashlib.sha256()
            work = ShardSettings(Path(place) / "shards", offer, torch.device("cpu"), torch.float32, 1, print)
            for files in compute_in_shards(work, name, WORKS[name], snapshot, model):
                for content in files.values():
                    digest.update(content)
            took = time.perf_counter() - start
            manifests = (Path(place) / "shards").glob("*/parts/*/manifest.json")
            writers = [read_json(path)["writer"] for path in manifests]
        finally:
            for process in processes:
                process.terminate()
                process.wait()
        by_helpers = len(writers) - writers.count("trainer")
        return took, digest.hexdigest(), f"helpers made {by_helpers} of {len(writers)} shards"


def compare(name: str, snapshot: Any, model: Mapping[str, bytes], processes: int, repeats: int) -> Row:
    """Some processes against one; AssertionError when they make other bytes."""
    made = set()
    shares = []

    def side(helpers: int) -> float:
        took, digest, share = seconds(name, snapshot, model, helpers)
        made.add(digest)
        shares.append(share)
        return took

    ours, theirs = against.interleave([lambda: side(processes - 1), lambda: side(0)], repeats)
    if len(made) != 1:
        raise AssertionError(f"{name}: {processes} processes and one make other bytes")
    what = f"{name} {len(snapshot):,} passages, {processes} processes"
    return Row(what, "one process", "s", ours, theirs, note="; ".join(shares[::2]))


def measure(arguments: argparse.Namespace) -> list[Row]:
    """One row for each work."""
    against.one_thread()
    with tempfile.TemporaryDirectory() as folder:
        snapshot = corpus(Path(folder), arguments.passages)
        return [
            compare(name, snapshot, model, arguments.processes, arguments.repeats)
            for name, model in models(snapshot).items()
        ]


def options(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--passages", type=int, default=20_000, help="of the corpus (%(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="the stage and its helpers (%(default)s)")


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    against.command(__doc__ or "", "shards", measure, options)
