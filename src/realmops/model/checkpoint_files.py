"""Build retriever and reader from options; save and load them as safetensors and JSON."""

import copy
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from tokenizers import Tokenizer
from torch import Tensor, nn

from realmops.artifacts import seed_for
from realmops.hub import (
    CONFIG,
    MODULES,
    POOLING,
    SAFETENSORS,
    encoder_folder,
    is_sentence_encoder,
    read_optional_json,
    read_weights,
    sentence_layers,
    sentence_pooling,
    unused_modules,
)
from realmops.model.encoder import Encoder
from realmops.model.encoder_files import (
    build_small_encoder,
    encoder_from_description,
    load_encoder,
    open_encoder,
    save_encoder,
)
from realmops.model.masked_word_head import MaskedWordHead
from realmops.model.portable import tokenizer_files
from realmops.model.reader import READERS, Reader, SpanHead, initialise_span_head
from realmops.model.retriever import (
    ACTIVATIONS,
    BagOfWords,
    Dense,
    DenseShape,
    Embedder,
    FusionWeights,
    Retriever,
    Tower,
    initialise_projection,
)
from realmops.options import BertOptions, ReaderOptions, RetrieverOptions

MODEL = "model.json"
RETRIEVER = "retriever.safetensors"
READER = "reader.safetensors"
READER_FOLDER = "reader"  # of a fine-tuned model: a reader in transformers' format
ENCODERS = {"query": "query_encoder", "document": "document_encoder", "reader": "reader_encoder"}
WEIGHTS = SAFETENSORS[0]  # in each folder of ENCODERS
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
    from the passages (``search.corpus_statistics``).
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
    bag = BagOfWords(vocabulary, options.embedding_width, options.temperature)
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
    segments = retriever.segments
    if pooling == "auto":
        configured = None if folder is None or retriever.head == "release" else sentence_pooling(folder)
        pooling = configured or "cls"
        if folder is not None and configured and warn is not None and (unused := unused_modules(folder)):
            warn(
                f"{folder / MODULES} names {', '.join(unused)} in addition to the encoder and its pooling ({POOLING}): "
                "these modules are ignored, and the retriever starts below the quality of this encoder"
            )
    retriever.check_vectors(pooling)
    if segments == "auto":
        is_single = encoder.segments < 2 or (folder is not None and is_sentence_encoder(folder))
        segments = "one" if is_single else "two"
    if segments == "two" and encoder.segments < 2:
        raise ValueError(
            f"retriever.segments is two, but {encoder.description} has no second segment; set retriever.segments=auto"
        )
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
        segments=segments,
        temperature=retriever.temperature,
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


