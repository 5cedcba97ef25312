"""Wordpiece sequences as the encoders take them (paper, section 3.2: join_BERT).

All functions take and give one-dimensional int64 arrays of wordpiece ids without padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

_NAMES = {  # of a role, where the tokenizer does not say which token has it
    "begin": ("[CLS]", "<s>"),
    "separator": ("[SEP]", "</s>"),
    "mask": ("[MASK]", "<mask>"),
    "unknown": ("[UNK]", "<unk>"),
    "padding": ("[PAD]", "<pad>"),
}


@dataclass(frozen=True)
class SpecialTokens:
    """The ids of one vocabulary's special wordpieces, by what they are for; a model that only retrieves needs no mask.

    ``cls`` begins a sequence, ``sep`` ends it and each of its parts.
    """

    cls: int
    sep: int
    mask_if_any: int | None
    unknown: int
    padding: int

    @property
    def mask(self) -> int:
        """What stands for a hidden wordpiece; ValueError where the vocabulary has none."""
        return _known(self.mask_if_any, "mask")

    @property
    def ids(self) -> list[int]:
        """All of them."""
        mask = [] if self.mask_if_any is None else [self.mask_if_any]
        return [self.cls, self.sep, *mask, self.unknown, self.padding]

    @staticmethod
    def of(tokenizer: Tokenizer) -> SpecialTokens:
        """As the tokenizer says: what it puts around a text, what is unknown to it, what it pads with.

        Where it does not say, and for the mask, usual names are looked up. ValueError names the first that is missing.
        """
        nothing = tokenizer.encode("")
        around = [token for token, there in zip(nothing.ids, nothing.attention_mask, strict=True) if there]
        said: dict[str, int | None] = {}
        if unknown := getattr(tokenizer.model, "unk_token", None):
            said["unknown"] = tokenizer.token_to_id(unknown)
        if len(around) > 1:
            said |= {"begin": around[0], "separator": around[-1]}
        if tokenizer.padding is not None:
            said["padding"] = tokenizer.padding["pad_id"]
        for role, names in _NAMES.items():
            if said.get(role) is None:
                ids = (tokenizer.token_to_id(name) for name in names)
                said[role] = next((found for found in ids if found is not None), None)
        known = [_known(said[role], role) for role in ("begin", "separator", "unknown", "padding")]
        return SpecialTokens(known[0], known[1], said["mask"], *known[2:])


def _known(found: int | None, role: str) -> int:
    if found is None:
        names = " or ".join(_NAMES[role])
        raise ValueError(
            f"the vocabulary has no wordpiece {names}; use the vocabulary of a BERT encoder, or another that has one"
        )
    return found


def join_query(x: np.ndarray, special: SpecialTokens, limit: int) -> np.ndarray:
    """[CLS] x [SEP], x cut so that all of it has at most ``limit`` wordpieces."""
    return np.concatenate([[special.cls], x[: limit - 2], [special.sep]])


def join_document(
    title: np.ndarray, body: np.ndarray, special: SpecialTokens, limit: int
) -> tuple[np.ndarray, np.ndarray]:
    """[CLS] title [SEP] body [SEP] and its segments (0 title, 1 body); the body is cut, the title kept.

    The null document is the empty title with the empty body.
    """
    title = title[: limit - 3]
    body = body[: limit - 3 - len(title)]
    tokens = np.concatenate([[special.cls], title, [special.sep], body, [special.sep]])
    segments = np.zeros(len(tokens), dtype=np.int64)
    segments[len(title) + 2 :] = 1
    return tokens, segments


def join_reader(
    x: np.ndarray, body: np.ndarray, special: SpecialTokens, limit: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """[CLS] x [SEP] body [SEP], its segments (0 x, 1 body) and the row of the body's first wordpiece.

    ``x`` is kept, the body is cut; the title is left out, as in the release.
    """
    tokens, segments = join_document(x, body, special, limit)
    return tokens, segments, min(len(x), limit - 3) + 2
