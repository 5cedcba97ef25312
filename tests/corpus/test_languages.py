"""Languages: detection, words of scripts without blanks, a corpus of several languages, and BM25 over it."""

import unicodedata
from pathlib import Path

import pytest
import Stemmer
from small_corpus import corpus
from small_project import Quiet, stage, toy_values, write_json_lines

from realmops.answering.passage_search import highlights, stem_query
from realmops.corpus.languages import AUTO, detect_language, load_languages
from realmops.corpus.passages import split_sentences
from realmops.corpus.snapshot_reader import Snapshot
from realmops.search import bm25
from realmops.search.bm25 import Bm25, query_stems, rank, words_with_offsets

TEXTS = {
    "de": "Die Häuser der Stadt wurden 1902 gebaut. Dr. Anna Berg zog z. B. aus Köln zu den alten Häusern.",
    "es": "Las casas de la ciudad fueron construidas en 1902. Anna Berg vivía en una casa antigua cerca del río.",
    "ro": "Casele orașului au fost construite în anul 1902. Anna Berg a locuit într-o casă veche de lângă râu.",
    "zh": "这座城市的房屋建于1902年。安娜·贝格搬进了河边的一座老房子！她在那里写了三本小说。",
    "en": "The houses of the town were built in 1902. Anna Berg moved into one of the old houses beside the river.",
}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    return corpus(tmp_path_factory.mktemp("mixed") / "corpus", [*TEXTS.values(), TEXTS["de"] + " Ende."], AUTO)


def test_every_language_has_a_stemmer_that_is_there_and_a_code_that_is_detected() -> None:
    for code, known in load_languages().items():
        assert len(code) == 2
        assert known.stemmer in ("", *Stemmer.algorithms()), code
        assert detect_language("words", [code]) == (code,)
    assert len(detect_language("words", list(load_languages()))) == 2


@pytest.mark.parametrize("code", TEXTS)
def test_the_language_of_a_text_is_detected(code: str) -> None:
    assert detect_language(TEXTS[code]) == (code,)


def test_a_name_alone_may_be_in_either_of_two_languages() -> None:
    assert len(detect_language("Marlee Matlin", ["en", "ro", "de"])) == 2
    assert len(detect_language("", ["en", "ro", "de"])) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Die Häuser, 1902 a b", ["die", "häuser", "1902", "a", "b"]),
        ("Ha\u0308user", ["häuser"]),
        ("老房子建于1902年。", ["老房", "房子", "子建", "建于", "1902", "年"]),
        ("서울에서 KBS를", ["서울", "울에", "에서", "kbs", "를"]),
        ("東京タワーへ", ["東京", "京タ", "タワ", "ワー", "ーへ"]),
        ("हिन्दी भाषा", ["हिन्दी", "भाषा"]),
        ("माँ दो क", ["माँ", "दो", "क"]),  # a vowel sign is a letter, a nasal none
        ("क़ क्", ["क़", "क्"]),
        ("e\u0301 e\u0301a \u0301", ["é", "éa"]),
        ("لَ خَب بّ", ["لَ", "خَب", "بّ"]),  # harakat
        ("שָׁ שָׁל", ["שָׁ", "שָׁל"]),  # niqqud
        ("ภาษา", ["ภา", "าษ", "ษา"]),
        ("ก ก่ ปี 9", ["ปี", "9"]),  # a tone mark is no letter
        ("ที่นี่", ["ที่นี่"]),
        ("ក្រុង ក្", ["ក្រុ", "រុង"]),
        ("か\u3099ん", ["がん"]),
        ("\u1109\u1165\u110b\u116e\u11af", ["서울"]),
    ],
)
def test_words_are_those_of_the_script(text: str, words: list[str]) -> None:
    found = list(words_with_offsets(text, "ja"))
    assert [word for word, _, _ in found] == words
    for word, start, end in found:
        assert bm25.query_words(text[start:end], "de") == [word]
        assert len(text[start:end]) >= len(word) or not unicodedata.is_normalized("NFC", text)


def test_sentences_are_cut_by_the_rules_of_the_language() -> None:
    def cut(code: str) -> list[str]:
        return [TEXTS[code][start:end] for start, end in split_sentences(TEXTS[code], code)]

    assert [len(cut(code)) for code in ("de", "es", "ro", "zh", "en")] == [2, 2, 2, 3, 2]
    assert cut("zh")[1] == "安娜·贝格搬进了河边的一座老房子！"


