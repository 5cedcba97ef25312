"""Embedding many documents against sentence-transformers' encode(), ONNX Runtime and OpenVINO.

    python benchmarks/encode.py --shapes MiniLM-L6 --documents 128
    python benchmarks/encode.py --model FOLDER --passages passages.jsonl.gz --questions questions.jsonl.gz
    python benchmarks/encode.py --precision bf16 --peers none

All sides tokenise the same texts, run the same BERT or MPNet, take the mean over wordpieces and normalise it; one
thread each, processor time, in turns. Without --model the weights are random, saved as a model folder that all sides
load. Without --passages, a file as `realmops` reads, the texts are generated; their lengths are lognormal: about 120
wordpieces in the mean, 288 at most. The timed texts come in batches of 32 of like lengths, which is what encode() makes
of a large corpus, so that it pads no more here than there. The first rows are ours in `run.precision`, by default
`auto`, against encode() in its own, fp32. --precisions leaves all others out. Each turn is told as it ends. The share
of the matrix product is that of useful operations (padding not counted) in the fastest product of one core.

Then each peer stands beside ours in the like precision (`exported.py` says how the peers run a model). The notes below
the table have the share of the first ten neighbours of each text that are fp32's too, and with --questions recall@5:
the share of questions, embedded in fp32 by all, whose passage is among the first five. The last row is our fastest
against the fastest peer, of those that lose no more than .003 of recall@5.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import against
from against import Goal, Row, Spread, not_run

LIMIT = 288
BATCH = 32
GOALS = {"MiniLM-L6": Goal(4), "BERT-base": Goal(8)}
LEAST_COSINE = Goal(0.9998)
SHARE = Goal(0.6)
BEST = Goal(0.97)
LOST = 0.003  # of recall@5, at most, by what counts as equal
NEIGHBOURS, FOUND = 10, 5
PEERS = ("sentence-transformers", "onnxruntime", "openvino")


def texts(count: int) -> list[str]:
    """Batches of 32 texts of like lengths, at even places of a large corpus sorted by length."""
    import generated
    import numpy as np

    rng = np.random.default_rng(0)
    batches = max(1, count // BATCH)
    length_N = np.sort(generated.lognormal_lengths(128 * batches * BATCH, rng)).reshape(batches, 128, BATCH)
    return [generated.text_of(int(length), rng) for length in length_N[:, 64, :].ravel()]


def random_model(folder: Path, shape: str) -> None:
    """A BERT with random weights as a folder that both sides load, with the vocabulary of the generated text."""
    import generated
    import torch

    from realmops.corpus.vocabulary import vocabulary_bytes
    from realmops.model.encoder_files import save_encoder

    torch.manual_seed(0)
    save_encoder(folder, generated.random_bert(shape, std=0.05)[0])
    (folder / "vocab.txt").write_bytes(vocabulary_bytes(generated.vocabulary()))


def spread_batches(documents: list[str], count: int) -> list[str]:
    """So many documents, in batches of 32 of like lengths from even places of all."""
    ordered = sorted(documents, key=len)
    batches = max(1, min(count, len(ordered)) // BATCH)
    starts = [int((n + 0.5) * len(ordered) / batches) - BATCH // 2 for n in range(batches)]
    return [text for start in starts for text in ordered[max(0, start) : max(0, start) + BATCH]]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines, compressed or not."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


class Ours:
    """The model of a folder as many passages are embedded with it."""

    def __init__(self, folder: Path, dtype: Any, device: str = "cpu") -> None:
        from realmops.corpus.encoder_tokenizer import read_encoder_tokenizer
        from realmops.corpus.vocabulary import build_tokenizer, open_tokenizer
        from realmops.model.encoder_files import load_encoder
        from realmops.model.retriever import Embedder
        from realmops.model.sequences import SpecialTokens
        from realmops.search.openvino import compile_graph

        self.bert: Any = load_encoder(folder, 0.0)[0].eval().to(device)
        how = {"pooling": "mean", "projection": "identity"}
        self.tower = Embedder(self.bert, self.bert.width, "cosine", **how).eval()
        pieces, casing, text = read_encoder_tokenizer(folder)
        self.tokenizer = open_tokenizer(text) if text else build_tokenizer(pieces, casing)
        self.special, self.dtype = SpecialTokens.of(self.tokenizer), dtype
        self.graph = compile_graph(self.tower, 1, dtype, passages=1_000_000)

    def sequences(self, documents: list[str]) -> list[Any]:
        """[CLS] text [SEP] of each, cut as the peer cuts."""
        import numpy as np

        from realmops.model.sequences import join_query
        from realmops.search.embed import query_sequences

        encoded = self.tokenizer.encode_batch(documents, add_special_tokens=False)
        return query_sequences([join_query(np.array(e.ids, dtype=np.int64), self.special, LIMIT) for e in encoded])

    def __call__(self, documents: list[str]) -> Any:
        """Unit vectors, documents x width."""
        from realmops.search.embed import embed

        return embed(self.tower, self.sequences(documents), self.dtype, graph=self.graph)


def peer(folder: Path, width: int, device: str = "cpu", **more: Any) -> Any:
    """The same model as sentence-transformers has it, by keywords of transformers: mean pooling, normalised."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    encoder = Transformer(str(folder), max_seq_length=LIMIT, model_kwargs=more)
    return SentenceTransformer(modules=[encoder, Pooling(width, "mean"), Normalize()], device=device)


