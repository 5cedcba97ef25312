"""The builder's loop: what it builds next, what a restart keeps, when it ends, and several at once."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import exchange_lab
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
)  # fmt: skip
from safetensors.torch import save
from small_project import wait_for

from realmops.files import Files
from realmops.refresh import child_processes as process
from realmops.refresh.builder import DONE, FAULT, MISCONFIGURED, Builder, BuilderWork, run_builder
from realmops.refresh.builder_process import builder_name, merge
from realmops.refresh.exchange import IDENTITY_VERSION, Exchange, part_name, row_ranges
from realmops.refresh.follower import Follower, assign_exchange
from realmops.refresh.trainer import RefreshPolicy, TrainerSide
from realmops.refresh.versions import Version, version_name
from realmops.search.embeddings import EMBEDDINGS, view_embeddings


def counting(embedded: list[tuple[int, int]]) -> BuilderWork:
    """The toy work, and a record of the rows that were embedded."""

    def recording(weights: Any) -> Any:
        def rows(first: int, end: int) -> dict[str, bytes]:
            embedded.append((first, end))
            return embedder(weights)(first, end)

        return rows

    return BuilderWork(ROWS, PART_ROWS, recording, WORK.merge)


def builder_with(work: BuilderWork, files: Files, name: str = "0") -> Builder:
    exchange = Exchange.open(ROOT, IDENTITY, f"builder-{name}", files=files, clock=StillClock(), grace=0.0)
    return Builder(exchange, work, on_status=lambda message: None)


def test_ranges_cover_all_rows_once() -> None:
    assert row_ranges(5, 3) == [(0, 3), (3, 5)]
    assert row_ranges(6, 3) == [(0, 3), (3, 6)]


def test_an_index_names_its_weights_and_rows() -> None:
    files = MemoryFiles()
    trainer = open_trainer(files)
    trainer.publish_weights(7, PARAMS, {})
    digest = trainer.exchange.weights.manifest(version_name(1, 7)).digest
    assert builder_on(files, StillClock()).build_next()
    index = trainer.index_for(7)
    check_index(index)
    assert {key: index.meta[key] for key in ("step", "rows", "recall")} == {"step": 7, "rows": 5, "recall": 1.0}
    assert index.meta["weights"] == digest
    assert not builder_on(files, StillClock()).build_next()


def test_the_index_of_realm_is_its_parts_as_one_safetensors_file() -> None:
    rows = torch.tensor([[1.0, -2.0], [3.0, 4.0], [0.5, 6.0]])
    card = {"passages": 3, "embedding_width": 2}
    files = {"realmops.json": b"{}", "model.safetensors": b"r"}
    weights = Version("v-000001-00000007", "", "", "", card, {}, {"trainer": {"published": 9.0}}, 0.0, files)
    parts = iter([{EMBEDDINGS: save({"embeddings": rows[a:b]})} for a, b in ((0, 2), (2, 3))])
    found, meta = merge(weights, parts)
    assert found == {EMBEDDINGS: save({"embeddings": rows}), **files}
    assert view_embeddings(found[EMBEDDINGS]).tolist() == rows.tolist()
    assert meta == {"published": 9.0}


def test_awaited_weights_are_built_oldest_first_and_others_newest_only() -> None:
    for adopt, expected in (("fixed_lag", [0, 2, 4]), ("as_soon_as_ready", [4])):
        files = MemoryFiles()
        trainer = open_trainer(files, RefreshPolicy(adopt))
        for step in (0, 2, 4):
            trainer.publish_weights(step, PARAMS, {})
        builder, built = builder_on(files, StillClock()), []
        while builder.build_next():
            names = builder.exchange.indexes.names()
            built.append([name for name in names if name not in built])
        assert [int(name[-8:]) for name in builder.exchange.indexes.names()] == expected


def test_a_killed_builder_goes_on_with_the_parts_it_has_committed() -> None:
    files, embedded = MemoryFiles(), []
    trainer = open_trainer(files)
    trainer.publish_weights(0, PARAMS, {})
    fault = Fault(-1)
    first = builder_with(counting(embedded), files.seen_by(fault))
    while len(first.exchange.parts.names()) < 1:
        fault.at += 1
        with pytest.raises(Killed):
            builder_with(counting([]), files.seen_by(Fault(fault.at))).build_next()
        first = builder_with(WORK, files)
    assert len(first.exchange.parts.names()) == 1
    builder_with(counting(embedded), files).build_next()
    assert len(embedded) == 1  # one of two parts
    check_index(trainer.index_for(0))


def test_builders_take_parts_in_orders_that_seldom_meet_and_skip_what_is_there() -> None:
    """Of 40 parts, four builders that are equally fast have all in little more than ten rounds."""
    embedded: list[tuple[int, int]] = []
    work = counting(embedded)
    small = BuilderWork(
        40, 1, work.embedder, lambda weights, parts: ({"rows.bin": b"".join(f["rows.bin"] for f in parts)}, {})
    )
    orders = []
    for name in ("0", "1", "2", "3"):
        volume = MemoryFiles()
        open_trainer(volume).publish_weights(0, PARAMS, {})
        embedded.clear()
        builder_with(small, volume, name).build_next()
        assert sorted(embedded) == [(row, row + 1) for row in range(40)]
        orders.append([first for first, _ in embedded])
    done: set[int] = set()
    rounds = 0
    while len(done) < 40:
        done |= {next(part for part in order if part not in done) for order in orders}
        rounds += 1
    assert rounds <= 13


@pytest.mark.parametrize("harm", ["cut", "changed", "of other weights"])
def test_a_part_that_is_damaged_or_of_other_weights_is_set_aside_and_embedded_again(harm: str) -> None:
    files = MemoryFiles()
    trainer = open_trainer(files)
    trainer.publish_weights(0, PARAMS, {})
    weights = trainer.exchange.weights.load(version_name(1, 0))
    name, digest = part_name(version_name(1, 0), 0, 3), "other" if harm == "of other weights" else weights.digest
    parts = builder_on(files, StillClock()).exchange.parts
    parts.publish(name, embedder(weights)(0, 3), {"weights": digest})
    if harm in ("cut", "changed"):
        files._at(ROOT / "parts" / name / "rows.bin").data = b"" if harm == "cut" else b"x" * 96
    assert run_until_idle(files) == ["starting over"]
    check_index(trainer.index_for(0))


def run_until_idle(files: MemoryFiles) -> list[str]:
    """Run the loop until it waits for weights; how often it began again or failed."""
    said: list[str] = []

    class Idle(Exception):
        pass

    def on_status(message: str) -> None:
        said.append(message)
        if message == "waiting for weights":
            raise Idle

    exchange = Exchange.open(ROOT, IDENTITY, "builder-0", files=files, clock=StillClock(), grace=0.0)
    with pytest.raises(Idle):
        Builder(exchange, WORK, on_status=on_status).run()
    return [message.split(":")[0] for message in said if message.startswith(("starting over", "retrying"))]


def test_a_volume_that_keeps_failing_ends_the_builder_with_1_and_a_short_failure_does_not() -> None:
    files = MemoryFiles()
    trainer = open_trainer(files)
    trainer.publish_weights(0, PARAMS, {})
    failures = 0

    def failing(operation: str, path: Path, effect: Any) -> Any:
        nonlocal failures
        if operation == "fsync" and "parts" in path.parts and failures > 0:
            failures -= 1
            raise OSError(28, "no room", str(path))
        return effect()

    def run(number: int) -> int:
        nonlocal failures
        failures = number
        clock, said = StillClock(), []

        def on_status(message: str) -> None:
            said.append(message)
            if message == "waiting for weights":
                trainer.finish("done")

        return run_builder(
            ROOT, IDENTITY, WORK, files=files.seen_by(failing), clock=clock, grace=0.0, on_status=on_status
        )

    assert run(5) == FAULT
    assert run(4) == DONE
    check_index(trainer.index_for(0))


def test_another_identity_ends_with_2_and_a_fault_in_the_embedding_with_1() -> None:
    files = MemoryFiles()
    trainer = open_trainer(files)
    assert run_builder(ROOT, {**IDENTITY, "corpus": "dead"}, WORK, files=files, clock=StillClock()) == MISCONFIGURED
    trainer.publish_weights(0, PARAMS, {})

    def broken(weights: Any) -> Any:
        raise ValueError("weights of another shape")

    assert run_builder(ROOT, IDENTITY, BuilderWork(5, 3, broken, WORK.merge), files=files, clock=StillClock()) == FAULT


def test_a_finished_run_ends_the_builder_with_0_until_a_new_trainer_takes_over() -> None:
    files = MemoryFiles()
    open_trainer(files).finish("failed", "loss is not a number")
    said: list[str] = []
    assert run_builder(ROOT, IDENTITY, WORK, files=files, clock=StillClock(), on_status=said.append) == DONE
    assert said == ["stopping: the trainer has finished (failed: loss is not a number)"]
    again = open_trainer(files)
    assert again.exchange.finished() is None


@pytest.mark.parametrize(
    ("host", "begins"),
    [("realmops-index-builder-7c9f-x2k8p", "realmops-index-builder-7c9f-x2k8p"), ("0", "0"), ("GPU.Lab", "gpu-lab-")],
)
def test_a_builder_takes_its_name_from_its_host(host: str, begins: str) -> None:
    assert builder_name(host).startswith(begins)
    assert (builder_name(host) == host) is (host == begins)


def test_a_builder_on_a_host_of_any_name_has_one_of_its_own() -> None:
    files = MemoryFiles()
    open_trainer(files)
    rack = "worker-0123456789-0123456789-0123456789-"
    hosts = ["", ".", "_", "Lab", "lab", "gpu.lab", "gpu-lab", "GPU-LAB", "größe", f"{rack}1", f"{rack}2", "1." * 99]
    holders = [builder_on(files, StillClock(), builder_name(host)).exchange.holder for host in hosts]
    assert len({*holders}) == len(hosts)


class Started:
    """What stands in the place of builder processes: each lives for so many seconds, and ends with a fault."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lives: float) -> None:
        self.now, self.lives = 0, lives
        self.times: list[int] = []
        self.ended = 0
        monkeypatch.setattr(process, "subprocess", SimpleNamespace(Popen=self.start, DEVNULL=subprocess.DEVNULL))
        monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: self.now))

    def start(self, words: list[str], **how: Any) -> Any:
        began = self.now
        self.times.append(began)
        poll: Callable[[], int | None] = lambda: FAULT if self.now >= began + self.lives else None  # noqa: E731
        return SimpleNamespace(poll=poll, terminate=self.end, wait=lambda seconds: FAULT)

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize(
    ("lives", "starts"),
    [(1, [0, 3, 8, 17, 34, 65, 96]), (40, [0, 41, 82])],  # pauses of 2, 4, 8, 16 and 30 seconds; of 1 second
)
def test_a_builder_that_ends_with_a_fault_is_started_again_after_a_longer_pause_unless_it_lived_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lives: int, starts: list[int]
) -> None:
    started = Started(monkeypatch, lives)
    assign_exchange(tmp_path / "assignment.json", tmp_path / "exchange", tmp_path / "corpus", "run")
    follower = Follower(tmp_path / "assignment.json", None)
    for started.now in range(100):
        follower.poll_once()
    assert started.times == starts


