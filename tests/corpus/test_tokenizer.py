"""The tokenizer with a memory gives what the tokenizer without one gives."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realmops.corpus.tokenizer import CachedTokenizer
from realmops.corpus.vocabulary import SPECIAL_TOKENS, build_tokenizer

EXAMPLES = int(os.environ.get("REALMOPS_FUZZ", "200"))
PLAIN = build_tokenizer(
    [
        *SPECIAL_TOKENS,
        *"abcdefghijklmnopqrstuvwxyz0123456789.,'-!",
        *(f"##{c}" for c in "abcdefghij012"),
        "the",
        "##ing",
        "東",
        "が",
        "か",
    ]
)
# what normalisers and pre-tokenisers treat apart: accents of every order, blanks of every kind, controls, scripts
# written without blanks, letters that grow in lower case or when they are taken apart, punctuation
ODD = (
    "\u0301\u0323\u0327\u302e\u20dd\u3099 \t\n\r\x0b\x0c\x1c\x85\xa0\u2028\u3000\x00\x7f\xad\u200b\u200d\ufeff\ufffd"
    "東京がかｶﾞ한각ẞßİıŉǰΐﬁéÅÅ!.,'-_^`~$+<|–“”…·।𝐀😀\U000e0100\U0001d165"
)
TEXT = st.text(st.one_of(st.sampled_from(ODD), st.sampled_from("abcTHEing 0.'-"), st.characters(codec="utf-8")))


def check(cached: CachedTokenizer, texts: list[str]) -> None:
    found = cached.encode(texts)
    wanted = PLAIN.encode_batch(texts, add_special_tokens=False)
    base = 0
    ids, chars = [], []
    for text, encoding in zip(texts, wanted, strict=True):
        ids += encoding.ids
        chars += [[start + base, end + base] for start, end in encoding.offsets]
        base += len(text) + 1
    assert found.ids.tolist() == ids
    assert found.chars.tolist() == chars
    assert found.by_text() == [encoding.ids for encoding in wanted]


@given(st.lists(st.lists(TEXT, max_size=6), max_size=3))
@settings(max_examples=EXAMPLES, deadline=None)
def test_wordpieces_are_those_of_the_tokenizer(batches: list[list[str]]) -> None:
    cached = CachedTokenizer(PLAIN)
    for texts in batches:
        check(cached, texts)


@pytest.mark.parametrize("character", ODD)
def test_odd_characters_at_every_border(character: str) -> None:
    texts = [f"{a}{character}{b}" for a in ("", "a", " ", ".", "\u0323", "東") for b in ("", "b", " ", ",", "\u0301")]
    check(CachedTokenizer(PLAIN), texts)


def test_forgetting_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realmops.corpus.tokenizer._CACHE_CHUNKS", 3)
    cached = CachedTokenizer(PLAIN)
    for texts in (["the thing", "a b c d"], ["b c"], ["e"], ["the"], ["a" * 101 + " b"]):
        check(cached, texts)
