"""Text, vocabularies and shapes of encoders for the benchmarks, all generated: nothing is downloaded."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from realmops.corpus.vocabulary import bert_words, build_tokenizer, learn_pieces
from realmops.model.encoder import Encoder
from realmops.model.masked_word_head import MaskedWordHead
from realmops.model.transformers_models import skip_weight_init
from realmops.sample.corpus import build_world

VOCABULARY = 30_522
LEARNED = 3_000  # pieces that the invented text has a use for
SHAPES = {
    name: {
        "model_type": "bert", "vocab_size": VOCABULARY, "hidden_size": width, "num_hidden_layers": layers,
        "num_attention_heads": heads, "intermediate_size": 4 * width, "max_position_embeddings": 512,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }
    for name, width, layers, heads in (("BERT-mini", 256, 4, 4), ("MiniLM-L6", 384, 6, 12), ("BERT-base", 768, 12, 12))
}  # fmt: skip
"""Configurations of BERT, as transformers names their values."""


def random_bert(shape: str, std: float = 0.02) -> tuple[Encoder, MaskedWordHead]:
    """Return a BERT with normal weights of torch's global generator, and its masked word head."""
    import torch
    from transformers import BertConfig, BertForMaskedLM

    with skip_weight_init():
        model = BertForMaskedLM(BertConfig(**SHAPES[shape]))
    model.tie_weights()
    encoder, head = Encoder(model.bert, packs=True), MaskedWordHead(model)
    with torch.no_grad():
        for part in (encoder, head):
            for name, parameter in part.named_parameters():
                if parameter.ndim > 1:
                    parameter.normal_(std=std)
                else:
                    parameter.fill_(1.0 if name.endswith("LayerNorm.weight") else 0.0)
    return encoder, head


@cache
def sentences() -> list[str]:
    """All sentences of an invented world, some 9,000."""
    world = build_world(0, 300)
    return [sentence.text for passage in world.passages for sentence in passage.sentences]


@cache
def vocabulary() -> list[str]:
    """Wordpieces of that text, filled up to BERT's number with pieces that never occur."""
    words = bert_words(Counter(word for sentence in sentences() for word in sentence.split()))
    pieces = learn_pieces(words, size=LEARNED)
    return [*pieces, *(f"[unused{n}]" for n in range(VOCABULARY - len(pieces)))]


@cache
def tokenizer() -> Tokenizer:
    """The tokenizer of ``vocabulary``."""
    return build_tokenizer(vocabulary())


def lognormal_lengths(count: int, rng: np.random.Generator) -> np.ndarray:
    """Wordpieces of documents as they are in prose: about 120 in the mean, 12 at least and 288 at most."""
    return np.clip(rng.lognormal(np.log(105), 0.6, count), 12, 288).astype(np.int64)


def text_of(length: int, rng: np.random.Generator) -> str:
    """Random sentences of about so many wordpieces with [CLS] and [SEP], the last one cut."""
    encoded = [_encoded()[n] for n in rng.integers(len(sentences()), size=length // 8 + 1)]
    words: list[str] = []
    left = length - 2
    for text, pieces in encoded:
        if left < len(pieces):
            ends = [end for piece, (_, end) in enumerate(pieces) if piece < left]
            words += [text[: ends[-1]]] if ends else []
            break
        words.append(text)
        left -= len(pieces)
    return " ".join(words)


@cache
def _encoded() -> list[tuple[str, list[tuple[int, int]]]]:
    found = tokenizer().encode_batch(sentences(), add_special_tokens=False)
    return [(text, encoding.offsets) for text, encoding in zip(sentences(), found, strict=True)]


def write_documents(path: Path, count: int, sentences_each: int = 3, seed: int = 0) -> float:
    """JSON lines with so many documents of random sentences, all different; returns MB of text."""
    rng = np.random.default_rng(seed)
    known, size = sentences(), 0
    with open(path, "w", encoding="utf-8") as file:
        for low in range(0, count, 10_000):
            rows = rng.integers(len(known), size=(min(10_000, count - low), sentences_each))
            for number, row in enumerate(rows.tolist(), start=low):
                text = " ".join(known[n] for n in row)
                size += len(text.encode())
                file.write(json.dumps({"id": str(number), "title": f"Document {number}", "text": text}) + "\n")
    return size / 1e6


def encoder_flops(config: Any, lengths: Sequence[int] | np.ndarray) -> float:
    """Floating point operations of a BERT's forward pass over sequences of these lengths, padding not counted.

    Args:
        config: transformers' configuration.
        lengths: in wordpieces.
    """
    length_N, width = np.asarray(lengths, dtype=np.float64), config.hidden_size
    per_piece = 2 * (4 * width**2 + 2 * width * config.intermediate_size)
    return config.num_hidden_layers * float((per_piece * length_N + 4 * width * length_N**2).sum())
