from pathlib import Path

import numpy as np
import pytest
from small_world import labels_of

from realmops.corpus.spans import Spans, SpansWriter, token_spans

# "Ann Lee sang. Bob heard." as wordpieces ann lee sang . bob heard .
CHARS = np.array([[0, 3], [4, 7], [8, 12], [12, 13], [14, 17], [18, 23], [23, 24]], np.int32)
SENTENCES = np.array([[0, 4], [4, 7]], np.int32)
NO_ROWS = np.empty((0, 2), np.int32)


@pytest.mark.parametrize(
    ("span", "found"),
    [
        ((0, 7), (0, 0, 2)),
        ((14, 17), (1, 4, 5)),
        ((5, 6), (0, 1, 2)),  # a part of a wordpiece takes all of it
        ((6, 9), (0, 1, 3)),
        ((3, 4), None),  # a blank
        ((8, 17), None),  # over the border of two sentences
        ((13, 14), None),
        ((18, 25), None),  # over the end of the passage
        ((-1, 3), None),
        ((0, 13), (0, 0, 4)),
    ],
)
def test_characters_become_wordpieces_of_one_sentence(
    span: tuple[int, int], found: tuple[int, int, int] | None
) -> None:
    assert token_spans([span], CHARS, SENTENCES) == [found]


def write(folder: Path) -> None:
    folder.mkdir()
    with SpansWriter(folder) as writer:
        assert writer.add([], CHARS, SENTENCES, 0) == 0
        given = [(14, 17, "PER"), (0, 7, "PER"), (8, 17, "EVENT"), (0, 7, "PER"), (8, 12, "ACT")]
        assert writer.add(given, CHARS, SENTENCES, 2) == 3
        assert writer.add([(18, 23, "ACT")], CHARS, SENTENCES, 4) == 1
        manifest = writer.close(corpus_hash="c", vocabulary_hash="v", tagger="none")
    assert (manifest["passages"], manifest["spans"], manifest["tagger"]) == (3, 4, "none")
    assert manifest["dropped"] == {"not_in_one_sentence": 1}


def test_spans_come_back_by_passage(tmp_path: Path) -> None:
    write(tmp_path / "spans")
    spans = Spans.open(tmp_path / "spans", corpus_hash="c")
    assert len(spans) == 3
    assert spans.of(0).shape == (0, 6)
    # passage, sentence, token_start, token_end, char_start, char_end
    assert spans.of(1).tolist() == [[1, 2, 0, 2, 0, 7], [1, 2, 2, 3, 8, 12], [1, 3, 4, 5, 14, 17]]
    assert labels_of(spans, 1) == ["PER", "ACT", "PER"]
    assert spans.of(2).tolist() == [[2, 5, 5, 6, 18, 23]]
    assert spans.of(1).dtype == np.int32
    assert (spans.label_ids.dtype, spans.offsets.dtype) == (np.uint8, np.int64)


def test_spans_of_another_corpus_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "spans"
    write(folder)
    with pytest.raises(ValueError, match="made for corpus c, but the snapshot is d"):
        Spans.open(folder, corpus_hash="d")
    content = bytearray((folder / "spans.npy").read_bytes())
    content[-1] ^= 1
    (folder / "spans.npy").write_bytes(content)
    with pytest.raises(ValueError, match=r"spans\.npy has sha256"):
        Spans.open(folder)


def test_too_many_labels_are_refused(tmp_path: Path) -> None:
    spans = [(0, 3, f"label {number}") for number in range(257)]
    with SpansWriter(tmp_path) as writer:
        assert writer.add(spans[:256], CHARS, SENTENCES, 0) == 256
        with pytest.raises(ValueError, match="over 256 span labels"):
            writer.add(spans[256:], CHARS, SENTENCES, 0)
