"""Salient spans without a tagger, in languages with and without capitals; questions made of them; a tagger's words."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from small_corpus import corpus
from small_world import section

from realmops.corpus.languages import load_languages
from realmops.corpus.phrases import DATE, NAME, NUMBER, PHRASE, PhraseFinder, find_phrases_and_dates
from realmops.corpus.snapshot_reader import Snapshot
from realmops.corpus.vocabulary import SPECIAL_TOKENS, build_tokenizer, is_continuation
from realmops.model.build import build_models
from realmops.questions.cloze import clause_around_gap, format_question, question_word
from realmops.train.conll import read_conll
from realmops.train.initialisation import init_lexical_features
from realmops.train.tagger import _encode, tag_names, word_entities

GERMAN = [
    "Der Maler lebte in Bergen. Dort sah Karl Lund die große Stadt und eine Brücke.",
    "Nach Bergen zog die Familie. Die Brücke über den Fluss kostete 1500 Kronen, sagte Lund später.",
    "Im Jahr 1931 verließ Lund die alte Stadt. Seine Brücke steht noch.",
]
CHINESE = [
    "黑豹队赢得了比赛。球迷们很高兴，黑豹队的教练也很高兴。",
    "去年黑豹队输给了野马队，比分是24比10。",
    "野马队在丹佛打球，教练来自丹佛，NFL很大。",
    "他住在丹佛，喜欢看书和写作。",
]
KOREAN = ["서울 대학교 에서 공부했다.", "그는 서울 대학교 교수다.", "부산 에 산다."]


def found(snapshot: Snapshot, passage: int) -> list[tuple[str, str]]:
    text = snapshot.text(passage)
    return [(text[start:end], label) for start, end, label in PhraseFinder(snapshot).of(passage)]


def test_german_names_have_no_article_and_nouns_have_one(tmp_path: Path) -> None:
    snapshot = corpus(tmp_path / "de", GERMAN, "de")
    assert found(snapshot, 0) == [("Bergen", NAME), ("Karl Lund", NAME)]
    assert found(snapshot, 1) == [("Bergen", NAME), ("1500", NUMBER), ("Lund", NAME)]
    assert found(snapshot, 2) == [("1931", NUMBER), ("Lund", NAME)]


def test_elsewhere_a_capital_inside_a_sentence_is_a_name(tmp_path: Path) -> None:
    texts = [
        "Ana vivía en la Isla de Francia. Antes era pintora.",
        "Allí pintó Ana antes de viajar a París; 12 cuadros.",
    ]
    snapshot = corpus(tmp_path / "es", texts, "es")
    assert found(snapshot, 0) == [("Ana", NAME), ("Isla de Francia", NAME)]
    assert found(snapshot, 1) == [("Ana", NAME), ("París", NAME), ("12", NUMBER)]


def test_without_capitals_runs_that_recur_and_hold_together_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("realmops.corpus.phrases.MIN_COHESION", 2.0)  # of sixty characters none is rare
    snapshot = corpus(tmp_path / "zh", CHINESE, "zh")
    assert ("黑豹队", PHRASE) in found(snapshot, 0)
    assert found(snapshot, 1) == [("黑豹队", PHRASE), ("野马队", PHRASE), ("24", NUMBER), ("10", NUMBER)]
    assert {("丹佛", PHRASE), ("NFL", NAME)} <= {*found(snapshot, 2)}
    assert ("丹佛", PHRASE) in found(snapshot, 3)
    assert not {word for row in range(4) for word, _ in found(snapshot, row)} & {"黑豹", "豹队", "很高兴"}
    monkeypatch.setattr("realmops.corpus.phrases.MIN_COHESION", 1.0)
    snapshot = corpus(tmp_path / "ko", KOREAN, "ko")
    assert ("서울 대학교", PHRASE) in found(snapshot, 0)


@pytest.mark.parametrize(("longer", "is_phrase"), [(3, True), (4, False)])
def test_a_part_of_a_run_that_is_nearly_as_frequent_is_no_phrase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, longer: int, is_phrase: bool
) -> None:
    """甲乙 is in five passages, before 丙 in some of them: where these are fewer than 0.8 of five, it is a phrase."""
    monkeypatch.setattr("realmops.corpus.phrases.MIN_COHESION", 1.0)
    others = ["子丑寅", "卯辰巳", "午未申", "酉戌亥", "天地人"]
    texts = [f"{text[0]}甲乙{'丙' if n < longer else text[1]}{text[2]}。" for n, text in enumerate(others)]
    snapshot = corpus(tmp_path / "zh", [*texts, "春夏秋冬东西南北风花雪月山川河海。"], "zh")
    assert ("甲乙丙", PHRASE) in found(snapshot, 0)
    assert (("甲乙", PHRASE) in found(snapshot, 4)) == is_phrase


def test_a_character_with_its_marks_is_no_word(tmp_path: Path) -> None:
    texts = ["ขน กี้ 5 ไป", "ตบ กี้ 7 ดู", "มด กี้ 9 นอน", "นก"]
    snapshot = corpus(tmp_path / "th", texts, "th")
    assert "กี้" not in {word for row in range(4) for word, _ in found(snapshot, row)}


def test_dates_come_first_and_what_touches_one_is_left_out(tmp_path: Path) -> None:
    snapshot = corpus(tmp_path / "de", GERMAN, "de")
    text = snapshot.text(2)
    spans = list(find_phrases_and_dates(snapshot))[2]
    assert [(text[start:end], label) for start, end, label in spans] == [("1931", DATE), ("Lund", NAME)]


@pytest.mark.parametrize(
    ("language", "label", "answer", "word"),
    [
        ("de", "PER", "Lund", "wer"),
        ("de", DATE, "12. Mai", "wann"),
        ("es", NUMBER, "12", "cuántos"),
        ("fr", "LOC", "Paris", "où"),
        ("zh", NAME, "丹佛", "什么"),
        ("pl", "PER", "Lund", ""),
        ("en", "PER", "Lund", "who"),
    ],
)
def test_each_language_has_its_question_words(language: str, label: str, answer: str, word: str) -> None:
    assert question_word(label, answer, np.random.default_rng(0), language) == word


def test_the_languages_with_question_words_have_all_of_them() -> None:
    kinds = {"who", "where", "when", "why", "which", "what", "how", "many", "year", "how many", "what year"}
    asking = {code for code, known in load_languages().items() if known.questions}
    assert asking == {"de", "es", "fr", "it", "pt", "nl", "ro", "ru", "zh", "ja", "ko"}
    for code in asking:
        assert set(load_languages()[code].questions) == kinds, code


@pytest.mark.parametrize(
    ("language", "before", "after", "words"),
    [
        ("de", "Der „Maler“, heißt es: dort sah ", " die große Stadt.", "dort sah die große Stadt"),
        ("zh", "去年，", "输给了野马队的教练。", "输给 了野 马队 的教 练"),
        ("ko", "그는 ", " 에서 공부했다고 한다.", "그는 에서 공부했다고 한다"),
    ],
)
def test_a_clause_ends_at_the_marks_of_the_language(language: str, before: str, after: str, words: str) -> None:
    found = clause_around_gap(before, after, language)
    assert found is not None
    assert [*found[0], *found[1]] == words.split()


@pytest.mark.parametrize(
    ("language", "words", "question"),
    [
        ("de", ["wer", "sah", "die", "Stadt"], "wer sah die Stadt?"),
        ("es", ["quién", "vivía"], "¿quién vivía?"),
        ("zh", ["什么", "输给", "NFL", "马队"], "什么输给 NFL 马队？"),
        ("pl", ["", "mieszka"], "mieszka?"),
    ],
)
def test_a_question_is_written_as_in_the_language(language: str, words: Sequence[str], question: str) -> None:
    assert format_question(words, language) == question


def test_a_tagger_learns_the_tags_of_words_without_blanks(tmp_path: Path) -> None:
    file = tmp_path / "tagged.conll"
    file.write_text("北京\tB-LOC\n是\tO\n首都\tO\n\nMünchen\tB-LOC\nliegt\tO\n", encoding="utf-8")
    chinese, german = read_conll(file)
    tokenizer = build_tokenizer([*SPECIAL_TOKENS, *"北京是首都", "mun", "##chen", "liegt"])
    tags = tag_names([chinese, german])
    for sentence, wanted in ((chinese, [(0, 2, "LOC")]), (german, [(0, 2, "LOC")])):
        encoded = _encode(sentence, tokenizer, tags, 96)
        starts_word = ~is_continuation(tokenizer)[encoded.tokens[1:-1]]
        assert list(word_entities([tags[tag] for tag in encoded.tags[1:-1]], starts_word)) == wanted
    assert encoded.capitals.tolist() == [0, 1, 1, 0, 0]


def test_a_reader_knows_the_question_words_of_its_documents(tmp_path: Path) -> None:
    texts = ["¿Cuándo vivía Ana en París? ¿Quién era? Qué bien.", "Ana era pintora. Vivía en París."]
    snapshot = corpus(tmp_path / "es", texts, "es")
    shape = section("bert", width=8, layers=1, heads=1, positions=64)
    options = section("reader", copies=False, apart=False, matches=True)
    size = snapshot.tokenizer.get_vocab_size()
    _, reader = build_models(shape, section("retriever", embedding_width=4), options, size, 0)
    init_lexical_features(reader, snapshot, 0, lambda label, total: lambda done: None)
    assert reader.matches is not None
    kinds = {
        piece: int(kind) for piece, kind in zip(snapshot.vocabulary, reader.matches.question_V, strict=True) if kind
    }
    assert kinds == {"quien": 1, "cuando": 2, "que": 6}
