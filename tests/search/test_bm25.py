"""BM25: its postings by hand, its scores against those of bm25s, its search, its files."""

import shutil
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from four_passages import TEXTS
from hypothesis import assume, example, given
from hypothesis import strategies as st
from small_world import World, build_snapshot, write_texts

from realmops.corpus.snapshot_reader import Snapshot
from realmops.search import bm25, bm25_writer
from realmops.search.bm25 import Bm25, query_words, rank, titled_texts, words_with_offsets
from realmops.search.bm25_writer import write_bm25

QUERIES = ("Which ferry crosses lakes?", "Where was Anna Berg born?", "Jon Vik and Jon Vik in Bergen", "Zebra Oslo")


def indexed(folder: Path, texts: Sequence[str], block_wordpieces: int = 512) -> Bm25:
    """The index of passages that hold these texts."""
    snapshot = build_snapshot(folder, write_texts(folder / "documents.jsonl", texts), block_wordpieces)
    assert snapshot.column("text") == list(texts)
    write_bm25(folder / bm25.FOLDER, snapshot)
    return Bm25.of(snapshot)


class PeerBm25:
    """bm25s over the same texts."""

    def __init__(self, texts: Sequence[str]) -> None:
        import bm25s

        self.index = bm25s.BM25(backend="numpy")
        self.index.index(self.words(texts), show_progress=False)

    def words(self, texts: Sequence[str]) -> list[list[str]]:
        import bm25s
        import Stemmer

        stemmer = Stemmer.Stemmer("english")
        words = bm25s.tokenize(list(texts), stopwords="en", stemmer=stemmer, return_ids=False, show_progress=False)
        return [list(words_of_text) for words_of_text in words]

    def scores(self, query: str) -> np.ndarray:
        return self.index.get_scores(self.words([query])[0])


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Bm25:
    return indexed(tmp_path_factory.mktemp("four"), TEXTS)


@pytest.fixture(scope="module")
def zipf(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bm25, list[str]]:
    """Passages of frequent and rare words, some of them twice, and their texts."""
    rng = np.random.default_rng(0)
    share = 1 / np.arange(2, 202)
    texts = [
        " ".join(f"word{n}" for n in rng.choice(200, rng.integers(3, 30), p=share / share.sum())) for _ in range(300)
    ]
    return indexed(tmp_path_factory.mktemp("zipf"), [*texts, *texts[:40]]), [*texts, *texts[:40]]


def test_rankings_match_stems_and_are_padded(four: Bm25) -> None:
    ranking = rank(four, ["Which ferry crosses lakes?", "Where was Vell born?"], 6)
    assert ranking.shape == (2, 6)
    assert ranking[:, 0].tolist() == [2, 1]
    assert ranking[:, 4:].tolist() == [[-1, -1], [-1, -1]]
    assert sorted(ranking[0, :4].tolist()) == [0, 1, 2, 3]


def test_scores_equal_those_of_bm25s_bit_for_bit(world: World, zipf: tuple[Bm25, list[str]]) -> None:
    for index, texts in ((Bm25.of(world.snapshot), titled_texts(world.snapshot)), zipf):
        peer = PeerBm25(texts)
        for query in (*QUERIES, *texts[:20]):
            assert index.scores(query).tolist() == peer.scores(query).tolist(), query


@pytest.mark.parametrize("exhaustive", [0, 1 << 17])
@pytest.mark.parametrize("k", [1, 3, 10, 400])
def test_a_search_returns_the_best_scores_and_of_equal_ones_the_first(
    zipf: tuple[Bm25, list[str]], k: int, exhaustive: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bm25, "_EXHAUSTIVE", exhaustive)
    index, texts = zipf
    queries = [*texts[:60], "word0", "word0 word1 word0", "word199 word0 word1 word2", "zebra", "word150 zebra"]
    score_QK, id_QK = index.search(queries, k)
    assert (score_QK.shape, score_QK.dtype, id_QK.dtype) == ((len(queries), k), np.float32, np.int64)
    for query, score_K, id_K in zip(queries, score_QK, id_QK, strict=True):
        score_P = index.scores(query)
        best = np.argsort(-score_P, kind="stable")[:k]
        best = best[score_P[best] > 0]
        assert id_K.tolist() == [*best.tolist(), *[-1] * (k - len(best))]
        assert score_K.tolist() == [*score_P[best].tolist(), *[-np.inf] * (k - len(best))]


