"""One pre-training step: ours against REALM in transformers 4.35.2, same weights, same batch.

    python benchmarks/step.py --peer PYTHON

PYTHON belongs to an environment with transformers 4.35.2 and torch (step_peer.py says how to make one); without it
the comparison is not run. A step is forward, backward and AdamW: two masked sentences with eight passages each, at most
352 wordpieces of sentence and passage together, a vocabulary of 30,522. Each side works in a process of its own on one
thread, told by lines when to take its next step; seconds are processor seconds, memory is the most that was resident.
The first step's losses must agree, or the ratio means nothing.

Shape suffixes: B examples, K candidates of each, L longest.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import against
from against import Goal, Row

BATCH, CANDIDATES, QUERY, JOINED, DOCUMENT = 2, 8, 64, 352, 288
EMBEDDING = 128
MASKED = (5, 6, 20, 21)  # places in the sentence
SHARE, MEMORY = Goal(0.45), Goal(0.5, at_most=True)
AGREE = 0.02
PARAMS = Path(__file__).parents[1] / "params.yaml"
PEER = Path(__file__).with_name("step_peer.py")


class Step:
    """Our models, batch and optimiser; call it for one step.

    ``folder`` takes the passages, and may hold the peer's weights; ``query`` and ``joined`` are the longest sequences.
    """

    def __init__(
        self,
        folder: Path,
        precision: str,
        shape: str,
        *,
        batch: int = BATCH,
        query: int = QUERY,
        joined: int = JOINED,
        device: str = "cpu",
    ) -> None:
        import torch

        from realmops import config
        from realmops.process import configure_malloc
        from realmops.train.optimiser import BertAdamW, Group, Schedule
        from realmops.train.realm import Realm

        configure_malloc()
        torch.manual_seed(0)
        self.retriever, self.reader = (model.to(device).train() for model in _models(folder, shape))
        snapshot = snapshot_of(folder, batch * CANDIDATES, [query] * batch)
        settings = [
            f"pretrain.reader_wordpieces={joined}",
            f"pretrain.candidates={CANDIDATES}",
            "pretrain.null_document=false",
            "pretrain.marginal=per_token",
        ]
        options = config.load_params(PARAMS, settings=settings).pretrain
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
        self.realm = Realm(self.retriever, self.reader, snapshot, options, dtype)
        self.candidates = [list(range(b * CANDIDATES, (b + 1) * CANDIDATES)) for b in range(batch)]
        self.examples = [self._example(batch * CANDIDATES + b) for b in range(batch)]
        groups = [Group("retriever", self.retriever, 1e-5), Group("reader", self.reader, 1e-5)]
        self.optimiser, self.schedule = BertAdamW(groups), Schedule(1000, 0)

    def _example(self, passage: int) -> Any:
        import numpy as np

        from realmops.train.masked_sentences import Example

        original = self.realm.snapshot.body(passage)[: self.realm.options.query_wordpieces - 2]
        x, positions = original.copy(), np.array([place for place in MASKED if place < len(original)])
        x[positions] = self.realm.special.mask
        return Example(passage, original, x, positions, original[positions], "")

    def __call__(self) -> float:
        """One step; the loss before it."""
        loss, _ = self.realm.loss(self.examples, self.candidates, retriever_learns=True)
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step(0, self.schedule)
        return loss.item()

    def _sequences(self) -> tuple[list[Any], list[Any], list[Any]]:
        """Queries, documents and joined pairs, each as wordpieces and segments."""
        from realmops.model.sequences import join_reader
        from realmops.search.embed import document_sequences, query_sequences

        snapshot, special = self.realm.snapshot, self.realm.special
        documents = document_sequences(snapshot, [p for row in self.candidates for p in row])
        joined = [
            join_reader(example.x, snapshot.body(passage), special, self.realm.options.reader_wordpieces)[:2]
            for example, row in zip(self.examples, self.candidates, strict=True)
            for passage in row
        ]
        return query_sequences(self.realm.queries(self.examples)), documents, joined

    def flops(self) -> float:
        """Operations of a step, padding not counted: the backward pass is twice the forward pass."""
        import generated

        config = self.reader.encoder.model.config
        lengths = [len(tokens) for part in self._sequences() for tokens, _ in part]
        predicted = sum(len(e.positions) for e in self.examples) * CANDIDATES
        head = 2 * predicted * config.hidden_size * (config.hidden_size + config.vocab_size)
        return 3 * (generated.encoder_flops(config, lengths) + head)

    def save_batch(self, path: Path) -> None:
        """The same batch, padded as the peer wants it."""
        import torch
        from safetensors.torch import save_file

        queries, documents, joined = self._sequences()
        by_query = (len(self.examples), CANDIDATES, -1)
        joined_NL = _padded([tokens for tokens, _ in joined])
        label_BL = torch.zeros(len(self.examples), joined_NL.shape[1], dtype=torch.int64)
        for row, example in zip(label_BL, self.examples, strict=True):
            row[torch.from_numpy(example.positions) + 1] = torch.from_numpy(example.targets)
        tensors = {
            "query_BL": _padded([tokens for tokens, _ in queries]),
            "document_BKL": _padded([tokens for tokens, _ in documents]).view(by_query),
            "document_segment_BKL": _padded([segments for _, segments in documents]).view(by_query),
            "joined_BKL": joined_NL.view(by_query),
            "joined_segment_BKL": _padded([segments for _, segments in joined]).view(by_query),
            "label_BL": label_BL,
        }
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def _padded(rows: Sequence[Any]) -> Any:
    import torch

    return torch.nn.utils.rnn.pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True)


def _models(folder: Path, shape: str) -> tuple[Any, Any]:
    """The peer's weights where it has saved some, else fresh ones."""
    import generated

    from realmops.hub import read_config, read_weights
    from realmops.model.reader import Reader
    from realmops.model.realm_checkpoints import PublishedCheckpoint, pretrained_models
    from realmops.model.retriever import Embedder, Retriever

    parts = [folder / "scorer", folder / "encoder"]
    if all(part.is_dir() for part in parts):
        return pretrained_models(
            [PublishedCheckpoint(part, read_config(part), read_weights(part), "") for part in parts]
        )
    tower = Embedder(generated.random_bert(shape)[0], EMBEDDING, "release")
    return Retriever(tower, tower), Reader(*generated.random_bert(shape))


