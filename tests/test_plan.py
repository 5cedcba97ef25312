"""`realmops plan`: the arithmetic by hand, and a calibration of a toy model with and without a snapshot."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import small_project
from small_world import section

from realmops.commands.plan.scales import Measured, Scale, notes, scale, scales_of
from realmops.corpus.snapshot import Snapshot

MEASURED = Measured(
    device="cpu",
    threads=1,
    precision="fp32",
    lengths="assumed",
    passage_wordpieces=100.0,
    documents_per_second=100.0,
    batch_size=8,
    measured_batch_size=8,
    step_seconds=1.0,
    search_seconds_per_million=0.5,
    passage_bytes=1000.0,
    embedding_width=100,
    parameter_bytes=1_000_000,
    trainer_bytes=1_000_000_000,
    builder_bytes=500_000_000,
    host_memory=8_000_000_000,
    device_memory=8_000_000_000,
)
GPU = replace(MEASURED, device="cuda")


def test_a_million_passages_by_hand() -> None:
    """A step takes 1 s and half a second of search, a refresh 10,000 s, which are 6,667 steps; embeddings 0.4 GB."""
    found = scale(1_000_000, "exact", 50, MEASURED)
    expected = Scale(
        passages=1_000_000,
        index_type="exact",
        search_seconds=0.5,
        step_seconds=1.5,
        refresh_seconds=10_000.0,
        staleness_steps_mean=10_000.0,  # between 6,667, when it is adopted, and twice that
        staleness_steps_most=40_000 / 3,
        builders=14,  # 500 steps are 750 s, in which one embeds 75,000
        passages_per_second=4_000 / 3,
        trainer_bytes=1.0e9 + 0.8e9,
        gpu_bytes=0.0,
        builder_bytes=0.5e9,
        disk_bytes=1.0e9 + 3.2e9 + 9e6,  # snapshot, eight times the embeddings, three checkpoints
    )
    for name in Scale.__annotations__:
        assert getattr(found, name) == pytest.approx(getattr(expected, name)), name


def test_a_builder_that_is_faster_than_the_publications_waits_for_them() -> None:
    """10 steps of refresh, published every 50: the index is 10 steps old at first and 60 at last."""
    found = scale(1_000, "exact", 50, replace(MEASURED, search_seconds_per_million=0.0))
    assert found.refresh_seconds == 10.0
    assert (found.staleness_steps_mean, found.staleness_steps_most) == (35.0, 60.0)
    assert found.builders == 1


@pytest.mark.parametrize(
    ("measured", "kind", "host", "gpu"),
    [
        (MEASURED, "exact", 2.0, 0.0),
        (replace(MEASURED, precision="bf16"), "exact", 3.0, 0.0),  # each with a copy in bf16
        (MEASURED, "ivf", 2.0, 0.0),
        (MEASURED, "pq", 0.25, 0.0),
        (MEASURED, "hnsw", 2 * 1.64, 0.0),  # 256 bytes of links beside 400
        (GPU, "exact", 0.0, 2.0),
        (replace(GPU, precision="bf16"), "exact", 0.0, 2.0),
        (GPU, "ivf", 0.0, 2.0),
        (GPU, "pq", 0.0, 0.125),
        (GPU, "hnsw", 2 * 1.64, 0.0),
    ],
)
def test_copies_of_the_embeddings_in_memory(measured: Measured, kind: str, host: float, gpu: float) -> None:
    found = scale(1_000_000, kind, 50, measured)
    assert found.trainer_bytes == pytest.approx(1e9 + host * 4e8)
    assert found.gpu_bytes == pytest.approx(gpu * 4e8)


def test_search_that_was_not_timed_is_in_no_step() -> None:
    found = scale(1_000_000, "pq", 50, MEASURED)
    assert (found.step_seconds, found.search_seconds) == (1.0, 0.5)
    assert found.builders == 20, "500 s, in which one embeds 50,000: more than the 14 of a slower step"


def test_the_index_type_is_the_named_or_the_fitting_one() -> None:
    sizes = (1_000_000, 6_000_000)  # 0.4 and 2.4 GB; a quarter of the memory is 2 GB
    assert [s.index_type for s in scales_of(MEASURED, sizes, section("index", type="auto"), 50)] == ["exact", "pq"]
    assert [s.index_type for s in scales_of(MEASURED, sizes, section("index", type="ivf"), 50)] == ["ivf", "ivf"]


def test_the_notes_say_what_was_scaled_and_what_does_not_fit() -> None:
    small = scales_of(MEASURED, [1_000_000], section("index"), 50)
    text = "\n".join(notes(MEASURED, small))
    assert "in proportion from steps" not in text
    assert "more than this machine has" not in text
    assert "not timed" not in text
    large = scales_of(MEASURED, [200_000_000], section("index"), 50)
    text = "\n".join(notes(replace(MEASURED, measured_batch_size=2), large))
    assert "in proportion from steps of 2" in text
    assert "* more than this machine has (8 GB)" in text
    assert "not timed" in text


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Params and documents, and a snapshot under ``root``."""
    folder = tmp_path_factory.mktemp("plan")
    small_project.write_project(folder, snapshot={"block_wordpieces": 30})
    values = small_project.toy_values(snapshot={"block_wordpieces": 30})
    small_project.stage("snapshot", values, folder, folder / "root")
    return folder


def planned(project: Path, root: Path, *options: str) -> dict[str, Any]:
    params = project / "params.yaml"
    result = small_project.cli("plan", "--params", params, "--root", root, "--seconds", "1", "--json", *options)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_lengths_are_those_of_the_snapshot(project: Path) -> None:
    found = planned(project, project / "root", "--passages", "1000", "--passages", "5000000")
    measured = found["measured"]
    snapshot = Snapshot.open(project / "root/data/snapshot/corpus")
    wordpieces = (len(snapshot.tokens) + len(snapshot.title_flat)) / len(snapshot) + 3  # [CLS] and two [SEP]
    assert measured["passage_wordpieces"] == pytest.approx(wordpieces)
    assert measured["lengths"].endswith("data/snapshot/corpus")
    assert measured["embedding_width"] == 8
    assert measured["batch_size"] == 2
    for name in ("documents_per_second", "step_seconds", "search_seconds_per_million", "trainer_bytes"):
        assert measured[name] > 0, name
    assert [one["passages"] for one in found["scales"]] == [1000, 5_000_000]
    assert found["scales"] == [
        scale(one["passages"], one["index_type"], 4, Measured(**measured)).__dict__ for one in found["scales"]
    ]
    assert sorted(p.name for p in project.iterdir()) == sorted(
        [
            "documents.jsonl",
            "params.yaml",
            "root",
            "tagged.conll",
            *(f"questions.{s}.jsonl" for s in small_project.QUESTIONS),
        ]
    ), "nothing is written"


def test_without_a_snapshot_the_lengths_are_assumed_and_said_to_be(project: Path) -> None:
    found = planned(project, project / "none", "--set", "index.type=pq")
    assert [one["passages"] for one in found["scales"]] == [1_000_000, 13_000_000, 100_000_000, 1_000_000_000]
    assert {one["index_type"] for one in found["scales"]} == {"pq"}
    assert "assumed: invented text in passages of up to snapshot.block_wordpieces=30" in found["notes"][0]
    assert 20 < found["measured"]["passage_wordpieces"] <= 30
    assert not (project / "none").exists()


def test_the_table_has_a_column_for_each_size(project: Path) -> None:
    arguments = ("--root", project / "root", "--seconds", "1", "--passages", "2000000", "--passages", "30000000")
    result = small_project.cli("plan", "--params", project / "params.yaml", *arguments)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    [head] = [line for line in lines if " passages " in line and "2 M" in line]
    assert "30 M" in head
    for row in ("seconds per step", "refresh by one builder", "builders for a refresh in 500 steps", "disk"):
        assert any(row in line for line in lines), row
    assert any(line.startswith("Measured here (cpu, fp32, 1 CPU threads)") for line in lines)
