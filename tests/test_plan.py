"""`realmops plan`: the arithmetic by hand, one step, and a calibration of a toy model with and without a snapshot."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_project
import torch
from small_world import build_world, section, tiny_models

from realmops.commands.plan import notes, scale, table, training_step
from realmops.corpus.snapshot import Snapshot
from realmops.train.optimiser import BertAdamW, Group
from realmops.train.realm import Realm

MEASURED: dict[str, Any] = {
    "device": "cpu", "threads": 1, "precision": "fp32", "lengths": "assumed", "passage_wordpieces": 100.0,
    "documents_per_second": 100.0, "batch_size": 8, "measured_batch_size": 8, "step_seconds": 1.0,
    "search_seconds_per_million": 0.5, "passage_bytes": 1000.0, "embedding_width": 100,
    "parameter_bytes": 1_000_000, "trainer_bytes": 1_000_000_000, "builder_bytes": 500_000_000,
    "host_memory": 8_000_000_000, "device_memory": 8_000_000_000,
}  # fmt: skip
GPU = MEASURED | {"device": "cuda"}


def test_a_million_passages_by_hand() -> None:
    """A step takes 1 s and half a second of search, a refresh 10,000 s, which are 6,667 steps; embeddings 0.4 GB."""
    expected = {
        "passages": 1_000_000,
        "index_type": "exact",
        "search_seconds": 0.5,
        "step_seconds": 1.5,
        "refresh_seconds": 10_000.0,
        "staleness_steps_mean": 10_000.0,  # between 6,667, when it is adopted, and twice that
        "staleness_steps_most": 40_000 / 3,
        "builders": 14,  # 500 steps are 750 s, in which one embeds 75,000
        "passages_per_second": 4_000 / 3,
        "trainer_bytes": 1.0e9 + 0.8e9,
        "gpu_bytes": 0.0,
        "builder_bytes": 0.5e9,
        "disk_bytes": 1.0e9 + 3.2e9 + 9e6,  # snapshot, eight times the embeddings, three checkpoints
    }
    assert scale(1_000_000, "exact", 50, MEASURED) == pytest.approx(expected)


def test_a_builder_that_is_faster_than_the_publications_waits_for_them() -> None:
    """10 steps of refresh, published every 50: the index is 10 steps old at first and 60 at last."""
    found = scale(1_000, "exact", 50, MEASURED | {"search_seconds_per_million": 0.0})
    assert found["refresh_seconds"] == 10.0
    assert (found["staleness_steps_mean"], found["staleness_steps_most"]) == (35.0, 60.0)
    assert found["builders"] == 1


@pytest.mark.parametrize(
    ("measured", "kind", "host", "gpu"),
    [
        (MEASURED, "exact", 2.0, 0.0),
        (MEASURED | {"precision": "bf16"}, "exact", 3.0, 0.0),  # each with a copy in bf16
        (MEASURED, "ivf", 2.0, 0.0),
        (MEASURED, "pq", 0.25, 0.0),
        (MEASURED, "hnsw", 2 * 1.64, 0.0),  # 256 bytes of links beside 400
        (GPU, "exact", 0.0, 2.0),
        (GPU | {"precision": "bf16"}, "exact", 0.0, 2.0),
        (GPU, "ivf", 0.0, 2.0),
        (GPU, "pq", 0.0, 0.125),
        (GPU, "hnsw", 2 * 1.64, 0.0),
    ],
)
def test_copies_of_the_embeddings_in_memory(measured: dict[str, Any], kind: str, host: float, gpu: float) -> None:
    found = scale(1_000_000, kind, 50, measured)
    assert found["trainer_bytes"] == pytest.approx(1e9 + host * 4e8)
    assert found["gpu_bytes"] == pytest.approx(gpu * 4e8)


def test_search_that_was_not_timed_is_in_no_step() -> None:
    found = scale(1_000_000, "pq", 50, MEASURED)
    assert (found["step_seconds"], found["search_seconds"]) == (1.0, 0.5)
    assert found["builders"] == 20, "500 s, in which one embeds 50,000: more than the 14 of a slower step"


def test_the_index_type_is_the_named_or_the_fitting_one() -> None:
    sizes = (1_000_000, 6_000_000)  # 0.4 and 2.4 GB; a quarter of the memory is 2 GB
    assert [scale(size, "auto", 50, MEASURED)["index_type"] for size in sizes] == ["exact", "pq"]
    assert [scale(size, "ivf", 50, MEASURED)["index_type"] for size in sizes] == ["ivf", "ivf"]


def test_the_notes_say_what_was_scaled_and_what_does_not_fit() -> None:
    small = [scale(1_000_000, "auto", 50, MEASURED)]
    text = "\n".join(notes(MEASURED, small))
    assert "in proportion from steps" not in text
    assert "more than this machine has" not in text
    assert "not timed" not in text
    needed = max(small[0]["trainer_bytes"], small[0]["builder_bytes"])
    for memory, is_told in ((needed, False), (needed - 1, True)):
        told = "\n".join(notes(MEASURED | {"host_memory": int(memory)}, small))
        assert ("more than this machine has" in told) == is_told
    large = [scale(200_000_000, "auto", 50, MEASURED)]
    text = "\n".join(notes(MEASURED | {"measured_batch_size": 2}, large))
    assert "in proportion from steps of 2" in text
    assert "* more than this machine has (8 GB)" in text
    assert "not timed" in text


@pytest.mark.parametrize("measured", [MEASURED, GPU])
def test_the_table_marks_what_is_no_whole_step_and_what_does_not_fit(measured: dict[str, Any]) -> None:
    shown = table(measured, [scale(size, "auto", 50, measured) for size in (1_000_000, 200_000_000)])
    cells = [list(column.cells) for column in shown.columns]
    rows = dict(zip(cells[0], zip(*cells[1:], strict=True), strict=True))
    assert [column.header for column in shown.columns] == ["passages", "1 M", "200 M"]
    assert rows["index.type"] == ("exact", "pq")
    assert rows["seconds per step"] == ("1.5 s", "> 1 s")
    assert rows["refresh by one builder"] == ("2.78 h", "23.1 days")
    assert rows["  staleness then, mean, steps"] == ("10 k", "3 M")
    assert rows["builders for a refresh in 500 steps"] == ("14", "4,000")
    if measured == GPU:
        assert rows["host memory, trainer"] == ("1 GB", "1 GB")
        assert rows["GPU memory, trainer's index"] == ("800 MB", "10 GB *")
        assert rows["GPUs, trainer and builders"] == ("15", "4,001")
    else:
        assert rows["host memory, trainer"] == ("1.8 GB", "21 GB *")
        assert not any(str(name).startswith("GPU") for name in rows)


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
    assert found["scales"] == [scale(one["passages"], one["index_type"], 4, measured) for one in found["scales"]]
    assert sorted(p.name for p in project.iterdir()) == sorted(
        [
            "documents.jsonl", "params.yaml", "root", "tagged.conll",
            *(f"questions.{s}.jsonl" for s in small_project.QUESTIONS),
        ]
    ), "nothing is written"  # fmt: skip


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
    assert any(" passages " in line and "2 M" in line and "30 M" in line for line in lines)
    assert any(line.startswith("Measured here (cpu, fp32, 1 CPU threads)") for line in lines)


@pytest.mark.parametrize("apart", [True, False])
def test_a_step_learns_from_other_passages_for_each_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    """As with a trained retriever: one that has learned nothing finds the same few for all."""
    world = build_world(tmp_path)
    passages = len(world.snapshot)
    retriever, reader = tiny_models(world, copying={"copies": apart, "apart": apart})
    options = section("pretrain", batch_size=passages, candidates=4)
    realm = Realm(retriever, reader, world.snapshot, options, torch.float32)
    read: list[list[int]] = []
    loss = realm.loss

    def spied(examples: Any, found: list[list[int]], **how: Any) -> Any:
        read.extend(found)
        return loss(examples, found, **how)

    monkeypatch.setattr(realm, "loss", spied)
    before = [parameter.clone() for parameter in reader.parameters()]
    optimiser = BertAdamW([Group("reader", reader, 1e-3)], weight_decay=0.01, clip=1.0)
    training_step(realm, optimiser, range(passages), np.random.default_rng(0))
    assert len(read) == passages
    assert len({passage for row in read for passage in row}) > 0.8 * passages
    assert not all(torch.equal(old, new) for old, new in zip(before, reader.parameters(), strict=True))
