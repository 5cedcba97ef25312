"""Embedding documents: our packed encoder against sentence-transformers' encode(), same model and texts.

    python benchmarks/encode.py --shapes MiniLM-L6 --documents 128
    python benchmarks/encode.py --model FOLDER
    python benchmarks/encode.py --precision int8

Both sides tokenise the same texts, run the same BERT, take the mean over wordpieces and normalise it; one thread each,
processor time. Without --model the weights are random, saved as a model folder that both sides load. Lengths are
lognormal: about 120 wordpieces in the mean, 288 at most. The texts come in batches of 32 of like lengths, which is
what encode() makes of a large corpus, so that it pads no more here than there. Ours works in `run.precision`, by
default `auto`, encode() in its own, fp32. The share of the matrix product is that of
useful operations (padding not counted) in the fastest product of one core.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import against
from against import Goal, Row

LIMIT = 288
BATCH = 32
GOALS = {"MiniLM-L6": Goal(4), "BERT-base": Goal(8)}
LEAST_COSINE = Goal(0.9998)
SHARE = Goal(0.6)


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
    from bert_files import save_bert

    from realmops.corpus.vocabulary import vocabulary_bytes
    from realmops.encoders.bert import Bert

    torch.manual_seed(0)
    bert = Bert(generated.SHAPES[shape])
    for module in bert.modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            torch.nn.init.normal_(module.weight, std=0.05)
    save_bert(folder, bert)
    (folder / "vocab.txt").write_bytes(vocabulary_bytes(generated.vocabulary()))


class Ours:
    """The model of a folder as our packed encoder."""

    def __init__(self, folder: Path, dtype: Any) -> None:
        from realmops.corpus.pretrained import read_encoder_vocabulary
        from realmops.corpus.vocabulary import build_tokenizer
        from realmops.encoders.bert import Bert
        from realmops.model.sequences import SpecialTokens

        self.bert = Bert.load(folder, 0.0)[0].eval()
        self.tokenizer = build_tokenizer(*read_encoder_vocabulary(folder))
        self.special, self.dtype = SpecialTokens.of(self.tokenizer), dtype

    def sequences(self, documents: list[str]) -> list[Any]:
        """[CLS] text [SEP] of each, cut as the peer cuts."""
        import numpy as np

        from realmops.model.sequences import join_query

        encoded = self.tokenizer.encode_batch(documents, add_special_tokens=False)
        return [join_query(np.array(e.ids, dtype=np.int64), self.special, LIMIT) for e in encoded]

    def __call__(self, documents: list[str]) -> Any:
        """Unit vectors, documents x width."""
        import torch
        import torch.nn.functional as F

        from realmops.encoders.devices import autocast, passage_products
        from realmops.encoders.packed import Packed, length_batches

        sequences, device = self.sequences(documents), self.bert.word_vectors.device
        out = torch.empty(len(sequences), self.bert.width, device=device)
        products = passage_products(self.bert, self.dtype)
        with torch.no_grad(), autocast(device, self.dtype), products:
            for rows in length_batches([len(s) for s in sequences], device):
                batch = Packed([sequences[i] for i in rows])
                hidden_TD = self.bert(batch).float()
                mean_BD = torch.segment_reduce(hidden_TD, "mean", lengths=batch.lengths_B)
                out[torch.tensor(rows)] = F.normalize(mean_BD, dim=-1)
        return out


def peer(folder: Path, width: int) -> Any:
    """The same model as sentence-transformers has it: mean pooling, normalised."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    encoder, pooling = Transformer(str(folder), max_seq_length=LIMIT), Pooling(width, "mean")
    return SentenceTransformer(modules=[encoder, pooling, Normalize()], device="cpu")


def compare(
    name: str, folder: Path, documents: list[str], goal: Goal | None, arguments: argparse.Namespace
) -> list[Row]:
    """The rows of one model."""
    import generated
    import torch

    from realmops.encoders.devices import PRECISIONS, resolve_precision

    dtype = resolve_precision(arguments.precision, torch.device("cpu"))
    multiplied = torch.bfloat16 if dtype == torch.int8 else dtype
    ours = Ours(folder, dtype)
    theirs = peer(folder, ours.bert.config.width)
    lengths = [len(s) for s in ours.sequences(documents)]
    gflop = generated.encoder_flops(ours.bert.config, lengths) / 1e9
    found: dict[str, Any] = {}

    def run_ours() -> float:
        return len(documents) / against.processor_seconds(lambda: found.update(ours=ours(documents)))

    def run_theirs() -> float:
        def encode() -> None:
            found["theirs"] = theirs.encode(documents, convert_to_tensor=True, show_progress_bar=False)

        return len(documents) / against.processor_seconds(encode)

    ours(documents[:BATCH])
    theirs.encode(documents[:BATCH], show_progress_bar=False)
    rates, peers, products = against.interleave([run_ours, run_theirs, against.GemmRate(multiplied)], arguments.repeats)
    cosine = float((found["ours"] * found["theirs"]).sum(-1).min())
    least = Goal(0.98) if dtype == torch.int8 else LEAST_COSINE
    precision = PRECISIONS[dtype]
    what = f"embedding, {name}"
    useful = tuple(gflop * rate / len(documents) for rate in rates)
    note = (
        f"{len(documents)} documents of {sum(lengths) / len(lengths):.0f} wordpieces in the mean, ours in {precision}"
    )
    product = f"fastest product, {PRECISIONS[multiplied]}"
    return [
        Row(what, "sentence-transformers encode()", "docs/s", rates, peers, goal, note),
        Row(f"{what}: least cosine of both", "1", "", (cosine,), (1.0,), least),
        Row(f"{what}: useful operations", product, "GFLOP/s", useful, products, SHARE),
    ]


def measure(arguments: argparse.Namespace) -> list[Row]:
    """The rows of every model."""
    against.one_thread()
    against.quiet_transformers()
    documents = texts(arguments.documents)
    if arguments.model is not None:
        return compare(arguments.model.name, arguments.model, documents, None, arguments)
    rows: list[Row] = []
    for shape in arguments.shapes:
        with tempfile.TemporaryDirectory() as folder:
            random_model(Path(folder), shape)
            mine = documents if shape != "BERT-base" else texts(arguments.documents // 2)
            rows += compare(shape, Path(folder), mine, GOALS[shape], arguments)
    return rows


def options(parser: argparse.ArgumentParser) -> None:
    """What this benchmark takes."""
    parser.add_argument("--shapes", nargs="+", choices=list(GOALS), default=list(GOALS))
    parser.add_argument("--documents", type=int, default=128, help="half as many at BERT-base (%(default)s)")
    parser.add_argument(
        "--precision", choices=("auto", "fp32", "bf16", "int8"), default="auto", help="ours (%(default)s)"
    )
    parser.add_argument("--model", type=Path, help="a folder with a BERT encoder, in the place of random weights")


if __name__ == "__main__":
    against.command(__doc__, "encode", measure, options)