def snapshot_of(folder: Path, count: int, sentences: list[int]) -> Any:
    """So many passages of lognormal lengths, and those of the given lengths that the sentences come from."""
    import generated
    import numpy as np

    from realmops.artifacts import atomic_folder
    from realmops.corpus.snapshot_reader import Snapshot
    from realmops.corpus.snapshot_writer import write_snapshot
    from realmops.readers.sources import list_sources

    rng = np.random.default_rng(0)
    lengths = [*generated.lognormal_lengths(count, rng).tolist(), *sentences]
    records = [
        {"id": str(n), "title": str(n), "text": generated.text_of(length, rng)} for n, length in enumerate(lengths)
    ]
    path = folder / "documents.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    with atomic_folder(folder / "snapshot") as stage:
        write_snapshot(
            list_sources(path, "jsonl"), stage, vocabulary=generated.vocabulary(),
            block_wordpieces=DOCUMENT, whole_documents=True,
        )  # fmt: skip
    return Snapshot.open(folder / "snapshot")


def serve(folder: Path, precision: str, shape: str) -> None:
    """Our side as a process: a step per line of stdin, each answered by a line of JSON."""
    against.one_thread()
    step = Step(folder, precision, shape)
    step.save_batch(folder / "batch.safetensors")
    print(json.dumps({"flops": step.flops()}), flush=True)
    for _ in sys.stdin:
        losses: list[float] = []
        seconds = against.processor_seconds(lambda found=losses: found.append(step()))
        mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"loss": losses[0], "seconds": seconds, "mib": mib}), flush=True)


