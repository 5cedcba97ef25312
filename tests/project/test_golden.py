"""Results of a seed: the sample corpus, its snapshot, the first batches and the first masks.

A change of any of them changes every figure that was published, so it is never by the way: `make golden` writes
fixtures/golden.json again, and the reason goes into the commit.
"""

import gzip
import hashlib
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from small_project import stage, toy_values, write_params
from small_world import PAPERS_READER, section, tiny_context

from realmops.artifacts import digest_of, seed_for
from realmops.corpus.snapshot_reader import Snapshot
from realmops.corpus.spans import Spans
from realmops.model import reader as reader_module
from realmops.model.build import build_models
from realmops.model.packed import PackedBatch
from realmops.sample.corpus import write_sample
from realmops.search.exact import ExactIndex
from realmops.train import inverse_cloze
from realmops.train.index_source import Index
from realmops.train.masked_sentences import Examples
from realmops.train.pretraining import pretrain
from realmops.train.realm import Realm

GOLDEN = Path(__file__).parents[1] / "fixtures" / "golden.json"
SEED = 0
STEPS = 2
SAMPLE = {"seed": SEED, "subjects": 60}
SNAPSHOT = {"documents": "data/sample/corpus.jsonl.gz", "warmup": "", "block_wordpieces": 48}
BERT = {"vocabulary": 600, "width": 8, "layers": 1, "heads": 1, "positions": 128}
ICT = {"steps": STEPS, "batch_size": 6, "neighbours": 2, "reader_steps": STEPS, "reader_batch_size": 6}
PRETRAIN = {"steps": STEPS, "batch_size": 6, "candidates": 3, "reader_wordpieces": 96}


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def sample_files(folder: Path) -> dict[str, str]:
    """Digests of the texts: compressed bytes are the compressor's."""
    return {
        path.name: digest(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
        for path in sorted(folder.iterdir())
        if path.suffix in (".gz", ".conll")
    }


def snapshot_digests(snapshot: Snapshot, spans: Spans) -> dict[str, str]:
    arrays = {"tokens": snapshot.tokens, "sentences": snapshot.sentence_rows, "date_spans": spans.rows}
    found = {name: digest(np.ascontiguousarray(array).tobytes()) for name, array in arrays.items()}
    return {"corpus_hash": snapshot.corpus_hash, "vocabulary_hash": snapshot.vocabulary_hash, **found}


class Seen:
    """Sequences of every batch that a loop encodes."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.batches: list[list[list[int]]] = []

    def packed(self, sequences: list[np.ndarray], *segments: list[np.ndarray]) -> PackedBatch:
        self.batches.append([s.tolist() for s in sequences])
        return PackedBatch(sequences, *segments)

    def summary(self) -> dict[str, Any]:
        tokenizer = self.snapshot.tokenizer
        first = " ".join(str(tokenizer.id_to_token(token)) for token in self.batches[0][0])
        return {"first": first, "digest": digest_of(self.batches), "batches": len(self.batches)}


class NoNeighbours:
    """The next passage instead of BM25's neighbours, whose scores are floating point."""

    def __init__(self, snapshot: Snapshot, folder: Path) -> None:
        self.count = len(snapshot)

    def draw(self, sentence: np.ndarray, own: int, rng: np.random.Generator) -> int:
        return (own + 1) % self.count


def first_batches(snapshot: Snapshot, spans: Spans) -> dict[str, Any]:
    """The inputs of the first steps of ict's two loops, and the masked sentences of pretrain's."""
    shape = section("bert", **BERT, dropout=0.0)
    size, papers_reader = snapshot.tokenizer.get_vocab_size(), section("reader", **PAPERS_READER)
    retriever, reader = build_models(shape, section("retriever", embedding_width=4), papers_reader, size, SEED)
    found: dict[str, Any] = {}
    for name in ("ict", "warm_start"):
        seen, context = Seen(snapshot), tiny_context(stream=name, seed=SEED)
        with (
            mock.patch.object(inverse_cloze, "PackedBatch", seen.packed),
            mock.patch.object(reader_module, "PackedBatch", seen.packed),
            mock.patch.object(inverse_cloze, "Neighbours", NoNeighbours),
        ):
            if name == "ict":
                inverse_cloze.train_retriever(context, retriever, snapshot, section("ict", **ICT))
            else:
                inverse_cloze.train_reader(context, reader, snapshot, spans, section("ict", **ICT), 96)
        found[name] = seen.summary()
    seen = Seen(snapshot)
    embedding = torch.zeros(len(snapshot), 4)

    class Source:
        def at_step(self, step: int, retriever: Any) -> list[Index]:
            return [Index(0, ExactIndex(embedding), retriever, 0.0, True)] if step == 0 else []

    with drawn(seen):
        context = tiny_context(stream="pretrain", seed=SEED)
        options = section("pretrain", **PRETRAIN, masking="salient")
        realm = Realm(retriever, reader, snapshot, options, context.dtype)
        examples = Examples(snapshot, spans, options)
        pretrain(context, realm, examples, Source(), evaluate=lambda index: {}, warn=lambda message: None)
    found["pretrain"] = seen.summary()
    return found


@contextmanager
def drawn(seen: Seen) -> Iterator[None]:
    """Context manager: record passage, masked sentence and targets that pretrain's loop draws."""
    usual = Examples.draw

    def draw(self: Examples, rng: np.random.Generator) -> Any:
        example = usual(self, rng)
        seen.batches.append([example.x.tolist(), example.targets.tolist(), [example.passage]])
        return example

    with mock.patch.object(Examples, "draw", draw):
        yield


def masks(snapshot: Snapshot, spans: Spans) -> dict[str, Any]:
    """Masked sentences under each scheme."""
    found = {}
    for scheme in ("salient", "random_token", "random_span", "matched_span"):
        seen = Seen(snapshot)
        with drawn(seen):
            examples = Examples(snapshot, spans, section("pretrain", **PRETRAIN, masking=scheme))
            rng = np.random.default_rng(seed_for(SEED, "golden", scheme))
            for _ in range(20):
                examples.draw(rng)
        found[scheme] = seen.summary()
    return found


def make(folder: Path) -> dict[str, Any]:
    """Return everything that golden.json has."""
    values = toy_values(sample=SAMPLE, snapshot=SNAPSHOT, bert=BERT, tag={"method": "dates"})
    write_params(folder / "params.yaml", values)
    with mock.patch("realmops.stages.sample.write_sample", partial(write_sample, warmup_worlds=1)):
        stage("sample", values, folder, folder)
    for name in ("snapshot", "tag"):
        stage(name, values, folder, folder)
    snapshot = Snapshot.open(folder / "data/snapshot/corpus")
    spans = Spans.open(folder / "data/spans/corpus")
    return {
        "sample": sample_files(folder / "data/sample"),
        "snapshot": snapshot_digests(snapshot, spans),
        "batches": first_batches(snapshot, spans),
        "masks": masks(snapshot, spans),
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return make(tmp_path_factory.mktemp("golden"))


@pytest.mark.parametrize("part", ["sample", "snapshot", "batches", "masks"])
def test_a_seed_gives_what_it_gave(made: dict[str, Any], part: str) -> None:
    golden = json.loads(GOLDEN.read_text())[part]
    changed = [name for name in {**golden, **made[part]} if golden.get(name) != made[part].get(name)]
    assert not changed, f"{changed} of {part} changed; if it was meant, write it down: make golden"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        GOLDEN.write_text(json.dumps(make(Path(place)), indent=1) + "\n")
    print(f"{GOLDEN} written; say in the commit what changed and why")
