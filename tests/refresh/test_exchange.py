"""Trainer and builders over one exchange in single steps: I1 to I8; random schedules are in test_schedules.py."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
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

from realmops.files import Clock
from realmops.refresh.builder import MISCONFIGURED, Builder, run_builder
from realmops.refresh.exchange import Exchange, FencedError, RunMismatchError
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


def test_a_folder_with_versions_of_no_exchange_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights" / "v-202601").mkdir(parents=True)
    with pytest.raises(RunMismatchError, match=r"weights/v-202601 is of no exchange; give this run another"):
        Exchange.open(tmp_path, IDENTITY)
    assert [*(tmp_path / "weights").iterdir()] == [tmp_path / "weights" / "v-202601"]


def test_i3_a_finished_run_ends_as_defined_and_leaves_only_the_retention() -> None:
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


def build(files: MemoryFiles, name: str = "0") -> bool:
    builder = builder_on(files, StillClock(), name)
    built = builder.build_next()
    builder.exchange.collect_garbage()
    return built


def test_i8_an_exchange_of_another_run_is_refused_with_both_values() -> None:
    files = MemoryFiles()
    open_trainer(files)
    for holder in ("trainer", "builder-0"):
        with pytest.raises(ValueError, match=r"vocabulary is 'beef', expected 'dead'"):
            Exchange.open(ROOT, {**IDENTITY, "vocabulary": "dead"}, holder, files=files)
        with pytest.raises(ValueError, match="dtype is None, expected 'bf16'"):
            Exchange.open(ROOT, {**IDENTITY, "dtype": "bf16"}, holder, files=files)
    with pytest.raises(FileNotFoundError, match="no exchange yet: its trainer has not started"):
        Exchange.open(Path("/elsewhere"), IDENTITY, "builder-0", files=files)


def test_i5_a_wait_reports_its_subject_its_duration_and_the_last_heartbeat() -> None:
    files, seconds = MemoryFiles(), list[float]()
    policy = RefreshPolicy(builder_timeout=4.0, poll=0.25)
    trainer = open_trainer(files, policy, on_wait=lambda message, waited: seconds.append(waited))
    trainer.publish_weights(0, PARAMS, {})
    with pytest.raises(TimeoutError, match="waiting for the index of step 0 for 4 s; no builder has ever been seen"):
        trainer.index_for(0)
    assert seconds == [0.0, 1.0, 2.0, 3.0]
    builder_on(files, StillClock()).exchange.beat("embedding part 1 of 2")
    with pytest.raises(TimeoutError, match=r"builder-0 \(embedding part 1 of 2\), last heartbeat 4 s ago"):
        trainer.index_for(0)


def test_restore_skips_damaged_checkpoints_with_a_warning_and_never_starts_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    files = finished_run()
    checkpoints = ROOT / "checkpoints"
    files._at(checkpoints / version_name(1, 6) / "params.bin").data = b"damage" * 5
    trainer = TrainerSide(with_builder(files), PLAN.policy)
    checkpoint = trainer.restore()
    assert (checkpoint.step, checkpoint.meta["trainer"]) == (4, {"loss": 0.5})
    assert "v-000001-00000006 is quarantined" in caplog.text
    assert life(with_builder(files), PLAN) == undisturbed(PLAN)
    for name in [name for name in files.listdir(checkpoints) if name.startswith("v-")]:
        del files._folder(checkpoints / name)["params.bin"]
    for _ in range(2):  # the second time they are quarantined already
        with pytest.raises(RuntimeError, match="holds checkpoints and none can be used"):
            TrainerSide(with_builder(files), PLAN.policy).restore()


def test_i6_a_damaged_index_is_quarantined_and_built_again() -> None:
    files = MemoryFiles()
    trainer = open_trainer(files, clock=StillClock(lambda: build(files) and None))
    trainer.publish_weights(0, PARAMS, {})
    build(files)
    node = files._at(ROOT / "indexes" / version_name(1, 0) / "rows.bin")
    node.data = bytes([node.data[0] ^ 1]) + node.data[1:]
    check_index(trainer.index_for(0))
    assert len(trainer.exchange.indexes.quarantined()) == 1


def test_damaged_weights_without_an_index_end_the_wait() -> None:
    files = MemoryFiles()
    trainer = TrainerSide(with_builder(files), PLAN.policy)
    trainer.publish_weights(0, PARAMS, {})
    files._at(ROOT / "weights" / version_name(1, 0) / "params.bin").data = b""
    with pytest.raises(RuntimeError, match="run the stage again: training resumes from the previous checkpoint"):
        trainer.index_for(0)


def fenced(old: TrainerSide, files: MemoryFiles, match: str) -> None:
    """Check that ``old`` may neither write nor adopt, and that nothing is written."""
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


def test_a_trainer_whose_successor_starts_during_a_commit_acknowledges_nothing() -> None:
    files = MemoryFiles()

    def around(operation: str, path: Path, effect: Callable[[], Any]) -> Any:
        result = effect()
        if operation == "rename" and path.parent.name == "weights":
            open_trainer(files)
        return result

    old = open_trainer(files.seen_by(around))
    with pytest.raises(FencedError, match="trainer 2 has taken over"):
        old.publish_weights(0, PARAMS, {})


def test_weights_and_indexes_beyond_the_checkpoint_are_not_used() -> None:
    files = MemoryFiles()
    first = open_trainer(files, AS_SOON)
    first.save_checkpoint(0, PARAMS, {})
    first.publish_weights(0, PARAMS, {})
    build(files)
    assert first.newest_index(0) is not None
    first.publish_weights(2, {"params.bin": b"late" * 8}, {})
    build(files)
    second = open_trainer(files, AS_SOON)
    checkpoint = second.restore()
    assert checkpoint.step == 0
    assert version_name(1, 2) in files.listdir(ROOT / "indexes")
    assert files.listdir(ROOT / "weights") == [version_name(1, 0)]
    assert second.newest_index(0).name == version_name(1, 0)
    assert second.newest_index(3) is None


def test_i2_as_soon_as_ready_adopts_the_newest_once_and_waits_if_it_is_too_stale() -> None:
    files, messages = MemoryFiles(), []
    clock = StillClock(lambda: build(files) and None)
    policy = RefreshPolicy("as_soon_as_ready", max_staleness_steps=3)
    trainer = open_trainer(files, policy, clock, on_wait=lambda message, seconds: messages.append(message))
    trainer.publish_weights(0, PARAMS, {})
    index = trainer.newest_index(0)
    assert index.step == 0
    assert "waiting for a first index" in messages.pop()
    trainer.publish_weights(2, PARAMS, {})
    assert trainer.newest_index(3) is None
    index = trainer.newest_index(4)
    assert index.step == 2
    assert "waiting for a newer index at step 4" in messages.pop()
    assert trainer.newest_index(4) is None
    assert messages == []


# An exchange that was removed or replaced


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


def test_a_builder_whose_exchange_became_another_runs_ends_and_quarantines_nothing() -> None:
    files, status = MemoryFiles(), list[str]()
    open_trainer(files)
    other = {**IDENTITY, "corpus": "dead"}

    def replaced(message: str) -> None:
        status.append(message)
        if message == "waiting for weights":
            del files._folder(ROOT.parent)[ROOT.name]
            trainer = TrainerSide(Exchange.open(ROOT, other, files=files, clock=StillClock(), grace=0.0))
            trainer.publish_weights(0, PARAMS, {})

    code = run_builder(ROOT, IDENTITY, WORK, files=files, clock=StillClock(), grace=0.0, on_status=replaced)
    assert (code, status) == (MISCONFIGURED, ["waiting for weights"])
    assert files.listdir(ROOT / "weights") == [version_name(1, 0)]


# Listings of NFS


def stale_listings(clock: Clock, outdated: list[Path]) -> Any:
    """An ``around`` of a mount that shows a listing for a minute, but its own changes at once."""
    listings: dict[Path, tuple[float, list[str]]] = {}

    def around(operation: str, path: Path, effect: Callable[[], Any]) -> Any:
        if operation != "listdir":
            if operation != "read":
                listings.pop(path.parent, None)
            return effect()
        fresh, now = effect(), clock.monotonic()
        if path not in listings or now - listings[path][0] >= 60.0:
            listings[path] = (now, fresh)
        outdated.extend([path] if sorted(listings[path][1]) != sorted(fresh) else [])
        return listings[path][1]

    return around


@pytest.mark.parametrize("plan", [PLAN, Plan(policy=replace(AS_SOON, poll=5.0))], ids=["fixed_lag", "as_soon_as_ready"])
def test_an_old_listing_delays_and_changes_nothing(plan: Plan) -> None:
    """Trainer and builder see each listing for a minute, on clocks that are a day apart."""
    volume, remote = MemoryFiles(), StillClock()
    remote.unix = lambda: remote.now - 86400.0  # type: ignore[method-assign]
    outdated: list[Path] = []
    mount = volume.seen_by(stale_listings(remote, outdated))
    builders: list[Builder] = []

    def build_remotely() -> None:
        remote.now = local.now
        with suppress(OSError):
            if not builders:
                exchange = Exchange.open(ROOT, IDENTITY, "builder-0", files=mount, clock=remote, grace=120.0)
                builders.append(Builder(exchange, WORK, on_status=lambda message: None))
            builders[0].build_next()
            builders[0].exchange.collect_garbage()

    local = StillClock(build_remotely)
    files = volume.seen_by(stale_listings(local, outdated))
    exchange = Exchange.open(ROOT, IDENTITY, files=files, clock=local, grace=120.0)
    params = life(exchange, plan, each_step=lambda step: local.sleep(7.0))
    assert plan is not PLAN or params == undisturbed(plan)
    sound(volume)
    assert outdated
