"""Export of a retriever to a sentence-transformers folder that contains only modules of that library.

Writing it does not require the library. An encoder tower becomes Transformer, Pooling, Dense, LayerNorm and Normalize,
a bag StaticEmbedding and Normalize; two towers become the routes ``query`` and ``document`` of a Router. A passage is
the pair (title, text), which the tokenizer joins as ``join_document`` does.
"""

import inspect
import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as save_tensors
from tokenizers import Tokenizer
from torch import Tensor

from realmops.corpus.special_tokens import build_post_processor
from realmops.hub import CONFIG, MODULES, SAFETENSORS, SENTENCE_CONFIG, TOKENIZER, TOKENIZER_CONFIG
from realmops.model.encoder import Encoder
from realmops.model.encoder_files import save_encoder
from realmops.model.retriever import BagOfWords, Dense, Embedder, Retriever, Tower
from realmops.model.sequences import SpecialTokens

ROUTES = ("query", "document")
LAYER_NORM_EPS = 1e-5  # fixed in the library's LayerNorm
_TYPES = "sentence_transformers.models."  # import path in all versions of the library
_NO_ACTIVATION, _TANH = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Tanh"


@dataclass(frozen=True)
class _Module:
    """One module: the name of its class in the library, and its files by name."""

    kind: str
    files: dict[str, bytes] = field(default_factory=dict)


def write_retriever(folder: Path, retriever: Retriever, tokenizer: Tokenizer, limits: tuple[int, int]) -> None:
    """Write the retriever into a folder that ``SentenceTransformer(folder)`` opens.

    Args:
        folder: existing folder.
        retriever: retriever to export; a passage has a single vector, even if ``retriever.vectors`` is larger.
        tokenizer: the snapshot's tokenizer.
        limits: maximum numbers of wordpieces in queries and in passages.
    """
    if retriever.shared:
        modules = _modules(retriever.query, tokenizer, max(limits))
        by_path = {f"{n}_{module.kind}" if n else "": module for n, module in enumerate(modules)}
        entries = [(path, _TYPES + module.kind) for path, module in by_path.items()]
    else:
        towers = zip(ROUTES, (retriever.query, retriever.document), limits, strict=True)
        routes = {route: _modules(tower, tokenizer, limit) for route, tower, limit in towers}
        structure = {r: {f"{r}_{n}_{m.kind}": m for n, m in enumerate(modules)} for r, modules in routes.items()}
        by_path = structure["query"] | structure["document"]
        router = {
            "types": {path: _TYPES + module.kind for path, module in by_path.items()},
            "structure": {route: [*modules] for route, modules in structure.items()},
            "parameters": {"default_route": "document", "allow_empty_key": True},
        }
        (folder / "router_config.json").write_bytes(_json(router))
        entries = [("", f"{_TYPES}Router")]
    for path, module in by_path.items():
        (folder / path).mkdir(exist_ok=True)
        for name, content in module.files.items():
            (folder / path / name).write_bytes(content)
    rows = [{"idx": n, "name": str(n), "path": path, "type": kind} for n, (path, kind) in enumerate(entries)]
    (folder / MODULES).write_bytes(_json(rows))
    config = {"model_type": "SentenceTransformer", "similarity_fn_name": similarity(retriever)}
    (folder / SENTENCE_CONFIG).write_bytes(_json({**config, "prompts": tokenizer_prompts(tokenizer)}))


def similarity(retriever: Retriever) -> str:
    """Return the library's name of the similarity function of its embeddings."""
    return "cosine" if retriever.query.head == "cosine" else "dot"


def joining_tokenizer(tokenizer: Tokenizer, segments: str = "two", with_prompts: bool = True) -> Tokenizer:
    """Return a tokenizer that encodes a text as ``join_query`` does, and a pair of title and text as ``join_document``.

    Without ``with_prompts`` it adds no prompts: the caller does (:func:`tokenizer_prompts`).
    """
    special, other = SpecialTokens.of(tokenizer), Tokenizer.from_str(tokenizer.to_str())
    if not with_prompts:
        special = replace(special, query=(), document=())
    other.post_processor = build_post_processor(other, special, 0 if segments == "one" else 1)
    return other


def tokenizer_prompts(tokenizer: Tokenizer) -> dict[str, str]:
    """Return the prompts of queries and documents as text, as the library stores them."""
    special = SpecialTokens.of(tokenizer)
    prompts = {"query": special.query, "document": special.document}
    return {name: tokenizer.decode(list(ids)).strip() + " " for name, ids in prompts.items() if ids}