@pytest.mark.parametrize("lives", [1, 1000], ids=["failed", "waits"])
def test_no_builder_is_left_for_an_exchange_that_is_gone_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lives: int
) -> None:
    """A stage removes both at its end; a file alone that cannot be read for a moment changes nothing."""
    started = Started(monkeypatch, lives)
    file, exchange = tmp_path / "tag.shards.json", tmp_path / "exchange"
    (exchange / "run" / IDENTITY_VERSION).mkdir(parents=True)
    assign_exchange(file, exchange, tmp_path / "corpus", "run")
    follower = Follower(file, None)
    follower.poll_once()
    content = file.read_bytes()
    file.unlink()
    follower.poll_once()
    assert (started.ended, follower._builder is None) == (0, False)
    shutil.rmtree(exchange)
    for started.now in range(100):
        follower.poll_once()
    assert follower._builder is None
    assert started.ended == 1
    assert started.times == [0]
    file.write_bytes(content)  # the same work again
    follower.poll_once()
    assert started.times == [0, 99]


# Real processes


def start(root: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, exchange_lab.__file__, str(root), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def read_until(process: subprocess.Popen[str], words: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if words in line:
            return
    raise AssertionError(f"{words!r} never came: {process.stderr and process.stderr.read()}")


def test_a_builder_that_comes_first_waits_builds_and_ends_with_0_on_sigterm(tmp_path: Path) -> None:
    root = tmp_path / "exchange"
    process = start(root)
    read_until(process, "its trainer has not started")
    trainer = TrainerSide(Exchange.open(root, IDENTITY, grace=0.0), RefreshPolicy(builder_timeout=600))
    trainer.publish_weights(0, PARAMS, {})
    check_index(trainer.index_for(0))
    read_until(process, "waiting for weights")
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")


def test_a_builder_ends_when_the_process_that_started_it_is_killed(tmp_path: Path) -> None:
    root = tmp_path / "exchange"
    Exchange.open(root, IDENTITY, grace=0.0)
    script = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen(sys.argv[1:])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(3600)\n"
    )
    command = [sys.executable, exchange_lab.__file__, str(root), "watch"]
    parent = subprocess.Popen([sys.executable, "-c", script, *command], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    read_until(parent, "waiting for weights")
    parent.kill()
    parent.wait()
    status = Path(f"/proc/{child}/status")
    try:
        wait_for(lambda: not status.exists() or "\nState:\tZ" in status.read_text(), 5)
    except (FileNotFoundError, ProcessLookupError):
        pass  # it ended between the two looks
    except AssertionError:
        os.kill(child, signal.SIGKILL)
        raise AssertionError("the builder outlived its parent") from None
    parent.stdout.close()
