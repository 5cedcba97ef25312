"""The builder's loop: what it builds next, what a restart reuses, and its exit codes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from exchange_lab import (
    IDENTITY,
    PARAMS,
    PART_ROWS,
    ROOT,
    ROWS,
    WORK,
    Fault,
    Killed,
    MemoryFiles,
    StillClock,
    builder_on,
    check_index,
    embedder,
    open_trainer,
)
from safetensors.torch import save

from realmops.files import Files
from realmops.refresh import child_processes
from realmops.refresh.builder import DONE, FAULT, MISCONFIGURED, Builder, BuilderWork, run_builder
from realmops.refresh.builder_process import merge
from realmops.refresh.child_processes import process_name
from realmops.refresh.exchange import Exchange, part_name
from realmops.refresh.trainer import RefreshPolicy, TrainerSide
from realmops.refresh.versions import Version, version_name
from realmops.search.embeddings import EMBEDDINGS, view_embeddings


@pytest.fixture
def files() -> MemoryFiles:
    return MemoryFiles()


@pytest.fixture
def trainer(files: MemoryFiles) -> TrainerSide:
    """A trainer with weights of step 0."""
    trainer = open_trainer(files)
    trainer.publish_weights(0, PARAMS, {})
    return trainer


def embedded_by(files: Files) -> list[int]:
    """Let a builder build once; return the first rows of the parts that it embedded, in its order."""
    embedded: list[int] = []

    def recording(weights: Any) -> Any:
        return lambda first, end: embedded.append(first) or embedder(weights)(first, end)

    exchange = Exchange.open(ROOT, IDENTITY, "builder-0", files=files, clock=StillClock(), grace=0.0)
    Builder(exchange, BuilderWork(ROWS, PART_ROWS, recording, WORK.merge), on_status=lambda message: None).build_next()
    return embedded


def test_an_index_names_its_weights_and_rows(files: MemoryFiles, trainer: TrainerSide) -> None:
    trainer.publish_weights(7, PARAMS, {})
    digest = trainer.exchange.weights.manifest(version_name(1, 7)).digest
    builder = builder_on(files, StillClock())
    assert builder.build_next()
    assert builder.build_next()
    index = trainer.index_for(7)
    check_index(index)
    expected = {"step": 7, "rows": ROWS, "recall": 1.0, "weights": digest}
    assert {key: index.meta[key] for key in expected} == expected
    assert not builder.build_next()


def test_the_index_of_realm_joins_its_parts_in_one_safetensors_file() -> None:
    rows = torch.tensor([[1.0, -2.0], [3.0, 4.0], [0.5, 6.0]])
    run = {"passages": 3, "embedding_width": 2}
    model = {"realmops.json": b"{}", "model.safetensors": b"r"}
    weights = Version("v-000001-00000007", "", "", "", run, {}, {"trainer": {"published": 9.0}}, 0.0, model)
    parts = iter([{EMBEDDINGS: save({"embeddings": rows[a:b]})} for a, b in ((0, 2), (2, 3))])
    merged, meta = merge(weights, parts)
    assert merged == {EMBEDDINGS: save({"embeddings": rows}), **model}
    assert view_embeddings(merged[EMBEDDINGS]).tolist() == rows.tolist()
    assert meta == {"published": 9.0}


@pytest.mark.parametrize(("adopt", "expected"), [("fixed_lag", [0, 2, 4]), ("as_soon_as_ready", [4])])
def test_awaited_weights_are_built_oldest_first_and_others_newest_only(
    files: MemoryFiles, adopt: Any, expected: list[int]
) -> None:
    trainer = open_trainer(files, RefreshPolicy(adopt))
    for step in (0, 2, 4):
        trainer.publish_weights(step, PARAMS, {})
    builder, built = builder_on(files, StillClock()), list[str]()
    while builder.build_next():
        built += [name for name in builder.exchange.indexes.names() if name not in built]
    assert [int(name[-8:]) for name in built] == expected


def test_a_killed_builder_resumes_with_its_committed_parts(files: MemoryFiles, trainer: TrainerSide) -> None:
    at = 0
    while len(builder_on(files, StillClock()).exchange.parts.names()) < 1:
        at += 1
        with pytest.raises(Killed):
            embedded_by(files.seen_by(Fault(at)))
    assert len(embedded_by(files)) == 1  # one of two parts
    check_index(trainer.index_for(0))


def run(
    files: Files, work: BuilderWork = WORK, *, at_rest: Any = lambda: None, **identity: str
) -> tuple[int, list[str]]:
    """Run a builder that calls ``at_rest`` when it waits for weights; return its exit code and its status lines."""
    status: list[str] = []

    def on_status(message: str) -> None:
        status.append(message.split(":")[0])
        if message == "waiting for weights":
            at_rest()

    clock, expected = StillClock(), {**IDENTITY, **identity}
    return run_builder(ROOT, expected, work, files=files, clock=clock, grace=0.0, on_status=on_status), status


@pytest.mark.parametrize("damage", ["cut", "of other weights"])
def test_a_damaged_part_and_one_of_other_weights_are_embedded_again(
    files: MemoryFiles, trainer: TrainerSide, damage: str
) -> None:
    weights = trainer.exchange.weights.load(version_name(1, 0))
    name, digest = part_name(version_name(1, 0), 0, 3), "other" if damage == "of other weights" else weights.digest
    parts = builder_on(files, StillClock()).exchange.parts
    parts.publish(name, embedder(weights)(0, 3), {"weights": digest})
    if damage == "cut":
        files._at(ROOT / "parts" / name / "rows.bin").data = b""
    code, status = run(files, at_rest=lambda: trainer.finish("done"))
    assert (code, status.count("starting over")) == (DONE, 1)
    check_index(trainer.index_for(0))


def test_a_builder_outlives_failures_of_the_volume(files: MemoryFiles, trainer: TrainerSide) -> None:
    left = [9]

    def failing(operation: str, path: Path, effect: Any) -> Any:
        if operation == "fsync" and "parts" in path.parts and left[0] > 0:
            left[0] -= 1
            raise OSError(28, "no room", str(path))
        return effect()

    code, status = run(files.seen_by(failing), at_rest=lambda: trainer.finish("done"))
    assert (code, left) == (DONE, [0])
    assert "starting over" in status


def test_another_identity_ends_with_2_and_a_fault_of_the_embedding_with_1(
    files: MemoryFiles, trainer: TrainerSide
) -> None:
    def broken(weights: Any) -> Any:
        raise ValueError("weights of another shape")

    assert run(files, corpus="dead")[0] == MISCONFIGURED
    assert run(files, BuilderWork(5, 3, broken, WORK.merge))[0] == FAULT


def test_a_finished_run_ends_the_builder_with_0(files: MemoryFiles) -> None:
    open_trainer(files).finish("failed", "loss is not a number")
    status: list[str] = []
    assert run_builder(ROOT, IDENTITY, WORK, files=files, clock=StillClock(), on_status=status.append) == DONE
    assert status == ["stopping: the trainer has finished (failed: loss is not a number)"]


@pytest.mark.parametrize("host", ["", "localhost", "GPU.größe", "1." * 99])
def test_a_builder_on_a_host_of_the_same_name_does_not_disturb_another(
    files: MemoryFiles, trainer: TrainerSide, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """In containers their process ids are often equal, too. The second starts before the first commits a part."""
    monkeypatch.setattr(child_processes.socket, "gethostname", lambda: host)
    monkeypatch.setattr(child_processes.os, "getpid", lambda: 1)
    first, second = process_name(), process_name()

    def around(operation: str, path: Path, effect: Any) -> Any:
        if operation == "rename" and path.parent.name == "parts":
            builder_on(files, StillClock(), second)
        return effect()

    assert builder_on(files.seen_by(around), StillClock(), first).build_next()
    check_index(trainer.index_for(0))
