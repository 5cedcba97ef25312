"""The campaign against faults: kills, failing disks, damaged files, crowds, old listings, long runs.

``make test`` runs it cut short, ``make faults`` at full length and ends with a table (tests/faults.py).
"""

import json
import os
import random
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from conftest import Told
from exchange_lab import (
    IDENTITY,
    PARAMS,
    ROOT,
    WORK,
    Fault,
    Killed,
    MemoryFiles,
    Plan,
    StaleFiles,
    StillClock,
    builder_on,
    check_index,
    life,
    sound,
    undisturbed,
)
from faults import CAMPAIGN, ERRORS, FailingDisk, found_by, may_mount, small_disk, times

from realmops.artifacts import atomic_folder, read_manifest, write_manifest
from realmops.refresh.builder import Builder
from realmops.refresh.exchange import Exchange, inspect
from realmops.refresh.shared_files import Files
from realmops.refresh.trainer import Policy, Trainer
from realmops.refresh.versions import Damaged, version_name

pytestmark = pytest.mark.faults
PLAN = Plan(steps=4)


# Kills


@pytest.mark.parametrize("seed", range(times(1, 2)))
def test_killed_stopped_doubled_and_with_wrong_clocks_the_run_ends_with_the_same_weights(
    tmp_path: Path, seed: int, told: Told
) -> None:
    done: dict[str, int] = found_by("kills.py", tmp_path, times(30, 1000), seed)["done"]
    kills = {word: done[f"{word} killed, at all"] for word in ("trainer", "builder")}
    assert min(kills.values()) > 5
    for word, number in kills.items():
        told(f"SIGKILL of a {word}, at every operation and at random instants", number, "the same weights")
    told("all processes killed at once", done.get("trainer killed all at an instant", 0) or 1, "the same weights")
    told("a second trainer beside the first", done.get("a second trainer", 0) or 1, "the same weights, one Fenced")
    told("a builder stopped and woken", done.get("a builder stopped and woken", 0) or 1, "the same weights")
    told("runs with one to three builders, clocks off by up to a day", done["runs"], "the same weights")


def test_tagging_and_embedding_killed_on_both_sides_makes_the_same_bytes_and_no_shard_twice(
    tmp_path: Path, told: Told
) -> None:
    """A stage and three helpers; each kill may cost the shard in hand and no other."""
    done: dict[str, int] = found_by("shard_kills.py", tmp_path, 3, times(20, 1000), 0)["done"]
    for word in ("stage", "helper"):
        assert done[word] > 2
        told(
            f"SIGKILL of a {word} that tags and embeds, at operations and at any instant", done[word], "the same bytes"
        )


# A disk that fails


def run_on(root: Path, plan: Plan = PLAN) -> bytes:
    """The toy trainer and a builder that works while it waits, in this process, until the run is done."""
    builders: list[Builder] = []

    def build() -> None:
        try:
            if not builders:
                builders.append(builder_on(Files(), StillClock(), root=root))
            builders[0].build_next()
            builders[0].exchange.collect_indexes()
        except (OSError, Damaged):
            pass

    for _ in range(3):
        clock = StillClock(build)
        try:
            return life(Exchange.open(root, IDENTITY, files=Files(), clock=clock, grace=0.0), plan)
        except OSError:
            continue
    raise AssertionError("one error of the disk ended three lives")


def at_every_write(kind: str, step: int = 1) -> Iterator[tuple[int, FailingDisk]]:
    """A disk that fails at its first write, then at a later one, until it has none so late; short writes are all."""
    at = 0
    while True:
        disk = FailingDisk(at, kind, lasting=kind not in ("EIO", "short"))
        yield at, disk
        if not disk.failed or kind == "short":
            return
        at += step


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_of_the_disk_at_any_write_of_the_exchange(tmp_path: Path, kind: str, told: Told) -> None:
    expected, injected = undisturbed(PLAN), 0
    for at, disk in at_every_write(kind, times(23, 1)):
        root, disk.lasting = tmp_path / str(at), False
        with disk:
            assert run_on(root) == expected, at
        sound(Files(), root)
        shutil.rmtree(root)
        injected += disk.failed
    assert at > 200
    told(f"{kind} at every write of the exchange", injected, "the same weights")


