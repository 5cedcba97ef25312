"""A retriever as files: a sentence-transformers folder, which that library opens without our code.

An encoder tower is Transformer, Pooling, Dense, LayerNorm and Normalize, a bag StaticEmbedding and Normalize; two
towers are the routes ``query`` and ``document`` of a Router. A passage is the pair (title, text), which the tokenizer
joins as ``join_document`` does. What the library does not know is in ``realmops.json``. Writing needs no library.
"""

import inspect
import json
import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import load_file
from safetensors.torch import save as save_tensors
from tokenizers import Tokenizer
from torch import Tensor, nn

from realmops.artifacts import digest_of, read_json, sha256_file
from realmops.corpus.snapshot_reader import Snapshot
from realmops.corpus.special_tokens import build_post_processor
from realmops.hub import CONFIG, MODULES, SAFETENSORS, SENTENCE_CONFIG, TOKENIZER, TOKENIZER_CONFIG
from realmops.model.encoder import Encoder
from realmops.model.encoder_files import open_encoder, save_encoder
from realmops.model.retriever import BagOfWords, Dense, Embedder, FusionWeights, Retriever, Tower
from realmops.model.sequences import SpecialTokens

RETRIEVER_FOLDER = "retriever"  # below the folder of a stage
DESCRIPTION = "realmops.json"
ROUTES = ("query", "document")
FORMAT = 1
WEIGHTS = SAFETENSORS[0]
LAYER_NORM_EPS = 1e-5  # fixed in the library's LayerNorm
_TYPES = "sentence_transformers.models."  # import path in all versions of the library
_NO_ACTIVATION, _TANH = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Tanh"
_NOT_OF_PASSAGES = ("format", "mixture", "share_embedders")
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class TextFormat:
    """Format of texts as sequences: a tokenizer, the hash of its vocabulary, and the most wordpieces of a passage."""

    tokenizer: Tokenizer
    vocabulary_hash: str
    limit: int

    @classmethod
    def of(cls, snapshot: Snapshot) -> Self:
        return cls(snapshot.tokenizer, snapshot.vocabulary_hash, snapshot.block_wordpieces)


@dataclass(frozen=True)
class _Layer:
    """A module of the library after the pooling: its class, our module and the factor of its parameters."""

    kind: str
    module: nn.Module | None = None
    activation: str = _NO_ACTIVATION
    scale: float = 1.0


def retriever_files(retriever: Retriever, text: TextFormat) -> dict[str, bytes]:
    """Return the files that ``SentenceTransformer`` opens, by name; it gives the mean of several vectors."""
    description = {
        **_describe_tower(retriever.query),
        "format": FORMAT,
        "share_embedders": retriever.shared,
        "document_vectors": retriever.vectors,
        "mixture": asdict(retriever.mixture),
        "vocabulary_hash": text.vocabulary_hash,
    }
    config = {"model_type": "SentenceTransformer", "similarity_fn_name": similarity(retriever)}
    special = SpecialTokens.of(text.tokenizer)
    pairs = zip(ROUTES, (special.query, special.document), strict=True)
    prompts = {route: text.tokenizer.decode(list(ids)).strip() + " " for route, ids in pairs if ids}
    files = {DESCRIPTION: _json(description), SENTENCE_CONFIG: _json({**config, "prompts": prompts})}
    modules = {"": "Router"}
    if retriever.shared:
        modules = _module_kinds(retriever.query, "")
        files |= _tower_files(retriever.query, "", text)
    else:
        towers = dict(zip(ROUTES, (retriever.query, retriever.document), strict=True))
        routes = {route: _module_kinds(tower, f"{route}_") for route, tower in towers.items()}
        router = {
            "types": {path: _TYPES + kind for kinds in routes.values() for path, kind in kinds.items()},
            "structure": {route: [*kinds] for route, kinds in routes.items()},
            "parameters": {"default_route": "document", "allow_empty_key": True},
        }
        files["router_config.json"] = _json(router)
        for route, tower in towers.items():
            files |= _tower_files(tower, f"{route}_", text)
    rows = enumerate(modules.items())
    files[MODULES] = _json([{"idx": n, "name": str(n), "path": p, "type": _TYPES + kind} for n, (p, kind) in rows])
    return files


def retriever_from_files(files: Mapping[str, bytes]) -> Retriever:
    return _assemble(lambda name: json.loads(files[name]), lambda name: load_tensors(files[name]))


def save_retriever(folder: Path, retriever: Retriever, text: TextFormat) -> None:
    for name, content in retriever_files(retriever, text).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def load_retriever(stage: Path, vocabulary_hash: str) -> Retriever:
    """Load the retriever of a stage; raise ValueError if its vocabulary or its version of realmops differs."""
    folder = stage / RETRIEVER_FOLDER
    read_description(folder, stage, vocabulary_hash)
    return _assemble(lambda name: read_json(folder / name), lambda name: load_file(folder / name))


