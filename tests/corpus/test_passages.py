import pytest
import sentencex
from hypothesis import given, settings
from hypothesis import strategies as st

from realmops.corpus.passages import cut_passages, pack_sentences, passage_digest, split_sentences
from realmops.corpus.tokenizer import CachedTokenizer
from realmops.corpus.vocabulary import SPECIAL_TOKENS, build_tokenizer
from realmops.readers.documents import Document

PLAIN = build_tokenizer([*SPECIAL_TOKENS, *"abcdefghijklmnopqrstuvwxyz.", *(f"##{c}" for c in "abcdefgh")])
TOKENIZER = CachedTokenizer(PLAIN)

SENTENCES = [
    ["Dr. Smith met Mr. Jones in Washington, D.C. on Jan. 5, 1999.", "They left at 5 p.m. and went home."],
    ["The U.S. Congress passed the act.", "It cost $3.5 million."],
    ["Prices rose 2.75% to 10.5 in 2001.", "Then they fell."],
    ['"I will go," she said.', '"Why not?" he asked.', "They left."],
    ['He said: "It is late. We must go."', "Nobody moved."],
    ["J. R. R. Tolkien wrote it.", "C. S. Lewis read it."],
    ["Is it true?", "Yes!", "It is."],
    ["He lived c. 1850 in Mt. Vernon, e.g. near the mill, i.e. the river.", "She did not."],
    ["Gen. Robert E. Lee fought at Gettysburg.", "The battle lasted 3 days."],
    ["It grew (see section 4.2. for more).", "Later it shrank."],
    ['Beyoncé sang "Déjà Vu" with Jay Z.', "It was No. 1 in the U.K."],
    ["The flight left at 6:30 a.m.", "Passengers slept."],
    ["The yacht (built in 1920) sank.", "It was 30 m long."],
    ["He was born in the 1990s.", "In 2005, he moved."],
    ["Version 2.0.1 was released on 12.05.2010.", "It fixed bugs."],
    ["The quake measured 8.0 Ms and 7.9 Mw.", "It killed 69,197 people."],
    ["Sgt. Pepper sold well, as did the Rev. Green et al. in 1970.", "Critics agreed."],
    ["The film stars John Smith, Jr.", "It was released in May."],
    ["The U.S. is large.", "Prof. Li of Univ. of Oslo said so."],
    ["Albert (b. 14 March 1879, d. 18 April 1955) was a physicist.", "He won."],
]


def document(text: str, title: str = "a") -> Document:
    return Document(title, text, None, (), "here:1")


@pytest.mark.parametrize("sentences", SENTENCES, ids=lambda sentences: sentences[0][:20])
def test_sentences_end_where_a_reader_ends_them(sentences: list[str]) -> None:
    text = "  ".join(sentences) + "\n"
    assert [text[start:end] for start, end in split_sentences(text)] == sentences


def test_what_the_splitter_loses_becomes_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sentencex.segment", lambda language, text: [] if text == "Gone." else ["B. ", "D."])
    text = "A. B. C. D. E.\n\nGone."
    assert [text[start:end] for start, end in split_sentences(text)] == ["A.", "B.", "C.", "D.", "E.", "Gone."]


def test_each_row_of_a_table_is_a_sentence() -> None:
    text = "Prices:\nOats\t21 marks\n\t18 marks\nRye\t9 marks\n\nIt is\nopen."
    rows = ["Prices:", "Oats\t21 marks", "18 marks", "Rye\t9 marks", "It is\nopen."]
    assert [text[start:end] for start, end in split_sentences(text)] == rows