def cpu_state(module: nn.Module) -> dict[str, Tensor]:
    """Copy a module's state dict to the CPU, each tensor contiguous."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in module.state_dict().items()}


def describe_models(retriever: Retriever, reader: Reader | None, vocabulary_hash: str) -> dict[str, Any]:
    """Return the configuration that a loader needs to rebuild both models, as JSON."""
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
    if isinstance(tower, BagOfWords):
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


def _tower_from_description(description: Mapping[str, Any], encoder: Encoder | None = None) -> Tower:
    """Build a tower from :func:`_describe_tower`, without weights, over ``encoder`` or a new one."""
    if description["tower"] == "bag":
        return BagOfWords(description["vocabulary"], description["embedding_width"], description["temperature"])
    if encoder is None:
        encoder = encoder_from_description(description["bert"])
    kind = {name: description[name] for name in ("pooling", "projection", "segments", "temperature")}
    dense = [DenseShape(**shape) for shape in description.get("dense", ())]
    return Embedder(encoder, description["embedding_width"], description["head"], dense=dense, **kind)


def _own_state(module: nn.Module) -> dict[str, Tensor]:
    """Copy the parameters of a tower or reader, without those in modules of transformers."""
    prefixes = [f"{name}." for name, part in module.named_modules() if isinstance(part, Encoder | MaskedWordHead)]
    return {name: tensor for name, tensor in cpu_state(module).items() if not name.startswith(tuple(prefixes))}


def retriever_files(retriever: Retriever, vocabulary_hash: str) -> dict[str, bytes]:
    """Serialise a retriever to files by name for the exchange; a shared tower is stored once."""
    description = json.dumps(describe_models(retriever, None, vocabulary_hash), sort_keys=True)
    towers = _towers(retriever)
    state = {f"{name}.{key}": t for name, tower in towers.items() for key, t in cpu_state(tower).items()}
    return {MODEL: description.encode(), RETRIEVER: save_tensors(state)}


def retriever_from_files(files: Mapping[str, bytes]) -> Retriever:
    """Load a retriever from the files of :func:`retriever_files`."""
    description = json.loads(files[MODEL])
    towers = [_tower_from_description(description) for _ in range(1 if description["share_embedders"] else 2)]
    return _assemble(description, towers, load_tensors(files[RETRIEVER]))


def _towers(retriever: Retriever) -> dict[str, Tower]:
    """Return the towers by name, a shared one once."""
    return {"query": retriever.query} | ({} if retriever.shared else {"document": retriever.document})


def _assemble(description: Mapping[str, Any], towers: Sequence[Tower], state: Mapping[str, Tensor]) -> Retriever:
    """Build a retriever from towers and load ``state``, whose keys are prefixed as in :func:`_towers`."""
    retriever = Retriever(towers[0], towers[-1], description["document_vectors"])
    retriever.mixture = FusionWeights(**description["mixture"])
    for name, tower in _towers(retriever).items():
        _fill(tower, {k.removeprefix(f"{name}."): t for k, t in state.items() if k.startswith(f"{name}.")})
    return retriever


def _fill(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load parameters; those in modules of transformers are loaded already and may be missing."""
    missing, unexpected = module.load_state_dict(dict(state), strict=False)
    own_state = _own_state(module) if missing else {}
    if mismatches := [name for name in missing if name in own_state] + unexpected:
        raise RuntimeError(f"{mismatches[0]} is missing or unexpected")


def save_models(
    folder: Path, retriever: Retriever, reader: Reader | None, vocabulary_hash: str, tokenizer: Tokenizer | None = None
) -> None:
    """Write both models into a folder, or the retriever alone.

    Each encoder becomes a subfolder in transformers' format, the reader's with its masked word head; all other
    parameters are safetensors files in the folder itself.
    """
    description = json.dumps(describe_models(retriever, reader, vocabulary_hash), indent=1, sort_keys=True)
    (folder / MODEL).write_text(description + "\n")
    towers = _towers(retriever)
    state = {f"{name}.{key}": t for name, tower in towers.items() for key, t in _own_state(tower).items()}
    (folder / RETRIEVER).write_bytes(save_tensors(state))
    for name, tower in towers.items():
        if isinstance(tower, Embedder):
            _save_encoder(folder / ENCODERS[name], tower.encoder, None, tokenizer)
    if reader is not None:
        (folder / READER).write_bytes(save_tensors(_own_state(reader)))
        _save_encoder(folder / ENCODERS["reader"], reader.encoder, reader.masked_words, tokenizer)


def _save_encoder(folder: Path, encoder: Encoder, head: MaskedWordHead | None, tokenizer: Tokenizer | None) -> None:
    save_encoder(folder, encoder, head)
    if tokenizer is not None:
        for name, content in tokenizer_files(tokenizer, encoder, encoder.positions).items():
            (folder / name).write_bytes(content)


def load_models(folder: Path, vocabulary_hash: str) -> tuple[Retriever, Reader]:
    """Load both models; raise ValueError if their vocabulary or their version of realmops differs."""
    with open_description(folder, vocabulary_hash) as description:
        return _load_retriever(folder, description), _load_reader(folder, description)


