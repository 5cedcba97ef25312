"""Build the models of a run, and hand them on as safetensors and JSON."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from realmops.artifacts import seed_for
from realmops.bert import Bert, BertConfig, MaskedWordHead, import_pooler, initialise_small, load_bert
from realmops.config import BertOptions, RetrieverOptions
from realmops.encoders import encoder_folder, read_weights
from realmops.model.reader import Reader, SpanHead, initialise_spans
from realmops.model.retriever import Embedder, Retriever, initialise_projection

MODEL = "model.json"
RETRIEVER = "retriever.safetensors"
READER = "reader.safetensors"


def build_bert(
    options: BertOptions, vocabulary: int, seed: int, warn: Callable[[str], None] | None = None
) -> tuple[Bert, MaskedWordHead]:
    """The encoder that ``bert.init`` names, with a masked word head; ``warn`` is told when that starts fresh."""
    generator = torch.Generator().manual_seed(seed_for(seed, "bert"))
    if options.init == "small":
        config = BertConfig(
            vocabulary,
            options.width,
            options.layers,
            options.heads,
            options.intermediate,
            options.positions,
            options.dropout,
        )
        if options.width % options.heads:
            raise ValueError(
                f"bert.width {options.width} is no multiple of bert.heads {options.heads}; choose such a width"
            )
        bert, head = Bert(config), MaskedWordHead(config)
        initialise_small(bert, head, generator)
        return bert, head
    folder = encoder_folder(options.init)
    bert, head, found = load_bert(folder, options.dropout)
    if bert.config.vocabulary != vocabulary:
        raise ValueError(
            f"{folder}: the encoder has {bert.config.vocabulary} wordpieces, the snapshot {vocabulary}; "
            "make the snapshot with this bert.init"
        )
    if bert.config.positions < options.positions:
        raise ValueError(
            f"{folder}: the encoder has {bert.config.positions} positions, bert.positions is {options.positions}; "
            f"set bert.positions={bert.config.positions}"
        )
    if not found:  # published without its head: start from a near identity
        with torch.no_grad():
            head.transform.weight.copy_(torch.eye(bert.config.width))
            head.transform.bias.zero_()
        if warn is not None:
            warn(
                f"{folder} has no masked word head (cls.predictions): the reader's starts fresh, over the word "
                "embeddings; give it more ict.reader_steps than a BERT with its head needs"
            )
    return bert, head


def build_models(
    bert: BertOptions,
    retriever: RetrieverOptions,
    vocabulary: int,
    seed: int,
    warn: Callable[[str], None] | None = None,
) -> tuple[Retriever, Reader]:
    """Retriever and reader that start from the same encoder; all towers and projections start equal."""
    reader_bert, head = build_bert(bert, vocabulary, seed, warn)
    query = Embedder(copy.deepcopy(reader_bert), retriever.embedding_width, retriever.head)
    initialise_projection(query, torch.Generator().manual_seed(seed_for(seed, "projection")))
    if query.pooler is not None and bert.init != "small":
        folder = encoder_folder(bert.init)
        import_pooler(query.pooler, read_weights(folder), str(folder))
    document = query if retriever.share_embedders else copy.deepcopy(query)
    return Retriever(query, document), Reader(reader_bert, head)


def add_spans(reader: Reader, span_width: int, seed: int) -> None:
    """Give the reader a new span head."""
    reader.spans = SpanHead(reader.bert.config.width, span_width)
    initialise_spans(reader.spans, torch.Generator().manual_seed(seed_for(seed, "spans")))
    reader.spans.to(reader.bert.word.weight.device)


def cpu_state(module: nn.Module) -> dict[str, Tensor]:
    """A copy of a module's parameters on the CPU, each tensor once."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in module.state_dict().items()}


def describe(retriever: Retriever, reader: Reader | None, vocabulary_hash: str) -> dict[str, Any]:
    """The shapes that a loader needs, as JSON."""
    return {
        "bert": retriever.query.bert.config.to_json(),
        "head": retriever.query.head,
        "embedding_width": retriever.query.projection.out_features,
        "share_embedders": retriever.shared,
        "reader": None if reader is None else reader.bert.config.to_json(),
        "span_width": None if reader is None or reader.spans is None else reader.spans.start.out_features,
        "span_layer_norm_eps": None if reader is None or reader.spans is None else reader.spans.norm.eps,
        "vocabulary_hash": vocabulary_hash,
    }


def retriever_state(retriever: Retriever) -> dict[str, Tensor]:
    """The parameters of a retriever; a shared tower is stored once, as the query tower."""
    state = cpu_state(retriever.query if retriever.shared else retriever)
    return {f"query.{name}": t for name, t in state.items()} if retriever.shared else state


def retriever_files(retriever: Retriever, vocabulary_hash: str) -> dict[str, bytes]:
    """A retriever as files for the exchange."""
    description = json.dumps(describe(retriever, None, vocabulary_hash), sort_keys=True)
    return {MODEL: description.encode(), RETRIEVER: save_tensors(retriever_state(retriever))}


def parse_retriever(description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Retriever:
    """A retriever from its description and parameters."""
    towers = [
        Embedder(
            Bert(BertConfig.from_json(description["bert"], MODEL)), description["embedding_width"], description["head"]
        )
        for _ in range(1 if description["share_embedders"] else 2)
    ]
    retriever = Retriever(towers[0], towers[-1])
    if retriever.shared:
        retriever.query.load_state_dict({name.removeprefix("query."): t for name, t in tensors.items()})
    else:
        retriever.load_state_dict(dict(tensors))
    return retriever


def retriever_from_files(files: Mapping[str, bytes]) -> Retriever:
    """The inverse of :func:`retriever_files`."""
    return parse_retriever(json.loads(files[MODEL]), load_tensors(files[RETRIEVER]))


def save_models(folder: Path, retriever: Retriever, reader: Reader, vocabulary_hash: str) -> None:
    """Write both models into a stage folder."""
    (folder / MODEL).write_text(
        json.dumps(describe(retriever, reader, vocabulary_hash), indent=1, sort_keys=True) + "\n"
    )
    (folder / RETRIEVER).write_bytes(save_tensors(retriever_state(retriever)))
    (folder / READER).write_bytes(save_tensors(cpu_state(reader)))


def load_models(folder: Path, vocabulary_hash: str) -> tuple[Retriever, Reader]:
    """Read both models; ValueError when they were trained with another vocabulary."""
    description = json.loads((folder / MODEL).read_text())
    if description["vocabulary_hash"] != vocabulary_hash:
        raise ValueError(
            f"{folder}: trained with the vocabulary {description['vocabulary_hash'][:12]}, the snapshot has "
            f"{vocabulary_hash[:12]}; run the stages since ict again"
        )
    retriever = parse_retriever(description, load_tensors((folder / RETRIEVER).read_bytes()))
    config = BertConfig.from_json(description["reader"], str(folder / MODEL))
    reader = Reader(Bert(config), MaskedWordHead(config))
    if description["span_width"] is not None:
        reader.spans = SpanHead(config.width, description["span_width"], description["span_layer_norm_eps"])
    reader.load_state_dict(load_tensors((folder / READER).read_bytes()))
    return retriever, reader
