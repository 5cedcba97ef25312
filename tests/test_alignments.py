"""`realmops alignments`: each row against the explanation of the same sentence, and what is written when."""

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import small_project

from realmops.artifacts import read_json, write_manifest
from realmops.commands.alignments import align
from realmops.commands.masked import explain_sentence
from realmops.commands.update import of_pipeline
from realmops.corpus.answers import contains_answer
from realmops.corpus.snapshot import Snapshot
from realmops.corpus.spans import Spans

Row = dict[str, Any]


@pytest.fixture(scope="module")
def root(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(trained / "root", tmp_path_factory.mktemp("alignments") / "root"))


def read(path: Path) -> dict[int, list[Row]]:
    """The rows of each masked span."""
    found: dict[int, list[Row]] = {}
    for row in pq.read_table(path).to_pylist():
        found.setdefault(row["span_row"], []).append(row)
    return found


@pytest.fixture(scope="module")
def found(root: Path) -> dict[int, list[Row]]:
    result = small_project.cli("alignments", "--root", root)
    assert result.exit_code == 0, result.output
    assert f"{root / 'alignments.parquet'}: spans=22, rows=" in result.stdout
    return read(root / "alignments.parquet")


def test_every_salient_span_has_its_sentence_masked(root: Path, found: dict[int, list[Row]]) -> None:
    snapshot = Snapshot.open(root / "data/snapshot/corpus")
    spans = Spans.open(root / "data/spans/corpus").rows
    assert sorted(found) == list(range(len(spans)))
    for number, rows in found.items():
        passage, _, _, _, start, end = spans[number].tolist()
        assert {row["span"] for row in rows} == {snapshot.text(passage)[start:end]}
        assert {row["source_passage_id"] for row in rows} == {snapshot.passage_id(passage)}
        for row in rows:
            assert row["sentence"].replace("[MASK]", row["span"]) in snapshot.text(passage)
    assert found[0][0]["sentence"] == "Anna Berg was born in [MASK]."
    assert found[0][0]["span"] == "Oslo"


def test_probabilities_are_those_of_the_explanation(root: Path, found: dict[int, list[Row]]) -> None:
    """Sums of one, Bayes' rule, and the same numbers as `realmops explain` where its candidates are the same."""
    for rows in found.values():
        assert sum(row["p_z"] for row in rows) == pytest.approx(1, rel=1e-5)
        weights = [row["p_z"] * math.exp(row["utility"]) for row in rows]
        assert [row["p_z_given_y"] for row in rows] == pytest.approx([w / sum(weights) for w in weights], rel=1e-4)
        assert [row["rank"] for row in rows] == [*range(len(rows) - 1), None]
        assert rows[:-1] == sorted(rows[:-1], key=lambda row: -row["p_z"])
        assert rows[-1]["aligned_passage_id"] is rows[-1]["title"] is None
        assert rows[-1]["utility"] == 0
    compared = 0
    for rows in found.values():
        explained = explain_sentence(rows[0]["sentence"], root, of_pipeline(root), rows[0]["span"])
        if [c["passage_id"] for c in explained["candidates"][:-1]] != [row["aligned_passage_id"] for row in rows[:-1]]:
            continue  # `explain` does not know the sentence's own passage
        compared += 1
        assert [row["p_z"] for row in rows] == pytest.approx([c["p_z"] for c in explained["candidates"]], rel=1e-4)
        assert [row["utility"] for row in rows] == pytest.approx(
            [c["utility"] for c in explained["candidates"]], abs=1e-4
        )
    assert compared > len(found) / 2


def test_the_source_is_no_candidate_and_what_holds_the_span_is_marked(root: Path, found: dict[int, list[Row]]) -> None:
    snapshot = Snapshot.open(root / "data/snapshot/corpus")
    text = {snapshot.passage_id(i): snapshot.text(i) for i in range(len(snapshot))}
    marks = set()
    for row in (row for rows in found.values() for row in rows if row["rank"] is not None):
        assert row["aligned_passage_id"] != row["source_passage_id"]
        assert row["contains_span"] == (row["span"] in text[row["aligned_passage_id"]])
        marks.add(row["contains_span"])
    assert marks == {True, False}
    twice = next(rows for rows in found.values() if rows[0]["sentence"] == "He lived in Bergen until [MASK].")
    assert "He lived in Bergen" not in "".join(text[row["aligned_passage_id"]] for row in twice[:-1]), "trivial"