@pytest.mark.parametrize(
    ("sentence", "language", "keeps_sentences"),
    [
        ("北京是中华人民共和国的首都位于华北平原。", "zh", True),
        ("Dr. Smith met him at 5 p.m.\u00a0in Oslo. ", "en", True),
        ('He said: "It is late. We must go to bed." ', "en", True),
        ("“a ", "en", False),  # one sentence
        ("ab\n", "en", False),
        ("a", "en", False),
    ],
)
def test_a_long_paragraph_is_segmented_in_parts_at_sentences(
    sentence: str, language: str, keeps_sentences: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []

    def segment(language: str, text: str) -> list[str]:
        lengths.append(len(text))
        return segmented(language, text)

    segmented = sentencex.segment
    monkeypatch.setattr("sentencex.segment", segment)
    for size in (5_000, 10_000):
        split_sentences((sentence * size)[:size], language)
    assert lengths == [5_000, 10_000]
    text = sentence * (100_000 // len(sentence))
    sentences = [text[start:end] for start, end in split_sentences(text, language)]
    assert max(lengths) == 10_000
    assert sum(lengths) < 5 * 100_000
    assert "".join("".join(sentences).split()) == "".join(text.split())
    words = {word for sentence in sentences for word in sentence.split()}
    assert {*sentences} == {sentence.strip()} if keeps_sentences else len(sentences) <= 20
    assert keeps_sentences or sentence == "a" or words == {sentence.strip()}


@pytest.mark.parametrize(
    ("lengths", "title", "limit", "blocks"),
    [
        ([4, 4, 4], 1, 12, [(0, 2), (2, 3)]),  # 3 + 1 + 8 = 12 fits, a third sentence does not
        ([4, 5, 4], 1, 12, [(0, 1), (1, 2), (2, 3)]),  # 9 does not fit, in either pair
        ([20, 1, 1], 1, 12, [(0, 1), (1, 3)]),  # too long alone: its own block
        ([1, 20, 1], 1, 12, [(0, 1), (1, 2), (2, 3)]),
        ([2, 2], 50, 12, [(0, 1), (1, 2)]),  # the title leaves no room
        ([], 1, 12, []),
    ],
)
def test_blocks_are_greedy(lengths: list[int], title: int, limit: int, blocks: list[tuple[int, int]]) -> None:
    assert list(pack_sentences(lengths, title, limit)) == blocks


def test_offsets_of_a_passage_are_those_of_its_text() -> None:
    documents = [document("A bé. Ca d!  Da b a.", title="b"), document("E. "), document("\n A.")]
    batch = cut_passages(documents, TOKENIZER, block_wordpieces=3 + 1 + 6)
    texts = [documents[p.document].text[slice(*p.chars)] for p in batch.passages]
    # Wordpieces: a b ##e . | c ##a d [UNK] | d ##a b a . | e . | a .
    assert texts == ["A bé.", "Ca d!", "Da b a.", "E.", "A."]
    words = [[text[a:b] for a, b in p.token_chars] for p, text in zip(batch.passages, texts, strict=True)]
    assert words[0] == ["A", "b", "é", "."]
    assert words[2] == ["D", "a", "b", "a", "."]
    assert words[4] == ["A", "."]
    assert [p.sentences.tolist() for p in batch.passages] == [[[0, 4]], [[0, 4]], [[0, 5]], [[0, 2]], [[0, 2]]]
    assert [p.digest for p in batch.passages] == [
        passage_digest(documents[p.document].title, text) for p, text in zip(batch.passages, texts, strict=True)
    ]
    wider = cut_passages(documents[:1], TOKENIZER, block_wordpieces=3 + 1 + 8)
    assert [p.sentences.tolist() for p in wider.passages] == [[[0, 4], [4, 8]], [[0, 5]]]


def test_wordpiece_includes_its_combining_accents() -> None:
    text = "Be\u0301 e\u0301a, e\u0301\u0323."
    [passage] = cut_passages([document(text)], TOKENIZER, block_wordpieces=30).passages
    assert [text[a:b] for a, b in passage.token_chars] == ["B", "e\u0301", "e\u0301", "a", ",", "e\u0301\u0323", "."]


@given(st.lists(st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("ab. \n")), max_size=80)))
@settings(max_examples=300, deadline=None)
def test_every_wordpiece_belongs_to_one_sentence_of_one_passage(texts: list[str]) -> None:
    documents = [document(text) for text in texts]
    batch = cut_passages(documents, TOKENIZER, block_wordpieces=12)
    whole = [i for text in texts for i in PLAIN.encode(text, add_special_tokens=False).ids]
    assert [i for passage in batch.passages for i in passage.ids.tolist()] == whole
    for passage in batch.passages:
        chars, bounds = passage.token_chars, passage.sentences.ravel().tolist()
        assert (chars >= 0).all()
        assert (chars <= passage.chars[1] - passage.chars[0]).all()
        assert (chars[:, 0] < chars[:, 1]).all()
        assert (bounds[0], bounds[-1], bounds[1:-1:2]) == (0, len(chars), bounds[2:-1:2])