def encoding(library: Any) -> Callable[[list[str]], Any]:
    """What a SentenceTransformer makes of documents, in fp32."""

    def encode(documents: list[str]) -> Any:
        return library.encode(documents, convert_to_tensor=True, show_progress_bar=False).float()

    return encode


def peers_of(folder: Path, width: int, named: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """By name with version, encode() in fp32 first: a peer's precision, its encoder; by name: why one is left out."""
    import sentence_transformers
    import torch

    def make(**more: Any) -> Any:
        return peer(folder, width, **more)

    library = f"sentence-transformers {sentence_transformers.__version__}, torch {torch.__version__}"
    found: dict[str, Any] = {f"{library}, fp32": ("fp32", encoding(make()))}
    left_out: dict[str, str] = {}
    if "sentence-transformers" in named:
        found[f"{library}, bf16"] = "bf16", encoding(make(dtype=torch.bfloat16))
    with tempfile.TemporaryDirectory() as temporary:
        for name in named:
            try:
                import exported

                if name == "onnxruntime":
                    graphs = exported.by_onnx_runtime(make, Path(temporary))
                elif name == "openvino":
                    graphs = exported.by_openvino(make)
                else:
                    continue
            except ModuleNotFoundError as error:
                left_out[name] = f"{error.name} is not installed, pip install 'realmops[bench]'"
                continue
            found |= {what: (precision, encoding(library)) for precision, (what, library) in graphs.items()}
    return found, left_out


def told(what: str) -> None:
    """Say how far this is: with a large model a side takes minutes."""
    print(f"encode: {what}", file=sys.stderr, flush=True)


def neighbours_kept(vectors: Any, true: Any) -> float:
    """The share of each text's first neighbours by ``true`` that are so by ``vectors`` too."""
    import torch

    count = min(NEIGHBOURS, len(true) - 1)
    own = 4 * torch.eye(len(true))  # unit vectors: nobody is its own neighbour
    sets = [torch.topk(side @ side.T - own, count).indices.tolist() for side in (vectors, true)]
    return sum(len(set(a) & set(b)) for a, b in zip(*sets, strict=True)) / (count * len(true))


def recall(queries: Any, right: Any, vectors: Any) -> float:
    """The share of queries whose passage, by its row, is among the first found."""
    import torch

    found = torch.topk(queries @ vectors.T, min(FOUND, len(vectors))).indices
    return float((found == right[:, None]).any(1).float().mean())


def fastest(rates: Mapping[str, tuple[float, ...]], recalls: Mapping[str, float], least: float) -> str:
    """The side with the highest median among those that find enough; one without a known recall does."""
    able = [name for name in rates if recalls.get(name, least) >= least]
    return max(able, key=lambda name: Spread.of(rates[name]).median)


def compare(
    name: str, folder: Path, texts: list[str], asked: list[tuple[str, int]], goal: Goal | None, arguments: Any
) -> list[Row]:
    """The rows of one model; a question is asked with the row of its text."""
    import generated
    import torch

    from realmops.devices import DTYPES, PRECISIONS, resolve_precision, supports_bf16

    dtype = resolve_precision(arguments.precision, torch.device("cpu"))
    precision = PRECISIONS[dtype]
    able = {"fp32": True, "bf16": supports_bf16()}
    mine = [p for p in DTYPES if p == precision or (arguments.peers and able[p] and p in arguments.precisions)]
    documents = spread_batches(texts, arguments.documents) if len(texts) > arguments.documents else texts
    ours: dict[str, Any] = {p: Ours(folder, DTYPES[p]) for p in mine}
    one = ours[precision]
    others, left_out = peers_of(folder, one.bert.width, arguments.peers)
    plain = next(iter(others))
    others = {what: other for what, other in others.items() if what == plain or other[0] in arguments.precisions}
    sides = ours | {what: side for what, (_, side) in others.items()}
    lengths = [len(tokens) for tokens, _ in one.sequences(documents)]
    gflop = generated.encoder_flops(one.bert.model.config, lengths) / 1e9
    found: dict[str, Any] = {}

    def turn(side: str) -> Callable[[], float]:
        def run() -> float:
            rate = len(documents) / against.processor_seconds(lambda: found.update({side: sides[side](documents)}))
            told(f"{side}: {rate:.4g} docs/s")
            return rate

        return run

    for side in sides.values():
        side(documents[:BATCH])
    turns = against.interleave([*map(turn, sides), against.GemmRate(dtype)], arguments.repeats)
    rates, products = dict(zip(sides, turns, strict=False)), turns[-1]
    cosine = float((found[precision] * found[plain]).sum(-1).min())
    what = f"embedding, {name}"
    useful = tuple(gflop * rate / len(documents) for rate in rates[precision])
    note = (
        f"{len(documents)} documents of {sum(lengths) / len(lengths):.0f} wordpieces in the mean, ours in {precision}"
    )
    product = f"fastest product, {precision}"
    rows = [
        Row(what, "sentence-transformers encode()", "docs/s", rates[precision], rates[plain], goal, note),
        Row(f"{what}: least cosine of both", "1", "", (cosine,), (1.0,), LEAST_COSINE),
        Row(f"{what}: useful operations", product, "GFLOP/s", useful, products, SHARE),
    ]
    if not arguments.peers:
        return rows
    if documents is not texts:
        found = {}
        for side, encode in sides.items():
            told(f"{side}: all {len(texts)} texts, for what it finds")
            found[side] = encode(texts)
    says = {side: f"neighbours {neighbours_kept(vectors, found[plain]):.3f}" for side, vectors in found.items()}
    recalls: dict[str, float] = {}
    if asked:
        queries, right = sides[plain]([question for question, _ in asked]), torch.tensor([row for _, row in asked])
        recalls = {side: recall(queries, right, vectors) for side, vectors in found.items()}
        says = {side: f"{words}, recall@5 {recalls[side]:.4f}" for side, words in says.items()}
    for other, (kind, _) in others.items():
        like = kind if kind in ours else precision
        note = f"{other}: ours {says[like]}; theirs {says[other]}"
        rows.append(Row(f"{what}, {like}", other, "docs/s", rates[like], rates[other], None, note))
    rows += [not_run(what, other, None, reason) for other, reason in left_out.items()]
    least_found = recalls.get(plain, 0.0) - LOST
    best, their_best = (fastest({s: rates[s] for s in names}, recalls, least_found) for names in (ours, others))
    note = f"ours in {best}, " + ("at recall@5 within .003" if asked else "whatever they find: no --questions")
    rows.append(Row(f"{what}, the fastest", their_best, "docs/s", rates[best], rates[their_best], BEST, note))
    return rows


def measure(arguments: argparse.Namespace) -> list[Row]:
    """The rows of every model."""
    from realmops.process import configure_process

    against.one_thread()
    against.quiet_transformers()
    configure_process(1)
    arguments.peers = [name for name in arguments.peers if name != "none"]
    documents = texts(arguments.documents)
    asked: list[tuple[str, int]] = []
    if arguments.passages is not None:
        passages = read_lines(arguments.passages)
        documents = [passage["text"] for passage in passages]
        row_of = {passage["id"]: row for row, passage in enumerate(passages)}
        lines = read_lines(arguments.questions) if arguments.questions is not None else []
        asked = [(q["question"], row_of[q["passage_id"]]) for q in lines if q["passage_id"] in row_of]
    if arguments.model is not None:
        return compare(arguments.model.name, arguments.model, documents, asked, None, arguments)
    rows: list[Row] = []
    for shape in arguments.shapes:
        with tempfile.TemporaryDirectory() as folder:
            random_model(Path(folder), shape)
            mine = documents if shape != "BERT-base" else texts(arguments.documents // 2)
            rows += compare(shape, Path(folder), mine, [], GOALS[shape], arguments)
    return rows


def options(parser: argparse.ArgumentParser) -> None:
    """What this benchmark takes."""
    parser.add_argument("--shapes", nargs="+", choices=list(GOALS), default=list(GOALS))
    parser.add_argument("--documents", type=int, default=128, help="half as many at BERT-base (%(default)s)")
    parser.add_argument("--precision", choices=("auto", "fp32", "bf16"), default="auto", help="ours (%(default)s)")
    parser.add_argument(
        "--peers", nargs="+", choices=(*PEERS, "none"), default=list(PEERS), help="beside encode() in fp32 (all)"
    )
    parser.add_argument(
        "--precisions", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"],
        help="of both sides, beside encode() in fp32 (all)",
    )  # fmt: skip
    parser.add_argument("--model", type=Path, help="a folder with a BERT encoder, in the place of random weights")
    parser.add_argument("--passages", type=Path, help="JSON lines with id and text, in the place of generated texts")
    parser.add_argument("--questions", type=Path, help="JSON lines with question and passage_id, of these passages")


if __name__ == "__main__":
    against.command(__doc__, "encode", measure, options)
