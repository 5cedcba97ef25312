"""The tokenizer of a pre-trained encoder: BERT's WordPiece from vocabulary and casing, any other from its JSON."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from realmops.corpus.special_tokens import add_prompts
from realmops.corpus.vocabulary import UNCASED, Casing, build_tokenizer, list_pieces, open_tokenizer, read_vocabulary
from realmops.hub import (
    SPECIAL_TOKENS_MAP,
    TOKENIZER,
    TOKENIZER_CONFIG,
    VOCABULARY,
    is_bert,
    read_optional_json,
    sentence_prompts,
)

_ROLES = {
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
}
_MASKS = ("[MASK]", "<mask>")  # the names that ``SpecialTokens.of`` recognizes


def read_encoder_tokenizer(folder: Path) -> tuple[list[str], Casing, str | None]:
    """Read pieces, casing, and the JSON with prompts: None for BERT's WordPiece and special tokens without prompts."""
    stated = read_optional_json(folder / TOKENIZER)
    names = _special_names(folder)
    kind = (stated.get("model") or {}).get("type", "WordPiece")  # old files state no type
    splits = (stated.get("pre_tokenizer") or {}).get("type", "BertPreTokenizer")
    if "cls" in (post := stated.get("post_processor") or {}):
        names.setdefault("cls_token", post["cls"][0])
    has_bert_tokens = all(names.get(role, name) == name for role, name in _ROLES.items())
    prompts = sentence_prompts(folder)
    if has_bert_tokens and (kind, splits) == ("WordPiece", "BertPreTokenizer"):
        pieces, casing = read_encoder_vocabulary(folder)
        return pieces, casing, add_prompts(build_tokenizer(pieces, casing), *prompts).to_str() if any(prompts) else None
    if not stated:
        raise ValueError(
            f"{folder}: its special tokens are not BERT's ({', '.join(sorted(set(names.values())))}), and {TOKENIZER} "
            f"is missing: write it with transformers, AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    try:
        tokenizer = open_tokenizer((folder / TOKENIZER).read_text(encoding="utf-8"))
        tokenizer = _normalize_special_tokens(tokenizer, names)
        tokenizer = add_prompts(tokenizer, *prompts) if any(prompts) else tokenizer
    except ValueError as error:
        raise ValueError(f"{folder / TOKENIZER}: {error}") from None
    except Exception as error:  # tokenizers raises plain Exception
        raise ValueError(f"{folder / TOKENIZER} is no tokenizer ({str(error)[:200]}); fetch it again") from None
    return list_pieces(tokenizer), UNCASED, tokenizer.to_str()


def _special_names(folder: Path) -> dict[str, str]:
    """Return the special tokens of a folder by role; ``bos`` and ``eos`` replace a missing ``cls`` and ``sep``."""
    stated = {} if is_bert(folder) else read_optional_json(folder / SPECIAL_TOKENS_MAP)
    stated |= read_optional_json(folder / TOKENIZER_CONFIG)
    items = ((role, value.get("content") if isinstance(value, dict) else value) for role, value in stated.items())
    named = {role: name for role, name in items if role.endswith("_token") and isinstance(name, str)}
    for role, other in (("cls_token", "bos_token"), ("sep_token", "eos_token")):
        if role not in named and other in named:
            named[role] = named[other]
    return {role: name for role, name in named.items() if role in _ROLES}


def _normalize_special_tokens(tokenizer: Tokenizer, names: dict[str, str]) -> Tokenizer:
    """Add a post-processor with cls and sep tokens if there is none, and rename other masks to ``[MASK]``."""
    special_ids = tokenizer.encode("").ids
    has_end_only = len(special_ids) == 1 and "cls_token" not in names  # a decoder's
    if len(special_ids) < 2 and not has_end_only:
        ends = [names.get(role) for role in ("cls_token", "sep_token")]
        ids = [None if name is None else tokenizer.token_to_id(name) for name in ends]
        if None in ids:
            raise ValueError(
                "it puts nothing around a text, and names no cls_token (bos_token) and sep_token (eos_token), so it is "
                "not an encoder's; choose a model trained on masked words, such as google-bert/bert-base-uncased"
            )
        begin, end = ends
        special_tokens = list(zip(ends, ids, strict=True))
        tokenizer.post_processor = TemplateProcessing(
            single=f"{begin} $A {end}", pair=f"{begin} $A {end} $B {end}", special_tokens=special_tokens
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
    """Read pieces and casing of a BERT encoder; its config decides on the casing, then normalizer, then capitals."""
    tokenizer = read_optional_json(folder / TOKENIZER)
    if (folder / VOCABULARY).is_file():
        pieces = read_vocabulary(folder / VOCABULARY)
    else:
        pieces = _wordpiece_vocabulary(tokenizer, folder / TOKENIZER)
    normalizer = tokenizer.get("normalizer") or {}
    stated = read_optional_json(folder / TOKENIZER_CONFIG)
    lowercase = stated.get("do_lower_case", normalizer.get("lowercase", not _has_capitals(pieces)))
    accents = stated.get("strip_accents", normalizer.get("strip_accents"))
    for key, value in (("do_lower_case", lowercase), ("strip_accents", accents)):
        if not isinstance(value, bool) and not (value is None and key == "strip_accents"):
            raise ValueError(f"{folder}: its tokenizer's {key} is {value!r}; expected true or false")
    return pieces, Casing(lowercase=lowercase, strip_accents=lowercase if accents is None else accents)


def _wordpiece_vocabulary(tokenizer: dict[str, Any], path: Path) -> list[str]:
    model = tokenizer.get("model") or {}
    ids = model.get("vocab")
    # old WordPiece files state no type
    if model.get("type", "WordPiece") != "WordPiece" or not isinstance(ids, dict):
        raise ValueError(
            f"{path}: its model is {model.get('type')!r}; only BERT's WordPiece can be used: choose a BERT encoder"
        )
    if sorted(ids.values()) != list(range(len(ids))):
        raise ValueError(f"{path}: the ids of its vocabulary are not 0 to {len(ids) - 1}; add {VOCABULARY}")
    return sorted(ids, key=ids.__getitem__)


def _has_capitals(pieces: list[str]) -> bool:
    return any(piece != piece.lower() for piece in pieces if not (piece.startswith("[") and piece.endswith("]")))
