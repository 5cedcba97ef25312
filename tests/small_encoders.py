"""Folders of encoders of many families, with random weights, as transformers writes them; one is registered here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from small_world import DOCUMENTS
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import nn
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput

from realmops.corpus.vocabulary import SPECIAL_TOKENS

PROMPTS = "Query: Passage: Find: one two three four"
TEXTS = [PROMPTS, *(part for title, text, _ in DOCUMENTS for part in (title, text))] * 3
ROBERTAS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")


def wordpiece(special: tuple[str, ...] = SPECIAL_TOKENS) -> Tokenizer:
    """BERT's kind; MPNet has RoBERTa's special tokens in it."""
    letters = [chr(n) for n in range(ord("a"), ord("z") + 1)] + list("0123456789")
    words = sorted({word.strip(".").lower() for text in TEXTS for word in text.split()})
    pieces = [*special, *words, *".?,:'()-", *(w for w in letters if w not in words), *(f"##{w}" for w in letters)]
    unknown = next(token for token in special if "unk" in token.lower())
    tokenizer = Tokenizer(models.WordPiece({piece: n for n, piece in enumerate(pieces)}, unk_token=unknown))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def byte_bpe(special: tuple[str, ...] = ROBERTAS) -> Tokenizer:
    """RoBERTa's and ModernBERT's kind."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=360, initial_alphabet=alphabet, special_tokens=list(special), show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def unigram(special: tuple[str, ...] = ROBERTAS) -> Tokenizer:
    """XLM-R's kind."""
    tokenizer = Tokenizer(models.Unigram())
    blanks = normalizers.Replace(tokenizers.Regex(" {2,}"), " ")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC(), blanks])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=list(special), unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def around(tokenizer: Tokenizer, begin: str, end: str) -> Tokenizer:
    """The tokenizer with a post-processor, as published ones have it."""
    ids = {token: tokenizer.token_to_id(token) for token in (begin, end) if token}
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}".strip(), pair=f"{begin} $A {end} $B {end}".strip(), special_tokens=list(ids.items())
    )
    return tokenizer


def write_tokenizer(folder: Path, tokenizer: Tokenizer, special: tuple[str, ...], begin: str, end: str) -> None:
    around(tokenizer, begin, end).save(str(folder / "tokenizer.json"))
    roles = {"cls_token": begin, "sep_token": end, "bos_token": begin, "eos_token": end}
    for role in ("pad", "unk", "mask"):
        roles[f"{role}_token"] = next((token for token in special if role in token.lower()), "")
    named = {role: token for role, token in roles.items() if token}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 64, **named}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


OWN = "neighbours"  # a model type that transformers knows by registration


class NeighboursConfig(transformers.PreTrainedConfig):
    model_type = OWN
    vocab_size: int = 100
    hidden_size: int = 16
    max_position_embeddings: int = 64
    initializer_range: float = 0.02
    dropout: float = 0.1
    pad_token_id: int | None = 0
    tie_word_embeddings: bool = True


class _Neighbours(transformers.PreTrainedModel):
    config_class = NeighboursConfig
    base_model_prefix = OWN


class NeighboursModel(_Neighbours):
    """A linear layer over the mean of each word vector and its neighbours: no attention, and nothing of BERT."""

    def __init__(self, config: NeighboursConfig) -> None:
        super().__init__(config)
        self.vectors = nn.Embedding(config.vocab_size, config.hidden_size)
        self.mix = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.vectors

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, inputs_embeds: Any = None, **_: Any
    ) -> BaseModelOutput:
        x_BLD = self.vectors(input_ids) if inputs_embeds is None else inputs_embeds
        mask_BL = x_BLD.new_ones(x_BLD.shape[:2]) if attention_mask is None else attention_mask.to(x_BLD)
        both_BLD = F.pad(torch.cat([x_BLD * mask_BL[..., None], mask_BL[..., None]], -1), (0, 0, 1, 1))
        sum_BLD = both_BLD[:, :-2] + both_BLD[:, 1:-1] + both_BLD[:, 2:]
        mean_BLD = sum_BLD[..., :-1] / sum_BLD[..., -1:].clamp(min=1)
        return BaseModelOutput(last_hidden_state=x_BLD + self.dropout(self.mix(mean_BLD)))


