"""Reading the passages of a question: our reader of published models against transformers' padded forward pass.

    python benchmarks/read.py
    python benchmarks/read.py --passages 5 --wordpieces 288 --precisions fp32

Random weights in the shape of MiniLM-L6 with BERT's tokenizer; one thread each, processor time, in turns. Theirs is the
model alone, on pairs that were tokenized and padded before. Ours tokenizes the same pairs and gives the probabilities
of all spans.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import against
from against import Goal, Row

GOAL = Goal(1.1, at_most=True)
ANSWER = 10  # wordpieces of a span
QUESTION = "Who built the ship that was sold in the town?"


def random_reader() -> tuple[Any, Any]:
    """A model of MiniLM's shape and its tokenizer."""
    import generated
    import torch
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import BertConfig, BertForQuestionAnswering, PreTrainedTokenizerFast

    torch.manual_seed(0)
    model = BertForQuestionAnswering(BertConfig(**generated.SHAPES["MiniLM-L6"])).eval()
    tokenizer = Tokenizer.from_str(generated.tokenizer().to_str())
    ids = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ids
    )
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    return model, PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **names)


def measure(arguments: argparse.Namespace) -> list[Row]:
    """A row for each precision."""
    import generated
    import numpy as np
    import torch

    from realmops.devices import DTYPES, autocast
    from realmops.model.extractive_reader import ExtractiveReader
    from realmops.process import configure_process

    against.one_thread()
    against.quiet_transformers()
    configure_process(1)
    model, tokenizer = random_reader()
    reader = ExtractiveReader(copy.deepcopy(model), tokenizer).eval()
    rng = np.random.default_rng(0)
    pairs = [(QUESTION, generated.text_of(arguments.wordpieces, rng)) for _ in range(arguments.passages)]
    limit = arguments.wordpieces + 40
    inputs = tokenizer(*map(list, zip(*pairs, strict=True)), padding=True, return_tensors="pt", max_length=limit,
                       truncation="only_second", return_token_type_ids=True)  # fmt: skip
    lengths = inputs["attention_mask"].sum(1).tolist()
    rows = []
    for precision in arguments.precisions:
        dtype = DTYPES[precision]
        found: dict[str, Any] = {}

        def ours(dtype: torch.dtype = dtype, found: dict[str, Any] = found) -> float:
            options: dict[str, Any] = {"limit": limit, "answer_wordpieces": ANSWER, "dtype": dtype}
            return 1e3 * against.processor_seconds(lambda: found.update(ours=reader.read(pairs, **options)))

        @torch.no_grad()
        def theirs(dtype: torch.dtype = dtype, found: dict[str, Any] = found) -> float:
            with autocast(torch.device("cpu"), dtype):
                return 1e3 * against.processor_seconds(lambda: found.update(theirs=model(**inputs)))

        for side in (ours, theirs):
            side()
        times = against.interleave([ours, theirs], arguments.repeats)
        spans = sum(len(part.log_p) for part in found["ours"])
        note = f"{len(pairs)} passages, with the question {np.mean(lengths):.0f} wordpieces in the mean; {spans} spans"
        rows.append(Row(f"reading, MiniLM-L6, {precision}", "transformers' forward pass", "ms", *times, GOAL, note))
    return rows


def options(parser: argparse.ArgumentParser) -> None:
    """What this benchmark takes."""
    parser.add_argument("--passages", type=int, default=5, help="%(default)s")
    parser.add_argument("--wordpieces", type=int, default=288, help="of each passage (%(default)s)")
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])


if __name__ == "__main__":
    against.command(__doc__, "read", measure, options)
