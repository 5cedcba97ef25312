"""The special wordpieces of a tokenizer, by what they are for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

_NAMES = {  # of a role, where the tokenizer does not say which token has it
    "begin": ("[CLS]", "<s>"),
    "separator": ("[SEP]", "</s>"),
    "mask": ("[MASK]", "<mask>"),
    "unknown": ("[UNK]", "<unk>"),
    "padding": ("[PAD]", "<pad>"),
}
_TOLD = "told-"  # begins the names of what a tokenizer puts before queries and documents


@dataclass(frozen=True)
class SpecialTokens:
    """The ids of one vocabulary's special wordpieces, by what they are for; a model that only retrieves needs no mask.

    ``cls`` begins a sequence, but for that of some decoders; ``sep`` ends it and each of its parts. ``query`` and
    ``document`` are the wordpieces of what the retriever is told before either ("query: "), which are not special
    themselves.
    """

    cls: int | None
    sep: int
    mask_if_any: int | None
    unknown: int
    padding: int
    query: tuple[int, ...] = ()
    document: tuple[int, ...] = ()

    @property
    def mask(self) -> int:
        """What stands for a hidden wordpiece; ValueError where the vocabulary has none."""
        return _known(self.mask_if_any, "mask")

    @property
    def begin(self) -> list[int]:
        """The wordpieces that begin a sequence: one or none."""
        return [] if self.cls is None else [self.cls]

    @property
    def ids(self) -> list[int]:
        """All of them."""
        mask = [] if self.mask_if_any is None else [self.mask_if_any]
        return [*self.begin, self.sep, *mask, self.unknown, self.padding]

    @staticmethod
    def of(tokenizer: Tokenizer) -> SpecialTokens:
        """As the tokenizer says: what it puts around a text and a pair, what is unknown to it, what it pads with.

        Where it does not say, and for the mask, usual names are looked up. ValueError names the first that is missing.
        A tokenizer that only ends a text, as a decoder's, needs no more than that wordpiece.
        """
        nothing = (tokenizer.encode(""), tokenizer.encode("", ""))
        around, pair = ([t for t, there in zip(e.ids, e.attention_mask, strict=True) if there] for e in nothing)
        ends_only = len(around) == 1 or f'[SpecialToken(id="{_TOLD}' in str(tokenizer.post_processor)
        said: dict[str, int | None] = {}
        if unknown := getattr(tokenizer.model, "unk_token", None):
            said["unknown"] = tokenizer.token_to_id(unknown)
        if ends_only:
            said["separator"] = around[-1]
        elif around:
            said |= {"begin": around[0], "separator": around[-1]}
        if tokenizer.padding is not None:
            said["padding"] = tokenizer.padding["pad_id"]
        for role, names in _NAMES.items():
            if said.get(role) is None:
                # MPNet's vocabulary has all of BERT's in it, and special tokens of its own
                angular = (tokenizer.id_to_token(said.get("begin") or 0) or "").startswith("<")
                ids = (tokenizer.token_to_id(name) for name in (reversed(names) if angular else names))
                said[role] = next((found for found in ids if found is not None), around[-1] if ends_only else None)
        if ends_only:
            said |= {"begin": None, "mask": None}
        begin = None if ends_only else _known(said["begin"], "begin")
        end, unknown_id, padding = (_known(said[role], role) for role in ("separator", "unknown", "padding"))
        told = [ids[0 if ends_only else 1 : ids.index(end)] if end in ids else [] for ids in (around, pair)]
        return SpecialTokens(begin, end, said["mask"], unknown_id, padding, tuple(told[0]), tuple(told[1]))


def prompted(tokenizer: Tokenizer, query: str, document: str) -> Tokenizer:
    """The same with these words behind what begins a text, which is a query, and a pair, which is a document."""
    special, other = SpecialTokens.of(tokenizer), Tokenizer.from_str(tokenizer.to_str())
    told = [tuple(tokenizer.encode(text.rstrip(), add_special_tokens=False).ids) for text in (query, document)]
    other.post_processor = around(other, replace(special, query=told[0], document=told[1]))
    other.encode_special_tokens = True
    return other


def blank_before(tokenizer: Tokenizer, told: tuple[int, ...]) -> str:
    """What a text has in front behind these wordpieces: a blank, where it is a part of the text's first."""
    return " " if told and "ByteLevel(add_prefix_space=False" in str(tokenizer.pre_tokenizer) else ""


def around(tokenizer: Tokenizer, special: SpecialTokens, of_text: int = 0) -> TemplateProcessing:
    """What makes ``join_query`` of a text and ``join_document`` of a pair; ``of_text`` is the segment of its second."""
    end: Any = tokenizer.id_to_token(special.sep)
    first: list[Any] = [tokenizer.id_to_token(number) for number in special.begin]
    known: list[Any] = [*zip(first, special.begin, strict=True), (end, special.sep)]
    told = {f"{_TOLD}query": special.query, f"{_TOLD}document": special.document}
    known += [
        {"id": name, "ids": list(ids), "tokens": [tokenizer.id_to_token(i) for i in ids]}
        for name, ids in told.items()
        if ids
    ]
    query, document = (" ".join([*first, name] if ids else first) for name, ids in told.items())
    return TemplateProcessing(
        single=f"{query} $A {end}".strip(),
        pair=f"{document} $A {end} $B:{of_text} {end}:{of_text}".strip(),
        special_tokens=known,
    )


def _known(found: int | None, role: str) -> int:
    if found is None:
        names = " or ".join(_NAMES[role])
        raise ValueError(
            f"the vocabulary has no wordpiece {names}; use the vocabulary of a BERT encoder, or another that has one"
        )
    return found