def test_writes_that_are_done_in_part_change_nothing(tmp_path: Path, told: Told) -> None:
    with FailingDisk(0, "short") as disk:
        assert run_on(tmp_path / "e") == undisturbed(PLAN)
    told("short writes in the exchange", disk.count, "the same weights")


def states(folder: Path) -> Iterator[tuple[int, dict[str, bytes]]]:
    for step in range(4):
        yield step, {"tensors": bytes([step]) * 5000, "state.json": b"%d" % step}


@pytest.mark.parametrize("kind", [*ERRORS, "short"])
def test_an_error_of_the_disk_at_any_write_of_a_checkpoint(tmp_path: Path, kind: str, told: Told) -> None:
    from realmops.train.checkpoints import FolderCheckpoints

    for at, disk in at_every_write(kind):
        checkpoints, saved = FolderCheckpoints(tmp_path / str(at)), None
        with disk:
            for step, files in states(tmp_path):
                try:
                    checkpoints.save(step, files)
                    saved = files
                except OSError:
                    assert disk.failed
                    found = checkpoints.restore()
                    assert found in (saved, files), at
                    saved = found
        assert checkpoints.restore() == saved
        checkpoints.save(9, {"tensors": b"new"})
        assert checkpoints.restore() == {"tensors": b"new"}
    told(f"{kind} at every write of a checkpoint", max(at, 1), "the one before, or the new one whole")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files that the failed writer left open
@pytest.mark.parametrize("kind", [*ERRORS, "short"])
def test_an_error_of_the_disk_at_any_write_of_a_snapshot(tmp_path: Path, kind: str, told: Told) -> None:
    from small_world import write_documents

    from realmops.corpus.formats import sources
    from realmops.corpus.snapshot_writer import write_snapshot
    from realmops.corpus.word_counts import train_vocabulary

    corpus = sources(write_documents(tmp_path / "documents.jsonl"), "auto")
    pieces = train_vocabulary(corpus, size=150, min_count=1)

    def write(folder: Path) -> dict[str, bytes]:
        with atomic_folder(folder / "s") as stage:
            write_snapshot(corpus, stage, work=folder / "work", vocabulary=pieces, block_wordpieces=48)
        return read(folder)

    def read(folder: Path) -> dict[str, bytes]:
        read_manifest(folder / "s", "snapshot")
        return {str(p.relative_to(folder / "s")): p.read_bytes() for p in (folder / "s").rglob("*") if p.is_file()}

    (tmp_path / "calm").mkdir()
    expected, injected = write(tmp_path / "calm"), 0
    for at, disk in at_every_write(kind, times(7, 1)):
        folder = tmp_path / str(at)
        folder.mkdir()
        with disk:
            try:
                found = write(folder)
            except OSError:
                assert disk.failed
                left = {path.name for path in folder.iterdir()} - {"work"}
                assert not left or (left == {"s"} and read(folder) == expected), "half a snapshot was left"
                found = None
        assert (found or write(folder)) == expected, at
        shutil.rmtree(folder)
        injected += disk.failed
    told(f"{kind} at every write of a snapshot", max(injected, 1), "none or the whole, then the same bytes")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files that the failed writer left open
@pytest.mark.parametrize("kind", [*ERRORS, "short"])
def test_an_error_of_the_disk_at_any_write_of_the_index_of_words(
    world: Any, tmp_path: Path, kind: str, told: Told
) -> None:
    from realmops.search.bm25 import Bm25
    from realmops.search.bm25_writer import write_bm25

    def read(folder: Path) -> dict[str, bytes]:
        Bm25.open(folder)
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    expected = read(world.folder / "lexical")
    for at, disk in at_every_write(kind, times(5, 1)):
        final, work = tmp_path / str(at) / "lexical", tmp_path / "work"
        with disk:
            try:
                write_bm25(final, world.snapshot, work=work, earlier=world.snapshot if at % 2 else None)
            except OSError:
                assert disk.failed
                assert not final.exists() or read(final) == expected, "half an index was left"
        write_bm25(final, world.snapshot, work=work)
        assert read(final) == expected, at
    told(f"{kind} at every write of the index of words", max(at, 1), "none or the whole, then the same bytes")


# Crowds, clocks, listings


