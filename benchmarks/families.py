"""Embedding documents by MPNet and ModernBERT: our packed encoders against sentence-transformers' encode().

    python benchmarks/families.py                             # small shapes, some minutes
    python benchmarks/families.py --shapes base --precisions bf16 --documents 64
    python benchmarks/families.py --model FOLDER
    python benchmarks/families.py --device cuda --shapes base --precisions bf16 --documents 4096

As in ``encode.py``, but both sides compute in the same precision: in bf16 the library's weights are bf16, ours are
multiplied in it. Random weights, the same folder for both, one thread each, processor time. The texts, about 120
wordpieces in the mean and 288 at most, come in batches of 32 of like lengths, so that encode() pads little.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import against
import encode
import gpu
from against import Goal, Row

GOAL = Goal(1.5)
LEAST_COSINE = {"fp32": Goal(0.9999), "bf16": Goal(0.99)}
BATCH = encode.BATCH
FAMILIES = ("mpnet", "modernbert")
SHAPES: dict[str, dict[str, dict[str, int]]] = {
    "mpnet": {
        "small": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
        "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    },
    "modernbert": {
        "small": {"hidden_size": 384, "num_hidden_layers": 10, "num_attention_heads": 6, "intermediate_size": 576},
        "base": {"hidden_size": 768, "num_hidden_layers": 22, "num_attention_heads": 12, "intermediate_size": 1152},
    },
}


def random_model(folder: Path, family: str, shape: str) -> None:
    """An encoder with random weights as transformers writes it, with the vocabulary of the generated text."""
    import generated
    import torch
    import transformers
    from tokenizers.processors import BertProcessing

    tokenizer = generated.tokenizer()
    ids = {f"{name}_token_id": tokenizer.token_to_id(f"[{name.upper()}]") for name in ("pad", "cls", "sep")}
    ids |= {"bos_token_id": ids["cls_token_id"], "eos_token_id": ids["sep_token_id"]}
    if family == "mpnet":
        ids = {"pad_token_id": 1}  # behind which its positions begin
    config = transformers.AutoConfig.for_model(family, vocab_size=generated.VOCABULARY, **SHAPES[family][shape], **ids)
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.05)
    model.save_pretrained(folder)
    begin, end = (("[CLS]", tokenizer.token_to_id("[CLS]")), ("[SEP]", tokenizer.token_to_id("[SEP]")))
    tokenizer.post_processor = BertProcessing(end, begin)
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    if family == "mpnet":
        names["pad_token"] = tokenizer.id_to_token(1)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)


def compare(name: str, folder: Path, documents: list[str], precision: str, arguments: argparse.Namespace) -> list[Row]:
    """The rows of one model in one precision."""
    from realmops.devices import DTYPES

    dtype, device = DTYPES[precision], arguments.device
    mine = encode.Ours(folder, dtype, device)
    theirs = encode.peer(folder, mine.bert.width, device, dtype=dtype)
    options = {"convert_to_tensor": True, "show_progress_bar": False, "batch_size": BATCH if device == "cpu" else 256}
    seconds_of = against.processor_seconds if device == "cpu" else gpu.seconds_of
    found: dict[str, Any] = {}

    def run_ours() -> float:
        return len(documents) / seconds_of(lambda: found.update(ours=mine(documents)))

    def run_theirs() -> float:
        return len(documents) / seconds_of(lambda: found.update(theirs=theirs.encode(documents, **options)))

    warm = documents[:BATCH] if device == "cpu" else documents
    mine(warm)
    theirs.encode(warm, **options)
    rates, peers = against.interleave([run_ours, run_theirs], arguments.repeats)
    cosine = float((found["ours"] * found["theirs"].float()).sum(-1).min())
    lengths = [len(one) for one in mine.sequences(documents)]
    what = f"embedding, {name}, {precision}"
    note = f"{len(documents)} documents of {sum(lengths) / len(lengths):.0f} wordpieces in the mean"
    return [
        Row(what, "sentence-transformers encode()", "docs/s", rates, peers, GOAL, note),
        Row(f"{what}: least cosine of both", "1", "", (cosine,), (1.0,), LEAST_COSINE[precision]),
    ]


def measure(arguments: argparse.Namespace) -> list[Row]:
    """The rows of every model."""
    if arguments.device == "cpu":
        against.one_thread()
    against.quiet_transformers()
    documents = encode.texts(arguments.documents)
    rows: list[Row] = []
    for precision in arguments.precisions:
        if arguments.model is not None:
            rows += compare(arguments.model.name, arguments.model, documents, precision, arguments)
            continue
        for family in arguments.families:
            for shape in arguments.shapes:
                with tempfile.TemporaryDirectory() as folder:
                    random_model(Path(folder), family, shape)
                    rows += compare(f"{family} {shape}", Path(folder), documents, precision, arguments)
    return rows


def options(parser: argparse.ArgumentParser) -> None:
    """What this benchmark takes."""
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--shapes", nargs="+", choices=("small", "base"), default=["small"])
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--documents", type=int, default=BATCH, help="%(default)s")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", type=Path, help="a folder with an encoder, in the place of random weights")


if __name__ == "__main__":
    against.command(__doc__, "families", measure, options)