class NeighboursForMaskedLM(_Neighbours):
    _tied_weights_keys = {"decoder.weight": "neighbours.vectors.weight"}  # noqa: RUF012

    def __init__(self, config: NeighboursConfig) -> None:
        super().__init__(config)
        self.neighbours = NeighboursModel(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.decoder

    def forward(self, **inputs: Any) -> MaskedLMOutput:
        return MaskedLMOutput(logits=self.decoder(self.neighbours(**inputs).last_hidden_state))


transformers.AutoConfig.register(OWN, NeighboursConfig)
transformers.AutoModel.register(NeighboursConfig, NeighboursModel)
transformers.AutoModelForMaskedLM.register(NeighboursConfig, NeighboursForMaskedLM)

_SHAPE: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 64, "initializer_range": 0.25,  # so large that texts differ
}  # fmt: skip
_ROBERTA = {"max_position_embeddings": 66, "type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": 1e-5}
_DECODER = {"num_key_value_heads": 2, "head_dim": 8}
_BERT = (wordpiece, SPECIAL_TOKENS)
_ALL: dict[str, tuple[Callable[[tuple[str, ...]], Tokenizer], tuple[str, ...], dict[str, Any]]] = {
    "bert": (*_BERT, {}),
    "roberta": (byte_bpe, ROBERTAS, _ROBERTA),
    "xlm-roberta": (unigram, ROBERTAS, _ROBERTA),
    "camembert": (unigram, ROBERTAS, _ROBERTA),
    "mpnet": (wordpiece, ROBERTAS, {"max_position_embeddings": 66, "layer_norm_eps": 1e-5}),
    "distilbert": (*_BERT, {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}),
    "electra": (*_BERT, {"embedding_size": 24}),
    "modernbert": (
        byte_bpe,
        SPECIAL_TOKENS,
        {
            "num_hidden_layers": 4, "local_attention": 16, "pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3,
            "bos_token_id": 2, "eos_token_id": 3,
        },
    ),
    "albert": (*_BERT, {"embedding_size": 24}),
    "ernie": (*_BERT, {}),
    "nomic_bert": (*_BERT, {}),
    "deberta-v2": (*_BERT, {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    OWN: (*_BERT, {}),
    "convbert": (*_BERT, {}),
    "nystromformer": (*_BERT, {}),
    "reformer": (*_BERT, {"attention_head_size": 8, "axial_pos_embds": False, "max_position_embeddings": 256}),
    "fnet": (*_BERT, {}),
    "gemma3_text": (*_BERT, {**_DECODER, "sliding_window": 16, "query_pre_attn_scalar": 8}),
    "qwen3": (byte_bpe, ("<pad>", "<|end|>"), _DECODER),  # its tokenizer only ends a text
}  # fmt: skip
PADDED = ("mpnet", "deberta-v2", OWN)  # families that need padded batches
DECODERS = ("qwen3", "gemma3_text")
ENCODERS = [*_ALL][: [*_ALL].index(OWN) + 1]  # those after it depend on the padding of their batch


def write_encoder(folder: Path, family: str, head: bool = True, **changes: Any) -> Path:
    """A folder of this family with random weights, biases and norms too, with its masked word head or without."""
    make, special, shape = _ALL[family]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make(special)
    ends = next(pair for pair in (("<s>", "</s>"), ("[CLS]", "[SEP]"), ("", "<|end|>")) if pair[1] in special)
    write_tokenizer(folder, tokenizer, special, *ends)
    values = {"vocab_size": tokenizer.get_vocab_size(), **_SHAPE, **shape, **changes}
    config = transformers.AutoConfig.for_model(family, **values)
    torch.manual_seed(1)
    kind = transformers.AutoModelForMaskedLM if head and family not in DECODERS else transformers.AutoModel
    model = kind.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape))
            assert parameter.isfinite().all(), name
    model.save_pretrained(folder)
    return folder


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_weights(folder: Path, change: Callable[[str, torch.Tensor], torch.Tensor | None]) -> None:
    """Replace each weight by ``change(name, weight)``, or remove it."""
    changed = {name: change(name, x) for name, x in load_file(folder / "model.safetensors").items()}
    kept = {name: x for name, x in changed.items() if x is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
