"""Build retriever and reader from options, before training."""

import copy
from collections.abc import Callable
from pathlib import Path

import torch

from realmops.artifacts import seed_for
from realmops.hub import (
    CONFIG,
    MODULES,
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
from realmops.model.reader import READERS, Reader, SpanHead
from realmops.model.retriever import (
    ACTIVATIONS,
    BagOfWords,
    Dense,
    Embedder,
    Retriever,
    Tower,
    initialise_projection,
)
from realmops.options import BertOptions, ReaderOptions, RetrieverOptions

SPARE_WORDPIECES = 128  # rows that an embedding matrix may have beyond its tokenizer's vocabulary, as padding


def build_encoder(init: str, options: BertOptions, vocabulary: int, seed: int) -> tuple[Encoder, MaskedWordHead | None]:
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
    """Build retriever and reader; both towers are one, which starts as a copy of the reader's encoder.

    The word vectors of a `BagOfWords` and the statistics of `LexicalFeatures` are filled later from the passages
    (``train.initialisation``).
    """
    encoder, head = build_encoder(retriever.init, bert, vocabulary, seed)
    generator = torch.Generator().manual_seed(seed_for(seed, "projection"))
    if retriever.tower == "bag":
        query: Tower = _build_bag(retriever, vocabulary, generator)
    else:
        query = _build_embedder(retriever, copy.deepcopy(encoder), generator, warn)
    reader_class = READERS["apart" if reader.apart else "together"]
    return (
        Retriever(query, query, retriever.document_vectors),
        reader_class(encoder, head, copies=reader.copies, matches=reader.matches),
    )


def _build_bag(options: RetrieverOptions, vocabulary: int, generator: torch.Generator) -> BagOfWords:
    if (width := options.embedding_width) > vocabulary:
        raise ValueError(
            f"retriever.embedding_width is {width}; a bag has at most one dimension per wordpiece ({vocabulary}): set "
            f"retriever.embedding_width={vocabulary} or less"
        )
    bag = BagOfWords(vocabulary, options.embedding_width)
    with torch.no_grad():
        bag.word.weight.normal_(0.0, 1.0, generator=generator)
    return bag


def _build_embedder(
    retriever: RetrieverOptions, encoder: Encoder, generator: torch.Generator, warn: Callable[[str], None] | None
) -> Embedder:
    folder = None if retriever.init == "small" else encoder_folder(retriever.init)
    sentence = None if folder is None or not is_sentence_encoder(folder) else folder
    configured = None if retriever.head == "release" else sentence
    pooling = retriever.pooling
    if pooling == "auto":
        pooling = "cls" if configured is None else sentence_pooling(configured)
        if configured is not None and warn is not None and (unused := unused_modules(configured)):
            warn(
                f"{configured / MODULES} names {', '.join(unused)}, which is ignored: the retriever starts below the "
                "quality of this encoder"
            )
    retriever.check_vectors(pooling)
    layers = [] if configured is None else [_dense_layer(path) for path in sentence_layers(configured)]
    width = layers[-1].outputs if layers else encoder.width
    retriever.check_width(width)
    tower = Embedder(
        encoder,
        retriever.embedding_width or width,
        retriever.head,
        pooling=pooling,
        projection=retriever.projection,
        segments="two" if encoder.segments > 1 and sentence is None else "one",
        dense=layers,
    )
    initialise_projection(tower, generator)
    if tower.pooler is not None and folder is not None:
        pooler = {name: x.float() for name, x in read_weights(folder).items() if "pooler.dense." in name}
        if pooler:  # BERT's layer over [CLS] of next sentence prediction
            tower.pooler.load_state_dict({name.rpartition(".")[2]: x for name, x in pooler.items()})
    return tower


def _dense_layer(folder: Path) -> Dense:
    about, state = read_optional_json(folder / CONFIG), read_weights(folder)
    activation = about.get("activation_function", "torch.nn.modules.activation.Tanh")
    if activation not in ACTIVATIONS:
        raise ValueError(f"{folder}: activation_function is {activation!r}; allowed: {', '.join(ACTIVATIONS)}")
    if "linear.weight" not in state or state.keys() - {"linear.weight", "linear.bias"}:
        raise ValueError(
            f"{folder}: its parameters are {', '.join(sorted(state))}; allowed: linear.weight, linear.bias"
        )
    outputs, inputs = state["linear.weight"].shape
    layer = Dense(inputs, outputs, "linear.bias" in state, activation)
    layer.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return layer


def add_span_head(reader: Reader, span_width: int, seed: int) -> None:
    """Add a span head, initialised as BERT: normal weights of standard deviation 0.02, zero biases."""
    head, generator = SpanHead(reader.encoder.width, span_width), torch.Generator().manual_seed(seed_for(seed, "spans"))
    with torch.no_grad():
        for layer in (head.start, head.end, head.score):
            layer.weight.normal_(0.0, 0.02, generator=generator)
        head.start.bias.zero_()
    reader.spans = head.to(reader.device)
