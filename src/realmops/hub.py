"""Pre-trained models in Hugging Face's format: locate their folders, and read their weights safely.

Only this module reads torch's .bin, a pickle, with the restricted unpickler, which builds tensors and nothing else.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from realmops.credentials import error_line

if TYPE_CHECKING:
    from torch import Tensor

Pooling = Literal["cls", "mean", "last"]
CONFIG = "config.json"
SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
BIN = ("pytorch_model.bin", "pytorch_model.bin.index.json")
VOCABULARY = "vocab.txt"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
SENTENCE_CONFIG = "config_sentence_transformers.json"  # of a sentence encoder: prompts
POOLING = "1_Pooling/config.json"  # of a sentence encoder: pooling mode
MODULES = "modules.json"  # of a sentence encoder: its modules in order
HUB = "hf:"  # prefix of names on the hub, of data sets and models
HUB_SECONDS = 5.0  # timeout of a question to the hub
_COMMON = (CONFIG, VOCABULARY, TOKENIZER, TOKENIZER_CONFIG, POOLING, MODULES)
_POOLED: dict[str, Pooling] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
_DENSE = ("*_Dense/config.json", "*_Dense/model.safetensors")
_DOCUMENT_PROMPTS = ("document", "passage", "corpus")  # sentence-transformers writes "document" even if it is empty


@dataclass(frozen=True)
class ModelFamily:
    """A kind of pre-trained model: its option, and the alternative files of its folder."""

    option: str
    name: str
    weights: tuple[tuple[str, str], ...]  # pairs of a single file and the index of a sharded one
    vocabulary: tuple[str, ...]
    more: tuple[str, ...] = ()  # further files that are read where they exist
    fallback: str = "small"  # value of the option that needs no folder

    @property
    def required(self) -> dict[str, tuple[str, ...]]:
        weights = " or ".join(whole for whole, _ in self.weights)
        vocabulary = " or ".join(self.vocabulary)
        return {CONFIG: (CONFIG,), weights: sum(self.weights, ()), vocabulary: self.vocabulary}

    @property
    def advice(self) -> str:
        return f"the folder of a {self.name} has {', '.join(self.required)}"

    def missing(self, folder: Path) -> list[str]:
        return [what for what, names in self.required.items() if not any((folder / name).is_file() for name in names)]


BERT = ModelFamily("retriever.init", "BERT encoder", (SAFETENSORS, BIN), (VOCABULARY, TOKENIZER))
T5 = ModelFamily("closed_book.init", "T5", (SAFETENSORS,), (TOKENIZER,))
READER = ModelFamily(
    "reader.init",
    "reader of answer spans",
    (SAFETENSORS,),
    (TOKENIZER, VOCABULARY, "vocab.json", "spiece.model", "sentencepiece.bpe.model"),
    ("merges.txt", "added_tokens.json", SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG, "confidence.json"),  # the last is ours
    "none",
)


def encoder_folder(init: str, family: ModelFamily = BERT) -> Path:
    """Return ``init`` itself if a folder, else the hub's download; a complete cached copy needs no request."""
    folder = Path(init) if Path(init).is_dir() else _from_hub(init.removeprefix(HUB), family)
    if missing := family.missing(folder):
        raise ValueError(f"{folder} lacks {', '.join(missing)}; {family.advice}")
    return folder


def describe_model(name: str) -> str | None:
    """Return a model's name, licence and size, without loading it; None if the hub does not answer."""
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        found = HfApi().model_info(name.removeprefix(HUB), files_metadata=True, timeout=HUB_SECONDS)
    except Exception:  # no network, unknown name, an error of the hub: it is not proposed
        return None
    size = sum(file.size or 0 for file in found.siblings or () if file.rfilename.endswith(".safetensors"))
    return f"{name} ({getattr(found.card_data, 'license', None) or 'unknown'}, {size / 1e6:,.0f} MB)"


def is_cached(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name.removeprefix(HUB), CONFIG), str)


def encoder_files(init: str, family: ModelFamily = BERT) -> dict[str, Path]:
    """Return all files that the model ``init`` depends on, by name in its folder; none for ``small``."""
    if init == "small":
        return {}
    folder = encoder_folder(init, family)
    names, layers = [CONFIG, *family.vocabulary, *family.more], []
    if family is not READER:
        names, layers = [*_COMMON], sentence_layers(folder)
        names += [] if is_bert(folder) else [SPECIAL_TOKENS_MAP]
        names += [SENTENCE_CONFIG] if any(sentence_prompts(folder)) else []
    files = [*filter(Path.is_file, (folder / name for name in names)), *(layer / CONFIG for layer in layers)]
    files += [weights for part in (*layers, folder) for weights in _weight_files(part)]
    return {path.relative_to(folder).as_posix(): path for path in files}


def is_bert(folder: Path) -> bool:
    """Return whether the configuration is that of a BERT, whose special tokens need no ``SPECIAL_TOKENS_MAP``."""
    return read_optional_json(folder / CONFIG).get("model_type", "bert") in ("bert", "realm")


def is_sentence_encoder(folder: Path) -> bool:
    return (folder / POOLING).is_file()


