from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from realmops.corpus.formats import sources
from realmops.corpus.vocabulary import (
    SPECIAL_TOKENS,
    bert_words,
    build_tokenizer,
    count_words,
    learn_pieces,
    read_vocabulary,
    train_vocabulary,
    vocabulary_bytes,
    vocabulary_hash,
)

PLAIN = [
    *SPECIAL_TOKENS,
    "a",
    "##b",
    "cafe",
    "z",
    "##r",
    "##rich",
    "10",
    ".",
    "5",
    "[",
    "]",
    "mask",
    "東",
    "x",
]


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


def test_equal_counts_are_ordered_by_the_pieces_alone() -> None:
    forward = learn_pieces({"ab": 3, "cd": 3, "ef": 3}, size=100)
    backward = learn_pieces({"ef": 3, "cd": 3, "ab": 3}, size=100)
    assert forward == backward
    assert forward[-3:] == ["ab", "cd", "ef"]


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
def test_incremental_counts_equal_counting_anew(seed: int) -> None:
    generator = np.random.default_rng(seed)
    letters = "abc"
    words = {
        "".join(letters[i] for i in generator.integers(0, 3, generator.integers(1, 12))): int(count)
        for count in generator.integers(1, 9, 60)
    }
    fast = learn_pieces(words, size=150, min_count=1)
    assert fast[len(SPECIAL_TOKENS) :] == slow_pieces(words, 150 - len(SPECIAL_TOKENS), 1)


def test_the_vocabulary_is_the_same_in_another_process_with_another_hash_seed(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    texts = ["".join(chr(97 + i) for i in generator.integers(0, 26, 6)) for _ in range(400)]
    path = corpus(tmp_path / "corpus.jsonl", *(" ".join(texts[i : i + 8]) for i in range(0, 400, 4)))
    here = vocabulary_hash(train_vocabulary(sources(path, "auto"), size=300))
    script = (
        "import sys; from pathlib import Path; from realmops.corpus import vocabulary as v;"
        "from realmops.corpus.formats import sources; found = sources(Path(sys.argv[1]), 'auto');"
        "print(v.vocabulary_hash(v.train_vocabulary(found, size=300)))"
    )
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", script, str(path)]
        there = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert there.stdout.strip() == here


def test_words_are_those_of_bert() -> None:
    assert bert_words({"Café-Bar,": 2, "x" * 101: 1, "東京": 1}) == {
        "cafe": 2, "-": 2, "bar": 2, ",": 2, "東": 1, "京": 1,
    }  # fmt: skip


def test_forgetting_keeps_the_frequent_words(tmp_path: Path) -> None:
    path = corpus(tmp_path / "corpus.jsonl", *(f"common rare{i}" for i in range(50)))
    assert len(count_words(sources(path, "auto"), distinct_limit=1000)) == 52  # T, common, 50 rare ones
    counts = count_words(sources(path, "auto"), distinct_limit=10)
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


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="too small"):
        learn_pieces({"a": 1}, size=10)
    with pytest.raises(ValueError, match="min_count"):
        learn_pieces({"a": 1}, size=100, min_count=0)


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


def test_bad_vocabularies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'a' twice"):
        build_tokenizer([*PLAIN, "a"])
    with pytest.raises(ValueError, match=r"lacks \[PAD\]"):
        build_tokenizer(PLAIN[1:])
    path = tmp_path / "vocab.txt"
    path.write_bytes(b"a\n\xff\n")
    with pytest.raises(ValueError, match=r"vocab\.txt: invalid UTF-8 at byte 2"):
        read_vocabulary(path)


def test_a_vocabulary_survives_its_file(tmp_path: Path) -> None:
    pieces = [*PLAIN, "\x85", "\u2028"]
    path = tmp_path / "vocab.txt"
    path.write_bytes(vocabulary_bytes(pieces))
    assert read_vocabulary(path) == pieces