def read_description(folder: Path, stage: Path, vocabulary_hash: str) -> dict[str, Any]:
    path = folder / DESCRIPTION
    description: dict[str, Any] = read_json(path) if path.is_file() else {}
    if description.get("format") != FORMAT:
        raise ValueError(
            f"{path} is missing or has another format: another version of realmops made it; run 'realmops run ict "
            "--force', then 'realmops run all' (or import or export it again)"
        )
    if description["vocabulary_hash"] != vocabulary_hash:
        raise ValueError(
            f"{stage}: trained with the vocabulary {description['vocabulary_hash'][:12]}, the snapshot has "
            f"{vocabulary_hash[:12]}; run the stages since ict again"
        )
    return description


def passage_tower_digest(folder: Path) -> str:
    """Return the digest of what embeds passages, which an index names; ``folder`` is the retriever's."""
    description = read_json(folder / DESCRIPTION)
    prefix = "" if description["share_embedders"] else f"{ROUTES[1]}_"
    digests = {}
    for path in (*folder.rglob(WEIGHTS), *folder.rglob(CONFIG)):
        module, _, name = path.relative_to(folder).as_posix().rpartition("/")
        if module.startswith(prefix):
            number = module.removeprefix(prefix).partition("_")[0] or "0"  # a single tower's first module is at the top
            digests[f"{number}/{name}"] = sha256_file(path)
    shape = {key: value for key, value in description.items() if key not in _NOT_OF_PASSAGES}
    return digest_of([digests, shape])


def _assemble(read: Callable[[str], Any], tensors: Callable[[str], Tensors]) -> Retriever:
    description = read(DESCRIPTION)
    prefixes = ("",) if description["share_embedders"] else tuple(f"{route}_" for route in ROUTES)
    towers = [_read_tower(description, prefix, read, tensors) for prefix in prefixes]
    retriever = Retriever(towers[0], towers[-1], description["document_vectors"])
    retriever.mixture = FusionWeights(**description["mixture"])
    return retriever


def _describe_tower(tower: Tower) -> dict[str, Any]:
    common = {"embedding_width": tower.width, "head": tower.head}
    if isinstance(tower, BagOfWords):
        ignored = (tower.counts_V == 0).nonzero().flatten().tolist()
        return common | {"tower": "bag", "vocabulary": tower.word.num_embeddings, "ignored": ignored}
    assert isinstance(tower, Embedder)
    return common | {
        "tower": "bert",
        "packs": tower.encoder.packs,
        "pooling": tower.pooling,
        "projection": tower.start,
        "segments": tower.segments,
        "dense": [layer.shape for layer in tower.dense if isinstance(layer, Dense)],
    }


def _read_tower(
    description: Mapping[str, Any], prefix: str, read: Callable[[str], Any], tensors: Callable[[str], Tensors]
) -> Tower:
    if description["tower"] == "bag":
        bag = BagOfWords(description["vocabulary"], description["embedding_width"])
        table = tensors(f"{_path(prefix, 0, 'StaticEmbedding')}{WEIGHTS}")
        bag.word.load_state_dict({"weight": table["embedding.weight"]})
        bag.counts_V[description["ignored"]] = 0.0
        return bag
    path = _path(prefix, 0, "Transformer")
    weights = tensors(path + WEIGHTS)
    encoder, _ = open_encoder(read(path + CONFIG), weights, path + WEIGHTS, description["packs"], predicts=False)
    kind = {name: description[name] for name in ("pooling", "projection", "segments")}
    dense = [Dense(**shape) for shape in description["dense"]]
    tower = Embedder(encoder, description["embedding_width"], description["head"], dense=dense, **kind)
    for n, layer in enumerate(_layers(tower), start=2):
        if layer.module is not None:
            state = tensors(_path(prefix, n, layer.kind) + WEIGHTS)
            layer.module.load_state_dict({key.partition(".")[2]: x / layer.scale for key, x in state.items()})
    return tower


def _path(prefix: str, n: int, kind: str) -> str:
    """Return the folder of a module with a final slash; the first module of a single tower is at the top."""
    return f"{prefix}{n}_{kind}/" if prefix or n else ""


def _module_kinds(tower: Tower, prefix: str) -> dict[str, str]:
    kinds = ["StaticEmbedding", "Normalize"]
    if isinstance(tower, Embedder):
        kinds = ["Transformer", "Pooling", *(layer.kind for layer in _layers(tower))]
    return {_path(prefix, n, kind).rstrip("/"): kind for n, kind in enumerate(kinds)}


def _layers(tower: Embedder) -> list[_Layer]:
    dense = (layer for layer in tower.dense if isinstance(layer, Dense))
    layers = [_Layer("Dense", layer.linear, str(layer.shape["activation"])) for layer in dense]
    if tower.pooler is not None:
        layers.append(_Layer("Dense", tower.pooler, _TANH))
    # A LayerNorm of s x with the library's epsilon is one of x with epsilon / s^2. A power of 2 is exact in both
    # directions and gives at most twice, or half of, our epsilon, which is far below the variance.
    eps = LAYER_NORM_EPS if tower.norm is None else tower.norm.eps
    scale = 2.0 ** round(math.log2(LAYER_NORM_EPS / eps) / 2)
    if tower.projection is not None:
        layers.append(_Layer("Dense", tower.projection, scale=scale))
    elif scale != 1 or tower.width != tower.pooled_width:  # keeps the first dimensions
        layers.append(_Layer("Dense", scale=scale))
    if tower.norm is not None:
        layers.append(_Layer("LayerNorm", tower.norm))
    return [*layers, *([_Layer("Normalize")] if tower.head == "cosine" else [])]


