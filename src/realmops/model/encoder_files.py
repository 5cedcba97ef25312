"""Encoders with their masked word heads: loaded from published folders or from a run, or built from scratch.

No code in a folder is executed.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from realmops.devices import eval_mode
from realmops.hub import CONFIG, read_config, read_weights
from realmops.model.encoder import Encoder, is_near, set_dropout
from realmops.model.masked_word_head import MaskedWordHead
from realmops.model.packed import PackedBatch
from realmops.model.transformers_models import (
    BUILD_LOCK,
    ENCODER,
    MASKED_WORDS,
    SUGGESTED_ENCODERS,
    check_supported,
    import_transformers,
    is_decoder,
    load_transformers_model,
    remove_pooler,
    skip_weight_init,
)
from realmops.options import BertOptions


def load_encoder(folder: Path, dropout: float | None = None) -> tuple[Encoder, MaskedWordHead | None]:
    """Load an encoder from a published folder, without executing code of that folder.

    Args:
        folder: config.json with weights as safetensors, or as torch's .bin, of which only tensors are read.
        dropout: dropout probability that replaces the configured one.

    Returns:
        The encoder and its masked word head, None for a decoder, which sees no word after a mask. Weights of the head
        that the folder lacks start near the identity, over the word embeddings.

    Raises:
        ValueError: a file is missing or damaged, or the model is not supported.
    """
    values = read_config(folder)
    check_supported(values, str(folder / CONFIG))
    predicts = not is_decoder(values)
    model, missing = load_transformers_model(
        read_weights(folder), values, str(folder), MASKED_WORDS if predicts else ENCODER
    )
    base = model.base_model if predicts else model
    prefix = f"{model.base_model_prefix}." if predicts else ""
    absent = [name for name in missing if name.startswith(prefix) and "pooler" not in name]
    if predicts:
        head_missing = {name for name in missing if not name.startswith(prefix)}
        absent = [name for name in absent if name not in head_missing]
        _initialise_head(model, head_missing)
        decoder = model.get_output_embeddings()
        words = base.get_input_embeddings().weight
        model.config.tie_word_embeddings = decoder is None or decoder.weight is words
        if not model.config.tie_word_embeddings and decoder.bias is not None:
            decoder.bias = nn.Parameter(decoder.bias.detach().clone())  # shared storage would be saved as tied
    if absent:
        raise ValueError(f"{folder}: the parameter {absent[0]} is missing; download the folder again")
    not_finite = next((name for name, part in model.named_parameters() if not bool(part.isfinite().all())), None)
    if not_finite is not None:
        raise ValueError(f"{folder}: the parameter {not_finite} has a value that is not finite; choose other weights")
    if dropout is not None:
        set_dropout(model, dropout)
    encoder = Encoder(remove_pooler(base))
    if not encoder.packs and (reason := _reason_padding_fails(encoder)):
        raise ValueError(
            f"{folder}: {values.get('model_type')} {reason}; use a supported encoder, for example {SUGGESTED_ENCODERS}"
        )
    return encoder, MaskedWordHead(model, is_trained=not head_missing) if predicts else None


def open_encoder(
    values: Mapping[str, Any], state: Mapping[str, Tensor], packs: bool, source: str, *, predicts: bool = False
) -> tuple[Encoder, MaskedWordHead | None]:
    """Load an encoder that :func:`save_encoder` wrote.

    Args:
        values: content of config.json.
        state: content of model.safetensors.
        packs: whether the encoder packs sequences.
        source: name of the weights, for messages.
        predicts: whether to load the masked word head too.
    """
    predicts = predicts and not is_decoder(values)
    model, missing = load_transformers_model(state, values, source, MASKED_WORDS if predicts else ENCODER)
    missing = [name for name in missing if "pooler" not in name]
    assert not missing, (source, missing)
    return Encoder(remove_pooler(model.base_model if predicts else model), packs), (
        MaskedWordHead(model) if predicts else None
    )


def encoder_from_description(description: Mapping[str, Any]) -> Encoder:
    """Build an encoder with the configuration of :meth:`Encoder.describe`, without initialised weights."""
    transformers = import_transformers()
    values = dict(description["config"])
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    with skip_weight_init():
        model = transformers.AutoModel.from_config(config, dtype=torch.float32)
    return Encoder(remove_pooler(model), description["packs"])


def build_small_encoder(
    options: BertOptions, vocabulary: int, generator: torch.Generator
) -> tuple[Encoder, MaskedWordHead]:
    """Build an untrained BERT that learns to use its second segment within a few hundred steps.

    Attention starts as half an identity (an orthogonal value matrix, its transpose in the output), positions as small
    sinusoids, the masked word head's transform as 1.5 times the identity. With BERT's usual initialisation, a two-layer
    encoder ignores the retrieved document during all of a short training.
    """
    transformers, width = import_transformers(), options.width
    config = transformers.BertConfig(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=options.layers,
        num_attention_heads=options.heads, intermediate_size=options.intermediate,
        max_position_embeddings=options.positions, hidden_dropout_prob=options.dropout,
        attention_probs_dropout_prob=options.dropout,
    )  # fmt: skip
    with skip_weight_init():
        model = transformers.BertForMaskedLM(config)
    model.tie_weights()
    embeddings, transform = model.bert.embeddings, model.cls.predictions.transform
    with BUILD_LOCK, torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for part in model.modules():
            if isinstance(part, nn.LayerNorm):
                part.weight.fill_(1.0)
        for table in (embeddings.word_embeddings, embeddings.position_embeddings, embeddings.token_type_embeddings):
            table.weight.normal_(0.0, 0.05, generator=generator)
        for layer in model.bert.encoder.layer:
            attention = layer.attention.self
            weight_ND = torch.empty(3 * width, width).normal_(0.0, 0.02, generator=generator)
            for part, weight_DD in zip(
                (attention.query, attention.key, attention.value), weight_ND.chunk(3), strict=True
            ):
                part.weight.copy_(weight_DD)
            for part in (layer.attention.output.dense, layer.intermediate.dense, layer.output.dense):
                part.weight.normal_(0.0, 0.02, generator=generator)
        angle = torch.arange(options.positions)[:, None] / 10_000 ** (torch.arange(0, width, 2)[None, :] / width)
        sinusoid = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)[:, :width]
        embeddings.position_embeddings.weight.copy_(0.05 * sinusoid)
        for layer in model.bert.encoder.layer:
            value_DD = nn.init.orthogonal_(torch.empty(width, width), generator=generator)
            layer.attention.self.value.weight.copy_(value_DD)
            layer.attention.output.dense.weight.copy_(0.5 * value_DD.T)
        transform.dense.weight.copy_(1.5 * torch.eye(width))
    return Encoder(model.bert, packs=True), MaskedWordHead(model)


def save_encoder(folder: Path, encoder: Encoder, head: MaskedWordHead | None = None) -> None:
    """Write config.json and model.safetensors in transformers' format: the encoder, or the model with its head."""
    with nullcontext(encoder.model) if head is None else head.joined_with(encoder) as model:
        model.save_pretrained(folder)
    for path in folder.glob("*.safetensors"):  # safetensors sets mode 0600
        path.chmod((folder / CONFIG).stat().st_mode)