def test_maxscore_skips_postings_of_frequent_words_that_cannot_matter(
    zipf: tuple[Bm25, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    index, _ = zipf
    read: list[int] = []
    usual = index._weights

    def weights(word: int) -> Any:
        read.append(index._document_frequency(word))
        return usual(word)

    monkeypatch.setattr(index, "_weights", weights)
    monkeypatch.setattr(bm25, "_EXHAUSTIVE", 0)
    index.search(["word190 word180 word170 word0"], 2)
    assert read
    assert max(read) < index._document_frequency(index._parse_query("word0")[1][0])


def test_scores_of_given_passages_equal_those_of_all(zipf: tuple[Bm25, list[str]]) -> None:
    index, texts = zipf
    ids = np.array([7, -1, 0, 339, 7, 120, -1, 33])
    for query in (*texts[:20], "zebra", ""):
        expected = np.where(ids < 0, 0, index.scores(query)[ids])
        assert index.score_passages(query, ids).tolist() == expected.tolist()
        assert index.score_passages(query, ids[:0]).tolist() == []


def test_words_of_every_script_match(tmp_path: Path) -> None:
    texts = ["Große Straßen in Köln.", "Москва и Łódź, ΑΘΗΝΑ.", "東京 の 天気", "naïve café_2", "Istanbul"]
    index = indexed(tmp_path, texts)
    peer = PeerBm25([f" {text}" for text in texts])
    for query in ("GROSSE", "große köln", "москва", "αθηνα łódź", "東京", "NAÏVE", "café_2", "istanbul"):
        assert index.scores(query).tolist() == peer.scores(query).tolist(), query
    assert index.search(["МОСКВА", "天気"], 1)[1].tolist() == [[1], [2]]


SPELLINGS = {  # of one word, and its form in the index
    "dvořák": ("Dvořák", "Dvor\u030ca\u0301k", "DVOŘÁK"),
    "istanbul": ("İstanbul", "I\u0307stanbul", "i\u0307stanbul", "Istanbul", "İSTANBUL"),
    "finance": ("finance", "\ufb01nance", "fi\u00adnance", "\uff26\uff29\uff2e\uff21\uff2e\uff23\uff25"),
    "سلام": ("سلام", "\ufeb3\ufefc\ufee1"),
    "한국어": ("한국어", "\u1112\u1161\u11ab\u1100\u116e\u11a8\u110b\u1165"),
}


@pytest.mark.parametrize("word", SPELLINGS)
def test_unicode_forms_of_a_word_are_one_word(tmp_path: Path, word: str) -> None:
    index = indexed(tmp_path, [*SPELLINGS[word], "Anything else."])
    for query in SPELLINGS[word]:
        assert query_words(f"Who saw {query}?") == ["who", "saw", word]
        scores = index.scores(query).tolist()
        assert scores == [scores[0]] * len(SPELLINGS[word]) + [0.0]
        assert scores[0] > 0


@pytest.mark.parametrize(
    ("text", "queries"),
    [
        ("The clinic gives vitamin K.", ["vitamin K", "vitamin k"]),
        ("The clinic gives vitamin A.", ["vitamin A", "VITAMIN A"]),
        ("Written in C++ and C#, tested in .NET.", ["C++", "c++", "Ｃ＋＋", "C#", ".NET", "net"]),
        ("The IT department of the WHO.", ["IT", "Who leads the WHO?", "I.T."]),
        ("The US ferry.", ["US", "U.S.", "us"]),
        ("R&D of AT&T, A/B, 24/7.", ["R&D", "AT&T", "ATT", "A/B", "24/7"]),
        ("Release v3.10.2, clause 5.1.", ["3.10.2", "v3.10.2", "5.1"]),
        ("It cost 33,970 crowns.", ["33970", "33.970", "33 970", "３３，９７０"]),
        ("O\u2019Neill doesn't use Wi-Fi.", ["O'Neill", "Oneill", "Neill", "doesnt", "wifi", "wi\u2010fi"]),
        ("His e-mail is berg@tolm.org.", ["email", "e\u00admail", "berg@tolm.org"]),
        ("Flight F-16 of COVID-19 to 192.168.0.1.", ["F-16", "F\u201316", "F16", "COVID-19", "192.168.0.1"]),
    ],
)  # fmt: skip
def test_spellings_of_a_word_a_number_and_a_name_meet(tmp_path: Path, text: str, queries: list[str]) -> None:
    others = (
        "It is said by us: who has a C, vitamin C or D, 3.1.2, release 10, 5 or 1? As at the mail of 33 and 970, no."
    )
    index = indexed(tmp_path, [others, text])
    assert [rank(index, [query], 1)[0, 0] for query in queries] == [1] * len(queries)


PIECES = ["\u0307", "I", "i", "İ", "ı", "\u0301", "\u0323", "e", "é", "_", " ", "\n", "\u0958", "\u0344", "\u212b",
          "\u1112", "\u1161", "\u11ab", "か", "\u3099", "老", "9", "Σ", "\u05c1", "ש", "ी", "ก", "้", "-",
          "\ufb01", "\u00ad", "\ufefc", "½"]  # fmt: skip


@pytest.mark.parametrize("language", ["en", "de"])
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=9))
@example(pieces=["\ufb01", "\u0307"])
@example(pieces=["I", "\u0130", "\u0301"])
def test_any_unicode_form_has_the_same_words_with_offsets_within_the_text(language: str, pieces: list[str]) -> None:
    text = "".join(pieces)
    assume(not text.isupper() or len(text.split()) < 2)  # a query in capitals is read in lower case
    words = query_words(text, language)
    assert all(query_words(unicodedata.normalize(form, text), language) == words for form in ("NFC", "NFD", "NFKC"))
    placed = list(words_with_offsets(text, language))
    assert [word for word, _, _ in placed] == words
    if len(words) == 1 and "Σ" not in text:  # whose lower case depends on the next letter
        [(word, start, end)] = placed
        assert query_words(text[start:end], language) == [word]
    assert all(0 <= start < end <= len(text) for _, start, end in placed)


