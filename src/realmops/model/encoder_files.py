"""Encoders with their masked word heads: loaded from published folders or from a run, or built from scratch.

No code in a folder is executed.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from realmops.hub import CONFIG, read_config, read_weights
from realmops.model.encoder import Encoder, set_dropout
from realmops.model.masked_word_head import MaskedWordHead
from realmops.model.transformers_models import (
    BUILD_LOCK,
    ENCODER,
    MASKED_WORDS,
    SUGGESTED_ENCODERS,
    check_supported,
    import_transformers,
    is_decoder,
    load_transformers_model,
    save_transformers_model,
    skip_weight_init,
)
from realmops.options import BertOptions


def load_encoder(folder: Path, dropout: float | None = None) -> tuple[Encoder, MaskedWordHead | None]:
    """Load an encoder from a published folder, without executing its code; raise ValueError if it is not supported.

    Its masked word head is None for a decoder, which sees no word after a mask. Weights of the head that the folder
    lacks start near the identity, over the word embeddings.
    """
    values = read_config(folder)
    check_supported(values, str(folder / CONFIG))
    encoder, head = open_encoder(values, read_weights(folder), str(folder), predicts=True)
    if dropout is not None:
        encoder.set_dropout(dropout)
        if head is not None:
            set_dropout(head.model, dropout)
    if not encoder.packs and not encoder.ignores_padding(str(folder)):
        raise ValueError(
            f"{folder}: {values.get('model_type')} is not invariant to the padding of a batch; use, for example, "
            f"{SUGGESTED_ENCODERS}"
        )
    return encoder, head


def open_encoder(
    values: Mapping[str, Any], state: Mapping[str, Tensor], source: str, packs: bool | None = None, *, predicts: bool
) -> tuple[Encoder, MaskedWordHead | None]:
    """Build an encoder from config.json and model.safetensors, and with ``predicts`` its masked word head."""
    predicts = predicts and not is_decoder(values)
    model, missing = load_transformers_model(state, values, source, MASKED_WORDS if predicts else ENCODER)
    if not predicts:
        return Encoder(model, packs), None
    _initialise_head(model, missing)
    decoder = model.get_output_embeddings()
    model.config.tie_word_embeddings = decoder is None or decoder.weight is model.get_input_embeddings().weight
    if not model.config.tie_word_embeddings and decoder.bias is not None:
        decoder.bias = nn.Parameter(decoder.bias.detach().clone())  # shared storage would be saved as tied
    return Encoder(model.base_model, packs), MaskedWordHead(model, is_trained=not missing)


def encoder_from_description(description: Mapping[str, Any]) -> Encoder:
    transformers = import_transformers()
    values = dict(description["config"])
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    with skip_weight_init():
        model = transformers.AutoModel.from_config(config, dtype=torch.float32)
    return Encoder(model, description["packs"])


def build_small_encoder(
    options: BertOptions, vocabulary: int, generator: torch.Generator
) -> tuple[Encoder, MaskedWordHead]:
    """Build an untrained BERT that learns to use its second segment within a few hundred steps.

    Attention starts as half an identity (an orthogonal value matrix, its transpose in the output), positions as small
    sinusoids, the head's transform as 1.5 times the identity; as BERT starts, it would ignore the document for long.
    """
    transformers, width = import_transformers(), options.width
    config = transformers.BertConfig(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=options.layers,
        num_attention_heads=options.heads, intermediate_size=4 * width,
        max_position_embeddings=options.positions, hidden_dropout_prob=options.dropout,
        attention_probs_dropout_prob=options.dropout,
    )  # fmt: skip
    with skip_weight_init():
        model = transformers.BertForMaskedLM(config)
    model.tie_weights()
    embeddings, transform = model.bert.embeddings, model.cls.predictions.transform
    with BUILD_LOCK, torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(float(name.endswith("LayerNorm.weight")))
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
        save_transformers_model(model, folder)


def cpu_state(module: nn.Module) -> dict[str, Tensor]:
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
