import numpy as np
import pytest
from small_world import World
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.processors import BertProcessing, RobertaProcessing

from realmops.model.sequences import SpecialTokens, join_document, join_query, join_reader

CLS, SEP = 101, 102
SPECIAL = SpecialTokens(cls=CLS, sep=SEP, mask_if_any=103, unknown=100, padding=0)
NOTHING = np.zeros(0, dtype=np.int64)


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def test_special_tokens_are_looked_up_by_name(world: World) -> None:
    pieces = ["[MASK]", "a", "[SEP]", "[PAD]", "[CLS]", "[UNK]"]
    tokenizer = Tokenizer(WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    assert SpecialTokens.of(tokenizer) == SpecialTokens(cls=4, sep=2, mask_if_any=0, unknown=5, padding=3)
    assert world.words(np.array([world.special.cls, world.special.mask])) == "[CLS] [MASK]"


def test_special_tokens_of_another_family_are_told_by_what_they_do() -> None:
    """The tokenizer puts <s> </s> around a text and pads with <pad>; the names say what the mask is."""
    pieces = ["<pad>", "a", "</s>", "<mask>", "<s>", "<unk>"]
    tokenizer = Tokenizer(WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    by_name = SpecialTokens.of(tokenizer)
    tokenizer.post_processor = RobertaProcessing(("</s>", 2), ("<s>", 4))
    tokenizer.enable_padding(pad_id=0, pad_token="<pad>", length=8)
    assert SpecialTokens.of(tokenizer) == by_name == SpecialTokens(cls=4, sep=2, mask_if_any=3, unknown=5, padding=0)
    assert by_name.ids == [4, 2, 3, 5, 0]


def test_a_tokenizer_is_believed_before_names() -> None:
    pieces = ["[CLS]", "[SEP]", "[MASK]", "[UNK]", "[PAD]", "begin", "end", "what", "nothing"]
    tokenizer = Tokenizer(WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="what"))
    tokenizer.post_processor = BertProcessing(("end", 6), ("begin", 5))
    tokenizer.enable_padding(pad_id=8, pad_token="nothing")
    assert SpecialTokens.of(tokenizer) == SpecialTokens(cls=5, sep=6, mask_if_any=2, unknown=7, padding=8)


def test_a_mask_is_missed_when_it_is_asked_for() -> None:
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer = Tokenizer(WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    special = SpecialTokens.of(tokenizer)
    assert special.ids == [2, 3, 1, 0], "enough for a retriever"
    with pytest.raises(ValueError, match=r"no wordpiece \[MASK\] or <mask>; use the vocabulary of a BERT encoder"):
        _ = special.mask


def test_a_vocabulary_without_separator_is_refused() -> None:
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[MASK]"]
    tokenizer = Tokenizer(WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    with pytest.raises(ValueError, match=r"no wordpiece \[SEP\] or </s>"):
        SpecialTokens.of(tokenizer)


@pytest.mark.parametrize(
    ("limit", "expected"), [(6, [CLS, 1, 2, 3, SEP]), (5, [CLS, 1, 2, 3, SEP]), (4, [CLS, 1, 2, SEP])]
)
def test_query(limit: int, expected: list[int]) -> None:
    assert join_query(ids(1, 2, 3), SPECIAL, limit).tolist() == expected


@pytest.mark.parametrize(
    ("title", "body", "limit", "tokens", "segments"),
    [
        (ids(1, 2), ids(5, 6, 7), 8, [CLS, 1, 2, SEP, 5, 6, 7, SEP], [0, 0, 0, 0, 1, 1, 1, 1]),
        (ids(1, 2), ids(5, 6, 7), 6, [CLS, 1, 2, SEP, 5, SEP], [0, 0, 0, 0, 1, 1]),
        (ids(1, 2, 3, 4), ids(5), 6, [CLS, 1, 2, 3, SEP, SEP], [0, 0, 0, 0, 0, 1]),
        (NOTHING, ids(5), 9, [CLS, SEP, 5, SEP], [0, 0, 1, 1]),
        (NOTHING, NOTHING, 9, [CLS, SEP, SEP], [0, 0, 1]),
    ],
    ids=["fits", "body cut", "title longer than the limit", "no title", "null document"],
)
def test_document(title: np.ndarray, body: np.ndarray, limit: int, tokens: list[int], segments: list[int]) -> None:
    found = join_document(title, body, SPECIAL, limit)
    assert (found[0].tolist(), found[1].tolist()) == (tokens, segments)


@pytest.mark.parametrize(
    ("x", "body", "limit", "tokens", "segments", "first"),
    [
        (ids(1, 2), ids(5, 6), 9, [CLS, 1, 2, SEP, 5, 6, SEP], [0, 0, 0, 0, 1, 1, 1], 4),
        (ids(1, 2), ids(5, 6), 6, [CLS, 1, 2, SEP, 5, SEP], [0, 0, 0, 0, 1, 1], 4),
        (ids(1, 2), NOTHING, 9, [CLS, 1, 2, SEP, SEP], [0, 0, 0, 0, 1], 4),
        (ids(1, 2, 3, 4), ids(5), 6, [CLS, 1, 2, 3, SEP, SEP], [0, 0, 0, 0, 0, 1], 5),
    ],
    ids=["fits", "body cut", "null document", "x longer than the limit"],
)
def test_reader(
    x: np.ndarray, body: np.ndarray, limit: int, tokens: list[int], segments: list[int], first: int
) -> None:
    found = join_reader(x, body, SPECIAL, limit)
    assert (found[0].tolist(), found[1].tolist(), found[2]) == (tokens, segments, first)


def test_joins_are_int64() -> None:
    """Packed sequences are concatenated: one float among them would make all of them floats."""
    for tokens in (
        join_query(NOTHING, SPECIAL, 9),
        join_document(NOTHING, NOTHING, SPECIAL, 9)[0],
        join_reader(NOTHING, NOTHING, SPECIAL, 9)[0],
    ):
        assert tokens.dtype == np.int64
