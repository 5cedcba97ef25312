"""Encoders: any that transformers has, over packed sequences, and the heads that predict masked words.

An encoder is transformers' own module. Where its family passes attention to transformers' interface, a batch goes
through it as one long row, and :mod:`realmops.model.attention` keeps the sequences apart; every layer then sees useful
wordpieces alone. Other families get padded batches.

Shape suffixes: B sequences, L the longest, T wordpieces of all sequences, D width, V vocabulary, N chosen positions.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor, nn

from realmops.config import BertOptions
from realmops.devices import evaluating, send
from realmops.hub import CONFIG, read_config, read_weights
from realmops.model.attention import NAME, register
from realmops.model.packed import Packed, even_rows, similar_lengths

_HALF = 1e-2  # of hidden states in fp16: largest relative error
_SAME = 1e-3  # of hidden states: largest difference of two ways to compute them that are meant to be one
_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout")
_KEY_BIASES = (".key.bias", ".k_lin.bias", ".k.bias")  # without rotary positions the softmax does not see them
_NOT_SHAPE = ("_name_or_path", "architectures", "dtype", "transformers_version")  # change when a model is saved
_NEAREST = {  # a model that works, by a word in the name of a kind that does not
    "t5": "FacebookAI/roberta-base, or with several languages FacebookAI/xlm-roberta-base",
    "bart": "FacebookAI/roberta-base",
    "code": "answerdotai/ModernBERT-base",
}
USUAL = "answerdotai/ModernBERT-base, or with several languages FacebookAI/xlm-roberta-base"


class Encoder(nn.Module):
    """Hidden states of packed sequences by an encoder of transformers.

    Args:
        model: the encoder (what AutoModel opens).
        packs: whether it computes packed sequences as it would each alone; None finds out by trying.
    """

    def __init__(self, model: Any, packs: bool | None = None) -> None:
        super().__init__()
        self.model = model
        config, parameters = model.config, inspect.signature(model.forward).parameters
        words = model.get_input_embeddings().weight
        self.vocabulary, self.added_width = words.shape
        self.width = int(config.hidden_size)
        self.layer_norm_eps = _first(config, 1e-12, "layer_norm_eps", "norm_eps", "rms_norm_eps")
        self.dropout = float(_first(config, 0.0, "hidden_dropout_prob", "dropout", "attention_dropout") or 0.0)
        self.segments = int(getattr(config, "type_vocab_size", 0) or 0) if "token_type_ids" in parameters else 0
        self._first_position = _first_position(model)
        self.positions = int(_first(config, 512, "max_position_embeddings")) - self._first_position
        self._common = {"use_cache": False} if "use_cache" in parameters else {}
        self._recomputes = False
        for name, parameter in model.named_parameters():
            if name.endswith(_KEY_BIASES) and "rotary" not in repr(model):
                parameter.requires_grad_(False)
        able = model._supports_attention_backend and "position_ids" in parameters
        self.packs = False
        if able and packs is not False:
            model.set_attn_implementation(register())
            self.packs = True
            self.packs = packs or self._computes_alike()
            if not self.packs:
                model.set_attn_implementation("sdpa")

    @property
    def predicts(self) -> bool:
        """Whether the family predicts masked words; a decoder does not, as it sees no word after them."""
        return not is_decoder({"model_type": self.model.config.model_type})

    @property
    def words(self) -> str:
        """What the encoder is, for people."""
        return f"a {self.model.config.model_type}" + ("" if self.packs else " (padded batches)")

    def forward(self, batch: Packed, added_TD: Tensor | None = None) -> Tensor:
        """Return the hidden states T x D of a batch, which moves to the encoder's device.

        Args:
            batch: sequences of at most ``positions`` wordpieces each.
            added_TD: is added to the word vectors, whose width it has (``added_width``).
        """
        assert batch.longest <= self.positions, (batch.longest, self.positions)
        batch.to(self.device)
        if not self.packs:
            return self._padded(batch, added_TD)
        tokens_T = even_rows(batch.tokens_T)
        inputs: dict[str, Any] = {"position_ids": even_rows(batch.positions_T)[None] + self._first_position}
        if self.segments > 1:
            inputs["token_type_ids"] = even_rows(batch.segments_T)[None]
        if added_TD is None:
            inputs["input_ids"] = tokens_T[None]
        else:
            word_TD = self.model.get_input_embeddings()(tokens_T)
            inputs["inputs_embeds"] = torch.cat([word_TD[: len(added_TD)] + added_TD, word_TD[len(added_TD) :]])[None]
        hidden_1TD: Tensor = self.model(**inputs, **self._common, packed=batch).last_hidden_state
        return hidden_1TD[0, : batch.wordpieces]

    def _padded(self, batch: Packed, added_TD: Tensor | None) -> Tensor:
        """The same of a family that does not pack: in padded batches of similar lengths, on a GPU in one."""
        groups = similar_lengths(batch.lengths) if self.device.type == "cpu" else [np.arange(len(batch))]
        rows = [np.concatenate([np.arange(batch.starts[n], batch.starts[n + 1]) for n in group]) for group in groups]
        place_T = torch.from_numpy(np.argsort(np.concatenate(rows), kind="stable"))
        of_groups = send(self.device, place_T, *map(torch.from_numpy, rows))
        parts = []
        for group, row_T in zip(groups, of_groups[1:], strict=True):
            lengths = batch.lengths[group]
            parts.append(self._padded_group(batch, lengths, row_T, None if added_TD is None else added_TD[row_T]))
        return parts[0] if len(parts) == 1 else torch.cat(parts).index_select(0, of_groups[0])

    def _padded_group(self, batch: Packed, lengths: np.ndarray, row_T: Tensor, added_TD: Tensor | None) -> Tensor:
        """Hidden states of the sequences of these lengths, whose wordpieces are the rows ``row_T`` of a batch."""
        shape = len(lengths), int(lengths.max())
        place_T = torch.from_numpy(np.flatnonzero(np.arange(shape[1]) < lengths[:, None]))
        (place_T,) = send(self.device, place_T)

        def padded(x_T: Tensor, value: int) -> Tensor:
            return x_T.new_full((shape[0] * shape[1],), value).index_copy_(0, place_T, x_T).view(shape)

        inputs = {"attention_mask": padded(torch.ones_like(place_T), 0)}
        if self.segments > 1:
            inputs["token_type_ids"] = padded(batch.segments_T[row_T], 0)
        id_BL = padded(batch.tokens_T[row_T], self.model.config.pad_token_id or 0)
        if added_TD is None:
            inputs["input_ids"] = id_BL
        else:
            word_BLD = self.model.get_input_embeddings()(id_BL)
            more_PD = added_TD.new_zeros(id_BL.numel(), added_TD.shape[1]).index_copy(0, place_T, added_TD)
            inputs["inputs_embeds"] = word_BLD + more_PD.view(*shape, -1)
        hidden_BLD: Tensor = self.model(**inputs, **self._common).last_hidden_state
        return hidden_BLD.flatten(0, 1).index_select(0, place_T)

    def cls(self, batch: Packed) -> Tensor:
        """Return the hidden state of each sequence's first wordpiece, B x D."""
        hidden_TD: Tensor = self(batch)
        return hidden_TD.index_select(0, batch.first_B)

    @torch.no_grad()
    def _computes_alike(self) -> bool:
        """Return whether sequences in one batch have the hidden states that each has alone, padded by transformers."""
        rng = np.random.default_rng(0)
        sequences = [rng.integers(0, self.vocabulary, min(length, self.positions)) for length in (9, 4, 150)]
        with evaluating(self):
            try:
                together_TD = self(Packed(sequences))
            except TypeError:  # a family that keeps the batch from its attention
                return False
            alone = []
            self.model.set_attn_implementation("sdpa" if self.model._supports_sdpa else "eager")
            for tokens in sequences:
                id_1L = torch.from_numpy(tokens).to(self.device)[None]
                position_1L = torch.arange(len(tokens), device=self.device)[None] + self._first_position
                alone.append(self.model(input_ids=id_1L, position_ids=position_1L, **self._common).last_hidden_state[0])
            self.model.set_attn_implementation(NAME)
        return torch.allclose(together_TD, torch.cat(alone), atol=_SAME)

    @property
    def device(self) -> torch.device:
        return self.word_vectors.device

    @property
    def word_vectors(self) -> nn.Parameter:
        """The vector of each wordpiece, V x D for most families."""
        return cast(nn.Parameter, self.model.get_input_embeddings().weight)

    @property
    def shifts(self) -> list[nn.Parameter]:
        """Biases that add the same vector to all hidden states: that of the last LayerNorm, where it comes last."""
        norms = [part for part in self.model.modules() if isinstance(part, nn.LayerNorm) and part.bias is not None]
        last = next((norm for norm in reversed(norms) if norm.normalized_shape == (self.width,)), None)
        if last is None:
            return []
        batch, step_D = Packed([np.arange(min(5, self.vocabulary))]), torch.linspace(1, 2, self.width)
        step_D, bias_D = step_D.to(last.bias), last.bias.detach().clone()
        with evaluating(self), torch.no_grad():
            before_TD = self(batch)
            last.bias.add_(step_D)
            moves = torch.allclose(self(batch) - before_TD, step_D.expand_as(before_TD), atol=_SAME)
            last.bias.copy_(bias_D)
        return [last.bias] if moves else []

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether training recomputes activations in the backward pass, where the family supports that."""
        return self._recomputes

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, on: bool) -> None:
        if self.model.supports_gradient_checkpointing and on != self._recomputes:
            self._recomputes = on
            if on:
                self.model.activation_checkpointing_enable({"use_reentrant": False})
            else:
                self.model.activation_checkpointing_disable()

    def set_dropout(self, dropout: float) -> None:
        """Train with another dropout from now on."""
        self.dropout = dropout
        _set_dropout(self.model, dropout)

    @torch.no_grad()
    def in_fp16(self) -> Self | None:
        """Return a copy in fp16, without gradients, for a GPU: faster than bf16 autocast and nearer to fp32.

        None where a number of the family leaves fp16's range, as far as wordpieces in any order show.
        """
        other = copy.deepcopy(self).eval()
        other.model.half()
        rng = np.random.default_rng(0)
        sequences = [rng.integers(0, self.vocabulary, min(length, self.positions)) for length in (64, 7)]
        with evaluating(self):
            exact_TD, half_TD = self(Packed(sequences)).float(), other(Packed(sequences)).float()
        error = (half_TD - exact_TD).norm() / exact_TD.norm()
        return other if bool(error < _HALF) else None

    def describe(self) -> dict[str, Any]:
        """Return the shape as JSON, the inverse of :func:`described_encoder`."""
        values = json.loads(self.model.config.to_json_string(use_diff=False))
        return {"packs": self.packs, "config": {k: value for k, value in values.items() if k not in _NOT_SHAPE}}


class MaskedWordHead(nn.Module):
    """A family's own head over chosen hidden states, which predicts masked words.

    Args:
        model: the family's masked language model (what AutoModelForMaskedLM opens). Its encoder is taken out.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        base = model.base_model
        decoder = model.get_output_embeddings()
        self.tied = decoder is not None and decoder.weight is base.get_input_embeddings().weight
        if self.tied:
            del decoder._parameters["weight"]  # the word vectors: forward brings them
        setattr(model, model.base_model_prefix, _Given(base))
        self.model = model

    def forward(self, hidden_ND: Tensor, word_VD: Tensor) -> Tensor:
        """Return logits N x V; ``word_VD`` are the encoder's word vectors, by which most families multiply."""
        if self.tied:
            object.__setattr__(self.model.get_output_embeddings(), "weight", word_VD)
        logits_1NV: Tensor = self.model(inputs_embeds=hidden_ND[None]).logits
        return logits_1NV[0]

    @contextmanager
    def whole(self, encoder: Encoder) -> Iterator[Any]:
        """Put the encoder back, within the context: transformers' masked language model as it saves it."""
        prefix = self.model.base_model_prefix
        given, decoder = getattr(self.model, prefix), self.model.get_output_embeddings()
        setattr(self.model, prefix, encoder.model)
        if self.tied:
            decoder.__dict__.pop("weight", None)
            decoder.weight = encoder.word_vectors
        try:
            yield self.model
        finally:
            setattr(self.model, prefix, given)
            if self.tied:
                del decoder._parameters["weight"]


