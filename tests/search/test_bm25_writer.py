"""The BM25 index of a snapshot: whole or not at all, the same bytes whatever way they were made."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_project import cli
from small_world import DOCUMENTS, World, build_snapshot, write_texts

from realmops.corpus.snapshot_reader import Snapshot
from realmops.search import bm25, bm25_writer
from realmops.search.bm25 import Bm25
from realmops.search.bm25_writer import write_bm25

TEXTS = [text for _, text, _ in DOCUMENTS]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def corpus(folder: Path, texts: list[str]) -> Snapshot:
    folder.mkdir()
    return build_snapshot(folder, write_texts(folder / "documents.jsonl", texts))


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many parts, many ranges of words, many rounds of vocabularies."""
    monkeypatch.setattr(bm25_writer, "_PASSAGES", 2)
    monkeypatch.setattr(bm25_writer, "_POSTINGS", 5)
    monkeypatch.setattr(bm25_writer, "_MERGED_PARTS", 2)


def test_what_is_written_by_hand(tmp_path: Path) -> None:
    """Words stand in the order of their digests; "and" and "a" are none."""
    snapshot = corpus(tmp_path / "c", ["Red ships and red ships.", "Sinking.", "A ship sinks and sinks and sinks."])
    manifest = write_bm25(tmp_path / "l", snapshot)
    index = Bm25.open(tmp_path / "l", corpus_hash=snapshot.corpus_hash)
    named = dict(zip(bm25.stem_hashes(["red", "sink", "ship"]).tolist(), ["red", "sink", "ship"], strict=True))
    assert index.word_W.tolist() == sorted(named)
    assert index.length_P.tolist() == [4, 1, 4]
    spans = zip(index.offset_W[:-1], index.offset_W[1:], strict=True)
    found = {
        named[code]: list(zip(index.posting_N[start:end].tolist(), index.count_N[start:end].tolist(), strict=True))
        for code, (start, end) in zip(index.word_W.tolist(), spans, strict=True)
    }
    assert found == {"red": [(0, 2)], "ship": [(0, 2), (2, 1)], "sink": [(1, 1), (2, 3)]}
    assert index.count_N.dtype == np.uint8
    assert {name: manifest[name] for name in ("passages", "words", "postings", "tokens")} == {
        "passages": 3, "words": 3, "postings": 5, "tokens": 9,
    }  # fmt: skip


def test_the_bytes_are_the_same_in_parts(world: World, parts: None, tmp_path: Path) -> None:
    done: list[int] = []
    write_bm25(tmp_path / "l", world.snapshot, done.append)
    assert files(tmp_path / "l") == files(world.folder / bm25.FOLDER)
    assert done == [2] * 6
    assert [path.name for path in tmp_path.iterdir()] == ["l"]


def test_the_bytes_are_the_same_whatever_the_number_of_workers(world: World, parts: None, tmp_path: Path) -> None:
    write_bm25(tmp_path / "l", world.snapshot, workers=2)
    assert files(tmp_path / "l") == files(world.folder / bm25.FOLDER)


@pytest.mark.parametrize(
    "change",
    [
        lambda texts: texts,
        lambda texts: texts[::-1],
        lambda texts: texts[3:9],
        lambda texts: ["A new beginning.", *texts[:5], "Bergen again.", *texts[6:], "The end of Oslo."],
        lambda texts: [*texts[:2], texts[0], texts[0], *texts[7:], texts[5]],
        lambda texts: ["Nothing of before."],
    ],
    ids=["same", "reversed", "fewer", "new", "copies", "all new"],
)
@pytest.mark.parametrize("in_parts", [False, True])
def test_an_update_has_the_bytes_of_a_new_index(
    tmp_path: Path, change: Callable[[list[str]], list[str]], in_parts: bool, request: pytest.FixtureRequest
) -> None:
    if in_parts:
        request.getfixturevalue("parts")
    old = corpus(tmp_path / "old", ["Only here stands quagga.", *TEXTS, TEXTS[2]])
    write_bm25(tmp_path / "old" / bm25.FOLDER, old)
    new = corpus(tmp_path / "new", change(TEXTS))
    done: list[int] = []
    write_bm25(tmp_path / "updated", new, done.append, earlier=old)
    write_bm25(tmp_path / "fresh", new)
    assert files(tmp_path / "updated") == files(tmp_path / "fresh")
    assert sum(done) == len(new)