def _modules(tower: Tower, tokenizer: Tokenizer, limit: int) -> list[_Module]:
    if isinstance(tower, BagOfWords):
        # The library's mean and the bag's sum have the same direction.
        weights = _tensors({"embedding.weight": tower.word.weight * tower.counts_V[:, None]})
        tokens = joining_tokenizer(tokenizer, with_prompts=False).to_str().encode()
        return [_Module("StaticEmbedding", {SAFETENSORS[0]: weights, TOKENIZER: tokens}), _Module("Normalize")]
    assert isinstance(tower, Embedder)
    pooling = {"word_embedding_dimension": tower.encoder.width}
    pooling |= {f"pooling_mode_{name}": name.startswith(tower.pooling) for name in ("cls_token", "mean_tokens")}
    pooling |= {"pooling_mode_lasttoken": True} if tower.pooling == "last" else {}
    modules = [_transformer(tower, tokenizer, limit), _Module("Pooling", {CONFIG: _json(pooling)})]
    for layer in tower.dense:
        assert isinstance(layer, Dense)
        modules.append(_dense(layer.linear.state_dict(), layer.shape.activation))
    if tower.pooler is not None:
        modules.append(_dense(tower.pooler.state_dict(), _TANH))
    # A LayerNorm with another epsilon gives the same output if its input is scaled by the square root of their ratio.
    scale = 1.0 if tower.norm is None else math.sqrt(LAYER_NORM_EPS / tower.norm.eps)
    if tower.projection is not None:
        modules.append(_dense({name: scale * x for name, x in tower.projection.state_dict().items()}))
    elif scale != 1 or tower.width != tower.pooled_width:  # keeps the first dimensions
        modules.append(_dense({"weight": scale * torch.eye(tower.width, tower.pooled_width)}))
    if tower.norm is not None:
        weights = _tensors({f"norm.{name}": tensor for name, tensor in tower.norm.state_dict().items()})
        modules.append(_Module("LayerNorm", {CONFIG: _json({"dimension": tower.width}), SAFETENSORS[0]: weights}))
    if tower.head == "cosine":
        modules.append(_Module("Normalize"))
    return modules


def _transformer(tower: Embedder, tokenizer: Tokenizer, limit: int) -> _Module:
    encoder = tower.encoder
    limit = min(limit, encoder.positions)
    config: dict[str, Any] = {"max_seq_length": limit, "do_lower_case": False}
    if "add_pooling_layer" in inspect.signature(type(encoder.model).__init__).parameters:
        config["model_args"] = {"add_pooling_layer": False}
    files = tokenizer_files(tokenizer, encoder, limit, tower.segments)
    files["sentence_bert_config.json"] = _json(config)
    with tempfile.TemporaryDirectory() as folder:
        save_encoder(Path(folder), encoder)
        files |= {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
    values = json.loads(files[CONFIG])
    values |= {"pad_token_id": values.get("pad_token_id", SpecialTokens.of(tokenizer).padding)}
    return _Module("Transformer", files | {CONFIG: _json(values)})


def tokenizer_files(tokenizer: Tokenizer, encoder: Encoder, limit: int, segments: str = "two") -> dict[str, bytes]:
    """Return tokenizer files for transformers; the tokenizer joins a pair as ``join_document`` does."""
    special = SpecialTokens.of(tokenizer)
    names = {"sep_token": special.sep, "unk_token": special.unknown, "pad_token": special.padding}
    names |= {} if special.cls is None else {"cls_token": special.cls}
    names |= {} if special.mask_if_any is None else {"mask_token": special.mask}
    config = {name: tokenizer.id_to_token(token) for name, token in names.items()} | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": limit,
        "model_input_names": model_input_names(encoder),
        "split_special_tokens": True,  # so that "[MASK]" in a text is three words
    }
    tokens = joining_tokenizer(tokenizer, segments, with_prompts=False).to_str().encode()
    return {TOKENIZER: tokens, TOKENIZER_CONFIG: _json(config)}


def model_input_names(encoder: Encoder) -> list[str]:
    """Return the inputs that transformers' tokenizer passes to the encoder."""
    return ["input_ids", *(["token_type_ids"] if encoder.segments > 1 else []), "attention_mask"]


def _dense(tensors: Mapping[str, Tensor], activation: str = _NO_ACTIVATION) -> _Module:
    outputs, inputs = tensors["weight"].shape
    config = {"in_features": inputs, "out_features": outputs, "bias": "bias" in tensors}
    weights = _tensors({f"linear.{name}": tensor for name, tensor in tensors.items()})
    return _Module("Dense", {CONFIG: _json(config | {"activation_function": activation}), SAFETENSORS[0]: weights})


def _tensors(tensors: dict[str, Tensor]) -> bytes:
    on_cpu = {name: tensor.detach().float().cpu().contiguous() for name, tensor in tensors.items()}
    return save_tensors(on_cpu, {"format": "pt"})


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()