def test_counts_above_255_are_16_bits_wide(tmp_path: Path) -> None:
    texts = ["sail " * 999 + "sail.", "One sail.", "No boat."]
    index = indexed(tmp_path, texts, 4000)
    assert index.count_N.dtype == np.uint16
    assert index.scores("sail").tolist() == PeerBm25(texts).scores("sail").tolist()


def test_passages_without_words_score_zero(tmp_path: Path) -> None:
    index = indexed(tmp_path, ["It is.", "A."])
    assert index.scores("It is a").tolist() == [0, 0]
    assert index.search(["it"], 2)[1].tolist() == [[-1, -1]]
    assert rank(index, ["it"], 2).tolist() == [[0, 1]]


@pytest.mark.parametrize("query", ["", "the", "zebra quagga"])
def test_a_query_without_known_words_ranks_passages_in_corpus_order(four: Bm25, query: str) -> None:
    assert four.scores(query).tolist() == [0.0] * 4
    assert rank(four, [query], 3).tolist() == [[0, 1, 2]]


# ---- files


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_a_damaged_a_missing_and_another_corpus_index_are_refused(world: World, four: Bm25, tmp_path: Path) -> None:
    for name in ("snapshot", bm25.FOLDER):
        shutil.copytree(world.folder / name, tmp_path / name)
    snapshot, path = Snapshot.open(tmp_path / "snapshot"), tmp_path / bm25.FOLDER / "postings.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"postings\.npy has sha256"):
        Bm25.of(snapshot, verify=True)
    shutil.rmtree(tmp_path / bm25.FOLDER)
    with pytest.raises(ValueError, match=r"lexical holds no manifest\.json.*run the stage that makes it"):
        Bm25.of(snapshot)
    with pytest.raises(ValueError, match=r"made for corpus .* run the snapshot stage again"):
        Bm25.open(four.folder, corpus_hash=world.snapshot.corpus_hash)


def test_postings_by_hand(tmp_path: Path) -> None:
    """Words are in the order of their hashes; "and" and "a" are stop words."""
    texts = ["Red ships and red ships.", "Sinking.", "A ship sinks and sinks and sinks."]
    index = indexed(tmp_path, texts)
    word_of = dict(zip(bm25.stem_hashes(["red", "sink", "ship"]).tolist(), ["red", "sink", "ship"], strict=True))
    assert index.word_W.tolist() == sorted(word_of)
    assert index.length_P.tolist() == [4, 1, 4]
    spans = zip(index.offset_W[:-1], index.offset_W[1:], strict=True)
    postings = {
        word_of[code]: list(zip(index.posting_N[start:end].tolist(), index.count_N[start:end].tolist(), strict=True))
        for code, (start, end) in zip(index.word_W.tolist(), spans, strict=True)
    }
    assert postings == {"red": [(0, 2)], "ship": [(0, 2), (2, 1)], "sink": [(1, 1), (2, 3)]}
    assert index.count_N.dtype == np.uint8
    assert {name: index.manifest[name] for name in ("passages", "words", "postings", "tokens")} == {
        "passages": 3, "words": 3, "postings": 5, "tokens": 9,
    }  # fmt: skip


@pytest.mark.parametrize("workers", [1, 2])
def test_bytes_do_not_depend_on_parts_and_workers(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    for name, value in {"_PASSAGES": 2, "_POSTINGS": 5, "_MERGED_PARTS": 2}.items():
        monkeypatch.setattr(bm25_writer, name, value)
    progress: list[int] = []
    write_bm25(tmp_path / "l", world.snapshot, progress.append, workers=workers)
    assert files(tmp_path / "l") == files(world.folder / bm25.FOLDER)
    assert progress == [2] * 6
    assert [path.name for path in tmp_path.iterdir()] == ["l"]