@pytest.mark.parametrize("fixed", [True, False], ids=["fixed_lag", "as_soon_as_ready"])
def test_a_listing_that_is_old_for_everybody_delays_and_changes_nothing(fixed: bool, told: Told) -> None:
    """Both sides see a listing for a minute, on clocks that are a day apart; either is killed at any operation."""
    policy = Policy("fixed_lag" if fixed else "as_soon_as_ready", max_staleness_steps=3, builder_timeout=1e6, poll=5.0)
    plan, at, old, injected = Plan(steps=4, policy=policy), -1, 0, 0
    while True:
        volume, fault = MemoryFiles(), Fault(at)
        seen: list[StaleFiles] = []
        there = StillClock()
        there.unix = lambda there=there: there.now - 86400.0  # type: ignore[method-assign]
        builders: list[Builder] = []

        def build() -> None:
            there.now = here.now  # noqa: B023
            try:
                if not builders:  # noqa: B023
                    files = StaleFiles(None, volume.top, there, 60.0)  # noqa: B023
                    seen.append(files)  # noqa: B023
                    exchange = Exchange.open(ROOT, IDENTITY, "builder-0", files=files, clock=there, grace=120.0)  # noqa: B023
                    builders.append(Builder(exchange, WORK, on_status=lambda message: None))  # noqa: B023
                builders[0].build_next()  # noqa: B023
                builders[0].exchange.collect_indexes()  # noqa: B023
            except (OSError, Damaged):
                pass

        here = StillClock(build)
        for around in (fault, None):
            seen.append(StaleFiles(around, volume.top, here, 60.0))
            try:
                exchange = Exchange.open(ROOT, IDENTITY, files=seen[-1], clock=here, grace=120.0)
                params = life(exchange, plan, each_step=lambda step: here.sleep(7.0))  # noqa: B023
                break
            except Killed:
                here.now += 1.0
        assert not fixed or params == undisturbed(plan), at
        sound(volume)
        old, injected = old + sum(files.old for files in seen), injected + (at >= 0)
        if 0 <= fault.count <= at:
            break
        at += times(29, 1)
    assert old > 20
    outcome = "the same weights" if fixed else "ends, sound"
    told(f"an old listing, {policy.adopt}, with a kill at every operation", injected, outcome)


@pytest.mark.parametrize("pause", [0.0, 700.0], ids=["overtaken", "stopped"])
def test_a_builder_before_whose_operation_another_builds_everything_harms_nothing(pause: float, told: Told) -> None:
    """I7, two builders at once; or one is stopped for minutes meanwhile, so that its draft is swept."""
    at, losers = 0, 0
    while True:
        files, fault, said = MemoryFiles(), Fault(-1), list[str]()
        clock = StillClock()
        trainer = Trainer(Exchange.open(ROOT, IDENTITY, files=files, clock=clock, grace=0.0))
        trainer.publish_weights(0, PARAMS, {})
        other = Exchange.open(ROOT, IDENTITY, "builder-1", files=files, clock=clock, grace=0.0)

        def others_first(operation: str, path: Path, effect: Callable[[], Any]) -> Any:
            if fault.count == at:  # noqa: B023
                for _ in range(3 if pause else 1):
                    Builder(other, WORK, on_status=lambda message: None).build_next()  # noqa: B023
                    other.collect_indexes()  # noqa: B023
                    clock.now += pause  # noqa: B023
            fault.count += 1  # noqa: B023
            return effect()

        seen = files.seen_by(others_first)
        stopped = Exchange.open(ROOT, IDENTITY, "builder-0", files=seen, clock=clock, grace=0.0)
        with suppress(OSError, Damaged):  # its loop begins again
            Builder(stopped, WORK, on_status=said.append).build_next()
        stopped.collect_indexes()
        losers += any("another builder published" in message for message in said)
        assert files.listdir(ROOT / "indexes") == [version_name(1, 0)], at
        assert files.listdir(ROOT / "parts") == [], at
        check_index(trainer.index_for(0))
        sound(files)
        if fault.count <= at:
            break
        at += times(3, 1) if pause else 1
    assert at > 40
    assert losers > 0
    told(f"a builder {'stopped for half an hour' if pause else 'overtaken'} at every operation", at, "one whole index")


# Damaged files


