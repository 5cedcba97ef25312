"""Tokenizers of other families: roles of special tokens, characters of wordpieces, words, and snapshots of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from small_encoders import ROBERTAS, byte_bpe, unigram, wordpiece, write_tokenizer
from small_world import DOCUMENTS
from tokenizers import Tokenizer

from realmops.artifacts import atomic_folder
from realmops.corpus.encoder_tokenizer import read_encoder_tokenizer
from realmops.corpus.snapshot_reader import Snapshot
from realmops.corpus.snapshot_writer import write_snapshot
from realmops.corpus.tokenizer import UncachedTokenizer, is_inside_word
from realmops.corpus.vocabulary import SPECIAL_TOKENS, open_tokenizer, surface_forms
from realmops.model.sequences import SpecialTokens
from realmops.readers.sources import list_sources

KINDS = {"wordpiece": wordpiece, "bpe": byte_bpe, "unigram": unigram}
ODD = "Oslo  is\n\n in Norway. \u4e2d\u6587 caf\u00e9, \u00bd cafe\u0301! <mask> [MASK] \U0001f600 x"


def opened(folder: Path, kind: str, special: tuple[str, ...] = ROBERTAS) -> Tokenizer:
    begin, end = ("<s>", "</s>") if "<s>" in special else ("[CLS]", "[SEP]")
    write_tokenizer(folder, KINDS[kind](special), special, begin, end)
    text = read_encoder_tokenizer(folder)[2]
    assert text is not None
    return open_tokenizer(text)


def write(folder: Path, documents: Path, tokenizer: str, pieces: list[str]) -> Snapshot:
    with atomic_folder(folder, "snapshot") as stage:
        write_snapshot(
            list_sources(documents, "auto"),
            stage,
            vocabulary=pieces,
            tokenizer=tokenizer,
            block_wordpieces=60,
        )
    return Snapshot.open(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_known_by_their_roles(kind: str, tmp_path: Path) -> None:
    """Also where the mask has a name of its own, and nothing is put around a text."""
    own = ("<s>", "<pad>", "</s>", "<unk>", "<|mask|>")
    for special, mask in ((ROBERTAS, "<mask>"), (own, "[MASK]")):
        tokenizer = opened(tmp_path, kind, special)
        found = SpecialTokens.of(tokenizer)
        names = [tokenizer.id_to_token(i) for i in (found.cls, found.sep, found.mask, found.unknown, found.padding)]
        assert names == ["<s>", "</s>", mask, "<unk>", "<pad>"]
        assert found.mask == 4
        bare = KINDS[kind](special)
        bare.save(str(tmp_path / "tokenizer.json"))
        text = read_encoder_tokenizer(tmp_path)[2]
        assert text is not None
        assert SpecialTokens.of(open_tokenizer(text)) == found
    (tmp_path / "tokenizer_config.json").unlink()
    if kind == "wordpiece":
        return
    with pytest.raises(ValueError, match=r"tokenizer.json: it puts nothing around a text, and names no cls_token"):
        read_encoder_tokenizer(tmp_path)


def test_bert_keeps_its_vocabulary_and_other_special_tokens_want_a_tokenizer(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, wordpiece(), SPECIAL_TOKENS, "[CLS]", "[SEP]")
    assert read_encoder_tokenizer(tmp_path)[2] is None
    write_tokenizer(tmp_path, wordpiece(ROBERTAS), ROBERTAS, "<s>", "</s>")
    (tmp_path / "vocab.txt").write_text("\n".join([*ROBERTAS, *SPECIAL_TOKENS]))
    assert read_encoder_tokenizer(tmp_path)[2] is not None
    both = opened(tmp_path, "wordpiece", (*ROBERTAS, *SPECIAL_TOKENS))  # as MPNet has them
    found = SpecialTokens.of(both)
    assert both.id_to_token(found.mask) == "<mask>"
    assert both.id_to_token(found.padding) == "<pad>"
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"its special tokens are not BERT's .*<mask>.*tokenizer.json is missing"):
        read_encoder_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "BPE"}}')
    with pytest.raises(ValueError, match=r"tokenizer.json is no tokenizer"):
        read_encoder_tokenizer(tmp_path)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_characters_are_those_of_the_text_without_blanks_before_them(kind: str, tmp_path: Path) -> None:
    tokenizer = opened(tmp_path, kind)
    texts = [ODD, "", " Oslo", "\u4e2d\u6587", "Anna Berg was born in Oslo."]
    found = UncachedTokenizer(tokenizer).encode(texts)
    assert found.by_text() == [one.ids for one in tokenizer.encode_batch(texts, add_special_tokens=False)]
    line, written = " ".join(texts), surface_forms(tokenizer)
    assert (np.diff(found.chars[:, 0]) >= 0).all()
    for piece, (start, end) in zip(found.ids.tolist(), found.chars.tolist(), strict=True):
        said, stands = written[piece].strip(), line[start:end]
        if said.isascii() and stands.isascii() and said != "<unk>":
            assert stands.strip() == said
        assert not stands[:1].isspace() or not stands.strip()
    assert found.borders()[1:3] == [len(tokenizer.encode(ODD, add_special_tokens=False).ids)] * 2


def test_words_begin_where_they_do_in_the_text() -> None:
    text = 'He said "Hello-world" in 1950. caf\u00e9s \u4e2d\u6587 x'
    pieces = ["He", "said", '"', "Hel", "lo", "-", "world", '"', "in", "19", "50", ".", "caf", "\u00e9", "s", "\u4e2d"]
    pieces += ["\u6587", "x"]
    places, at = [], 0
    for piece in pieces:
        at = text.index(piece, at)
        places.append((at, at + len(piece)))
    inside = is_inside_word(text, np.array(places))
    assert [piece for piece, one in zip(pieces, inside, strict=True) if one] == ["lo", "50", "\u00e9", "s"]
    shared = is_inside_word("\u4e2d", np.array([(0, 1), (0, 1), (0, 1)]))
    assert shared.tolist() == [False, True, True], "three bytes of a character"


@pytest.mark.parametrize("kind", KINDS)
def test_a_snapshot_has_the_wordpieces_of_each_passage_on_its_own(kind: str, tmp_path: Path) -> None:
    """Whatever stood before it in its document; characters and sentences are exact, and no run differs."""
    tokenizer = opened(tmp_path, kind)
    long = " ".join(text for _, text, _ in DOCUMENTS).replace("Oslo.", "Oslo.\n\n").replace("Its", "\u4e2d\u6587. Its")
    documents = tmp_path / "documents.jsonl"
    documents.write_text(json.dumps({"title": "Oslo", "text": long}) + "\n")
    snapshot = write(tmp_path / "snapshot", documents, tokenizer.to_str(), ["unused"])
    assert len(snapshot) >= 3
    assert snapshot.tokenizer.to_str() == tokenizer.to_str()
    assert snapshot.vocabulary == [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    rooms = []
    for i in range(len(snapshot)):
        text, chars, sentences = snapshot.text(i), snapshot.chars(i), snapshot.sentences(i)
        own = tokenizer.encode(text, add_special_tokens=False)
        assert snapshot.body(i).tolist() == own.ids
        rooms.append(len(own.ids) if len(sentences) > 1 else 0)  # one sentence is kept whole
        assert sentences[0, 0] == 0
        assert sentences[-1, 1] == len(own.ids)
        assert sentences[1:, 0].tolist() == sentences[:-1, 1].tolist()
        assert (sentences[:, 1] > sentences[:, 0]).all()
        for first, end in sentences.tolist():
            assert text[chars[first, 0] : chars[end - 1, 1]].strip()[:1].isalnum()
            assert text[: chars[first, 0]].rstrip()[-1:] in ("", ".")
        assert snapshot.continues(i).tolist() == is_inside_word(text, chars).tolist()
    assert 0 < max(rooms) < 60
    again = write(tmp_path / "again", documents, tokenizer.to_str(), ["unused"])
    assert replace_made(again.manifest) == replace_made(snapshot.manifest)


def replace_made(manifest: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in manifest.items() if name not in ("made", "created")}
