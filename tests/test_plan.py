"""`realmops plan`: the arithmetic by hand, one step, and a calibration of a toy model with and without a snapshot."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_project
import torch
import yaml
from small_world import build_world, section, tiny_models

from realmops.commands import duration
from realmops.commands.duration import START_SECONDS, Sizes, seconds_of, told, work_of
from realmops.commands.plan import notes, scale, table, training_step
from realmops.commands.run import run_stages
from realmops.corpus.snapshot import Snapshot
from realmops.train.optimiser import BertAdamW, Group
from realmops.train.realm import Realm

MEASURED: dict[str, Any] = {
    "device": "cpu", "types_on_gpu": [], "threads": 1, "precision": "fp32", "lengths": "assumed",
    "passage_wordpieces": 100.0,
    "documents_per_second": 100.0, "batch_size": 8, "measured_batch_size": 8, "step_seconds": 1.0,
    "search_seconds_per_million": 0.5, "passage_bytes": 1000.0, "embedding_width": 100,
    "parameter_bytes": 1_000_000, "trainer_bytes": 1_000_000_000, "builder_bytes": 500_000_000,
    "host_memory": 8_000_000_000, "device_memory": 8_000_000_000,
}  # fmt: skip
GPU = MEASURED | {"device": "cuda"}
FAISS = GPU | {"types_on_gpu": ["ivf", "pq"]}


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
        (GPU, "ivf", 2.0, 0.0),  # with FAISS for CPUs
        (GPU, "pq", 0.25, 0.0),
        (GPU, "hnsw", 2 * 1.64, 0.0),
        (FAISS, "exact", 0.0, 2.0),
        (FAISS, "ivf", 0.0, 2.0),
        (FAISS, "pq", 0.0, 0.25),
        (FAISS, "hnsw", 2 * 1.64, 0.0),
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
        assert rows["host memory, trainer"] == ("1 GB", "21 GB *")
        assert rows["GPU memory, trainer's index"] == ("800 MB", "0 MB")
        assert rows["GPUs, trainer and builders"] == ("15", "4,001")
    else:
        assert rows["host memory, trainer"] == ("1.8 GB", "21 GB *")
        assert not any(str(name).startswith("GPU") for name in rows)


def test_the_work_of_a_run_by_hand() -> None:
    """100 passages of 40 wordpieces and 8 beside them, in sentences of 20; 50 questions."""
    sizes = Sizes(100, 4000, 200, 0, {"train": 50, "dev": 10, "test": 20})
    values = small_project.toy_values(
        ict={"steps": 5, "batch_size": 4, "reader_steps": 3, "reader_batch_size": 2, "reader_wordpieces": 100},
        pretrain={"steps": 2, "masked_sentences": 10, "candidates": 3, "reader_wordpieces": 100},
        finetune={"epochs": 2, "batch_size": 5, "reader_candidates": 2, "reader_wordpieces": 100},
        evaluate={"bm25": False},
    )
    assert work_of(values, sizes) == {
        "snapshot": {"cut": 4000},
        "tag": {},
        "ict": {"retriever learns": 5 * 4 * (48 + 20), "reader learns": 3 * 2 * (20 + 48)},
        "pretrain": {"steps": 2, "embedded": 2 * 100 * 48, "read": (10 + 2 * 10) * 2 * (20 + 48)},
        "finetune": {
            "read": 10 * 2 * (48 + 16),
            "retriever learns": 2 * 50 * 16,
            "embedded": 100 * 48,
            "reader learns": 20 * 5 * 2 * (48 + 16),
        },
        "evaluate": {"read": 20 * 2 * (48 + 16), "embedded": 2 * 100 * 48},
    }
    rates = {"reader_wordpieces_per_second": 100, "retriever_wordpieces_per_second": 50, **MEASURED}
    found = seconds_of({"a": {"reader learns": 600, "retriever learns": 100, "embedded": 5000, "read": 300}}, rates)
    assert found == {"a": pytest.approx(START_SECONDS + 6 + 2 + 0.5 + 1)}


def test_steps_that_a_small_corpus_does_not_take_cost_nothing() -> None:
    sizes = Sizes(10, 400, 20, 4000, {"train": 50, "dev": 10, "test": 20})
    values = small_project.toy_values(ict={"steps": 60, "batch_size": 8, "reader_steps": 90, "reader_batch_size": 4})
    values["ict"]["epochs"] = 2
    found = work_of(values, sizes)["ict"]
    assert found["retriever learns"] == 3 * 8 * (48 + 20)  # 20 passages in batches of 8
    assert found["reader learns"] == 50 * 4 * (20 + 48)  # 200 of the warm-up text's
    assert "not known" in told(None, {}, str)[0]


@pytest.mark.parametrize("seconds", [60.0, -1.0])
def test_passages_of_documents_are_guessed_from_those_that_are_read_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    monkeypatch.setattr(duration, "LOOK_SECONDS", seconds)
    documents = small_project.write_json_lines(tmp_path / "d.jsonl", [{"title": "T", "text": "a b c d " * 25}] * 3000)
    options = section("snapshot", block_wordpieces=53, whole_documents=False)
    passages, wordpieces = duration.look_at(documents, options)
    assert (passages, wordpieces) == (pytest.approx(9000, rel=0.01), pytest.approx(405_000, rel=0.01))


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
    assert set(found["run"]["seconds"]) == {"snapshot", "tag", "ict", "pretrain", "finetune", "evaluate"}
    assert (found["run"]["passages"], found["run"]["questions"]) == (len(snapshot), {"train": 6, "dev": 2, "test": 2})
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
    assert any(line.startswith("This run takes about ") for line in lines)
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


def test_a_run_of_several_stages_begins_with_its_steps(tmp_path: Path) -> None:
    write = small_project.write_project(tmp_path, tag={"method": "dates", "steps": 7})
    values = yaml.safe_load(write.read_text())
    report = small_project.Quiet()
    names = ("snapshot", "tag")
    list(run_stages(names, values, project=tmp_path, root=tmp_path / "root", report=report, force=False))
    assert report.said[0].startswith("run: 2 stages"), report.said
    assert "tag 7" not in report.said[0], "dates need no training"
    assert "ict 8, pretrain 12; finetune, epochs over the questions: 2" in duration.begins(
        ("ict", "pretrain", "finetune"), values
    )
