"""Models of transformers: whether a configuration is supported, and how to build the model from weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import RLock
from typing import Any

import torch
from torch import Tensor

BUILD_LOCK = RLock()  # transformers replaces functions of torch.nn.init, for all threads, while it builds a model
_ALTERNATIVES = {  # supported models, by a substring of an unsupported model_type
    "t5": "FacebookAI/roberta-base, or with several languages FacebookAI/xlm-roberta-base",
    "bart": "FacebookAI/roberta-base",
    "code": "answerdotai/ModernBERT-base",
}
ENCODER, MASKED_WORDS, ANSWER_SPANS = "AutoModel", "AutoModelForMaskedLM", "AutoModelForQuestionAnswering"
SUGGESTED_ENCODERS = "answerdotai/ModernBERT-base, or with several languages FacebookAI/xlm-roberta-base"


def model_type_of(values: Mapping[str, Any]) -> str:
    """Return the model type of a configuration; REALM (removed from transformers) and a missing one count as BERT."""
    kind = str(values.get("model_type", "bert"))
    return "bert" if kind == "realm" else kind


def is_decoder(values: Mapping[str, Any]) -> bool:
    """Return whether a model is a causal one, which can embed passages but cannot predict masked words."""
    return not has_auto_class(MASKED_WORDS, model_type_of(values))


def check_supported(values: Mapping[str, Any], source: str) -> None:
    """Raise ValueError if a model is not supported, with the reason and a supported alternative."""
    kind = model_type_of(values)
    if not has_auto_class(ENCODER, kind):
        reason = "is unknown to the installed transformers"
        if "auto_map" in values:
            reason = "needs custom code (auto_map), which is never executed"
    elif values.get("is_encoder_decoder") or has_auto_class("AutoModelForSeq2SeqLM", kind):
        reason = "is an encoder-decoder, which was not trained to predict masked words"
    elif is_decoder(values) and not has_auto_class("AutoModelForCausalLM", kind):
        reason = "is no text encoder"
    elif not is_decoder(values) and values.get("is_decoder"):
        reason = "is configured as a decoder (is_decoder), which sees no word after the mask"
    else:
        return
    alternative = next((name for word, name in _ALTERNATIVES.items() if word in kind), SUGGESTED_ENCODERS)
    raise ValueError(f"{source}: model_type {kind!r} {reason}; use a supported encoder, for example {alternative}")


def has_auto_class(auto_class: str, model_type: str) -> bool:
    """Return whether an auto class of transformers, such as AutoModel, has this model type (registered ones too)."""
    transformers = import_transformers()
    configs = transformers.CONFIG_MAPPING
    return model_type in configs and configs[model_type] in getattr(transformers, auto_class)._model_mapping


def import_transformers() -> Any:
    """Import transformers with its log lines and progress bars disabled."""
    with BUILD_LOCK:  # its modules are imported on first use, which fails in several threads at once
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        _ = transformers.AutoConfig
        return transformers


def load_transformers_model(
    state: Mapping[str, Tensor], values: Mapping[str, Any], source: str, auto_class: str = ENCODER
) -> tuple[Any, list[str]]:
    """Build the transformers model of a configuration and load its weights.

    Args:
        state: weights by name; the prefix ``realm.`` of REALM's checkpoints is read as ``bert.``.
        values: configuration, as in config.json.
        source: file or folder that error messages name.
        auto_class: class of transformers that chooses the model: the encoder, or one with a head.

    Returns:
        The model, and the sorted names of its parameters that ``state`` lacks.

    Raises:
        ValueError: transformers cannot build or load it.
    """
    transformers = import_transformers()
    try:
        own_values = {name: value for name, value in values.items() if name != "auto_map"}  # refers to custom code
        config = transformers.AutoConfig.for_model(**{**own_values, "model_type": model_type_of(values)})
        state_dict = {f"bert.{name[6:]}" if name.startswith("realm.") else name: t for name, t in state.items()}
        with BUILD_LOCK, torch.random.fork_rng(devices=[]):  # CPU only: otherwise a context is created on every GPU
            model, report = (
                getattr(transformers, auto_class)
                ._model_mapping[type(config)]
                .from_pretrained(
                    None, config=config, state_dict=state_dict, dtype=torch.float32, output_loading_info=True
                )
            )
    except Exception as error:  # any error of the library: the folder is unusable
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{source}: transformers cannot open it ({type(error).__name__}: {reason})") from None
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # mapped files have another alignment, which changes rounding
    return model, sorted(report["missing_keys"])


@contextmanager
def skip_weight_init() -> Iterator[None]:
    """Context manager: build transformers models without initialising weights or advancing torch's generator.

    One thread at a time: two at once would leave the functions of ``torch.nn.init`` replaced.
    """
    from transformers.initialization import no_init_weights

    with BUILD_LOCK, torch.random.fork_rng(devices=[]), no_init_weights():
        yield


def remove_pooler(model: Any) -> Any:
    """Remove the pooler, a layer over the first hidden state that only pre-training uses; return the model."""
    if getattr(model, "pooler", None) is not None:
        model.pooler = None
    return model
