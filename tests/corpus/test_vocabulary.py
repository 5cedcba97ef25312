import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE, Unigram, WordLevel, WordPiece

from realmops.corpus.vocabulary import (
    SPECIAL_TOKENS,
    bert_words,
    build_tokenizer,
    is_continuation,
    learn_pieces,
)
from realmops.corpus.word_counts import count_words
from realmops.readers.sources import list_sources

PLAIN = [*SPECIAL_TOKENS, "a", "##b", "cafe", "z", "##r", "##rich", "10", ".", "5", "[", "]", "mask", "東", "x"]


def corpus(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"title": "T", "text": text}) + "\n" for text in texts))
    return path


def test_the_most_frequent_pair_is_merged_first_and_ties_go_by_code_point() -> None:
    # b occurs 4 times: it becomes no piece and "bun" is not counted.
    # ##u ##g occurs 20 times; then h ##ug 15, ##u ##n and p ##u 12 ("#" comes before "p"), p ##un 12,
    # hug ##s and p ##ug 5.
    words = {"hug": 10, "pug": 5, "pun": 12, "bun": 4, "hugs": 5}
    pieces = learn_pieces(words, size=30, min_count=5)
    alphabet = sorted(form for letter in "bghnpsu" if letter != "b" for form in (letter, f"##{letter}"))
    assert pieces == [*SPECIAL_TOKENS, *alphabet, "##ug", "hug", "##un", "pun", "hugs", "pug"]


def slow_pieces(words: dict[str, int], size: int, min_count: int) -> list[str]:
    """All pairs counted anew for each merge; every character kept."""
    split = {word: [word[0], *(f"##{letter}" for letter in word[1:])] for word in words}
    pieces = dict.fromkeys(sorted({form for letter in "".join(words) for form in (letter, f"##{letter}")}))
    while len(pieces) < size:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, parts in split.items():
            for pair in pairwise(parts):
                pairs[pair] += words[word]
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        if pairs[best] < min_count:
            break
        merged = best[0] + best[1][2:]
        pieces[merged] = None
        for word, parts in split.items():
            joined, rest = [], list(parts)
            while rest:
                if tuple(rest[:2]) == best:
                    joined.append(merged)
                    rest = rest[2:]
                else:
                    joined.append(rest.pop(0))
            split[word] = joined
    return list(pieces)


@pytest.mark.parametrize("seed", range(8))
def test_incremental_counts_equal_a_full_count(seed: int) -> None:
    generator = np.random.default_rng(seed)
    letters = "abc"
    words = {
        "".join(letters[i] for i in generator.integers(0, 3, generator.integers(1, 12))): int(count)
        for count in generator.integers(1, 9, 60)
    }
    fast = learn_pieces(words, size=150, min_count=1)
    assert fast[len(SPECIAL_TOKENS) :] == slow_pieces(words, 150 - len(SPECIAL_TOKENS), 1)


def test_words_are_those_of_bert() -> None:
    assert bert_words({"Café-Bar,": 2, "x" * 101: 1, "y" * 100: 1, "東京": 1}) == {
        "y" * 100: 1,
        "cafe": 2, "-": 2, "bar": 2, ",": 2, "東": 1, "京": 1,
    }  # fmt: skip


def test_forgetting_keeps_the_frequent_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = corpus(tmp_path / "corpus.jsonl", *(f"common rare{i}" for i in range(50)))
    assert len(count_words(list_sources(path, "auto"))) == 52  # T, common, 50 rare ones
    monkeypatch.setattr("realmops.corpus.word_counts._DISTINCT_LIMIT", 10)
    counts = count_words(list_sources(path, "auto"))
    assert len(counts) <= 10
    assert counts["common"] == 50


def test_a_small_vocabulary_leaves_half_of_its_room_to_pieces() -> None:
    words = {chr(0x4E00 + i): 5 for i in range(100)} | {"aa": 50, "aab": 40, "ab": 30}
    pieces = learn_pieces(words, size=25)
    assert len(pieces) <= 25
    assert {"a", "##a", "b", "##b", "aa"} <= set(pieces)
    assert (
        len([piece for piece in pieces if piece >= "一"]) == 6
    )  # 10 places for characters, 4 of them taken by a and b


def test_offsets_are_characters_of_the_original_text() -> None:
    text = "CAFÉ Zürich 10.5 東x"
    tokenizer = build_tokenizer([*PLAIN, "zu"])
    encoding = tokenizer.encode(text, add_special_tokens=False)
    assert encoding.tokens == ["cafe", "zu", "##rich", "10", ".", "5", "東", "x"]
    assert [text[a:b] for a, b in encoding.offsets] == ["CAFÉ", "Zü", "rich", "10", ".", "5", "東", "x"]


def test_special_tokens_are_known_by_name_but_not_found_in_text() -> None:
    tokenizer = build_tokenizer(PLAIN)
    assert tokenizer.token_to_id("[MASK]") == 4
    assert tokenizer.encode("[MASK] q").tokens == ["[", "mask", "]", "[UNK]"]


def test_bad_vocabularies_are_refused() -> None:
    with pytest.raises(ValueError, match="'a' twice"):
        build_tokenizer([*PLAIN, "a"])
    with pytest.raises(ValueError, match=r"lacks \[PAD\]"):
        build_tokenizer(PLAIN[1:])


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (WordPiece({"re": 0, "##ad": 1, "#": 2, "##": 3}, unk_token="#"), [False, True, False, True]),
        (
            WordPiece({"re": 0, "~ad": 1, "##ad": 2}, unk_token="re", continuing_subword_prefix="~"),
            [False, True, False],
        ),
        (
            BPE({"\u0120re": 0, "ad": 1, ",": 2, "<s>": 3, "\u0120": 4, "9": 5}, []),
            [False, True, False, False, False, True],
        ),
        (Unigram([("\u2581re", -1.0), ("ad", -1.0), (".", -1.0)], 0), [False, True, False]),
        (WordLevel({"read": 0, "ing": 1}, unk_token="read"), [False, False]),
    ],
)
def test_pieces_that_continue_a_word_follow_from_the_model(model: object, expected: list[bool]) -> None:
    assert is_continuation(Tokenizer(model)).tolist() == expected


def test_pieces_continue_the_words_that_the_tokenizer_cuts() -> None:
    """Every character is a piece: blanks, punctuation and each CJK character begin a word, and nothing else does."""
    text = "The U.S. isn't 5\u00b0, x\u00b2, re\u0301sume\u0301s, foo\u200bbar, \u6771\u4eac Tokyo12 (unread)"
    letters = sorted({letter for word in bert_words(Counter(text.split())) for letter in word})
    tokenizer = build_tokenizer([*SPECIAL_TOKENS, *letters, *(f"##{letter}" for letter in letters)])
    encoding = tokenizer.encode(text, add_special_tokens=False)
    assert "[UNK]" not in encoding.tokens
    begins = [place for place, (old, new) in enumerate(pairwise([None, *encoding.word_ids])) if old != new]
    assert np.flatnonzero(~is_continuation(tokenizer)[encoding.ids]).tolist() == begins
    assert len(begins) == 22