class Worker:
    """A process that takes a step for each line it is told."""

    def __init__(self, words: Sequence[str], process: subprocess.Popen[str]) -> None:
        self.words, self.process = words, process
        self.answers: list[dict[str, float]] = []
        self.first = self.read()

    def read(self) -> dict[str, Any]:
        """Its next answer; SystemExit when it has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(self.words)} ended with exit code {self.process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def tell(self) -> None:
        """A line."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def __call__(self) -> float:
        """One step: its seconds."""
        self.tell()
        self.answers.append(self.read())
        return self.answers[-1]["seconds"]


@contextmanager
def worker(*words: str) -> Iterator[Worker]:
    """A worker that ends with the block."""
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Worker(words, process)
        assert process.stdin is not None
        process.stdin.close()


def peer_shape(shape: str) -> dict[str, Any]:
    """The configuration of the peer's models."""
    import generated

    return {
        **generated.SHAPES[shape],
        "retriever_proj_size": EMBEDDING,
        "num_candidates": CANDIDATES,
        "pad_token_id": 0,
    }


def compare(arguments: argparse.Namespace, precision: str, theirs: str, goal: Goal) -> list[Row]:
    """Ours in a precision against the peer in a precision."""
    import torch

    what = f"pre-training step, {arguments.shape}, {precision}"
    name = f"transformers 4.35.2's REALM, {theirs}"
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        peer = None
        if arguments.peer is not None:
            shape = json.dumps(peer_shape(arguments.shape))
            peer = stack.enter_context(worker(arguments.peer, "-W", "ignore", str(PEER), folder, theirs, shape))
        ours = stack.enter_context(worker(sys.executable, __file__, "--serve", folder, precision, arguments.shape))
        if peer is not None:
            peer.tell()
        sides = [ours, against.GemmRate(dtype), *([peer] if peer else [])]
        for side in sides:
            side()
        seconds, products, *others = against.interleave(sides, arguments.repeats)
    gflop = ours.first["flops"] / 1e9
    useful = tuple(gflop / s for s in seconds)
    share = Row(
        f"{what}: useful operations", f"fastest product, {precision}", "GFLOP/s", useful, products, SHARE,
        f"{gflop:.0f} GFLOP a step",
    )  # fmt: skip
    if peer is None:
        reason = "name a Python that has transformers 4.35.2 with --peer"
        return [
            against.not_run(what, name, goal, reason),
            against.not_run(f"{what}: memory", name, MEMORY, reason),
            share,
        ]
    first, second = (side.answers[0]["loss"] for side in (ours, peer))
    agree = abs(first - second) <= AGREE
    note = f"losses of the first step {first:.4f} and {second:.4f}; the peer's torch is {peer.first['torch']}"
    note += "" if agree else "; THEY DISAGREE: the ratio means nothing"
    rates = [tuple(1 / s for s in side) for side in (seconds, others[0])]
    mib = [(max(answer["mib"] for answer in side.answers),) for side in (ours, peer)]
    return [
        Row(what, name, "steps/s", rates[0], rates[1], goal if agree else None, note),
        Row(f"{what}: memory", name, "MiB", mib[0], mib[1], MEMORY),
        share,
    ]


def measure(arguments: argparse.Namespace) -> list[Row]:
    """Ours at its best against fp32, and bf16 against bf16 where the processor multiplies it."""
    import torch

    from realmops.devices import resolve_precision

    against.one_thread()
    best = "bf16" if resolve_precision("auto", torch.device("cpu")) == torch.bfloat16 else "fp32"
    rows = compare(arguments, best, "fp32", Goal(12))
    if best == "bf16":
        return rows + compare(arguments, best, "bf16", Goal(5))
    what, name = f"pre-training step, {arguments.shape}, bf16", "transformers 4.35.2's REALM, bf16"
    return [*rows, against.not_run(what, name, Goal(5), "this processor does not multiply bf16")]


def options(parser: argparse.ArgumentParser) -> None:
    """What this benchmark takes."""
    parser.add_argument("--peer", help="a Python with transformers 4.35.2 and torch")
    parser.add_argument("--shape", choices=["BERT-mini", "BERT-base"], default="BERT-mini")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(Path(sys.argv[2]), sys.argv[3], sys.argv[4])
    else:
        against.command(__doc__, "step", measure, options)
