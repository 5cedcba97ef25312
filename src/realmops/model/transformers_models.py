"""Transformers' models by their configurations: which of them work here, and how they are made from weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_NEAREST = {  # a model that works, by a word in the name of a kind that does not
    "t5": "FacebookAI/roberta-base, or with several languages FacebookAI/xlm-roberta-base",
    "bart": "FacebookAI/roberta-base",
    "code": "answerdotai/ModernBERT-base",
}
USUAL = "answerdotai/ModernBERT-base, or with several languages FacebookAI/xlm-roberta-base"


def model_type_of(values: Mapping[str, Any]) -> str:
    """Return the family of a configuration: that of REALM, which transformers has no more, and of none is BERT."""
    kind = str(values.get("model_type", "bert"))
    return "bert" if kind == "realm" else kind


def is_decoder(values: Mapping[str, Any]) -> bool:
    """Return whether a configuration is of a model that continues texts, which may retrieve but predicts no mask."""
    return not _opens("AutoModelForMaskedLM", model_type_of(values))


def check_supported(values: Mapping[str, Any], source: str) -> None:
    """Raise ValueError for a configuration of a model that cannot work here: the reason, and one that can."""
    kind = model_type_of(values)
    if not _opens("AutoModel", kind):
        reason = "is not among those of the installed transformers"
        if "auto_map" in values:
            reason = "comes with code of its own, which is never run"
    elif values.get("is_encoder_decoder") or _opens("AutoModelForSeq2SeqLM", kind):
        reason = "is an encoder with a decoder, which was not trained to predict masked words"
    elif is_decoder(values) and not _opens("AutoModelForCausalLM", kind):
        reason = "is no encoder of texts"
    elif not is_decoder(values) and values.get("is_decoder"):
        reason = "is set up as a decoder (is_decoder), which sees no word after the mask"
    else:
        return
    near = next((name for word, name in _NEAREST.items() if word in kind), USUAL)
    raise ValueError(f"{source}: model_type {kind!r} {reason}; the nearest that works here is {near}")


def _opens(auto: str, model_type: str) -> bool:
    """Return whether a class of transformers as AutoModel has models of this type, registered ones too."""
    transformers = import_transformers()
    known = transformers.CONFIG_MAPPING
    return model_type in known and known[model_type] in getattr(transformers, auto)._model_mapping


def import_transformers() -> Any:
    """Import transformers without its log lines and progress bars."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def open_model(
    state: Mapping[str, Tensor], values: Mapping[str, Any], source: str, *, predicts: bool
) -> tuple[Any, list[str]]:
    """Return transformers' model of a configuration with these weights, and the names of parameters they lack.

    REALM's names of a BERT's parameters (``realm.``) are known too.

    Raises:
        ValueError: transformers cannot open it; names the source.
    """
    transformers = import_transformers()
    kind = transformers.AutoModelForMaskedLM if predicts else transformers.AutoModel
    try:
        own = {name: value for name, value in values.items() if name != "auto_map"}  # code of the folder's own
        config = transformers.AutoConfig.for_model(**{**own, "model_type": model_type_of(values)})
        theirs = {f"bert.{name[6:]}" if name.startswith("realm.") else name: t for name, t in state.items()}
        with torch.random.fork_rng(devices=[]):  # of the CPU alone: else every GPU of the machine is taken
            model, report = kind._model_mapping[type(config)].from_pretrained(
                None, config=config, state_dict=theirs, dtype=torch.float32, output_loading_info=True
            )
    except Exception as error:  # whatever the library stumbles over: the folder is of no use
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{source}: transformers cannot open it ({type(error).__name__}: {reason})") from None
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # mapped files are aligned otherwise, which changes last digits
    return model, sorted(report["missing_keys"])


@contextmanager
def without_start() -> Iterator[None]:
    """Within it transformers makes models without drawing weights, and torch's random numbers stay as they are."""
    from transformers.initialization import no_init_weights

    with torch.random.fork_rng(devices=[]), no_init_weights():
        yield


def without_pooler(model: Any) -> Any:
    """Take the layer over the first hidden state away, which pre-training of some families leaves behind."""
    if getattr(model, "pooler", None) is not None:
        model.pooler = None
    return model
