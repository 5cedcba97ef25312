"""Small readers of answer spans of several families, and questions with passages; equal in every transformers.

benchmarks/reader_fixture.py imports this module too, with transformers 4.57, so that it imports nothing of realmops.
numpy's RandomState is used because its streams are frozen.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

NAMES = ("anna", "karl", "maria", "jon", "berg", "lund", "holm", "vik", "ingrid", "olav")
TOWNS = ("oslo", "bergen", "fjell", "molde", "tromso", "hamar", "alta", "voss")
WORDS = (
    *NAMES, *TOWNS, "norway", "the", "a", "of", "in", "was", "is", "born", "wrote", "built", "sang", "lived",
    "until", "town", "port", "poet", "ship", "play", "novel", "who", "where", "when", "what", "did", "and", "rain",
    "sea", "cold",
)  # fmt: skip
ODD = ("Ålesund", "naïve", "Æsop", "東京", "Zoë", "🙂", "don't", "x²", "1931", "47", "3.5", "U.S.", "(1950)", "-", "#%")
MARKS = (". ", ", ", "; ", "\n\n", "  ", " \t ", "? ", " — ", "\u00a0", "!")
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
PUNCTUATION = ".,;?!'()-#%—"
BERTS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ROBERTAS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
POSITIONS = 128
LIMIT, ANSWER = 120, 8  # wordpieces of a window and of an answer


def wordpiece(special: Sequence[str] = BERTS) -> Tokenizer:
    """BERT's tokenizer; every second word is known, others are split into letters."""
    pieces = [*special, *WORDS[::2], *PUNCTUATION, *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    vocabulary = {piece: n for n, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return _with_segments(tokenizer)


def byte_bpe() -> Tokenizer:
    """RoBERTa's tokenizer, which splits letters that are not ASCII into bytes."""
    vocabulary = {piece: n for n, piece in enumerate((*ROBERTAS, *sorted(pre_tokenizers.ByteLevel.alphabet())))}
    merges: list[tuple[str, str]] = []
    for word in (f"Ġ{word}" for word in WORDS[::2]):
        for end in range(1, len(word)):
            vocabulary.setdefault(word[: end + 1], len(vocabulary))
            if (word[:end], word[end]) not in merges:
                merges.append((word[:end], word[end]))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    ends = [(token, vocabulary[token]) for token in ("</s>", "<s>")]
    tokenizer.post_processor = processors.RobertaProcessing(*ends, trim_offsets=True, add_prefix_space=False)
    return tokenizer


def unigram() -> Tokenizer:
    """A tokenizer of SentencePiece's kind: blanks are part of the pieces, and a piece can be a blank alone."""
    words = [f"▁{word}" for word in WORDS[::2]]
    pieces = [*words, "▁", *LETTERS, *PUNCTUATION, *LETTERS.upper()[:26]]
    scores = [(piece, -3 - 0.05 * n) for n, piece in enumerate(pieces)]
    tokenizer = Tokenizer(models.Unigram([*((token, 0.0) for token in BERTS), *scores], unk_id=1))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _with_segments(tokenizer)


def _with_segments(tokenizer: Tokenizer) -> Tokenizer:
    """Add [CLS] question [SEP] passage [SEP], segment 1 for the passage."""
    ids = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ids
    )
    return tokenizer


@dataclass(frozen=True)
class Family:
    """A model type with its tokenizer; ``segments``: whether transformers 4 gives token_type_ids to the model."""

    tokenizer: Callable[[], Tokenizer]
    config: dict[str, Any]
    tokenizer_class: str = ""  # empty: chosen by the model type, as in folders of older readers
    segments: bool = True
    special: tuple[str, ...] = BERTS


_SHAPE = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": POSITIONS + 2,
}  # fmt: skip
_DISTILBERT = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": POSITIONS + 2}
_ROBERTA = {**_SHAPE, "type_vocab_size": 1, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
_DEBERTA = {
    **_SHAPE, "type_vocab_size": 0, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 16,
    "share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False,
}  # fmt: skip
FAMILIES = {
    "bert": Family(wordpiece, _SHAPE, "BertTokenizer"),
    "roberta": Family(byte_bpe, _ROBERTA, "RobertaTokenizer", segments=False, special=ROBERTAS),
    "distilbert": Family(wordpiece, _DISTILBERT, segments=False),
    "deberta-v2": Family(unigram, _DEBERTA, "PreTrainedTokenizerFast"),
    "albert": Family(unigram, {**_SHAPE, "embedding_size": 24}, "PreTrainedTokenizerFast"),
}

PADDING_LEAKS = {  # families whose texts depend on the padding of their batch
    "fnet": Family(unigram, _SHAPE, "PreTrainedTokenizerFast"),
    "convbert": Family(unigram, {**_SHAPE, "embedding_size": 32}, "PreTrainedTokenizerFast"),
    "nystromformer": Family(unigram, _SHAPE, "PreTrainedTokenizerFast"),
}


def build_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """A model whose weights depend on the names of its parameters and the seed alone."""
    known = (FAMILIES | PADDING_LEAKS)[family]
    values = {"vocab_size": known.tokenizer().get_vocab_size(), **known.config, **changes}
    config = transformers.AutoConfig.for_model(family, **values)
    model = transformers.AutoModelForQuestionAnswering.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            random = np.random.RandomState(zlib.crc32(f"{seed} {name}".encode()))
            value = torch.from_numpy(random.standard_normal(parameter.shape)).float()
            scale = 1.0 if "embeddings" in name else 4.0 if "qa_outputs" in name else 1.5
            if parameter.ndim == 1:
                value = 0.1 * value + ("norm" in name.lower() and name.endswith("weight"))
            else:
                value = scale * value / parameter.shape[-1] ** 0.5
            parameter.copy_(value)
    return model.eval()


def write_reader(folder: Path, family: str, seed: int = 0, **changes: Any) -> Path:
    """A folder that AutoModelForQuestionAnswering and AutoTokenizer open."""
    folder.mkdir(parents=True, exist_ok=True)
    model = build_model(family, seed, **changes)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    save_file({name: p.detach().clone() for name, p in model.named_parameters()}, folder / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    write_tokenizer(folder, family)
    return folder


def write_tokenizer(folder: Path, family: str) -> None:
    known = (FAMILIES | PADDING_LEAKS)[family]
    known.tokenizer().save(str(folder / "tokenizer.json"))
    about = {f"{role}_token": next(t for t in known.special if role in t.lower()) for role in ("pad", "unk", "mask")}
    cls, sep = ("<s>", "</s>") if "<s>" in known.special else ("[CLS]", "[SEP]")
    about |= {"cls_token": cls, "sep_token": sep, "model_max_length": POSITIONS}
    if known.tokenizer_class:
        about["tokenizer_class"] = known.tokenizer_class
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def question_and_passage(number: int) -> tuple[str, str]:
    """A pair by its number: words, numbers and marks, blanks of several kinds; from one word to several windows."""
    random = np.random.RandomState(1000 + number)

    def words(count: int) -> str:
        text = ""
        for _ in range(count):
            draw = random.random_sample()
            word = ODD[random.randint(len(ODD))] if draw < 0.15 else WORDS[random.randint(len(WORDS))]
            text += word.capitalize() if 0.3 < draw < 0.4 else word
            text += MARKS[random.randint(len(MARKS))] if random.random_sample() < 0.2 else " "
        return text

    question = words(1 + random.randint(8)).strip() + "?"
    kind = number % 10
    if kind == 0:
        passage = words(1).strip()
    elif kind == 1:
        passage = (" .", "\n?\n", "  ()  ", " # ")[random.randint(4)]
    elif kind < 4:
        passage = words(60 + random.randint(60))  # several windows
    else:
        passage = ("  " if kind == 4 else "") + words(3 + random.randint(22))
    return question, passage


def questions_and_passages(numbers: Sequence[int]) -> list[tuple[str, str]]:
    """Pairs by their numbers."""
    return [question_and_passage(int(number)) for number in numbers]
