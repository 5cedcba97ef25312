"""Any other encoder that transformers has, by its AutoModel: correct, but padded, and so slower than the packed ones.

Nothing of a folder is executed (``trust_remote_code`` is never set), and its weights must be safetensors.

Shape suffixes: B sequences, L the longest, T wordpieces of all sequences, D width.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from realmops.encoders.bert import BertConfig, MaskedWordHead
from realmops.encoders.encoder import Encoder
from realmops.encoders.families import MASKED_WORD_HEADS, spellings
from realmops.encoders.folders import CONFIG, is_tied, read_config, read_weights
from realmops.encoders.packed import Packed

MODEL_TYPE = "transformers"  # of a description
_NEAREST = {  # one that can, by a word in the name of one that cannot
    "t5": "FacebookAI/roberta-base, or with several languages FacebookAI/xlm-roberta-base",
    "bart": "FacebookAI/roberta-base",
    "code": "answerdotai/ModernBERT-base",
}
_USUAL = "answerdotai/ModernBERT-base, or with several languages FacebookAI/xlm-roberta-base"


class Foreign(Encoder):
    """An encoder of transformers: packed wordpieces in, padded in between, one vector for each of them out."""

    reentrant = False  # nobody promises it

    def __init__(self, model: Any) -> None:
        config = model.config
        words = model.get_input_embeddings().weight
        dropout = float(getattr(config, "hidden_dropout_prob", 0.0) or 0.0)
        super().__init__(len(words), config.hidden_size, _positions(model), dropout, _eps(config))
        self.model, self.added_width = model, words.shape[1]
        self.words = f"{config.model_type} by transformers"
        self._recomputes = False
        self.takes = set(inspect.signature(model.forward).parameters)
        tells = "token_type_ids" in self.takes
        self.segments = int(getattr(config, "type_vocab_size", 0) or 0) if tells else 0

    def forward(self, batch: Packed, added_TD: Tensor | None = None) -> Tensor:
        """Hidden states T x D; ``added_TD`` is added to the word vectors."""
        batch.to(self.device)
        count, longest = len(batch), batch.longest
        sequence_T = torch.repeat_interleave(
            torch.arange(count, device=self.device), batch.lengths_B, output_size=batch.wordpieces
        )
        row_T = sequence_T * longest + batch.positions_T

        def padded(x_T: Tensor, value: int) -> Tensor:
            return x_T.new_full((count * longest,), value).index_copy_(0, row_T, x_T).view(count, longest)

        padding = self.model.config.pad_token_id or 0
        inputs = {"attention_mask": padded(torch.ones_like(batch.tokens_T), 0)}
        if self.segments > 1:
            inputs["token_type_ids"] = padded(batch.segments_T, 0)
        id_BL = padded(batch.tokens_T, padding)
        if added_TD is None:
            inputs["input_ids"] = id_BL
        else:
            word_BLD = self.model.get_input_embeddings()(id_BL)
            more_PD = added_TD.new_zeros(count * longest, added_TD.shape[1]).index_copy(0, row_T, added_TD)
            inputs["inputs_embeds"] = word_BLD + more_PD.view(count, longest, -1)
        if self.model.supports_gradient_checkpointing and self._recomputes != self.gradient_checkpointing:
            self._recomputes = self.gradient_checkpointing
            if self._recomputes:
                self.model.gradient_checkpointing_enable({"use_reentrant": False})
            else:
                self.model.gradient_checkpointing_disable()
        hidden_BLD: Tensor = self.model(**inputs, return_dict=True).last_hidden_state
        return hidden_BLD.flatten(0, 1).index_select(0, row_T)

    @torch.no_grad()
    def _unfit(self) -> str:
        """Why it cannot read batches of several sequences, if so: what stands beside one must not change it."""
        if "attention_mask" not in self.takes:
            return "takes no attention_mask, so that it would read padding"
        short, long = np.arange(4) + 5, np.arange(9) + 5
        self.eval()
        try:
            alone_TD, beside_TD = self(Packed([short])), self(Packed([short, long]))[:4]
        except Exception as error:  # whatever the library stumbles over
            return f"does not read a batch ({type(error).__name__}: {' '.join(str(error).split())[:120]})"
        finally:
            self.train()
        return "" if torch.allclose(alone_TD, beside_TD, atol=1e-3) else "reads the padding of a batch"

    @property
    def word_vectors(self) -> nn.Parameter:
        return cast(nn.Parameter, self.model.get_input_embeddings().weight)

    @property
    def shifts(self) -> list[nn.Parameter]:
        """None is known: where the last layer has such a bias, nothing is lost but a little time."""
        return []

    def masked_word_head(self) -> MaskedWordHead:
        inner = 0 if self.added_width == self.width else self.added_width
        activation = getattr(self.model.config, "hidden_act", "gelu")
        shape = {"layers": 1, "heads": 1, "intermediate": 1, "positions": 1, "dropout": 0.0}
        known = activation if activation in ("gelu", "gelu_new", "gelu_pytorch_tanh") else "gelu"
        return MaskedWordHead(
            BertConfig(
                self.vocabulary, self.width, layer_norm_eps=self.layer_norm_eps, activation=known, embedding=inner,
                tied=getattr(self.model.config, "tie_word_embeddings", True), **shape,  # type: ignore[arg-type]
            )
        )  # fmt: skip

    def describe(self) -> dict[str, Any]:
        return {"model_type": MODEL_TYPE, "config": json.loads(self.model.config.to_json_string())}

    def published(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        config = self.describe()["config"]
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in self.model.state_dict().items()}
        return config | {"architectures": [type(self.model).__name__]}, state

    @classmethod
    def described(cls, description: Mapping[str, Any], source: str) -> Foreign:
        transformers = _transformers()
        values = dict(description["config"])
        config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
        return cls(transformers.AutoModel.from_config(config, dtype=torch.float32))

    @classmethod
    def load(cls, folder: Path, dropout: float | None = None) -> tuple[Foreign, MaskedWordHead, bool]:
        """From a folder that transformers opens without code of the folder's own; ValueError says what is in the way.

        A masked word head of a usual form is taken too; one that it lacks starts from a near identity.
        """
        values = read_config(folder)
        refuse(values, str(folder / CONFIG))
        transformers = _transformers()
        if not any((folder / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json")):
            raise ValueError(f"{folder}: {values['model_type']} is read from model.safetensors alone, which is missing")
        try:
            model, found = transformers.AutoModel.from_pretrained(
                folder, use_safetensors=True, local_files_only=True, dtype=torch.float32, output_loading_info=True
            )
        except Exception as error:  # whatever the library stumbles over: the folder is of no use
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"{folder}: transformers cannot open it ({type(error).__name__}: {reason})") from None
        if missing := sorted(name for name in found["missing_keys"] if "pooler" not in name):
            raise ValueError(f"{folder}: the parameter {missing[0]} is missing; fetch the folder again")
        parameters = model.state_dict()
        for name in found["missing_keys"]:  # not read; transformers drew them, by no seed of ours
            parameters[name].zero_()
        encoder = cls(model)
        if reason := encoder._unfit():
            raise ValueError(f"{folder}: {values['model_type']} {reason}; the nearest that works here is {_USUAL}")
        if dropout is not None:
            encoder.set_dropout(dropout)
        state = read_weights(folder)
        decoders = [state[names["decoder"]] for names in MASKED_WORD_HEADS if names["decoder"] in state]
        model.config.tie_word_embeddings = all(is_tied(decoder, encoder.word_vectors) for decoder in decoders)
        head = encoder.masked_word_head()
        return encoder, head, _fill_head(head, state, encoder.word_vectors)

    def set_dropout(self, dropout: float) -> None:
        super().set_dropout(dropout)
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = dropout


def refuse(values: Mapping[str, Any], source: str) -> None:
    """ValueError where a configuration is of a model that cannot work here; it says why, and names one that can."""
    kind = str(values.get("model_type"))
    auto = _transformers().models.auto.modeling_auto
    if kind not in auto.MODEL_MAPPING_NAMES:
        reason = "is not among those of the installed transformers"
        if "auto_map" in values:
            reason = "comes with code of its own, which is never run"
    elif values.get("is_encoder_decoder") or kind in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        reason = "is an encoder with a decoder, which was not trained to tell masked words"
    elif kind not in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        reason = "is no encoder that tells masked words: one that continues texts sees no word behind the mask"
    elif values.get("is_decoder"):
        reason = "is set up as a decoder (is_decoder), which sees no word behind the mask"
    else:
        return
    near = next((name for word, name in _NEAREST.items() if word in kind), _USUAL)
    raise ValueError(f"{source}: model_type {kind!r} {reason}; the nearest that works here is {near}")


def _positions(model: Any) -> int:
    """The longest sequence; where positions begin behind the number of the padding, those before are none."""
    config = model.config
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return module.num_embeddings - module.padding_idx - 1
    return int(getattr(config, "max_position_embeddings", 0) or 512)


def _eps(config: Any) -> float:
    return float(next((getattr(config, n) for n in ("layer_norm_eps", "norm_eps") if hasattr(config, n)), 1e-12))


def _fill_head(head: MaskedWordHead, state: Mapping[str, Tensor], word_VD: Tensor) -> bool:
    """Fill the head from the first usual names that are all there, else with a near identity; whether it was found."""
    ours = head.state_dict()
    for names in MASKED_WORD_HEADS:
        found = {mine: next((state[n] for n in spellings(names[mine]) if n in state), None) for mine in ours}
        if all(tensor is not None and tensor.shape == ours[mine].shape for mine, tensor in found.items()):
            head.load_state_dict({mine: tensor.float() for mine, tensor in found.items() if tensor is not None})
            return True
    head.start_afresh(word_VD)
    return False


def _transformers() -> Any:
    """Import transformers, without its log lines and progress bars."""
    import transformers
    import transformers.models.auto.modeling_auto

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers
