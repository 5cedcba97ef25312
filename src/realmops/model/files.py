"""Build the models of a run, and hand them on as safetensors and JSON."""

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from realmops.artifacts import seed_for
from realmops.config import BertOptions, ReaderOptions, RetrieverOptions
from realmops.config_rules import check, vector_rules, width_rules
from realmops.encoders.architectures import described_encoder, load_encoder
from realmops.encoders.bert import Bert, BertConfig, MaskedWordHead, import_pooler, initialise_small
from realmops.encoders.encoder import Encoder
from realmops.encoders.folders import (
    MODULES,
    POOLING,
    encoder_folder,
    is_sentence_encoder,
    read_layer,
    read_weights,
    sentence_layers,
    sentence_pooling,
    unused_modules,
)
from realmops.model.reader import READERS, Reader, SpanHead, initialise_spans
from realmops.model.retriever import (
    ACTIVATIONS,
    Bag,
    Dense,
    DenseShape,
    Embedder,
    Mixture,
    Retriever,
    Tower,
    initialise_projection,
)

MODEL = "model.json"
RETRIEVER = "retriever.safetensors"
READER = "reader.safetensors"
SPARE_WORDPIECES = 128  # at most, that an encoder has beside its tokenizer's: matrices are padded to round numbers


def build_encoder(
    options: BertOptions, vocabulary: int, seed: int, warn: Callable[[str], None] | None = None
) -> tuple[Encoder, nn.Module]:
    """The encoder that ``bert.init`` names, with a masked word head; ``warn`` is told when that starts fresh."""
    generator = torch.Generator().manual_seed(seed_for(seed, "bert"))
    if options.init == "small":
        shape = options.model_dump(exclude={"init"}) | {"vocabulary": vocabulary}
        config = BertConfig(**shape)
        bert, small_head = Bert(config), MaskedWordHead(config)
        initialise_small(bert, small_head, generator)
        return bert, small_head
    folder = encoder_folder(options.init)
    encoder, head, found = load_encoder(folder, options.dropout)
    if not vocabulary <= encoder.vocabulary <= vocabulary + SPARE_WORDPIECES:
        raise ValueError(
            f"{folder}: the encoder has {encoder.vocabulary} wordpieces, the snapshot {vocabulary}; "
            "make the snapshot with this bert.init"
        )
    if encoder.positions < options.positions:
        raise ValueError(
            f"{folder}: the encoder has {encoder.positions} positions, bert.positions is {options.positions}; "
            f"set bert.positions={encoder.positions}"
        )
    if not found and warn is not None:
        warn(
            f"{folder} has no masked word head (cls.predictions): the reader's starts fresh, over the word "
            "embeddings; give it more ict.reader_steps than a BERT with its head needs"
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
    """Retriever and reader; all towers and projections start equal, those of a BERT from the reader's encoder.

    A bag, a projection by PCA and what a reader that compares knows of wordpieces are then filled from the passages
    (``index.start``).
    """
    encoder, head = build_encoder(bert, vocabulary, seed, warn)
    generator = torch.Generator().manual_seed(seed_for(seed, "projection"))
    query: Tower
    if retriever.tower == "bag":
        query = _build_bag(retriever, vocabulary, generator)
    else:
        folder = None if bert.init == "small" else encoder_folder(bert.init)
        query = _build_embedder(folder, retriever, copy.deepcopy(encoder), generator, warn)
    document = query if retriever.share_embedders else copy.deepcopy(query)
    reads = READERS["apart" if reader.apart else "together"]
    return (
        Retriever(query, document, retriever.document_vectors),
        reads(encoder, head, copies=reader.copies, matches=reader.matches),
    )


def _build_bag(options: RetrieverOptions, vocabulary: int, generator: torch.Generator) -> Bag:
    assert options.head == "cosine", options.head
    assert options.embedding_width, "config_rules.option_rules"
    if options.embedding_width > vocabulary:
        raise ValueError(
            f"retriever.embedding_width is {options.embedding_width}, and a bag has at most one dimension for each of "
            f"the {vocabulary} wordpieces; set retriever.embedding_width={vocabulary} or less"
        )
    bag = Bag(vocabulary, options.embedding_width, options.temperature)
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
    """``folder`` is the encoder's, None for one that starts from scratch."""
    pooling: str = retriever.pooling
    segments = retriever.segments
    if pooling == "auto":
        own = None if folder is None or retriever.head == "release" else sentence_pooling(folder)
        pooling = own or "cls"
        if folder is not None and own and warn is not None and (unused := unused_modules(folder)):
            warn(
                f"{folder / MODULES} names {', '.join(unused)} beside the encoder and its pooling ({POOLING}): they "
                "are not used here, and the retriever starts below what this encoder can do"
            )
    check(vector_rules(retriever.document_vectors, retriever.pooling, pooling))
    if segments == "auto":
        one = encoder.segments < 2 or (folder is not None and is_sentence_encoder(folder))
        segments = "one" if one else "two"
    if segments == "two" and encoder.segments < 2:
        raise ValueError(
            f"retriever.segments is two, and {encoder.words} tells no segments apart; set retriever.segments=auto"
        )
    layers = []
    if folder is not None and is_sentence_encoder(folder) and retriever.head != "release":
        layers = [_dense_layer(path) for path in sentence_layers(folder)]
    shapes = [shape for shape, _ in layers]
    width = shapes[-1].outputs if shapes else encoder.width
    check(width_rules(retriever.projection, retriever.embedding_width, width))
    tower = Embedder(
        encoder,
        retriever.embedding_width or width,
        retriever.head,
        pooling=pooling,
        projection=retriever.projection,
        segments=segments,
        temperature=retriever.temperature,
        dense=shapes,
    )
    for layer, (_, state) in zip(tower.dense, layers, strict=True):
        layer.load_state_dict(state)
    initialise_projection(tower, generator)
    if tower.pooler is not None and folder is not None:
        import_pooler(tower.pooler, read_weights(folder), str(folder))
    return tower


def _dense_layer(folder: Path) -> tuple[DenseShape, dict[str, Tensor]]:
    """A layer of a sentence encoder; ValueError names what it has that is not known here."""
    about, state = read_layer(folder)
    activation = about.get("activation_function", "torch.nn.modules.activation.Tanh")
    if activation not in ACTIVATIONS:
        raise ValueError(f"{folder}: activation_function is {activation!r}; {', '.join(ACTIVATIONS)} are known")
    if "linear.weight" not in state or state.keys() - {"linear.weight", "linear.bias"}:
        raise ValueError(f"{folder}: its parameters are {', '.join(sorted(state))}; a linear layer's alone are known")
    outputs, inputs = state["linear.weight"].shape
    shape = DenseShape(inputs, outputs, "linear.bias" in state, activation)
    return shape, {name: tensor.float() for name, tensor in state.items()}


def add_spans(reader: Reader, span_width: int, seed: int) -> None:
    """Give the reader a new span head."""
    reader.spans = SpanHead(reader.encoder.width, span_width)
    initialise_spans(reader.spans, torch.Generator().manual_seed(seed_for(seed, "spans")))
    reader.spans.to(reader.device)


def cpu_state(module: nn.Module) -> dict[str, Tensor]:
    """A copy of a module's parameters on the CPU, each tensor once."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in module.state_dict().items()}


def describe(retriever: Retriever, reader: Reader | None, vocabulary_hash: str) -> dict[str, Any]:
    """The shapes that a loader needs, as JSON."""
    return {
        **_describe_tower(retriever.query),
        "share_embedders": retriever.shared,
        "document_vectors": retriever.vectors,
        "mixture": asdict(retriever.mixture),
        "reader": None if reader is None else reader.encoder.describe(),
        "reader_class": next((name for name, kind in READERS.items() if kind is type(reader)), None),
        "copies": reader is not None and reader.copy is not None,
        "matches": reader is not None and reader.matches is not None,
        "span_width": None if reader is None or reader.spans is None else reader.spans.start.out_features,
        "span_layer_norm_eps": None if reader is None or reader.spans is None else reader.spans.norm.eps,
        "vocabulary_hash": vocabulary_hash,
    }


def _describe_tower(tower: Tower) -> dict[str, Any]:
    common = {"embedding_width": tower.width, "head": tower.head, "temperature": tower.temperature}
    if isinstance(tower, Bag):
        return common | {"tower": "bag", "vocabulary": tower.word.num_embeddings}
    assert isinstance(tower, Embedder)
    dense = [asdict(layer.shape) for layer in tower.dense if isinstance(layer, Dense)]
    return common | {
        "tower": "bert",
        "bert": tower.encoder.describe(),
        "pooling": tower.pooling,
        "projection": tower.start,
        "segments": tower.segments,
        **({"dense": dense} if dense else {}),
    }


def _described_tower(description: Mapping[str, Any]) -> Tower:
    """The inverse of :func:`_describe_tower`, without the weights."""
    if description["tower"] == "bag":
        return Bag(description["vocabulary"], description["embedding_width"], description["temperature"])
    encoder = described_encoder(description["bert"], MODEL)
    kind = {name: description[name] for name in ("pooling", "projection", "segments", "temperature")}
    dense = [DenseShape(**shape) for shape in description.get("dense", ())]
    return Embedder(encoder, description["embedding_width"], description["head"], dense=dense, **kind)


def _retriever_bytes(retriever: Retriever) -> bytes:
    """The parameters of a retriever; a shared tower is stored once, as the query tower."""
    if not retriever.shared:
        return save_tensors(cpu_state(retriever))
    return save_tensors({f"query.{name}": tensor for name, tensor in cpu_state(retriever.query).items()})


def retriever_files(retriever: Retriever, vocabulary_hash: str) -> dict[str, bytes]:
    """A retriever as files for the exchange."""
    description = json.dumps(describe(retriever, None, vocabulary_hash), sort_keys=True)
    return {MODEL: description.encode(), RETRIEVER: _retriever_bytes(retriever)}


def retriever_from_files(files: Mapping[str, bytes]) -> Retriever:
    """The inverse of :func:`retriever_files`."""
    return _retriever(json.loads(files[MODEL]), load_tensors(files[RETRIEVER]))


def _retriever(description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Retriever:
    towers = [_described_tower(description) for _ in range(1 if description["share_embedders"] else 2)]
    vectors = description.get("document_vectors", 1)  # earlier versions knew one alone
    retriever = Retriever(towers[0], towers[-1], vectors)
    retriever.mixture = Mixture(**description["mixture"])
    if retriever.shared:
        retriever.query.load_state_dict({name.removeprefix("query."): t for name, t in tensors.items()})
    else:
        retriever.load_state_dict(dict(tensors))
    return retriever


def save_models(folder: Path, retriever: Retriever, reader: Reader, vocabulary_hash: str) -> None:
    description = json.dumps(describe(retriever, reader, vocabulary_hash), indent=1, sort_keys=True)
    (folder / MODEL).write_text(description + "\n")
    (folder / RETRIEVER).write_bytes(_retriever_bytes(retriever))
    (folder / READER).write_bytes(save_tensors(cpu_state(reader)))


def load_models(folder: Path, vocabulary_hash: str) -> tuple[Retriever, Reader]:
    """Read both models; ValueError when they were trained with another vocabulary or by another version."""
    with _described(folder, vocabulary_hash, "run the stages since ict again") as description:
        return _retriever(description, load_tensors((folder / RETRIEVER).read_bytes())), _reader(folder, description)


def load_reader(folder: Path, vocabulary_hash: str) -> Reader:
    """The reader of an export alone; ValueError as of ``load_models``."""
    remedy = "set bert.init to the encoder that this reader began with (README.md there names it)"
    with _described(folder, vocabulary_hash, remedy) as description:
        return _reader(folder, description)


@contextmanager
def _described(folder: Path, vocabulary_hash: str, remedy: str) -> Iterator[dict[str, Any]]:
    description = json.loads((folder / MODEL).read_text())
    if description["vocabulary_hash"] != vocabulary_hash:
        raise ValueError(
            f"{folder}: trained with the vocabulary {description['vocabulary_hash'][:12]}, the snapshot has "
            f"{vocabulary_hash[:12]}; {remedy}"
        )
    try:
        yield description
    except (KeyError, RuntimeError) as error:  # of the description, of load_state_dict
        said = f"{MODEL} lacks {error}" if isinstance(error, KeyError) else str(error)
        reason = " ".join(said.split())[:200]
        raise ValueError(
            f"{folder}: its parameters are not those of this version ({reason}); run the stages since ict again with "
            "--force"
        ) from None


def _reader_class(folder: Path, description: Mapping[str, Any]) -> type[Reader]:
    name = description.get("reader_class") or ("apart" if description["apart"] else "together")  # as 0.1.0 says it
    if name not in READERS:
        raise ValueError(
            f"{folder / MODEL}: reader_class is {name!r}, this version has {', '.join(READERS)}; open it with the "
            "version that trained it"
        )
    return READERS[name]


def _reader(folder: Path, description: Mapping[str, Any]) -> Reader:
    encoder = described_encoder(description["reader"], str(folder / MODEL))
    kind = {name: description[name] for name in ("copies", "matches")}
    reader = _reader_class(folder, description)(encoder, encoder.masked_word_head(), **kind)
    if description["span_width"] is not None:
        reader.spans = SpanHead(encoder.width, description["span_width"], description["span_layer_norm_eps"])
    reader.load_state_dict(load_tensors((folder / READER).read_bytes()))
    return reader