def _tower_files(tower: Tower, prefix: str, text: TextFormat) -> dict[str, bytes]:
    if isinstance(tower, BagOfWords):
        # The library's mean and the bag's sum have the same direction.
        weights = _tensors({"embedding.weight": tower.word.weight * tower.counts_V[:, None]})
        tokens = joining_tokenizer(text.tokenizer, with_prompts=False).to_str().encode()
        modules = [{WEIGHTS: weights, TOKENIZER: tokens}, {}]
    else:
        assert isinstance(tower, Embedder)
        pooling = {"word_embedding_dimension": tower.encoder.width}
        pooling |= {f"pooling_mode_{name}": name.startswith(tower.pooling) for name in ("cls_token", "mean_tokens")}
        pooling |= {"pooling_mode_lasttoken": True} if tower.pooling == "last" else {}
        layers = [_layer_files(layer, tower) for layer in _layers(tower)]
        modules = [_transformer_files(tower, text), {CONFIG: _json(pooling)}, *layers]
    paths = _module_kinds(tower, prefix)
    return {
        f"{path}/{name}".lstrip("/"): content
        for path, files in zip(paths, modules, strict=True)
        for name, content in files.items()
    }


def _layer_files(layer: _Layer, tower: Embedder) -> dict[str, bytes]:
    if layer.kind == "Normalize":
        return {}
    identity = {"weight": torch.eye(tower.width, tower.pooled_width)}
    state = identity if layer.module is None else layer.module.state_dict()
    tensors = {name: layer.scale * tensor for name, tensor in state.items()}
    if layer.kind == "LayerNorm":
        weights = _tensors({f"norm.{name}": tensor for name, tensor in tensors.items()})
        return {CONFIG: _json({"dimension": tower.width}), WEIGHTS: weights}
    outputs, inputs = tensors["weight"].shape
    config = {"in_features": inputs, "out_features": outputs, "bias": "bias" in tensors}
    weights = _tensors({f"linear.{name}": tensor for name, tensor in tensors.items()})
    return {CONFIG: _json(config | {"activation_function": layer.activation}), WEIGHTS: weights}


def _transformer_files(tower: Embedder, text: TextFormat) -> dict[str, bytes]:
    encoder = tower.encoder
    limit = min(text.limit, encoder.positions)
    config: dict[str, Any] = {"max_seq_length": limit, "do_lower_case": False}
    if "add_pooling_layer" in inspect.signature(type(encoder.model).__init__).parameters:
        config["model_args"] = {"add_pooling_layer": False}
    files = tokenizer_files(text.tokenizer, encoder, limit, tower.segments)
    files["sentence_bert_config.json"] = _json(config)
    with tempfile.TemporaryDirectory() as folder:
        save_encoder(Path(folder), encoder)
        return files | {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def tokenizer_files(tokenizer: Tokenizer, encoder: Encoder, limit: int, segments: str = "two") -> dict[str, bytes]:
    """Return tokenizer files for transformers; the tokenizer joins a pair as ``join_document`` does."""
    special = SpecialTokens.of(tokenizer)
    ids = {"sep": special.sep, "unk": special.unknown, "pad": special.padding, "cls": special.cls}
    ids["mask"] = special.mask_if_any
    config = {f"{role}_token": tokenizer.id_to_token(token) for role, token in ids.items() if token is not None} | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": limit,
        "model_input_names": model_input_names(encoder),
        "split_special_tokens": True,  # so that "[MASK]" in a text is three words
    }
    tokens = joining_tokenizer(tokenizer, segments, with_prompts=False).to_str().encode()
    return {TOKENIZER: tokens, TOKENIZER_CONFIG: _json(config)}


def joining_tokenizer(tokenizer: Tokenizer, segments: str = "two", with_prompts: bool = True) -> Tokenizer:
    """Return a tokenizer that joins a text as ``join_query`` does, and title and text as ``join_document`` does."""
    special, other = SpecialTokens.of(tokenizer), Tokenizer.from_str(tokenizer.to_str())
    if not with_prompts:
        special = replace(special, query=(), document=())
    other.post_processor = build_post_processor(other, special, 0 if segments == "one" else 1)
    return other


def model_input_names(encoder: Encoder) -> list[str]:
    return ["input_ids", *(["token_type_ids"] if encoder.segments > 1 else []), "attention_mask"]


def similarity(retriever: Retriever) -> str:
    return "cosine" if retriever.query.head == "cosine" else "dot"


def _tensors(tensors: Tensors) -> bytes:
    on_cpu = {name: tensor.detach().float().cpu().contiguous() for name, tensor in tensors.items()}
    return save_tensors(on_cpu, {"format": "pt"})


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()
