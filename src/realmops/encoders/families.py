"""The relatives of BERT: how each differs in its configuration, its parameters' names and its parts.

What :mod:`realmops.encoders.bert` needs to be each of them, and nothing that computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_BERT_CONFIG = {
    "vocabulary": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "intermediate": "intermediate_size",
    "positions": "max_position_embeddings",
    "dropout": "hidden_dropout_prob",
    "segments": "type_vocab_size",
    "layer_norm_eps": "layer_norm_eps",
    "activation": "hidden_act",
}
_BERT_NAMES = {
    "word": "embeddings.word_embeddings",
    "position": "embeddings.position_embeddings",
    "segment": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
    "project": "embeddings_project",
    "layers": "encoder.layer",
    "qkv": "attention.self.{query,key,value}",
    "query_bias": "attention.self.query.bias",
    "value_bias": "attention.self.value.bias",
    "attention_output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "intermediate": "intermediate.dense",
    "output": "output.dense",
    "output_norm": "output.LayerNorm",
}


def _head(transform: str, norm: str, bias: str, decoder: str) -> dict[str, str]:
    parts = {f"transform.{kind}": f"{transform}.{kind}" for kind in ("weight", "bias")}
    parts |= {f"norm.{kind}": f"{norm}.{kind}" for kind in ("weight", "bias")}
    return parts | {"bias": bias, "decoder": f"{decoder}.weight"}


def _usual_head(name: str, transform: str, norm: str) -> dict[str, str]:
    return _head(f"{name}.{transform}", f"{name}.{norm}", f"{name}.bias", f"{name}.decoder")


HEAD_NAMES = _usual_head("cls.predictions", "transform.dense", "transform.LayerNorm")
_LM_HEAD = _usual_head("lm_head", "dense", "layer_norm")


@dataclass(frozen=True)
class Family:
    """One family; what is not said is BERT's.

    ``names`` are Hugging Face's of each part of ours, ``prefixes`` what stands before them, ours to write first.
    ``head`` are those of a masked word head, whose decoder is the word embedding unless a file has another. ``config``
    are the keys of ``config.json``. ``fixed`` are shapes that no key
    tells. ``behind_padding``: positions begin behind the number of the padding. ``own_gelu``: the masked word head has
    the exact GELU, whatever the layers have.
    """

    words: str
    model: str  # the class of transformers
    prefixes: tuple[str, ...]
    names: Mapping[str, str] = field(default_factory=lambda: _BERT_NAMES)
    head: Mapping[str, str] = field(default_factory=lambda: HEAD_NAMES)
    config: Mapping[str, str] = field(default_factory=lambda: _BERT_CONFIG)
    dropouts: tuple[str, ...] = ("attention_probs_dropout_prob",)  # more keys of the dropout
    fixed: Mapping[str, float] = field(default_factory=dict)
    behind_padding: bool = False
    own_gelu: bool = False
    pools: bool = True  # its class has a layer over the first wordpiece


_ROBERTA = {"head": _LM_HEAD, "behind_padding": True, "own_gelu": True}
FAMILIES = {
    "bert": Family("a BERT", "BertModel", ("bert.", "realm.")),
    "roberta": Family("a RoBERTa", "RobertaModel", ("roberta.",), **_ROBERTA),  # type: ignore[arg-type]
    "xlm-roberta": Family("an XLM-R", "XLMRobertaModel", ("roberta.",), **_ROBERTA),  # type: ignore[arg-type]
    "camembert": Family("a CamemBERT", "CamembertModel", ("roberta.",), **_ROBERTA),  # type: ignore[arg-type]
    "mpnet": Family(
        "an MPNet",
        "MPNetModel",
        ("mpnet.",),
        names=_BERT_NAMES
        | {
            "relative": "encoder.relative_attention_bias",
            "qkv": "attention.attn.{q,k,v}",
            "query_bias": "attention.attn.q.bias",
            "value_bias": "attention.attn.v.bias",
            "attention_output": "attention.attn.o",
            "attention_norm": "attention.LayerNorm",
        },
        config={key: name for key, name in _BERT_CONFIG.items() if key != "segments"}
        | {"buckets": "relative_attention_num_buckets"},
        fixed={"segments": 0},
        **_ROBERTA,  # type: ignore[arg-type]
    ),
    "distilbert": Family(
        "a DistilBERT",
        "DistilBertModel",
        ("distilbert.",),
        names=_BERT_NAMES
        | {
            "layers": "transformer.layer",
            "qkv": "attention.{q_lin,k_lin,v_lin}",
            "query_bias": "attention.q_lin.bias",
            "value_bias": "attention.v_lin.bias",
            "attention_output": "attention.out_lin",
            "attention_norm": "sa_layer_norm",
            "intermediate": "ffn.lin1",
            "output": "ffn.lin2",
            "output_norm": "output_layer_norm",
        },
        head=_head("vocab_transform", "vocab_layer_norm", "vocab_projector.bias", "vocab_projector"),
        config={
            "vocabulary": "vocab_size",
            "width": "dim",
            "layers": "n_layers",
            "heads": "n_heads",
            "intermediate": "hidden_dim",
            "positions": "max_position_embeddings",
            "dropout": "dropout",
            "activation": "activation",
        },
        dropouts=("attention_dropout",),
        fixed={"segments": 0, "layer_norm_eps": 1e-12},
        pools=False,
    ),
    "electra": Family(
        "an ELECTRA",
        "ElectraModel",
        ("electra.",),
        head=_head(
            "generator_predictions.dense",
            "generator_predictions.LayerNorm",
            "generator_lm_head.bias",
            "generator_lm_head",
        ),
        config=_BERT_CONFIG | {"embedding": "embedding_size"},
        own_gelu=True,
        pools=False,
    ),
}

PACKED = {*FAMILIES, "realm", "modernbert"}  # kinds that are read without padding
# the names of masked word heads, also of other families
MASKED_WORD_HEADS = (HEAD_NAMES, _LM_HEAD, _usual_head("predictions", "dense", "LayerNorm"))


def spellings(name: str) -> tuple[str, ...]:
    """Return the names of a parameter in files; the first one that a file has counts.

    A decoder's own bias comes before the one that it otherwise shares, as in transformers. LayerNorms of the first
    converted checkpoints have other names.
    """
    old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
    decoder = name.replace("predictions.bias", "predictions.decoder.bias")
    return decoder.replace("lm_head.bias", "lm_head.decoder.bias"), name, old