class _Given(nn.Module):
    """In the place of a masked language model's encoder: hidden states pass through, all else is the encoder's."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self._base = (base,)  # in a tuple it is no submodule

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_base"][0], name)

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutput

        return BaseModelOutput(last_hidden_state=inputs_embeds)


def load_encoder(folder: Path, dropout: float | None = None) -> tuple[Encoder, MaskedWordHead | None, bool]:
    """Open a published folder, without any code of its own.

    Args:
        folder: config.json with weights in safetensors, or in torch's form, of which tensors alone are read.
        dropout: replaces the folder's.

    Returns:
        The encoder, its masked word head (None of a decoder, which sees no word after a mask), and whether the folder
        had all of that head. One that it lacks starts near the identity, over the word vectors.

    Raises:
        ValueError: names the folder and what is missing, damaged or not supported.
    """
    values = read_config(folder)
    check_supported(values, str(folder / CONFIG))
    predicts = not is_decoder(values)
    model, missing = open_model(read_weights(folder), values, str(folder), predicts=predicts)
    base = model.base_model if predicts else model
    prefix = f"{model.base_model_prefix}." if predicts else ""
    absent = [name for name in missing if name.startswith(prefix) and "pooler" not in name]
    if predicts:
        head_missing = {name for name in missing if not name.startswith(prefix)}
        absent = [name for name in absent if name not in head_missing]
        _start_head(model, head_missing)
        decoder = model.get_output_embeddings()
        words = base.get_input_embeddings().weight
        model.config.tie_word_embeddings = decoder is None or decoder.weight is words
        if not model.config.tie_word_embeddings and decoder.bias is not None:
            decoder.bias = nn.Parameter(decoder.bias.detach().clone())  # else it is saved as a tied one, and not found
    if absent:
        raise ValueError(f"{folder}: the parameter {absent[0]} is missing; fetch the folder again")
    if dropout is not None:
        _set_dropout(model, dropout)
    encoder = Encoder(without_pooler(base))
    if not encoder.packs and (reason := _padding_matters(encoder)):
        raise ValueError(f"{folder}: {values.get('model_type')} {reason}; the nearest that works here is {USUAL}")
    return encoder, MaskedWordHead(model) if predicts else None, predicts and not head_missing


def open_encoder(folder: Path, packs: bool, *, predicts: bool = False) -> tuple[Encoder, MaskedWordHead | None]:
    """Open what :func:`save_encoder` wrote.

    Args:
        packs: what :meth:`Encoder.describe` says.
        predicts: whether the folder has a masked word head.

    Raises:
        RuntimeError: names a parameter that is missing.
    """
    values = read_config(folder)
    predicts = predicts and not is_decoder(values)
    model, missing = open_model(read_weights(folder), values, str(folder), predicts=predicts)
    if missing := [name for name in missing if "pooler" not in name]:
        raise RuntimeError(f"{folder.name} lacks {missing[0]}")
    return Encoder(without_pooler(model.base_model if predicts else model), packs), (
        MaskedWordHead(model) if predicts else None
    )


def described_encoder(description: Mapping[str, Any]) -> tuple[Encoder, MaskedWordHead | None]:
    """Return an encoder and its masked word head of the shape that :meth:`Encoder.describe` wrote, without weights."""
    transformers = import_transformers()
    values = dict(description["config"])
    predicts = not is_decoder(values)
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    kind = transformers.AutoModelForMaskedLM if predicts else transformers.AutoModel
    with _without_start():
        model = kind.from_config(config, dtype=torch.float32)
    base = model.base_model if predicts else model
    model.tie_weights()
    return Encoder(without_pooler(base), description["packs"]), MaskedWordHead(model) if predicts else None


def small_encoder(options: BertOptions, vocabulary: int, generator: torch.Generator) -> tuple[Encoder, MaskedWordHead]:
    """Return a BERT from scratch that learns to use its second segment within a few hundred steps.

    Attention starts as half an identity (an orthogonal value matrix, its transpose in the output), positions as small
    sinusoids, the masked word head's transform as 1.5 times the identity. With BERT's usual start a two-layer encoder
    ignores the retrieved document for the whole of a short training.
    """
    transformers, width = import_transformers(), options.width
    config = transformers.BertConfig(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=options.layers,
        num_attention_heads=options.heads, intermediate_size=options.intermediate,
        max_position_embeddings=options.positions, hidden_dropout_prob=options.dropout,
        attention_probs_dropout_prob=options.dropout,
    )  # fmt: skip
    with _without_start():
        model = transformers.BertForMaskedLM(config)
    model.tie_weights()
    embeddings, transform = model.bert.embeddings, model.cls.predictions.transform
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for part in model.modules():
            if isinstance(part, nn.LayerNorm):
                part.weight.fill_(1.0)
        for table in (embeddings.word_embeddings, embeddings.position_embeddings, embeddings.token_type_embeddings):
            table.weight.normal_(0.0, 0.05, generator=generator)
        for layer in model.bert.encoder.layer:
            attends = layer.attention.self
            drawn_ND = torch.empty(3 * width, width).normal_(0.0, 0.02, generator=generator)
            for part, weight_DD in zip((attends.query, attends.key, attends.value), drawn_ND.chunk(3), strict=True):
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
    """Write config.json and model.safetensors into a folder, as transformers saves an encoder or its whole model."""
    with nullcontext(encoder.model) if head is None else head.whole(encoder) as model:
        model.save_pretrained(folder)
    for path in folder.glob("*.safetensors"):  # which safetensors makes readable for the owner alone
        path.chmod((folder / CONFIG).stat().st_mode)


def is_decoder(values: Mapping[str, Any]) -> bool:
    """Return whether a configuration is of a model that continues texts, which may retrieve but predicts no mask."""
    return not _opens("AutoModelForMaskedLM", str(values.get("model_type", "bert")))


def check_supported(values: Mapping[str, Any], source: str) -> None:
    """Raise ValueError for a configuration of a model that cannot work here: the reason, and one that can."""
    kind = str(values.get("model_type", "bert"))
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

    Raises:
        ValueError: transformers cannot open it; names the source.
    """
    transformers = import_transformers()
    kind = transformers.AutoModelForMaskedLM if predicts else transformers.AutoModel
    try:
        own = {name: value for name, value in values.items() if name != "auto_map"}  # code of the folder's own
        config = transformers.AutoConfig.for_model(**{"model_type": "bert", **own})
        with torch.random.fork_rng():
            model, report = kind._model_mapping[type(config)].from_pretrained(
                None, config=config, state_dict=dict(state), dtype=torch.float32, output_loading_info=True
            )
    except Exception as error:  # whatever the library stumbles over: the folder is of no use
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{source}: transformers cannot open it ({type(error).__name__}: {reason})") from None
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # mapped files are aligned otherwise, which changes last digits
    return model, sorted(report["missing_keys"])


@contextmanager
def _without_start() -> Iterator[None]:
    """Within it transformers makes models without drawing weights, and torch's random numbers stay as they are."""
    from transformers.initialization import no_init_weights

    with torch.random.fork_rng(), no_init_weights():
        yield


def without_pooler(model: Any) -> Any:
    """Take the layer over the first hidden state away, which pre-training of some families leaves behind."""
    if getattr(model, "pooler", None) is not None:
        model.pooler = None
    return model


@torch.no_grad()
def _start_head(model: Any, missing: set[str]) -> None:
    """Start parameters of a masked word head that a folder lacks: near the identity, over the word vectors."""
    word_VD = model.base_model.get_input_embeddings().weight
    for name, parameter in model.named_parameters():
        if name not in missing or parameter is word_VD:
            continue
        if parameter.ndim == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            parameter.copy_(word_VD if parameter.shape == word_VD.shape else torch.eye(*parameter.shape))


@torch.no_grad()
def _padding_matters(encoder: Encoder) -> str:
    """Return why batches of several sequences cannot be read, if so: a sequence's neighbours must not change it."""
    if "attention_mask" not in inspect.signature(encoder.model.forward).parameters:
        return "takes no attention_mask, so that it would read padding"
    short, long = np.arange(4) + 5, np.arange(9) + 5
    try:
        with evaluating(encoder):
            alone_TD, together_TD = encoder(Packed([short])), encoder(Packed([short, long]))[:4]
    except Exception as error:  # whatever the library stumbles over
        return f"does not read a batch ({type(error).__name__}: {' '.join(str(error).split())[:120]})"
    return "" if torch.allclose(alone_TD, together_TD, atol=_SAME) else "reads the padding of a batch"


def _set_dropout(model: nn.Module, dropout: float) -> None:
    for part in (*model.modules(), model.config):
        if isinstance(part, nn.Dropout):
            part.p = dropout
        for name in _DROPOUTS:
            if isinstance(part.__dict__.get(name), float | int):
                setattr(part, name, dropout)


def _first(config: Any, default: float, *names: str) -> float:
    return next((getattr(config, name) for name in names if getattr(config, name, None) is not None), default)


def _first_position(model: Any) -> int:
    """The number of a sequence's first position: some families count from after their padding's number."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return module.padding_idx + 1
    return 0