def test_a_draw_is_a_part_of_all_and_the_same_again(root: Path, found: dict[int, list[Row]], tmp_path: Path) -> None:
    report = small_project.Quiet()
    metrics = [align(root, tmp_path / name, limit=5, report=report) for name in ("a", "b")]
    assert metrics[0] == metrics[1]
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    drawn = read(tmp_path / "a")
    assert len(drawn) == metrics[0]["spans"] == 5
    assert sum(map(len, drawn.values())) == metrics[0]["rows"]
    best = [max(rows[:-1], key=lambda row: row["p_z_given_y"])["contains_span"] for rows in drawn.values()]
    assert metrics[0]["best_contains_span"] == np.mean(best)
    for number, rows in drawn.items():
        assert [r["aligned_passage_id"] for r in rows] == [r["aligned_passage_id"] for r in found[number]]
        assert [r["p_z_given_y"] for r in rows] == pytest.approx([r["p_z_given_y"] for r in found[number]], rel=1e-4)


def changed(root: Path, folder: Path, **options: Any) -> Path:
    """A copy of a run whose pre-training says that it had other options."""
    for name in ("models", "data"):
        shutil.copytree(root / name, folder / name)
    path = folder / "models/pretrain/manifest.json"
    manifest = read_json(path)
    manifest["sections"]["pretrain"] |= options
    write_manifest(path.parent, **{key: manifest[key] for key in ("kind", "fingerprint", "sections")})
    return folder


def test_without_a_null_document_there_is_no_utility(root: Path, tmp_path: Path) -> None:
    align(changed(root, tmp_path, null_document=False), tmp_path / "out.parquet", limit=4, report=small_project.Quiet())
    for rows in read(tmp_path / "out.parquet").values():
        assert len(rows) == 3
        assert all(row["utility"] is None and row["aligned_passage_id"] for row in rows)
        assert sum(row["p_z_given_y"] for row in rows) == pytest.approx(1, rel=1e-5)


def test_sentences_come_from_the_text_that_was_masked(root: Path, found: dict[int, list[Row]], tmp_path: Path) -> None:
    """pretrain.examples=warmup; here the warm-up text is the corpus again, so that the rows must be the same."""
    changed(root, tmp_path, examples="warmup")
    for name in ("snapshot", "spans"):
        shutil.copytree(root / "data" / name / "corpus", tmp_path / "data" / name / "warmup")
    shutil.rmtree(tmp_path / "data/spans/corpus")
    align(tmp_path, tmp_path / "out.parquet", limit=None, report=small_project.Quiet())
    assert read(tmp_path / "out.parquet") == found


def test_written_whole_or_not_at_all(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.parquet"
    out.write_bytes(b"earlier")
    calls = 0

    def fails_late(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError(28, "No space left on device")
        return contains_answer(*arguments)

    monkeypatch.setattr("realmops.commands.alignments.contains_answer", fails_late)
    with pytest.raises(OSError, match="No space"):
        align(root, out, limit=None, report=small_project.Quiet())
    assert [path.name for path in tmp_path.iterdir()] == ["out.parquet"]
    assert out.read_bytes() == b"earlier"


def test_a_file_that_cannot_be_written_is_told_before_anything_is_done(root: Path, tmp_path: Path) -> None:
    for out in (tmp_path, tmp_path / "gone" / "out.parquet"):
        refused = small_project.cli("alignments", "--root", root, "--out", out)
        assert refused.exit_code == 2
        assert f"{out} cannot be written: name a file in a folder that exists" in refused.output
    refused = small_project.cli("alignments", "--root", tmp_path)
    assert refused.exit_code == 2
    assert "it is no finished pretrain; run the stage that makes it" in refused.output