def test_each_document_has_its_own_language(mixed: Snapshot) -> None:
    assert mixed.language == AUTO
    assert [mixed.language_of(row) for row in range(len(mixed))] == [*TEXTS, "de"]
    assert mixed.languages == ["de", "en", "es", "ro", "zh"]
    assert mixed.code_P.tolist() == [code.encode() for code in (*TEXTS, "de")]
    lengths = [len(mixed.sentences(row)) for row in range(len(mixed))]
    assert lengths == [2, 2, 2, 3, 2, 3]


@pytest.mark.parametrize(
    ("query", "passages"),
    [
        ("Wann wurden die Häuser gebaut?", {0, 5}),
        ("¿Cuándo fueron construidas las casas?", {1}),
        ("Când au fost construite casele?", {2}),
        ("房屋建于哪一年？", {3}),
        ("When were the houses built?", {4}),
    ],
)
def test_a_question_finds_passages_of_its_language_first(mixed: Snapshot, query: str, passages: set[int]) -> None:
    index = Bm25.of(mixed)
    assert {*rank(index, [query], len(passages))[0].tolist()} == passages
    score_QK, id_QK = index.search([query], 6)
    found = id_QK[0][id_QK[0] >= 0]
    assert index.score_passages(query, found).tolist() == score_QK[0][: len(found)].tolist()
    assert index.scores(query)[found].tolist() == score_QK[0][: len(found)].tolist()


def test_a_question_of_no_sure_language_is_looked_up_both_ways(
    mixed: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = Bm25.of(mixed)
    assert query_stems("houses Häuser", ("de", "en")) == ["hous", "haus", "häuser"]
    assert set(rank(index, ["Anna Berg"], 5)[0].tolist()) == {0, 1, 2, 4, 5}
    monkeypatch.setattr(index, "query_languages", lambda query: ("en", "de"))
    assert {*rank(index, ["houses Häuser"], 3)[0].tolist()} == {0, 4, 5}


def test_highlights_are_places_of_the_text_whatever_its_spelling() -> None:
    text = "Der Komponist Dvor\u030ca\u0301k, I\u0307stanbul und Dvořák"
    for query_languages in ("en", "de"):
        marked = highlights(text, stem_query("Dvořák in İstanbul", (query_languages,)))
        assert [text[start:end] for start, end in marked] == ["Dvor\u030ca\u0301k", "I\u0307stanbul", "Dvořák"]


@pytest.mark.parametrize("german", [29, 30])
def test_thirty_of_fifty_passages_in_another_language_are_a_warning(german: int, tmp_path: Path) -> None:
    codes = ["de"] * german + ["en"] * (50 - german)
    documents = [{"title": "", "text": f"{TEXTS[code]} {TEXTS[code]} {n}"} for n, code in enumerate(codes)]
    write_json_lines(tmp_path / "documents.jsonl", documents)
    report = Quiet()
    stage("snapshot", toy_values(snapshot={"block_wordpieces": 512}), tmp_path, tmp_path, report)
    report_of = "snapshot.language is en, but 30 of 50 sampled passages are in German"
    assert len([line for line in report.warned if report_of in line]) == (german == 30)
    values = toy_values(snapshot={"block_wordpieces": 512, "language": "de" if german == 30 else "en"})
    warned = len(report.warned)
    stage("snapshot", values, tmp_path, tmp_path, report)
    assert len(report.warned) == warned, "the language that is set is that of most"


def test_a_question_is_in_no_language_of_a_few_stray_passages(tmp_path: Path) -> None:
    dutch = "De huizen van de stad werden in 1902 gebouwd. Anna Berg woonde in een oud huis bij de rivier."
    snapshot = corpus(tmp_path / "corpus", [*(f"{TEXTS['de']} {n}" for n in range(120)), dutch], AUTO)
    assert snapshot.languages == ["de", "nl"]
    assert snapshot.common_languages == ["de"]
    index = Bm25.of(snapshot)
    assert index.query_languages("Waar staan de huizen van de stad?") == ("de",)
    assert rank(index, ["Waar werden de huizen van de stad gebouwd?"], 1).tolist() == [[120]], (
        "its words are found still"
    )