def sentence_pooling(folder: Path) -> Pooling:
    values = _read_object(folder / POOLING)
    modes = values.get("pooling_mode")
    if modes is None:  # before sentence-transformers 6: a flag per mode
        flags = [key for key, is_on in values.items() if key.startswith("pooling_mode_") and is_on]
        modes = [key.removeprefix("pooling_mode_").removesuffix("_token").removesuffix("_tokens") for key in flags]
    modes = modes if isinstance(modes, list) else [modes]
    if len(modes) != 1 or modes[0] not in _POOLED:
        raise ValueError(
            f"{folder / POOLING}: pooling mode is {', '.join(map(str, modes)) or 'missing'}; allowed: cls, mean, "
            "lasttoken; set retriever.pooling to cls, mean or last, or choose another encoder"
        )
    if values.get("include_prompt") is False and any(sentence_prompts(folder)):
        raise ValueError(
            f"{folder / POOLING}: include_prompt is false; prompts are always pooled here: choose another encoder"
        )
    return _POOLED[modes[0]]


def sentence_layers(folder: Path) -> list[Path]:
    names = [path for kind, path in _modules(folder) if kind == "Dense"]
    for name in names:
        if Path(name).name != name or not (folder / name / CONFIG).is_file():
            raise ValueError(f"{folder / MODULES}: {name!r} is not the folder of a layer; download the encoder again")
    return [folder / name for name in names]


def sentence_prompts(folder: Path) -> tuple[str, str]:
    path = folder / SENTENCE_CONFIG
    values = read_optional_json(path)
    prompts: Any = values.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ValueError(f"{path}: prompts is {prompts!r}; expected a mapping from names to strings")
    default = prompts.get(str(values.get("default_prompt_name")), "")
    document = next((prompts[name] for name in _DOCUMENT_PROMPTS if prompts.get(name)), default)
    return str(prompts.get("query", default)), str(document)


def unused_modules(folder: Path) -> list[str]:
    return [kind for kind, _ in _modules(folder) if kind not in ("Transformer", "Pooling", "Normalize", "Dense")]


def _modules(folder: Path) -> list[tuple[str, str]]:
    path = folder / MODULES
    try:
        modules = json.loads(path.read_bytes()) if path.is_file() else []
        return [(module["type"].rpartition(".")[2], str(module.get("path"))) for module in modules]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not a list of a sentence encoder's modules ({error}); download it again") from None


def read_config(folder: Path) -> dict[str, Any]:
    return _read_object(folder / CONFIG)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read all parameters of a folder by name, memory-mapped; raise ValueError if a file is missing or damaged."""
    files = [_read_weights(path) for path in _weight_files(folder) if path.suffix != ".json"]
    return {name: tensor for weights in files for name, tensor in weights.items()}


def read_optional_json(path: Path) -> dict[str, Any]:
    return _read_object(path) if path.is_file() else {}


def _from_hub(name: str, family: ModelFamily) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        with suppress(LocalEntryNotFoundError):
            folder = Path(snapshot_download(name, local_files_only=True))
            if not family.missing(folder):
                return folder
        patterns = [*_COMMON, SPECIAL_TOKENS_MAP, SENTENCE_CONFIG, *_DENSE, *family.vocabulary, *family.more]
        folder = Path(snapshot_download(name, allow_patterns=[*patterns, *SAFETENSORS, "model-*.safetensors"]))
        if BIN in family.weights and not any((folder / weights).is_file() for weights in SAFETENSORS):
            folder = Path(snapshot_download(name, allow_patterns=[*patterns, *BIN, "pytorch_model-*.bin"]))
    except Exception as error:  # no network, unknown name, HF_HUB_OFFLINE: the remedy is the same
        target = name.split("/")[-1] or "FOLDER"
        raise ValueError(
            f"{family.option} is {name!r}: no such folder, and the download failed ({type(error).__name__}). On a "
            f"machine with a network run 'hf download {name} --local-dir {target}', copy that folder here and set "
            f"{family.option} to its path; {family.advice}. Or set {family.option}={family.fallback}"
        ) from None
    return folder


def _weight_files(folder: Path) -> list[Path]:
    for whole, index in (SAFETENSORS, BIN):
        if (folder / whole).is_file():
            return [folder / whole]
        if (folder / index).is_file():
            return [folder / index, *_shards(folder / index)]
    raise ValueError(f"{folder} lacks {SAFETENSORS[0]} or {BIN[0]}; {BERT.advice}")


def _shards(index: Path) -> list[Path]:
    names = _read_object(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"{index} has no weight_map from parameters to files; download it again")
    files = sorted(set(names.values()))
    for name in files:
        if Path(name).name != name or Path(name).suffix not in (".safetensors", ".bin"):
            raise ValueError(f"{index}: {name!r} is not a weights file in the same folder; do not use this folder")
        if not (index.parent / name).is_file():
            raise ValueError(f"{index.parent / name} is missing (listed in {index.name}); download it too")
    return [index.parent / name for name in files]


def _read_weights(path: Path) -> dict[str, Tensor]:
    import torch
    from safetensors.torch import load_file

    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        weights: Any = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # any error of either library: the file is unusable
        raise ValueError(
            f"{path} is damaged or not a weights file ({error_line(error)}); none of it was executed: "
            f"download it again, or use the model's {SAFETENSORS[0]} from a source that you trust"
        ) from None
    pairs = weights.items() if isinstance(weights, dict) else [(None, None)]
    if not all(isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in pairs):
        raise ValueError(f"{path} is not a mapping from names to tensors; use the model's {SAFETENSORS[0]}")
    return dict(weights)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object; download it again")
    return value
