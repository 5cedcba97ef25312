"""Folders of models that others published in Hugging Face's format: where they lie, and their weights.

Weights come as safetensors or, in older folders, in torch's .bin form, which is a pickle in a zip file. This is
the one place that reads the latter: with torch's restricted loader, which makes tensors and calls nothing else.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "config.json"
SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
BIN = ("pytorch_model.bin", "pytorch_model.bin.index.json")
VOCABULARY = "vocab.txt"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
SENTENCE_CONFIG = "config_sentence_transformers.json"  # of a sentence encoder: what texts begin with
POOLING = "1_Pooling/config.json"  # of a sentence encoder: how its vectors become one
MODULES = "modules.json"  # of a sentence encoder: what comes after another
_COMMON = (CONFIG, VOCABULARY, TOKENIZER, TOKENIZER_CONFIG, POOLING, MODULES)
_POOLING_MODE = "pooling_mode_"
_POOLED = {"cls": "cls", "cls_token": "cls", "mean": "mean", "mean_tokens": "mean", "lasttoken": "last"}
_USED = {"Transformer", "Pooling", "Normalize", "Dense"}
_DENSE = ("*_Dense/config.json", "*_Dense/model.safetensors")
_DOCUMENT_PROMPTS = ("document", "passage", "corpus")  # sentence-transformers writes an empty first one itself
_SHARDS = ("model-*.safetensors", "pytorch_model-*.bin")


@dataclass(frozen=True)
class Family:
    """Models of one kind: the option that names one, and the files of which its folder has one each."""

    option: str
    name: str
    weights: tuple[tuple[str, str], ...]  # a whole file, or the index of several
    vocabulary: tuple[str, ...]

    @property
    def advice(self) -> str:
        """What a folder has, as a clause."""
        weights = " or ".join(whole for whole, _ in self.weights)
        return f"a {self.name}'s folder has {CONFIG}, {weights}, and {' or '.join(self.vocabulary)}"


BERT = Family("bert.init", "BERT encoder", (SAFETENSORS, BIN), (VOCABULARY, TOKENIZER))
T5 = Family("closed_book.init", "T5", (SAFETENSORS,), (TOKENIZER,))


def encoder_folder(init: str, family: Family = BERT) -> Path:
    """The folder of a pre-trained model: ``init`` itself, or the hub's copy of that name.

    A copy in the hub's cache is taken as it is; otherwise it is fetched, unless HF_HUB_OFFLINE forbids it.
    Raises ValueError that says what to fetch, and where to put it, when neither can be had.
    """
    folder = Path(init)
    if not folder.is_dir():
        folder = _from_hub(init, family)
    if missing := _missing(folder, family):
        raise ValueError(f"{folder} lacks {', '.join(missing)}; {family.advice}")
    return folder


def encoder_files(init: str, family: Family = BERT) -> dict[str, Path]:
    """Every file that the model ``init`` depends on, by its name in the folder; none for ``small``."""
    if init == "small":
        return {}
    folder = encoder_folder(init, family)
    names = [*_COMMON, *([] if is_bert(folder) else [SPECIAL_TOKENS_MAP])]
    names += [SENTENCE_CONFIG] if any(sentence_prompts(folder)) else []
    found = [folder / name for name in names if (folder / name).is_file()]
    for layer in sentence_layers(folder):
        found += [layer / CONFIG, *_weight_files(layer)]
    return {path.relative_to(folder).as_posix(): path for path in (*found, *_weight_files(folder))}


def is_bert(folder: Path) -> bool:
    """Whether it is a BERT by its configuration: its special tokens are told without ``SPECIAL_TOKENS_MAP``."""
    return read_optional(folder / CONFIG, "model configuration").get("model_type", "bert") in ("bert", "realm")


def is_sentence_encoder(folder: Path) -> bool:
    """Whether a folder says how its vectors become one: it was trained to make embeddings."""
    return (folder / POOLING).is_file()


def sentence_pooling(folder: Path) -> str | None:
    """``cls``, ``mean`` or ``last`` as a sentence encoder's folder says, None for another; ValueError says what."""
    if not is_sentence_encoder(folder):
        return None
    values = _read_object(folder / POOLING, "pooling of a sentence encoder")
    modes = values.get("pooling_mode")
    if modes is None:  # before sentence-transformers 6 a flag for each
        modes = [key.removeprefix(_POOLING_MODE) for key, on in values.items() if key.startswith(_POOLING_MODE) and on]
    modes = modes if isinstance(modes, list) else [modes]
    if len(modes) != 1 or modes[0] not in _POOLED:
        raise ValueError(
            f"{folder / POOLING}: its vectors become one by {', '.join(map(str, modes)) or 'nothing that is known'}; "
            "cls, mean and lasttoken are possible here: set retriever.pooling to one of them, or choose another encoder"
        )
    if values.get("include_prompt") is False and any(sentence_prompts(folder)):
        raise ValueError(f"{folder / POOLING}: include_prompt is false; what texts begin with is always read here")
    return _POOLED[modes[0]]


def sentence_layers(folder: Path) -> list[Path]:
    """The folders of a sentence encoder's dense layers, in their order; ValueError names the file."""
    names = [str(module.get("path")) for module in _modules(folder) if _kind(module) == "Dense"]
    for name in names:
        if Path(name).name != name or not (folder / name / CONFIG).is_file():
            raise ValueError(f"{folder / MODULES}: {name!r} is no folder of a layer beside it; fetch the encoder again")
    return [folder / name for name in names]


