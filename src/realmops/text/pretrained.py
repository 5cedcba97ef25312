"""The tokenizer of a pre-trained encoder: BERT's WordPiece by its vocabulary and casing, any other as it is."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from realmops.hub import (
    SPECIAL_TOKENS_MAP,
    TOKENIZER,
    TOKENIZER_CONFIG,
    VOCABULARY,
    is_bert,
    read_optional,
    sentence_prompts,
)
from realmops.text.special import prompted
from realmops.text.vocabulary import UNCASED, Casing, build_tokenizer, open_tokenizer, pieces_of, read_vocabulary

_ROLES = {
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
}
_MASKS = ("[MASK]", "<mask>")  # the names by which ``SpecialTokens.of`` knows it


def read_encoder_tokenizer(folder: Path) -> tuple[list[str], Casing, str | None]:
    """The pieces of an encoder's folder in the order of their ids, its casing, and its tokenizer.json.

    The last is None where pieces and casing say all: for WordPiece with BERT's special tokens. What a sentence encoder
    wants before queries and documents is a part of it. ValueError for a tokenizer without a word for what begins a
    sequence or ends its parts.
    """
    stated = read_optional(folder / TOKENIZER, "tokenizer")
    names = _special_names(folder)
    kind = (stated.get("model") or {}).get("type", "WordPiece")  # one of old files states no type
    splits = (stated.get("pre_tokenizer") or {}).get("type", "BertPreTokenizer")
    if "cls" in (post := stated.get("post_processor") or {}):
        names.setdefault("cls_token", post["cls"][0])
    berts = all(names.get(role, name) == name for role, name in _ROLES.items())
    told = sentence_prompts(folder)
    if berts and (kind, splits) == ("WordPiece", "BertPreTokenizer"):
        pieces, casing = read_encoder_vocabulary(folder)
        return pieces, casing, prompted(build_tokenizer(pieces, casing), *told).to_str() if any(told) else None
    if not stated:
        raise ValueError(
            f"{folder}: its special tokens are not BERT's ({', '.join(sorted(set(names.values())))}), and {TOKENIZER} "
            f"is missing: write it with transformers, AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    try:
        tokenizer = open_tokenizer((folder / TOKENIZER).read_text(encoding="utf-8"))
        tokenizer = _with_roles(tokenizer, names)
        tokenizer = prompted(tokenizer, *told) if any(told) else tokenizer
    except ValueError as error:
        raise ValueError(f"{folder / TOKENIZER}: {error}") from None
    except Exception as error:  # whatever the library stumbles over; it raises Exception itself
        raise ValueError(f"{folder / TOKENIZER} is no tokenizer ({str(error)[:200]}); fetch it again") from None
    return pieces_of(tokenizer), UNCASED, tokenizer.to_str()


def _special_names(folder: Path) -> dict[str, str]:
    """The special tokens that a folder names, by role; ``bos`` and ``eos`` stand for a missing ``cls`` and ``sep``."""
    stated = {} if is_bert(folder) else read_optional(folder / SPECIAL_TOKENS_MAP, "map of special tokens")
    stated |= read_optional(folder / TOKENIZER_CONFIG, "tokenizer configuration")
    both = ((role, value.get("content") if isinstance(value, dict) else value) for role, value in stated.items())
    named = {role: name for role, name in both if role.endswith("_token") and isinstance(name, str)}
    for role, other in (("cls_token", "bos_token"), ("sep_token", "eos_token")):
        if role not in named and other in named:
            named[role] = named[other]
    return {role: name for role, name in named.items() if role in _ROLES}


def _with_roles(tokenizer: Tokenizer, names: dict[str, str]) -> Tokenizer:
    """The same, with what begins and ends a text around it, and its mask under a name that is known."""
    around = tokenizer.encode("").ids
    ends_only = len(around) == 1 and "cls_token" not in names  # a decoder's
    if len(around) < 2 and not ends_only:
        ends = [names.get(role) for role in ("cls_token", "sep_token")]
        ids = [None if name is None else tokenizer.token_to_id(name) for name in ends]
        if None in ids:
            raise ValueError(
                "it puts nothing around a text, and names no cls_token (bos_token) and sep_token (eos_token): it is "
                "none of an encoder; choose one that was trained on masked words, as google-bert/bert-base-uncased"
            )
        begin, end = ends
        known = list(zip(ends, ids, strict=True))
        tokenizer.post_processor = TemplateProcessing(
            single=f"{begin} $A {end}", pair=f"{begin} $A {end} $B {end}", special_tokens=known
        )
    mask = names.get("mask_token")
    if mask is None or mask in _MASKS or tokenizer.token_to_id(mask) is None:
        return tokenizer
    values = json.loads(tokenizer.to_str())
    for token in values["added_tokens"]:
        token["content"] = _MASKS[0] if token["content"] == mask else token["content"]
    model = values["model"]["vocab"]
    if isinstance(model, dict):
        values["model"]["vocab"] = {_MASKS[0] if piece == mask else piece: number for piece, number in model.items()}
    else:
        values["model"]["vocab"] = [[_MASKS[0] if piece == mask else piece, score] for piece, score in model]
    return open_tokenizer(json.dumps(values))


def read_encoder_vocabulary(folder: Path) -> tuple[list[str], Casing]:
    """The pieces of an encoder's folder in the order of their ids, and its casing.

    ``tokenizer_config.json`` decides on the casing, then the normaliser of ``tokenizer.json``, then the
    vocabulary itself: one with capitals is cased.  Raises ValueError for a tokenizer other than BERT's.
    """
    tokenizer = read_optional(folder / TOKENIZER, "tokenizer")
    if (folder / VOCABULARY).is_file():
        pieces = read_vocabulary(folder / VOCABULARY)
    else:
        pieces = _pieces(tokenizer, folder / TOKENIZER)
    normaliser = tokenizer.get("normalizer") or {}
    stated = read_optional(folder / TOKENIZER_CONFIG, "tokenizer configuration")
    lowercase = stated.get("do_lower_case", normaliser.get("lowercase", not _has_capitals(pieces)))
    accents = stated.get("strip_accents", normaliser.get("strip_accents"))
    for key, value in (("do_lower_case", lowercase), ("strip_accents", accents)):
        if not isinstance(value, bool) and not (value is None and key == "strip_accents"):
            raise ValueError(f"{folder}: its tokenizer's {key} is {value!r}; true or false is wanted")
    return pieces, Casing(lowercase=lowercase, strip_accents=lowercase if accents is None else accents)


def _pieces(tokenizer: dict[str, Any], path: Path) -> list[str]:
    model = tokenizer.get("model") or {}
    ids = model.get("vocab")
    # a WordPiece model of old files states no type
    if model.get("type", "WordPiece") != "WordPiece" or not isinstance(ids, dict):
        raise ValueError(
            f"{path}: its model is {model.get('type')!r}; only BERT's WordPiece can be used: choose a BERT encoder"
        )
    if sorted(ids.values()) != list(range(len(ids))):
        raise ValueError(f"{path}: the ids of its vocabulary are not 0 to {len(ids) - 1}; bring {VOCABULARY} beside it")
    return sorted(ids, key=ids.__getitem__)


def _has_capitals(pieces: list[str]) -> bool:
    return any(piece != piece.lower() for piece in pieces if not (piece.startswith("[") and piece.endswith("]")))
