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


@dataclass(frozen=True)
class SpecialTokens:
    """The ids of one vocabulary's special wordpieces, by what they are for; a model that only retrieves needs no mask.

    ``cls`` begins a sequence, ``sep`` ends it and each of its parts. ``query`` and ``document`` are the wordpieces of
    what the retriever is told before either ("query: "), which are not special themselves.
    """

    cls: int
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
    def ids(self) -> list[int]:
        """All of them."""
        mask = [] if self.mask_if_any is None else [self.mask_if_any]
        return [self.cls, self.sep, *mask, self.unknown, self.padding]

    @staticmethod
    def of(tokenizer: Tokenizer) -> SpecialTokens:
        """As the tokenizer says: what it puts around a text and a pair, what is unknown to it, what it pads with.

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
                # MPNet's vocabulary has all of BERT's in it, and special tokens of its own
                angular = (tokenizer.id_to_token(said.get("begin") or 0) or "").startswith("<")
                ids = (tokenizer.token_to_id(name) for name in (reversed(names) if angular else names))
                said[role] = next((found for found in ids if found is not None), None)
        roles = ("begin", "separator", "unknown", "padding")
        begin, end, unknown_id, padding = (_known(said[role], role) for role in roles)
        query, document = _prompts(tokenizer, begin, end)
        return SpecialTokens(begin, end, said["mask"], unknown_id, padding, query, document)


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
    begin, end = (tokenizer.id_to_token(number) for number in (special.cls, special.sep))
    known: list[Any] = [(begin, special.cls), (end, special.sep)]
    told = {"told-query": special.query, "told-document": special.document}
    known += [
        {"id": name, "ids": list(ids), "tokens": [tokenizer.id_to_token(i) for i in ids]}
        for name, ids in told.items()
        if ids
    ]
    query, document = (f"{name} " if ids else "" for name, ids in told.items())
    return TemplateProcessing(
        single=f"{begin} {query}$A {end}",
        pair=f"{begin} {document}$A {end} $B:{of_text} {end}:{of_text}",
        special_tokens=known,
    )


def _prompts(tokenizer: Tokenizer, begin: int, end: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the tokenizer puts behind the beginning of a text, and of a pair."""
    found = []
    for encoding in (tokenizer.encode(""), tokenizer.encode("", "")):
        ids = [token for token, there in zip(encoding.ids, encoding.attention_mask, strict=True) if there]
        first = ids.index(end) if end in ids else 0
        found.append(tuple(ids[1:first]) if ids[:1] == [begin] else ())
    return found[0], found[1]


def _known(found: int | None, role: str) -> int:
    if found is None:
        names = " or ".join(_NAMES[role])
        raise ValueError(
            f"the vocabulary has no wordpiece {names}; use the vocabulary of a BERT encoder, or another that has one"
        )
    return found
