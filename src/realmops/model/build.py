"""Build retriever and reader from options, before training."""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from realmops.artifacts import seed_for
from realmops.hub import (
    CONFIG,
    MODULES,
    POOLING,
    encoder_folder,
    is_sentence_encoder,
    read_optional_json,
    read_weights,
    sentence_layers,
    sentence_pooling,
    unused_modules,
)
from realmops.model.encoder import Encoder
from realmops.model.encoder_files import build_small_encoder, load_encoder
from realmops.model.masked_word_head import MaskedWordHead
from realmops.model.reader import READERS, Reader, SpanHead, initialise_span_head
from realmops.model.retriever import (
    ACTIVATIONS,
    BagOfWords,
    DenseShape,
    Embedder,
    Retriever,
    Tower,
    initialise_projection,
)
from realmops.options import BertOptions, ReaderOptions, RetrieverOptions

TEMPERATURE = 0.05  # f(x, z) = cosine / temperature, for head: cosine
SPARE_WORDPIECES = 128  # rows that an embedding matrix may have beyond its tokenizer's vocabulary, as padding


def build_encoder(init: str, options: BertOptions, vocabulary: int, seed: int) -> tuple[Encoder, MaskedWordHead | None]:
    """Build the encoder of ``retriever.init`` with its masked word head."""
    generator = torch.Generator().manual_seed(seed_for(seed, "bert"))
    if init == "small":
        return build_small_encoder(options, vocabulary, generator)
    folder = encoder_folder(init)
    encoder, head = load_encoder(folder, options.dropout)
    if not vocabulary <= encoder.vocabulary <= vocabulary + SPARE_WORDPIECES:
        raise ValueError(
            f"{folder}: the encoder has {encoder.vocabulary} wordpieces, the snapshot {vocabulary}; "
            "build the snapshot with this retriever.init"
        )
    if encoder.positions < options.positions:
        raise ValueError(
            f"{folder}: the encoder has {encoder.positions} positions, bert.positions is {options.positions}; "
            f"set bert.positions={encoder.positions}"
        )
    return encoder, head


def build_models(
    bert: BertOptions,
    retriever: RetrieverOptions,
    reader: ReaderOptions,
    vocabulary: int,
    seed: int,
    warn: Callable[[str], None] | None = None,
) -> tuple[Retriever, Reader]:
    """Build retriever and reader; both towers start equal, and an encoder tower as a copy of the reader's encoder.

    The word vectors of a `BagOfWords`, a projection by PCA and the statistics of `LexicalFeatures` are filled later
    from the passages (``train.initial_weights``).
    """
    encoder, head = build_encoder(retriever.init, bert, vocabulary, seed)
    generator = torch.Generator().manual_seed(seed_for(seed, "projection"))
    query: Tower
    if retriever.tower == "bag":
        query = _build_bag(retriever, vocabulary, generator)
    else:
        folder = None if retriever.init == "small" else encoder_folder(retriever.init)
        query = _build_embedder(folder, retriever, copy.deepcopy(encoder), generator, warn)
    document = query if retriever.share_embedders else copy.deepcopy(query)
    reader_class = READERS["apart" if reader.apart else "together"]
    return (
        Retriever(query, document, retriever.document_vectors),
        reader_class(encoder, head, copies=reader.copies, matches=reader.matches),
    )


def _build_bag(options: RetrieverOptions, vocabulary: int, generator: torch.Generator) -> BagOfWords:
    assert options.head == "cosine", options.head
    assert options.embedding_width, "RetrieverOptions"
    if options.embedding_width > vocabulary:
        raise ValueError(
            f"retriever.embedding_width is {options.embedding_width}; a bag has at most one dimension per wordpiece "
            f"({vocabulary}): set retriever.embedding_width={vocabulary} or less"
        )
    bag = BagOfWords(vocabulary, options.embedding_width, TEMPERATURE)
    with torch.no_grad():
        bag.word.weight.normal_(0.0, 1.0, generator=generator)
    return bag


def _build_embedder(
    folder: Path | None,
    retriever: RetrieverOptions,
    encoder: Encoder,
    generator: torch.Generator,
    warn: Callable[[str], None] | None,
) -> Embedder:
    """Build an encoder tower; ``folder`` is the pre-trained encoder's, or None for a new one."""
    pooling: str = retriever.pooling
    if pooling == "auto":
        configured = None if folder is None or retriever.head == "release" else sentence_pooling(folder)
        pooling = configured or "cls"
        if folder is not None and configured and warn is not None and (unused := unused_modules(folder)):
            warn(
                f"{folder / MODULES} names {', '.join(unused)} in addition to the encoder and its pooling ({POOLING}): "
                "these modules are ignored, and the retriever starts below the quality of this encoder"
            )
    retriever.check_vectors(pooling)
    is_single = encoder.segments < 2 or (folder is not None and is_sentence_encoder(folder))
    layers = []
    if folder is not None and is_sentence_encoder(folder) and retriever.head != "release":
        layers = [_dense_layer(path) for path in sentence_layers(folder)]
    shapes = [shape for shape, _ in layers]
    width = shapes[-1].outputs if shapes else encoder.width
    retriever.check_width(width)
    tower = Embedder(
        encoder,
        retriever.embedding_width or width,
        retriever.head,
        pooling=pooling,
        projection=retriever.projection,
        segments="one" if is_single else "two",
        temperature=TEMPERATURE,
        dense=shapes,
    )
    for layer, (_, state) in zip(tower.dense, layers, strict=True):
        layer.load_state_dict(state)
    initialise_projection(tower, generator)
    if tower.pooler is not None and folder is not None:
        load_pooler(tower.pooler, read_weights(folder))
    return tower


def load_pooler(pooler: nn.Linear, state: Mapping[str, Tensor]) -> bool:
    """Load BERT's pooler, the layer over [CLS] of next sentence prediction; return whether ``state`` has it."""
    pooler_state = {
        kind: t for kind in ("weight", "bias") for n, t in state.items() if n.endswith(f"pooler.dense.{kind}")
    }
    if pooler_state:
        pooler.load_state_dict({kind: tensor.float() for kind, tensor in pooler_state.items()})
    return bool(pooler_state)


def _dense_layer(folder: Path) -> tuple[DenseShape, dict[str, Tensor]]:
    """Read a dense layer of a sentence encoder; raise ValueError for an unsupported activation or parameter."""
    about, state = read_optional_json(folder / CONFIG, "dense layer"), read_weights(folder)
    activation = about.get("activation_function", "torch.nn.modules.activation.Tanh")
    if activation not in ACTIVATIONS:
        raise ValueError(f"{folder}: activation_function is {activation!r}; allowed: {', '.join(ACTIVATIONS)}")
    if "linear.weight" not in state or state.keys() - {"linear.weight", "linear.bias"}:
        raise ValueError(
            f"{folder}: its parameters are {', '.join(sorted(state))}; allowed: linear.weight, linear.bias"
        )
    outputs, inputs = state["linear.weight"].shape
    shape = DenseShape(inputs, outputs, "linear.bias" in state, activation)
    return shape, {name: tensor.float() for name, tensor in state.items()}


def add_span_head(reader: Reader, span_width: int, seed: int) -> None:
    """Add an untrained span head to the reader."""
    reader.spans = SpanHead(reader.encoder.width, span_width)
    initialise_span_head(reader.spans, torch.Generator().manual_seed(seed_for(seed, "spans")))
    reader.spans.to(reader.device)