def sentence_prompts(folder: Path) -> tuple[str, str]:
    """What a sentence encoder wants before a query, and before a document; ValueError names the file."""
    path = folder / SENTENCE_CONFIG
    values = read_optional(path, "configuration of a sentence encoder")
    prompts: Any = values.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ValueError(f"{path}: prompts is {prompts!r}; texts by names are wanted")
    usual = prompts.get(str(values.get("default_prompt_name")), "")
    document = next((prompts[name] for name in _DOCUMENT_PROMPTS if prompts.get(name)), usual)
    return str(prompts.get("query", usual)), str(document)


def unused_modules(folder: Path) -> list[str]:
    """The modules of a sentence encoder that are more than the encoder, its pooling and a division by the length."""
    return [kind for kind in map(_kind, _modules(folder)) if kind not in _USED]


def _modules(folder: Path) -> list[dict[str, Any]]:
    path = folder / MODULES
    if not path.is_file():
        return []
    try:
        modules = list(json.loads(path.read_bytes()))
        for module in modules:
            module["type"].rpartition(".")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is no list of a sentence encoder's modules ({error}); fetch it again") from None
    return modules


def _kind(module: dict[str, Any]) -> str:
    return str(module["type"]).rpartition(".")[2]


def read_config(folder: Path) -> dict[str, Any]:
    """The content of ``config.json``; ValueError names the file."""
    return _read_object(folder / CONFIG, "model configuration")


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All parameters of a folder by name, memory-mapped; ValueError names the file that cannot be read."""
    weights: dict[str, Tensor] = {}
    for path in _weight_files(folder):
        if path.suffix != ".json":
            weights |= _read_weights(path)
    return weights


def read_optional(path: Path, what: str) -> dict[str, Any]:
    """A JSON object, empty where there is no such file; ValueError names the file."""
    return _read_object(path, what) if path.is_file() else {}


def _from_hub(name: str, family: Family) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        try:
            folder = Path(snapshot_download(name, local_files_only=True))
            if not _missing(folder, family):
                return folder
        except LocalEntryNotFoundError:
            pass
        others = [*_COMMON, SPECIAL_TOKENS_MAP, SENTENCE_CONFIG, *_DENSE]
        folder = Path(snapshot_download(name, allow_patterns=[*others, *SAFETENSORS, _SHARDS[0]]))
        if BIN in family.weights and not any((folder / weights).is_file() for weights in SAFETENSORS):
            folder = Path(snapshot_download(name, allow_patterns=[*others, *BIN, _SHARDS[1]]))
    except Exception as error:  # no network, no such name, HF_HUB_OFFLINE: the advice is the same
        target = name.split("/")[-1] or "FOLDER"
        raise ValueError(
            f"{family.option} is {name!r}: no such folder, and the hub did not give it ({type(error).__name__}). On a "
            f"machine with a network run 'hf download {name} --local-dir {target}', bring that folder here and set "
            f"{family.option} to its path, or bring the hub's cache to {constants.HF_HUB_CACHE}; {family.advice}. "
            f"Or set {family.option}=small"
        ) from None
    return folder


def _missing(folder: Path, family: Family) -> list[str]:
    wanted = {
        CONFIG: (CONFIG,),
        " or ".join(whole for whole, _ in family.weights): sum(family.weights, ()),
        " or ".join(family.vocabulary): family.vocabulary,
    }
    return [what for what, names in wanted.items() if not any((folder / name).is_file() for name in names)]


def _weight_files(folder: Path) -> list[Path]:
    """The files with the weights, behind the index that names them where they are several."""
    for whole, index in (SAFETENSORS, BIN):
        if (folder / whole).is_file():
            return [folder / whole]
        if (folder / index).is_file():
            return [folder / index, *_shards(folder / index)]
    raise ValueError(f"{folder} lacks {SAFETENSORS[0]} or {BIN[0]}; {BERT.advice}")


def _shards(index: Path) -> list[Path]:
    names = _read_object(index, "index of weights").get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"{index} has no weight_map from parameters to files; fetch it again")
    files = sorted(set(names.values()))
    for name in files:
        if Path(name).name != name or Path(name).suffix not in (".safetensors", ".bin"):
            raise ValueError(f"{index}: {name!r} is no file of weights beside it; do not use this folder")
        if not (index.parent / name).is_file():
            raise ValueError(f"{index.parent / name} is missing (named in {index.name}); fetch it too")
    return [index.parent / name for name in files]


def _read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of one file; nothing that it holds is executed."""
    import torch
    from safetensors.torch import load_file

    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        weights = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # whatever either library stumbles over: the file is of no use
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{path} is damaged, or holds something other than weights ({type(error).__name__}: {reason}); nothing of "
            f"it was executed: fetch it again, or take the model's {SAFETENSORS[0]} from a source that you trust"
        ) from None
    if not isinstance(weights, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in weights.items()
    ):
        raise ValueError(f"{path} holds no mapping from names to tensors; take the model's {SAFETENSORS[0]}")
    return weights


def _read_object(path: Path, what: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object; it is no {what}")
    return value