def damaged(content: bytes, flips: int, rng: random.Random) -> Iterator[bytes]:
    """Every prefix (in short runs some), and as many flips of a random bit."""
    for length in range(0, len(content), times(max(1, len(content) // 15), 1)):
        yield content[:length]
    for _ in range(flips):
        place = rng.randrange(len(content))
        yield content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]


REFUSED = (ValueError, Damaged)


def endure(
    kind: str, path: Path, read: Callable[[], Any], told: Told, *, alike: int = 1, may_change: bool = False
) -> None:
    """Damage one file in every way: it is refused with words, or what is read is what was written.

    ``alike`` files share the 10,000 flips of a kind.
    """
    whole, wanted, refused, cases = path.read_bytes(), read(), 0, 0
    rng = random.Random(kind)
    for content in damaged(whole, times(40, 10_000) // alike, rng):
        path.write_bytes(content)
        cases += 1
        try:
            found = read()
        except REFUSED:
            refused += 1
        else:
            assert may_change or found == wanted, f"{kind}: {len(content)} of {len(whole)} bytes give another result"
    path.write_bytes(whole)
    assert read() == wanted
    assert refused > 0 or may_change
    told(f"prefixes and flipped bits of {kind}", cases, "refused or passed over" if may_change else "refused")


def exchange_with_everything(root: Path) -> Exchange:
    """A checkpoint, weights, a part and an index, and signs of life."""
    trainer = Trainer(Exchange.open(root, IDENTITY, clock=StillClock(), grace=0.0))
    trainer.save_checkpoint(0, PARAMS, {})
    trainer.publish_weights(0, PARAMS, {})
    trainer.beat(0)
    builder = builder_on(Files(), StillClock(), root=root)
    builder.exchange.beat("waiting for weights")
    assert builder.build_next()
    unsynced = Files(lambda operation, path, effect: None if "sync" in operation else effect())
    return Exchange(root, IDENTITY, "trainer", clock=StillClock(), files=unsynced)


@pytest.mark.parametrize("kind", ["run", "checkpoints", "weights", "parts", "indexes"])
def test_damage_to_a_version_in_the_exchange(tmp_path: Path, kind: str, told: Told) -> None:
    store = exchange_with_everything(tmp_path / "e").stores[kind]
    name = store.names()[0]

    def read() -> Any:
        version = store.load(name)
        store.unpin(version)
        return version.files, version.meta, version.run

    for path in sorted((tmp_path / "e" / kind / name).iterdir()):
        endure(f"{kind}/{path.name} of the exchange", path, read, told, alike=5)


def test_damage_to_files_that_carry_no_digest_ends_no_process(tmp_path: Path, told: Told) -> None:
    from realmops.journal import read_journal
    from realmops.refresh.builder_process import Follower, assign

    exchange = exchange_with_everything(tmp_path / "e")
    for role, holder in (("trainer", "trainer"), ("builder", "builder-0")):
        path = tmp_path / "e" / "alive" / role / f"{holder}.json"
        read = lambda: (exchange.builders_in_words(), inspect(exchange.root, StillClock()))[1] and None  # noqa: E731
        endure(f"the {role}'s sign of life", path, read, told, may_change=True)
    assignment = tmp_path / "assignment.json"
    assign(assignment, tmp_path / "e", tmp_path / "s", "a run")
    follower = Follower(assignment, None)
    endure("the assignment file", assignment, lambda: follower._read() and None, told, may_change=True)
    lines = [json.dumps({"stage": "ict", "step": step, "time": 1.0, "loss": 0.5}) + "\n" for step in range(4)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    path = tmp_path / "metrics.jsonl"
    endure("the journal", path, lambda: read_journal(path), told, may_change=True)


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000, b"[]", b'{"exchange": 1, "snapshot": "s"}', b'{"exchange": "a\\u0000", "snapshot": "s"}',
        b"\x80\x04.",
    ],
)  # fmt: skip
def test_an_assignment_that_nobody_of_ours_wrote_is_passed_over(tmp_path: Path, content: bytes) -> None:
    from realmops.refresh.builder_process import Follower

    (tmp_path / "assignment.json").write_bytes(content)
    follower = Follower(tmp_path / "assignment.json", None)
    follower.look()
    assert follower._builder is None
    (tmp_path / "assignment.json").unlink()
    (tmp_path / "assignment.json").symlink_to("/dev/zero")
    follower.look()
    assert follower._builder is None


@pytest.fixture
def stage_folders(world: Any, tmp_path: Path) -> dict[str, Path]:
    """What stages hand over, one folder of each kind of file."""
    from small_world import tiny_models

    from realmops.model.checkpoint_files import save_models
    from realmops.train.checkpoints import FolderCheckpoints

    models = tmp_path / "models"
    models.mkdir()
    save_models(models, *tiny_models(world), world.snapshot.vocabulary_hash)
    (models / "metrics.json").write_text(json.dumps({"em": 0.5}))
    write_manifest(models, "ict", fingerprint="f", sections={"run": {"seed": 0}})
    shutil.copytree(world.snapshot.folder, tmp_path / "snapshot")
    FolderCheckpoints(tmp_path / "work").save(3, {"tensors.bin": bytes(300), "state.json": b"{}"})
    return {"ict": models, "snapshot": tmp_path / "snapshot", "checkpoint": tmp_path / "work" / "step-00000003"}


@pytest.mark.parametrize("kind", ["ict", "snapshot", "checkpoint"])
def test_damage_to_what_a_stage_handed_over(stage_folders: dict[str, Path], kind: str, told: Told) -> None:
    folder = stage_folders[kind]
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    for path in paths:
        alike = sum(path.suffix == other.suffix for other in paths)
        endure(f"{kind}: {path.relative_to(folder)}", path, lambda: read_manifest(folder, kind), told, alike=alike)


def test_damage_to_the_progress_of_a_killed_snapshot_starts_it_over(world: Any, tmp_path: Path, told: Told) -> None:
    from realmops.corpus.formats import sources
    from realmops.corpus.snapshot_writer import _restored, write_snapshot

    corpus = sources(world.folder / "documents.jsonl", "auto")
    with atomic_folder(tmp_path / "s") as stage:
        write_snapshot(corpus, stage, work=tmp_path / "w", vocabulary=world.snapshot.vocabulary, block_wordpieces=48)
    shutil.copytree(tmp_path / "w", tmp_path / "kept")
    path = tmp_path / "w" / "checkpoint.json"
    whole, wanted, cases = path.read_bytes(), _restored(tmp_path / "w"), 0
    for content in damaged(whole, times(40, 10_000), random.Random(0)):
        path.write_bytes(content)
        cases += 1
        if _restored(tmp_path / "w") not in (wanted, {}):
            raise AssertionError(content)
        if not path.exists():
            shutil.copytree(tmp_path / "kept", tmp_path / "w", dirs_exist_ok=True, copy_function=os.link)
            path.unlink()
    told("prefixes and flipped bits of a snapshot's progress", cases, "starts over")


# Pickles


class Evil:
    """Whoever unpickles it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def test_a_pickle_planted_anywhere_is_never_run(stage_folders: dict[str, Path], tmp_path: Path, told: Told) -> None:
    """In the place of every file, with manifests that list it as it is."""
    import pickle

    import numpy as np
    import torch

    from realmops.corpus.snapshot_reader import Snapshot
    from realmops.evaluate.predictions import read_predictions
    from realmops.hub import read_weights
    from realmops.model.checkpoint_files import load_models, retriever_from_files
    from realmops.refresh.builder_process import Follower
    from realmops.search.embeddings import load_index
    from realmops.train.checkpoints import FolderCheckpoints
    from realmops.train.loop import STATE, TENSORS, _restore

    mark, planted = tmp_path / "mark", 0
    torch.save(Evil(mark), tmp_path / "evil.pt")
    np.save(tmp_path / "evil.npy", np.array([Evil(mark)], dtype=object), allow_pickle=True)
    evils = [pickle.dumps(Evil(mark)), (tmp_path / "evil.pt").read_bytes(), (tmp_path / "evil.npy").read_bytes()]
    pickle.loads(evils[0])
    assert mark.exists(), "the pickles are live ones"
    mark.unlink()
    snapshot = Snapshot.open(stage_folders["snapshot"])
    index = tmp_path / "index"
    index.mkdir()
    exchange = exchange_with_everything(tmp_path / "e")

    def use_snapshot() -> None:
        found = Snapshot.open(stage_folders["snapshot"])
        assert found.text(0)
        assert found.tokenizer
        assert found.given_spans()

    def use_models() -> None:
        load_models(stage_folders["ict"], snapshot.vocabulary_hash)

    def use_checkpoint() -> None:
        class Context:
            checkpoints = FolderCheckpoints(tmp_path / "work")

        files = FolderCheckpoints(tmp_path / "work").restore()
        assert files
        FolderCheckpoints(tmp_path / "work").save(4, {TENSORS: files["tensors.bin"], STATE: files["state.json"]})
        _restore(Context(), None)  # type: ignore[arg-type]

    def use_version() -> None:
        retriever_from_files(exchange.weights.load(version_name(2, 0)).files)

    def plant_version(content: bytes) -> None:
        writer = Exchange(exchange.root, IDENTITY, "trainer", clock=StillClock()).weights
        shutil.rmtree(writer.folder / version_name(2, 0), ignore_errors=True)
        writer.publish(version_name(2, 0), {"model.json": content, "retriever.safetensors": content}, {})

    def plant(path: Path, kind: str | None, content: bytes) -> None:
        path.write_bytes(content)
        if kind:
            made = ("schema", "kind", "files", "manifest_digest")
            fields = {k: v for k, v in manifests[kind].items() if k not in made}
            write_manifest(stage_folders[kind], kind, **fields)

    manifests = {kind: read_manifest(folder, kind) for kind, folder in stage_folders.items()}
    uses: list[tuple[Path, str | None, Callable[[], Any]]] = [
        *((path, "snapshot", use_snapshot) for path in stage_folders["snapshot"].rglob("*.*")),
        *((path, "ict", use_models) for path in stage_folders["ict"].rglob("*.*")),
        *((path, "checkpoint", use_checkpoint) for path in stage_folders["checkpoint"].iterdir()),
        (index / "index.safetensors", None, lambda: load_index(index, snapshot)),
        (tmp_path / "encoder" / "pytorch_model.bin", None, lambda: read_weights(tmp_path / "encoder")),
        (tmp_path / "coder" / "model.safetensors", None, lambda: read_weights(tmp_path / "coder")),
        (tmp_path / "predictions.parquet", None, lambda: read_predictions(tmp_path / "predictions.parquet")),
        (tmp_path / "assignment.json", None, lambda: Follower(tmp_path / "assignment.json", None).look()),
        *((path, None, lambda: inspect(exchange.root)) for path in (exchange.root / "alive").rglob("*.json")),
        *((path, None, lambda: inspect(exchange.root)) for path in exchange.root.glob("*/v-*/*")),
    ]
    for content in evils:
        for path, kind, use in uses:
            path.parent.mkdir(exist_ok=True)
            before = path.read_bytes() if path.exists() else b""
            plant(path, kind, content)
            with suppress(Exception):
                use()
            assert not mark.exists(), path
            plant(path, kind, before)
            planted += 1
        plant_version(content)
        with pytest.raises(Exception, match=r"."):
            use_version()
        assert not mark.exists()
    told("a pickle in the place of every file, with a right manifest", planted + len(evils), "never run")


# What doctor says


def test_doctor_names_each_condition_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Told) -> None:
    from realmops.refresh import exchange as module

    root = exchange_with_everything(tmp_path / "e").root
    sign = root / "alive" / "builder" / "builder-0.json"
    whole = json.loads(sign.read_bytes())
    now = sign.stat().st_mtime
    minutes_ago = {path: path.stat().st_mtime - 300 for path in (root / "alive").rglob("*.json")}
    conditions: dict[str, Callable[[], object]] = {
        "builder-0 has been silent for 30": lambda: [os.utime(path, (at, at)) for path, at in minutes_ago.items()],
        "trainer has been silent for 30": lambda: [os.utime(path, (at, at)) for path, at in minutes_ago.items()],
        "run its stage again: it goes on from the newest checkpoint": lambda: os.utime(
            root / "alive/trainer/trainer.json", (minutes_ago[sign],) * 2
        ),
        "the clock of builder-0 is 86400 s ahead of the volume's": lambda: rewrite(sign, unix=now + 86400),
        "the clock of builder-0 is 86400 s behind the volume's": lambda: rewrite(sign, unix=now - 86400),
        "trainer 1 is seen here, but 2 has taken over": lambda: Trainer(Exchange.open(root, IDENTITY, grace=0.0)),
        "finished: failed: a test": lambda: Trainer(Exchange.open(root, IDENTITY, grace=0.0)).finish(
            "failed", "a test"
        ),
        "builder-0 is realmops 0.0.9, this is": lambda: rewrite(sign, realmops="0.0.9"),
        "builder-0: its sign of life cannot be read": lambda: sign.write_bytes(b"{"),
        "written by another version of realmops": lambda: monkeypatch.setattr("realmops.refresh.versions.SCHEMA", 0),
        "MB are free and the largest version here wants": lambda: monkeypatch.setattr(
            module, "free_bytes", lambda folder: 9
        ),
        "cannot be written: the volume is read-only": lambda: monkeypatch.setattr(
            module, "writable", lambda folder: False
        ),
        "was set aside as damaged or superseded": lambda: Exchange(root, IDENTITY, "trainer").indexes.set_aside(
            version_name(1, 0), "a test"
        ),
        "awaited: the index of v-000001-00000000": lambda: shutil.rmtree(root / "indexes" / version_name(1, 0)),
        "builder-0 waits for weights and does not see v-000001-00000000": lambda: (
            shutil.rmtree(root / "indexes" / version_name(1, 0)),
            rewrite(sign, doing="waiting for weights"),
            os.utime(root / "weights" / version_name(1, 0), (minutes_ago[sign],) * 2),
        ),
        "no trainer has started here, or it was removed": lambda: shutil.rmtree(root),
    }

    def rewrite(path: Path, **fields: Any) -> None:
        written = path.stat().st_mtime
        path.write_bytes(json.dumps({**whole, "unix": written, "since_unix": 0.0, **fields}).encode())
        os.utime(path, (written, written))  # a busy machine writes a second later

    for path in minutes_ago:
        path.write_bytes(json.dumps({**json.loads(path.read_bytes()), "unix": path.stat().st_mtime}).encode())
    shutil.copytree(root, tmp_path / "kept")
    for words, cause in conditions.items():
        assert not [line for line in inspect(root) if words in line], words
        cause()
        found = inspect(root)
        assert [line for line in found if words in line], (words, found)
        monkeypatch.undo()
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(tmp_path / "kept", root)
    told("conditions that doctor is asked about", len(conditions), "named in words")


# Small volumes, long runs, kills: the real thing


@pytest.mark.skipif(not may_mount(), reason="file systems can be mounted by root only")
def test_an_exchange_on_a_volume_that_is_too_small_goes_on_when_it_has_grown(told: Told) -> None:
    plan, kilobytes, refused = Plan(steps=4, policy=Policy(builder_timeout=3.0)), 16, 0
    while True:
        with small_disk(kilobytes << 10) as disk:
            try:
                run_on(disk / "e", plan)
                break
            except (AssertionError, TimeoutError, OSError):
                refused += 1
            subprocess.run(["mount", "-o", "remount,size=8m", disk], check=True)
            assert run_on(disk / "e") == undisturbed(PLAN)
            sound(Files(), disk / "e")
        kilobytes += times(16, 4)
    assert refused > 2
    told("an exchange on a tmpfs that is full", refused, "the same weights once there is room")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project of which everything before pre-training is done."""
    import yaml
    from small_project import stage, write_project

    folder = tmp_path_factory.mktemp("project")
    values = yaml.safe_load(write_project(folder).read_text())
    for name in ("snapshot", "tag", "ict"):
        stage(name, values, folder, folder / "root")
    return folder


def family(process: int) -> dict[str, int]:
    """A process and its index builder, by role."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    words = {int(child): Path(f"/proc/{child}/cmdline").read_bytes() for child in children}
    builders = [child for child, line in words.items() if b"index-builder" in line]
    return {"trainer": process, **dict(zip(("builder",), builders, strict=False))}


def look_at(process: int) -> tuple[float, int]:
    """Megabytes in memory and open files."""
    status = Path(f"/proc/{process}/status").read_text()
    memory = int(status.partition("VmRSS:")[2].split()[0]) / 1024
    return memory, len(os.listdir(f"/proc/{process}/fd"))


@pytest.mark.skipif(not CAMPAIGN, reason="one of the long parts, which make faults runs")
def test_pre_training_of_fifty_times_the_length_is_flat_in_memory_files_and_disk(prepared: Path, told: Told) -> None:
    from small_project import command

    steps, root = 50 * 12, prepared / "long"
    shutil.copytree(prepared / "root", root)
    words = ["--params", prepared / "params.yaml", "--root", root, "--set", f"pretrain.steps={steps}"]
    seen: list[tuple[int, dict[str, tuple[float, int]], int]] = []
    with subprocess.Popen(command("run", "pretrain", *words), stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            time.sleep(0.2)
            with suppress(OSError, IndexError, ValueError):
                [journal] = root.glob(".realmops/work/*/metrics.jsonl")
                step = journal.read_bytes().count(b"\n")
                looks = {role: look_at(pid) for role, pid in family(process.pid).items()}
                seen.append((step, looks, bytes_under(journal.parent / "exchange")))
        assert process.returncode == 0, process.stderr.read() if process.stderr else ""
    early = [one for one in seen if steps // 5 <= one[0] < 2 * steps // 5 and len(one[1]) == 2]
    late = [one for one in seen if one[0] >= 4 * steps // 5 and len(one[1]) == 2]
    for role in ("trainer", "builder"):
        memory, files = ([max(one[1][role][place] for one in part) for part in (early, late)] for place in (0, 1))
        assert memory[1] < 1.05 * memory[0] + 8, (role, memory)
        assert files[1] <= files[0] + 2, (role, files)
        told(
            f"steps of pre-training, {role}: {memory[0]:.0f} MB then {memory[1]:.0f} MB, {files[0]:.0f} then "
            f"{files[1]:.0f} files open", steps, "flat",
        )  # fmt: skip
    # not the most: for the moment in which a checkpoint is exchanged there are three of them, if a look falls there
    disk = [statistics.median(one[2] for one in part) / 1e3 for part in (early, late)]
    assert disk[1] < 1.1 * disk[0], disk
    told(f"steps of pre-training, the exchange: {disk[0]:.0f} kB then {disk[1]:.0f} kB", steps, "flat")


@pytest.mark.skipif(not CAMPAIGN, reason="one of the long parts, which make faults runs")
def test_pre_training_killed_on_both_sides_ends_with_the_same_bytes(prepared: Path, told: Told) -> None:
    found = found_by("lives.py", prepared, 60)
    for role in ("trainer", "builder"):
        told(f"SIGKILL of pre-training's {role} at random instants and file operations", found[role], "the same bytes")


def test_mlflow_listens_on_loopback_unless_told_otherwise(told: Told) -> None:
    """Of ours `realmops serve` alone listens, on loopback too; the other documented commands that do are MLflow's."""
    import mlflow.cli

    from realmops.cli import main

    for command in (mlflow.cli.cli.commands["server"], main.commands["serve"]):
        [host] = [option for option in command.params if option.name == "host"]
        assert host.default == "127.0.0.1"
    root = Path(__file__).parents[1]
    serving = {root / "docs/serve.md", root / "docs/commands.md", root / "src/realmops/serve/server.py"}
    for path in {root / "README.md", *(root / "docs").glob("*.md"), *(root / "src").rglob("*.py")} - serving:
        for words in ("0.0.0.0", "HTTPServer", ".bind(", ".listen("):
            if not (words == "0.0.0.0" and path.name == "answering_commands.py"):  # what --host says of it
                assert words not in path.read_text(encoding="utf-8"), path
    told("mlflow server without --host", 1, "listens on 127.0.0.1")


# Long runs


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def bytes_under(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are counted in /proc")
def test_a_run_of_fifty_times_the_length_keeps_its_files_and_its_room(tmp_path: Path, told: Told) -> None:
    plan, seen = Plan(steps=times(300, 3000)), list[tuple[int, int, int]]()
    builder: list[Builder] = []

    def build() -> None:
        if not builder:
            builder.append(builder_on(Files(), StillClock(), root=tmp_path / "e"))
        builder[0].build_next()
        builder[0].exchange.collect_indexes()

    def look(step: int) -> None:
        if step % 20 == 0:
            entries = len([*(tmp_path / "e").rglob("*")]) - len(os.listdir(tmp_path / "e" / "fences"))
            seen.append((open_files(), entries, bytes_under(tmp_path / "e")))

    exchange = Exchange.open(tmp_path / "e", IDENTITY, files=Files(), clock=StillClock(build), grace=0.0)
    with FailingDisk(0, "short"):  # without fsync
        life(exchange, plan, each_step=look)
    first, last = seen[1], seen[-1]
    assert last[0] == first[0]
    assert last[1] <= first[1]
    assert last[2] <= 1.02 * first[2]
    told(f"steps of the toy in one process, {first[0]} files open, {first[2]} bytes", plan.steps, "flat")
