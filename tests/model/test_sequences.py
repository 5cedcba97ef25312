"""Input sequences of queries, documents and readers, and the special tokens that they are built of."""

import numpy as np
import pytest
from small_world import World
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.processors import BertProcessing, RobertaProcessing

from realmops.model.sequences import SpecialTokens, join_document, join_query, join_reader

CLS, SEP = 101, 102
SPECIAL = SpecialTokens(cls=CLS, sep=SEP, mask_if_any=103, unknown=100, padding=0)


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def tokenizer_of(pieces: str, unknown: str = "[UNK]") -> Tokenizer:
    return Tokenizer(WordPiece({piece: i for i, piece in enumerate(pieces.split())}, unk_token=unknown))


def test_special_tokens_are_found_by_name(world: World) -> None:
    special = SpecialTokens.of(tokenizer_of("[MASK] a [SEP] [PAD] [CLS] [UNK]"))
    assert special == SpecialTokens(cls=4, sep=2, mask_if_any=0, unknown=5, padding=3)
    assert world.words(np.array([world.special.cls, world.special.mask])) == "[CLS] [MASK]"


def test_the_tokenizers_processor_overrides_names() -> None:
    tokenizer = tokenizer_of("[CLS] [SEP] [MASK] [UNK] [PAD] begin end what nothing", "what")
    tokenizer.post_processor = BertProcessing(("end", 6), ("begin", 5))
    tokenizer.enable_padding(pad_id=8, pad_token="nothing")
    assert SpecialTokens.of(tokenizer) == SpecialTokens(cls=5, sep=6, mask_if_any=2, unknown=7, padding=8)
    tokenizer = tokenizer_of("<pad> a </s> <mask> <s> <unk>", "<unk>")
    by_name = SpecialTokens.of(tokenizer)
    tokenizer.post_processor = RobertaProcessing(("</s>", 2), ("<s>", 4))
    tokenizer.enable_padding(pad_id=0, pad_token="<pad>", length=8)
    assert SpecialTokens.of(tokenizer) == by_name == SpecialTokens(cls=4, sep=2, mask_if_any=3, unknown=5, padding=0)


def test_a_vocabulary_without_separator_or_mask_is_refused() -> None:
    special = SpecialTokens.of(tokenizer_of("[PAD] [UNK] [CLS] [SEP]"))
    assert special.ids == [2, 3, 1, 0], "enough for a retriever"
    with pytest.raises(ValueError, match=r"no wordpiece \[MASK\] or <mask>; use the vocabulary of a BERT encoder"):
        _ = special.mask
    with pytest.raises(ValueError, match=r"no wordpiece \[SEP\] or </s>"):
        SpecialTokens.of(tokenizer_of("[PAD] [UNK] [CLS] [MASK]"))


@pytest.mark.parametrize(
    ("limit", "expected"), [(6, [CLS, 1, 2, 3, SEP]), (5, [CLS, 1, 2, 3, SEP]), (4, [CLS, 1, 2, SEP])]
)
def test_a_query_is_truncated(limit: int, expected: list[int]) -> None:
    assert join_query(ids(1, 2, 3), SPECIAL, limit).tolist() == expected


@pytest.mark.parametrize(
    ("title", "body", "limit", "tokens", "segments"),
    [
        (ids(1, 2), ids(5, 6, 7), 8, [CLS, 1, 2, SEP, 5, 6, 7, SEP], [0, 0, 0, 0, 1, 1, 1, 1]),
        (ids(1, 2), ids(5, 6, 7), 6, [CLS, 1, 2, SEP, 5, SEP], [0, 0, 0, 0, 1, 1]),
        (ids(1, 2, 3, 4), ids(5), 6, [CLS, 1, 2, 3, SEP, SEP], [0, 0, 0, 0, 0, 1]),
        (ids(), ids(5), 9, [CLS, SEP, 5, SEP], [0, 0, 1, 1]),
        (ids(), ids(), 9, [CLS, SEP, SEP], [0, 0, 1]),
    ],
    ids=["fits", "body cut", "title longer than the limit", "no title", "null document"],
)
def test_a_document_is_title_and_body(
    title: np.ndarray, body: np.ndarray, limit: int, tokens: list[int], segments: list[int]
) -> None:
    joined = join_document(title, body, SPECIAL, limit)
    assert [part.tolist() for part in joined] == [tokens, segments]
    assert [part.dtype for part in joined] == [np.int64, np.int64]


@pytest.mark.parametrize(
    ("x", "body", "limit", "tokens", "segments", "first"),
    [
        (ids(1, 2), ids(5, 6), 9, [CLS, 1, 2, SEP, 5, 6, SEP], [0, 0, 0, 0, 1, 1, 1], 4),
        (ids(1, 2), ids(5, 6), 6, [CLS, 1, 2, SEP, 5, SEP], [0, 0, 0, 0, 1, 1], 4),
        (ids(1, 2), ids(), 9, [CLS, 1, 2, SEP, SEP], [0, 0, 0, 0, 1], 4),
        (ids(1, 2, 3, 4), ids(5), 6, [CLS, 1, 2, 3, SEP, SEP], [0, 0, 0, 0, 0, 1], 5),
    ],
    ids=["fits", "body cut", "null document", "x longer than the limit"],
)
def test_a_reader_gets_x_and_body(
    x: np.ndarray, body: np.ndarray, limit: int, tokens: list[int], segments: list[int], first: int
) -> None:
    joined = join_reader(x, body, SPECIAL, limit)
    assert (joined[0].tolist(), joined[1].tolist(), joined[2]) == (tokens, segments, first)