def cpu_state(module: nn.Module) -> dict[str, Tensor]:
    """Copy a module's state dict to the CPU, each tensor contiguous."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in module.state_dict().items()}


@torch.no_grad()
def _initialise_head(model: Any, missing: set[str]) -> None:
    """Initialise missing parameters of a masked word head: near the identity, over the word embeddings."""
    word_VD = model.base_model.get_input_embeddings().weight
    for name, parameter in model.named_parameters():
        if name not in missing or parameter is word_VD:
            continue
        if parameter.ndim == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            parameter.copy_(word_VD if parameter.shape == word_VD.shape else torch.eye(*parameter.shape))


@torch.no_grad()
def _reason_padding_fails(encoder: Encoder) -> str:
    """Return why padded batches give wrong hidden states, or an empty string where they are right."""
    if "attention_mask" not in inspect.signature(encoder.model.forward).parameters:
        return "takes no attention_mask, so that padding changes its hidden states"
    short, long = np.arange(7) + 5, np.arange(9) + 5  # of lengths so similar that the short one is padded
    try:
        with eval_mode(encoder):
            alone_TD, together_TD = encoder(PackedBatch([short])), encoder(PackedBatch([short, long]))[:7]
    except Exception as error:  # any error of the library
        return f"fails on a batch ({type(error).__name__}: {' '.join(str(error).split())[:120]})"
    return "" if is_near(together_TD, alone_TD) else "is not invariant to the padding of a batch"
