"""Models of transformers: whether a configuration is supported, and how to build the model from weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from realmops.credentials import error_line
from realmops.hub import CONFIG

BUILD_LOCK = RLock()  # transformers replaces functions of torch.nn.init, for all threads, while it builds a model
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
    raise ValueError(f"{source}: model_type {kind!r} {reason}; use, for example, {SUGGESTED_ENCODERS}")


def has_auto_class(auto_class: str, model_type: str) -> bool:
    transformers = import_transformers()
    configs = transformers.CONFIG_MAPPING
    return model_type in configs and configs[model_type] in getattr(transformers, auto_class)._model_mapping


def import_transformers() -> Any:
    with BUILD_LOCK:  # its modules are imported on first use, which fails in several threads at once
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        _ = transformers.AutoConfig
        return transformers


def load_transformers_model(
    state: Mapping[str, Tensor], values: Mapping[str, Any], source: str, auto_class: str = ENCODER
) -> tuple[Any, set[str]]:
    """Build a model with its weights; raise ValueError if transformers cannot, or a weight is missing or not finite.

    Also return the names of its head's parameters that ``state`` lacks. ``realm.`` of REALM's checkpoints is ``bert.``.
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
        raise ValueError(f"{source}: transformers cannot open it ({error_line(error)})") from None
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # mapped files have another alignment, which changes rounding
    missing = {name for name in report["missing_keys"] if "pooler" not in name}
    prefix = "" if auto_class == ENCODER else f"{model.base_model_prefix}."
    if absent := sorted(name for name in missing if name.startswith(prefix)):
        raise ValueError(f"{source}: the parameter {absent[0]} is missing; download the folder again")
    not_finite = next((name for name, part in model.named_parameters() if not bool(part.isfinite().all())), None)
    if not_finite is not None:
        raise ValueError(f"{source}: the parameter {not_finite} has a value that is not finite; choose other weights")
    return model, missing


def save_transformers_model(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    for path in folder.glob("*.safetensors"):  # safetensors sets mode 0600
        path.chmod((folder / CONFIG).stat().st_mode)


@contextmanager
def skip_weight_init() -> Iterator[None]:
    """Context manager: build transformers models without initialising weights or advancing torch's generator."""
    from transformers.initialization import no_init_weights

    with BUILD_LOCK, torch.random.fork_rng(devices=[]), no_init_weights():
        yield
