"""The vocabulary of a pre-trained encoder, and what its tokenizer does to capitals and accents."""

from pathlib import Path
from typing import Any

from realmops.corpus.vocabulary import Casing, read_vocabulary
from realmops.encoders.folders import TOKENIZER, TOKENIZER_CONFIG, VOCABULARY, read_optional


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
