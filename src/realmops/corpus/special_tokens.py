"""Special tokens of a tokenizer by role, and prompts before queries and documents."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

_NAMES = {  # usual names by role, for tokenizers that do not state the token of a role
    "begin": ("[CLS]", "<s>"),
    "separator": ("[SEP]", "</s>"),
    "mask": ("[MASK]", "<mask>"),
    "unknown": ("[UNK]", "<unk>"),
    "padding": ("[PAD]", "<pad>"),
}
_PROMPT = "told-"  # prefix of the names of prompts in a tokenizer's JSON


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of a vocabulary's special tokens by role."""

    cls: int | None  # begins a sequence; None for some decoders
    sep: int  # ends a sequence and each of its parts
    mask_if_any: int | None  # the mask; None for a model that can only retrieve
    unknown: int  # the unknown token
    padding: int  # the padding token
    query: tuple[int, ...] = ()  # wordpieces of the prompt before a query ("query: "), which are not special themselves
    document: tuple[int, ...] = ()  # wordpieces of the prompt before a document

    @property
    def mask(self) -> int:
        return _require(self.mask_if_any, "mask")

    @property
    def begin(self) -> list[int]:
        return [] if self.cls is None else [self.cls]

    @property
    def ids(self) -> list[int]:
        mask = [] if self.mask_if_any is None else [self.mask_if_any]
        return [*self.begin, self.sep, *mask, self.unknown, self.padding]

    @staticmethod
    def of(tokenizer: Tokenizer) -> SpecialTokens:
        """Find the special tokens in the post-processor, model and padding, else by their usual names."""
        empty = (tokenizer.encode(""), tokenizer.encode("", ""))
        single, pair = ([t for t, is_token in zip(e.ids, e.attention_mask, strict=True) if is_token] for e in empty)
        has_end_only = len(single) == 1 or f'[SpecialToken(id="{_PROMPT}' in str(tokenizer.post_processor)
        id_of: dict[str, int | None] = {}
        if unknown := getattr(tokenizer.model, "unk_token", None):
            id_of["unknown"] = tokenizer.token_to_id(unknown)
        if has_end_only:
            id_of["separator"] = single[-1]
        elif single:
            id_of |= {"begin": single[0], "separator": single[-1]}
        if tokenizer.padding is not None:
            id_of["padding"] = tokenizer.padding["pad_id"]
        for role, names in _NAMES.items():
            if id_of.get(role) is None:
                # MPNet's vocabulary contains BERT's special tokens, but uses others
                is_angular = (tokenizer.id_to_token(id_of.get("begin") or 0) or "").startswith("<")
                ids = (tokenizer.token_to_id(name) for name in (reversed(names) if is_angular else names))
                fallback = single[-1] if has_end_only else None
                id_of[role] = next((token_id for token_id in ids if token_id is not None), fallback)
        if has_end_only:
            id_of |= {"begin": None, "mask": None}
        begin = None if has_end_only else _require(id_of["begin"], "begin")
        end, unknown_id, padding = (_require(id_of[role], role) for role in ("separator", "unknown", "padding"))
        start = 0 if has_end_only else 1
        query, document = (tuple(ids[start : ids.index(end)] if end in ids else ()) for ids in (single, pair))
        return SpecialTokens(begin, end, id_of["mask"], unknown_id, padding, query, document)


def add_prompts(tokenizer: Tokenizer, query: str, document: str) -> Tokenizer:
    """Return a copy whose post-processor adds a prompt: ``query`` to a single text, ``document`` to a pair."""
    special, copy = SpecialTokens.of(tokenizer), Tokenizer.from_str(tokenizer.to_str())
    query_ids, document_ids = (
        tuple(tokenizer.encode(prompt.rstrip(), add_special_tokens=False).ids) for prompt in (query, document)
    )
    copy.post_processor = build_post_processor(copy, replace(special, query=query_ids, document=document_ids))
    copy.encode_special_tokens = True
    return copy


def prompt_separator(tokenizer: Tokenizer, prompt: tuple[int, ...]) -> str:
    """Return what to put before a text that follows a prompt: a blank if the vocabulary joins it to the first word."""
    return " " if prompt and "ByteLevel(add_prefix_space=False" in str(tokenizer.pre_tokenizer) else ""


def build_post_processor(tokenizer: Tokenizer, special: SpecialTokens, second_segment: int = 0) -> TemplateProcessing:
    """Build the post-processor that gives ``join_query`` of a single text and ``join_document`` of a pair."""
    end: Any = tokenizer.id_to_token(special.sep)
    begin: list[Any] = [tokenizer.id_to_token(token_id) for token_id in special.begin]
    special_tokens: list[Any] = [*zip(begin, special.begin, strict=True), (end, special.sep)]
    prompts = {f"{_PROMPT}query": special.query, f"{_PROMPT}document": special.document}
    special_tokens += [
        {"id": name, "ids": list(ids), "tokens": [tokenizer.id_to_token(i) for i in ids]}
        for name, ids in prompts.items()
        if ids
    ]
    query, document = (" ".join([*begin, name] if ids else begin) for name, ids in prompts.items())
    return TemplateProcessing(
        single=f"{query} $A {end}".strip(),
        pair=f"{document} $A {end} $B:{second_segment} {end}:{second_segment}".strip(),
        special_tokens=special_tokens,
    )


def _require(token_id: int | None, role: str) -> int:
    if token_id is None:
        names = " or ".join(_NAMES[role])
        raise ValueError(
            f"the vocabulary has no wordpiece {names}; use the vocabulary of a BERT encoder, or another that has one"
        )
    return token_id