def test_an_update_counts_the_words_of_new_passages_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = corpus(tmp_path / "old", TEXTS)
    write_bm25(tmp_path / "old" / bm25.FOLDER, old)
    new = corpus(tmp_path / "new", [*TEXTS[:4], "A new text.", *TEXTS[4:]])
    counted = watched(monkeypatch)
    write_bm25(tmp_path / "updated", new, earlier=old)
    assert counted == [[4]]
    monkeypatch.setattr(bm25_writer, "NORMAL_FORM", "other")
    write_bm25(tmp_path / "other", new, earlier=old)
    assert counted[1:] == [[0, 1, 2, 3, 4, *range(5, len(new))]], "words of another normal form are counted again"


def watched(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The passages of each part that is counted from now on."""
    seen: list[list[int]] = []
    usual = bm25_writer._count_words

    def counted(texts: Any, languages: Any, rows: Any) -> Any:
        seen.append(rows.tolist())
        return usual(texts, languages, rows)

    monkeypatch.setattr(bm25_writer, "_count_words", counted)
    return seen


@pytest.mark.parametrize("with_work", [False, True])
def test_a_writer_that_dies_leaves_nothing_and_goes_on_with_its_parts(
    world: World, parts: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_work: bool
) -> None:
    work = tmp_path / "work" if with_work else None
    usual = bm25_writer._merge

    def dies(*arguments: Any) -> Any:
        usual(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(bm25_writer, "_merge", dies)
        with pytest.raises(KeyboardInterrupt):
            write_bm25(tmp_path / "l", world.snapshot, work=work)
    assert [path.name for path in tmp_path.iterdir()] == (["work"] if with_work else [])
    if with_work:
        (tmp_path / "work" / "part-00001" / "posting_N.npy").write_bytes(b"damaged")
    counted = watched(monkeypatch)
    write_bm25(tmp_path / "l", world.snapshot, work=work)
    assert len(counted) == (1 if with_work else 6)
    assert files(tmp_path / "l") == files(world.folder / bm25.FOLDER)


def test_parts_of_another_corpus_are_not_used(world: World, tmp_path: Path) -> None:
    work = tmp_path / "work"
    write_bm25(tmp_path / "other", corpus(tmp_path / "c", TEXTS[:3] * 4), work=work)
    write_bm25(tmp_path / "l", world.snapshot, work=work)
    assert files(tmp_path / "l") == files(world.folder / bm25.FOLDER)


def test_the_stage_writes_it_for_the_corpus_and_an_update_its_own(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    root = tmp_path / "root"
    manifest = json.loads((root / "data/snapshot/manifest.json").read_text())
    assert "lexical/postings.npy" in manifest["files"]
    snapshot = Snapshot.open(root / "data/snapshot/corpus")
    write_bm25(tmp_path / "fresh", snapshot)
    assert files(root / "data/snapshot/lexical") == files(tmp_path / "fresh")
    words = ("--params", tmp_path / "params.yaml", "--root", root)
    for name in ("finetune", "evaluate"):
        assert cli("run", name, *words).exit_code == 0
    with open(tmp_path / "documents.jsonl", "a") as documents:
        documents.write('{"title": "Moss", "text": "Moss is a town by the sea."}\n')
    assert cli("update", *words).exit_code == 0
    [folder] = (root / "updates").iterdir()
    new = Snapshot.open(folder / "snapshot/corpus")
    write_bm25(tmp_path / "updated", new)
    assert files(folder / "snapshot/lexical") == files(tmp_path / "updated")
    assert [new.title(row) for row in Bm25.of(new).search(["moss"], 1)[1][0]] == ["Moss"]