def load_retriever(folder: Path, vocabulary_hash: str) -> Retriever:
    """Load the retriever alone; raise ValueError as ``load_models`` does."""
    with open_description(folder, vocabulary_hash) as description:
        return _load_retriever(folder, description)


def load_reader(folder: Path, vocabulary_hash: str) -> Reader:
    """Load the reader alone; raise ValueError as ``load_models`` does."""
    with open_description(folder, vocabulary_hash) as description:
        return _load_reader(folder, description)


def _load_retriever(folder: Path, description: Mapping[str, Any]) -> Retriever:
    state, towers = load_tensors((folder / RETRIEVER).read_bytes()), []
    for name in ("query",) if description["share_embedders"] else ("query", "document"):
        encoder = None
        if description["tower"] == "bert":
            encoder, _ = open_encoder(folder / ENCODERS[name], description["bert"]["packs"])
        towers.append(_tower_from_description(description, encoder))
    return _assemble(description, towers, state)


def copy_models(source: Path, target: Path) -> None:
    """Copy the files of both models (:func:`identifying_files`)."""
    for path in identifying_files(source, "retriever", "reader"):
        if path.parent == source:
            shutil.copyfile(path, target / path.name)
        else:
            shutil.copytree(path.parent, target / path.parent.name)


def identifying_files(folder: Path, *parts: str) -> list[Path]:
    """Return the description and weight files of the parts "retriever" and "reader", in a fixed order.

    They determine all that the models of a folder compute.
    """
    files = [folder / MODEL]
    if "retriever" in parts:
        files += [folder / RETRIEVER, *(folder / ENCODERS[name] / WEIGHTS for name in ("query", "document"))]
    if "reader" in parts:
        files += [folder / READER, folder / ENCODERS["reader"] / WEIGHTS, *sorted((folder / READER_FOLDER).glob("*"))]
    return [path for path in files if path.is_file()]


@contextmanager
def open_description(folder: Path, vocabulary_hash: str) -> Iterator[dict[str, Any]]:
    """Context manager: read :func:`describe_models`, and report an error in the block as one of the folder."""
    description = json.loads((folder / MODEL).read_text())
    if description["vocabulary_hash"] != vocabulary_hash:
        raise ValueError(
            f"{folder}: trained with the vocabulary {description['vocabulary_hash'][:12]}, the snapshot has "
            f"{vocabulary_hash[:12]}; run the stages since ict again"
        )
    if description["reader"] and not (folder / ENCODERS["reader"]).is_dir():
        raise ValueError(
            f"{folder}: trained by an earlier version of realmops, without the folder {ENCODERS['reader']}; run "
            "'realmops run ict --force', then 'realmops run all' (or import or export it again)"
        )
    try:
        yield description
    except (KeyError, RuntimeError) as error:  # from the description, from load_state_dict
        message = f"{MODEL} lacks {error}" if isinstance(error, KeyError) else str(error)
        reason = " ".join(message.split())[:200]
        raise ValueError(
            f"{folder}: its parameters are not those of this version ({reason}); run the stages since ict again with "
            "--force"
        ) from None


def _load_reader(folder: Path, description: Mapping[str, Any]) -> Reader:
    name = description["reader_class"]
    if name not in READERS:
        raise ValueError(
            f"{folder / MODEL}: reader_class is {name!r}; allowed: {', '.join(READERS)}; use the version of realmops "
            "that trained it"
        )
    encoder, head = open_encoder(folder / ENCODERS["reader"], description["reader"]["packs"], predicts=True)
    reader = READERS[name](encoder, head, copies=description["copies"], matches=description["matches"])
    if description["span_width"] is not None:
        reader.spans = SpanHead(encoder.width, description["span_width"], description["span_layer_norm_eps"])
    _fill(reader, load_tensors((folder / READER).read_bytes()))
    return reader
