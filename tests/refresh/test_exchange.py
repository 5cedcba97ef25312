"""Trainer and builders over one exchange in single steps: I1 to I8; random schedules are in test_schedules.py."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from exchange_lab import (
    IDENTITY,
    PARAMS,
    ROOT,
    WORK,
    MemoryFiles,
    Plan,
    StillClock,
    builder_on,
    check_index,
    life,
    open_trainer,
    sound,
    undisturbed,
)  # fmt: skip

from realmops import artifacts
from realmops.refresh.builder import DONE, MISCONFIGURED, Builder, run_builder
from realmops.refresh.exchange import Exchange, FencedError
from realmops.refresh.trainer import RefreshPolicy, TrainerSide
from realmops.refresh.versions import CorruptVersionError, version_name

PLAN = Plan()
AS_SOON = RefreshPolicy("as_soon_as_ready", max_staleness_steps=3, builder_timeout=1e6)


def with_builder(files: MemoryFiles, around: Any = None) -> Exchange:
    """The exchange of a trainer whose waits let a builder work."""

    def work() -> None:
        with suppress(CorruptVersionError):
            build(files)

    clock = StillClock(work)
    return Exchange.open(ROOT, IDENTITY, files=files.seen_by(around), clock=clock, grace=0.0)


def finished_run() -> MemoryFiles:
    files = MemoryFiles()
    assert life(with_builder(files), PLAN) == undisturbed(PLAN)
    return files


def test_i3_the_undisturbed_run_ends_as_defined_and_leaves_only_what_is_kept() -> None:
    files = finished_run()
    sound(files)
    kept = {kind: files.listdir(ROOT / kind) for kind in ("checkpoints", "weights", "parts", "indexes", "finished")}
    step = {number: version_name(1, number) for number in range(7)}
    assert kept == {
        "checkpoints": [step[4], step[6]],
        "weights": [step[4]],  # of the step of a kept checkpoint
        "parts": [],
        "indexes": [step[0], step[2], step[4]],  # not collected since the last checkpoint
        "finished": ["v-000001"],
    }
    assert with_builder(files).finished() == "done"
    TrainerSide(with_builder(files))
    assert with_builder(files).finished() is None  # the next trainer has no outcome yet


# The trainer's side in single steps


def build(files: MemoryFiles, name: str = "0") -> bool:
    builder = builder_on(files, StillClock(), name)
    built = builder.build_next()
    builder.exchange.collect_garbage()
    return built


def test_i8_an_exchange_of_another_run_is_refused_with_the_field_and_both_values() -> None:
    files = MemoryFiles()
    open_trainer(files)
    for holder in ("trainer", "builder-0"):
        with pytest.raises(ValueError, match=r"vocabulary is 'beef', expected 'dead'"):
            Exchange.open(ROOT, {**IDENTITY, "vocabulary": "dead"}, holder, files=files)
        with pytest.raises(ValueError, match="dtype is None, expected 'bf16'"):
            Exchange.open(ROOT, {**IDENTITY, "dtype": "bf16"}, holder, files=files)
    with pytest.raises(FileNotFoundError, match="no exchange yet: its trainer has not started"):
        Exchange.open(Path("/elsewhere"), IDENTITY, "builder-0", files=files)


def test_i8_an_index_of_another_run_that_was_copied_in_is_never_adopted() -> None:
    files, foreign = MemoryFiles(), MemoryFiles()
    for volume, corpus in ((files, "c0ffee"), (foreign, "dead")):
        exchange = Exchange.open(ROOT, {**IDENTITY, "corpus": corpus}, files=volume, clock=StillClock(), grace=0.0)
        trainer = TrainerSide(exchange, RefreshPolicy(builder_timeout=1.0))
        trainer.publish_weights(0, PARAMS, {})
        if corpus == "c0ffee":
            ours = trainer
        else:
            exchange = Exchange.open(ROOT, exchange.run or {}, "builder-0", files=volume, clock=StillClock())
            Builder(exchange, WORK, on_status=lambda message: None).build_next()
    name = version_name(1, 0)
    files._folder(ROOT / "indexes")[name] = foreign._folder(ROOT / "indexes")[name]
    with pytest.raises(TimeoutError):
        ours.index_for(0)
    assert ours.exchange.indexes.quarantined() != []


def test_i5_a_wait_reports_its_subject_its_duration_and_the_last_heartbeat() -> None:
    files, told = MemoryFiles(), []
    trainer = open_trainer(
        files,
        RefreshPolicy(builder_timeout=4.0, poll=0.25),
        on_wait=lambda message, seconds: told.append((seconds, message)),
    )
    trainer.publish_weights(0, PARAMS, {})
    with pytest.raises(TimeoutError, match="waiting for the index of step 0 for 4 s; no builder has ever been seen"):
        trainer.index_for(0)
    assert [seconds for seconds, _ in told] == [0.0, 1.0, 2.0, 3.0]
    builder_on(files, StillClock()).exchange.beat("embedding part 1 of 2")
    with pytest.raises(TimeoutError, match=r"builder-0 \(embedding part 1 of 2\), last heartbeat 4 s ago"):
        trainer.index_for(0)


def test_an_index_whose_weights_were_never_published_is_an_error_at_once() -> None:
    trainer = open_trainer(MemoryFiles())
    with pytest.raises(ValueError, match=r"no index of step 5 is possible: its weights were not published"):
        trainer.index_for(5)
    with pytest.raises(ValueError, match="publish the weights of this step first"):
        trainer.newest_index(5)


def test_restore_falls_back_over_damaged_checkpoints_loudly_and_never_to_step_0(
    caplog: pytest.LogCaptureFixture,
) -> None:
    files = finished_run()
    checkpoints = ROOT / "checkpoints"
    files._at(checkpoints / version_name(1, 6) / "params.bin").data = b"rotten" * 5
    trainer = TrainerSide(with_builder(files), PLAN.policy)
    checkpoint = trainer.restore()
    assert (checkpoint.step, checkpoint.meta["trainer"]) == (4, {"loss": 0.5})
    assert "v-000001-00000006 is quarantined" in caplog.text
    assert life(with_builder(files), PLAN) == undisturbed(PLAN)
    for name in [name for name in files.listdir(checkpoints) if name.startswith("v-")]:
        del files._folder(checkpoints / name)["params.bin"]
    for _ in range(2):  # the second time they have been set aside already
        with pytest.raises(RuntimeError, match="holds checkpoints and none can be used"):
            TrainerSide(with_builder(files), PLAN.policy).restore()


def test_a_checkpoint_that_a_collector_takes_and_brings_back_is_used() -> None:
    files, name = finished_run(), version_name(1, 6)
    checkpoints, reads = ROOT / "checkpoints", []

    def meddled(operation: str, path: Path, effect: Callable[[], Any]) -> Any:
        if operation == "read" and path.parent == checkpoints / name:
            reads.append(path.name)
            if len(reads) == 2:
                files.rename(checkpoints / name, checkpoints / f".trash.{name}")
        elif operation == "unlink" and len(reads) == 2:
            files.rename(checkpoints / f".trash.{name}", checkpoints / name)
        return effect()

    checkpoint = open_trainer(files.seen_by(meddled)).restore()
    assert (checkpoint.name, reads[:2]) == (name, ["manifest.json", "params.bin"])


def test_i6_a_damaged_index_is_set_aside_and_built_again() -> None:
    files = MemoryFiles()
    trainer = open_trainer(files, clock=StillClock(lambda: build(files) and None))
    trainer.publish_weights(0, PARAMS, {})
    build(files)
    node = files._at(ROOT / "indexes" / version_name(1, 0) / "rows.bin")
    node.data = bytes([node.data[0] ^ 1]) + node.data[1:]
    check_index(trainer.index_for(0))
    assert len(trainer.exchange.indexes.quarantined()) == 1


def test_weights_that_were_damaged_before_they_were_built_end_the_wait() -> None:
    files = MemoryFiles()
    trainer = TrainerSide(with_builder(files), PLAN.policy)
    trainer.publish_weights(0, PARAMS, {})
    files._at(ROOT / "weights" / version_name(1, 0) / "params.bin").data = b""
    with pytest.raises(RuntimeError, match="run the stage again: training resumes from the previous checkpoint"):
        trainer.index_for(0)


def fenced(old: TrainerSide, files: MemoryFiles, match: str) -> None:
    """Whatever ``old`` would write or take is refused, and nothing is written."""
    before = {kind: files.listdir(ROOT / kind) for kind in ("checkpoints", "weights", "finished")}
    for act in (
        lambda: old.save_checkpoint(2, PARAMS, {}),
        lambda: old.publish_weights(2, PARAMS, {}),
        lambda: old.finish("done"),
        lambda: old.index_for(0),
    ):
        with pytest.raises(FencedError, match=match):
            act()
    assert {kind: files.listdir(ROOT / kind) for kind in before} == before


def test_a_trainer_that_resumes_next_to_its_successor_writes_nothing_more() -> None:
    files = MemoryFiles()
    old = open_trainer(files)
    old.publish_weights(0, PARAMS, {})
    new = open_trainer(files)
    fenced(old, files, "trainer 2 has taken over")
    new.save_checkpoint(2, PARAMS, {})


def test_the_index_that_a_checkpoint_names_outlives_newer_ones_and_its_pin() -> None:
    files = MemoryFiles()
    trainer = open_trainer(files, AS_SOON)
    trainer.publish_weights(0, PARAMS, {})
    build(files)
    trainer.newest_index(0)
    trainer.save_checkpoint(1, PARAMS, {})
    for step in (2, 4, 6):
        trainer.publish_weights(step, PARAMS, {})
        build(files)
    again = open_trainer(files)  # fixed_lag: needs that very index
    assert files.listdir(ROOT / "pins" / "trainer") == []
    build(files)
    checkpoint = again.restore()
    assert checkpoint.step == 1
    check_index(again.index_for(0))


def test_weights_published_after_the_checkpoint_of_their_step_belong_to_it() -> None:
    files = MemoryFiles()
    first = open_trainer(files)
    first.save_checkpoint(2, PARAMS, {})
    first.publish_weights(2, PARAMS, {})
    for _ in range(2):  # before and after the index is there, adopted and its weights are collected
        second = open_trainer(files)
        assert second.restore() is not None
        second.publish_weights(2, PARAMS, {})
        assert files.listdir(ROOT / "weights") == [version_name(1, 2)]
        build(files)
        assert second.index_for(2).name == version_name(1, 2)


def test_what_a_lost_life_published_is_retired_and_its_indexes_are_not_adopted() -> None:
    files = MemoryFiles()
    first = open_trainer(files, AS_SOON)
    first.save_checkpoint(0, PARAMS, {})
    first.publish_weights(0, PARAMS, {})
    build(files)
    assert first.newest_index(0) is not None
    first.publish_weights(2, {"params.bin": b"lost" * 8}, {})
    build(files)
    second = open_trainer(files, AS_SOON)
    checkpoint = second.restore()
    assert checkpoint.step == 0
    assert version_name(1, 2) in files.listdir(ROOT / "indexes")
    assert files.listdir(ROOT / "weights") == [version_name(1, 0)]
    found = second.newest_index(0)
    assert found.name == version_name(1, 0)
    assert second.newest_index(3) is None


def test_i2_as_soon_as_ready_takes_the_newest_once_and_waits_when_it_is_too_stale() -> None:
    files, told = MemoryFiles(), []
    clock = StillClock(lambda: build(files) and None)
    policy = RefreshPolicy("as_soon_as_ready", max_staleness_steps=3)
    trainer = open_trainer(files, policy, clock, on_wait=lambda message, seconds: told.append(message))
    trainer.publish_weights(0, PARAMS, {})
    index = trainer.newest_index(0)
    assert index.step == 0
    assert "waiting for a first index" in told.pop()
    trainer.publish_weights(2, PARAMS, {})
    assert trainer.newest_index(3) is None
    index = trainer.newest_index(4)
    assert index.step == 2
    assert "waiting for a newer index at step 4" in told.pop()
    assert trainer.newest_index(4) is None
    assert told == []


@pytest.mark.parametrize(("on_stale", "warned"), [("warn", True), ("continue", False)])
def test_a_stale_index_can_be_warned_of_or_used_in_silence(
    on_stale: Any, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    files = MemoryFiles()
    trainer = open_trainer(files, RefreshPolicy("as_soon_as_ready", max_staleness_steps=3, on_stale=on_stale))
    trainer.publish_weights(0, PARAMS, {})
    build(files)
    trainer.newest_index(0)
    trainer.publish_weights(2, PARAMS, {})
    assert trainer.newest_index(4) is None
    assert ("the index is 4 steps old" in caplog.text) == warned


def test_i4_storage_stays_bounded_when_the_builder_is_away_and_when_it_is_fast() -> None:
    files = MemoryFiles()
    trainer = open_trainer(files, RefreshPolicy("as_soon_as_ready"))
    for step in range(0, 40, 2):
        trainer.publish_weights(step, PARAMS, {})
    assert files.listdir(ROOT / "weights") == [version_name(1, 36), version_name(1, 38)]
    for step in range(40, 80, 2):
        trainer.publish_weights(step, PARAMS, {})
        build(files)
        trainer.newest_index(step)
        trainer.save_checkpoint(step, PARAMS, {})
        counts = {
            kind: len(files.listdir(ROOT / kind))
            for kind in ("checkpoints", "weights", "indexes", "parts", "pins/trainer")
        }
        assert counts["checkpoints"] <= 2
        assert counts["weights"] <= 3
        assert counts["indexes"] <= 4
        assert counts["parts"] == 0
        assert counts["pins/trainer"] == 1


def test_the_index_in_use_stays_pinned_until_a_checkpoint_names_the_next_one() -> None:
    files = MemoryFiles()
    trainer = open_trainer(files, RefreshPolicy("as_soon_as_ready"))
    pins = lambda: sorted(pin.split(".")[1] for pin in files.listdir(ROOT / "pins" / "trainer"))  # noqa: E731
    for step in (0, 2):
        trainer.publish_weights(step, PARAMS, {})
        build(files)
        trainer.newest_index(step)
    assert pins() == [version_name(1, 0), version_name(1, 2)]
    trainer.save_checkpoint(3, PARAMS, {})
    assert pins() == [version_name(1, 2)]


# The exchange is taken away or belongs to somebody else


def test_a_trainer_whose_exchange_was_removed_ends_and_writes_nothing_into_the_next() -> None:
    files = MemoryFiles()
    for _ in range(2):
        old = open_trainer(files)
    old.publish_weights(0, PARAMS, {})
    removed = files._folder(ROOT.parent).pop(ROOT.name)
    fenced(old, files, "was removed or emptied while this trainer used it")
    new = open_trainer(files)
    new.publish_weights(0, PARAMS, {})
    fenced(old, files, "was removed or emptied")
    files._folder(ROOT.parent)[ROOT.name] = removed
    old.save_checkpoint(2, PARAMS, {})


def test_a_builder_whose_exchange_became_another_runs_ends_and_sets_nothing_aside() -> None:
    files, said = MemoryFiles(), list[str]()
    open_trainer(files)
    other = {**IDENTITY, "corpus": "dead"}

    def replaced(message: str) -> None:
        said.append(message)
        if message == "waiting for weights":
            del files._folder(ROOT.parent)[ROOT.name]
            trainer = TrainerSide(Exchange.open(ROOT, other, files=files, clock=StillClock(), grace=0.0))
            trainer.publish_weights(0, PARAMS, {})

    code = run_builder(ROOT, IDENTITY, WORK, files=files, clock=StillClock(), grace=0.0, on_status=replaced)
    assert (code, said) == (MISCONFIGURED, ["waiting for weights"])
    assert files.listdir(ROOT / "weights") == [version_name(1, 0)]


def test_a_builder_whose_exchange_was_removed_waits_and_reports_it() -> None:
    files, said = MemoryFiles(), list[str]()
    trainer = open_trainer(files)
    removed: list[Any] = []

    def taken(message: str) -> None:
        said.append(message)
        if message == "waiting for weights" and not removed:
            removed.append(files._folder(ROOT.parent).pop(ROOT.name))
        elif "is no exchange yet" in message:
            files._folder(ROOT.parent)[ROOT.name] = removed[0]
            trainer.finish("done")

    assert run_builder(ROOT, IDENTITY, WORK, files=files, clock=StillClock(), on_status=taken) == DONE
    assert said[1] == f"starting over: {ROOT} is no exchange yet: its trainer has not started"
    assert said[-1] == "stopping: the trainer has finished (done)"


@pytest.mark.parametrize("holder", ["trainer", "builder-0"])
def test_another_version_of_realmops_is_refused_by_the_identity_card(
    holder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = MemoryFiles()
    open_trainer(files)
    monkeypatch.setattr(artifacts, "SCHEMA", 0)
    with pytest.raises(ValueError, match="written by another version of realmops"):
        Exchange.open(ROOT, IDENTITY, holder, files=files, clock=StillClock())
    if holder != "trainer":
        assert run_builder(ROOT, IDENTITY, WORK, files=files, clock=StillClock()) == MISCONFIGURED
    assert files.listdir(ROOT / "run") == ["v-000000"]
