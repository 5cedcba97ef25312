"""The store of versions: publishing, reading and removing under kills, errors, power cuts and damage."""

import errno
import hashlib
import mmap
import os
import random
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from exchange_lab import FAULTS, Fault, Killed, MemoryFiles, StillClock

from realmops import memory_map
from realmops.artifacts import MANIFEST, add_digest, canonical_json
from realmops.files import Files
from realmops.refresh import versions
from realmops.refresh.versions import (
    STALE_SECONDS,
    CorruptVersionError,
    VersionStore,
    fence_of,
    step_of,
    version_name,
)

RUN = {"corpus": "c0ffee", "dimensions": 4}
OLD, NEW = version_name(1, 10), version_name(1, 20)
CONTENT = {"a.bin": b"alpha" * 3, "0_Transformer/model/b.bin": b"beta" * 2}
ROOT = Path("/x")


def volume() -> MemoryFiles:
    """A volume with the folders of one kind, all of it durable."""
    files = MemoryFiles()
    for folder in ("/x", "/x/kind", "/x/pins", "/x/pins/trainer", "/x/pins/builder", "/x/alive", "/x/alive/trainer"):
        files.mkdir(Path(folder))
        files.sync_folder(Path(folder).parent)
    return files


def store_on(files: Files, holder: str = "trainer", root: Path = ROOT, **settings: Any) -> VersionStore:
    return VersionStore(root, "kind", RUN, holder, files, StillClock(), **{"grace": 0.0, **settings})


def real_volume(tmp_path: Path) -> Path:
    for folder in ("kind", "pins/trainer", "pins/builder", "alive/trainer"):
        (tmp_path / folder).mkdir(parents=True)
    return tmp_path


def visible_faults(files: Files, expected: Mapping[str, Mapping[str, bytes]] | None = None) -> list[str]:
    """I1: every version that can be seen is whole, and those that are expected are there."""
    store, wrong = store_on(files, holder="builder-checker"), []
    found = {}
    for name in store.names():
        try:
            version = store.load(name)
            store.unpin(version)
            found[name] = version.files
        except (CorruptVersionError, OSError) as error:
            wrong.append(f"visible but not whole: {error}")
    wrong += [f"{name} is lost or changed" for name in expected or {} if found.get(name) != (expected or {})[name]]
    return wrong


def test_what_was_published_comes_back(tmp_path: Path) -> None:
    store = store_on(Files(), root=real_volume(tmp_path))
    assert store.publish(OLD, CONTENT, {"loss": 0.5})
    version = store.load(OLD)
    assert version.files == CONTENT
    assert (version.meta, version.run, version.writer, version.step) == ({"loss": 0.5}, RUN, "trainer", 10)
    assert os.listdir(tmp_path / "pins" / "trainer") == [version.pin.name]  # type: ignore[union-attr]
    store.unpin(version)
    assert os.listdir(tmp_path / "pins" / "trainer") == []
    listed = {name: (len(content), hashlib.sha256(content).hexdigest()) for name, content in CONTENT.items()}
    assert {name: (e["bytes"], e["sha256"]) for name, e in store.manifest(OLD).listing.items()} == listed


def test_a_large_file_is_copied_while_it_is_checked_and_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_map, "MIN_BYTES", 1)
    store = store_on(Files(), root=real_volume(tmp_path))
    store.publish(OLD, CONTENT, {})
    found = store.load(OLD, mapped=("a.bin",)).files
    assert [type(found[name]) for name in CONTENT] == [mmap.mmap, bytes]
    for file in CONTENT:
        os.truncate(tmp_path / "kind" / OLD / file, 0)
    assert {name: bytes(content) for name, content in found.items()} == CONTENT
    store.publish(NEW, found, {})
    assert store.load(NEW).files == CONTENT
    file = tmp_path / "kind" / NEW / "a.bin"
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    with pytest.raises(CorruptVersionError, match=r"a\.bin has sha256"):
        store.load(NEW, mapped=("a.bin",))


def test_names_sort_by_life_then_step_and_foreign_names_are_not_listed(tmp_path: Path) -> None:
    store = store_on(Files(), root=real_volume(tmp_path))
    for name in (version_name(2, 5), version_name(1, 100), version_name(1, 20)):
        store.publish(name, {}, {})
    for other in ("v-1-2", "step-5", ".stage.trainer.ab", "v-000001-00000020x"):
        (tmp_path / "kind" / other).mkdir()
    assert store.names() == ["v-000001-00000020", "v-000001-00000100", "v-000002-00000005"]
    assert (fence_of("v-000002-00000005"), step_of("v-000002-00000005")) == (2, 5)


# Publishing under faults


def test_i1_a_publisher_that_is_killed_at_any_operation_leaves_the_old_state_or_the_new_one() -> None:
    at, ended = 0, False
    while not ended:
        for kind in ("kill", "kill after"):
            files = volume()
            store_on(files).publish(OLD, CONTENT, {})
            fault = Fault(at, kind)
            try:
                store_on(files.seen_by(fault)).publish(NEW, CONTENT, {})
                ended = True
            except Killed:
                pass
            assert visible_faults(files, {OLD: CONTENT}) == [], (kind, at)
            again = store_on(files)  # the next life sweeps and publishes
            again.sweep_own()
            assert NEW in again.names() or again.publish(NEW, CONTENT, {}), (kind, at)
            again.collect(lambda: {OLD, NEW})
            assert files.listdir(ROOT / "kind") == [OLD, NEW] or at >= fault.count, (kind, at)
        at += 1
    assert at > 10


@pytest.mark.parametrize("kind", ["ENOSPC", "EIO", "applied but error"])
def test_i1_one_error_at_any_operation_leaves_the_whole_version_or_nothing(kind: str) -> None:
    """A commit that was done, or can be tried again, does not fail."""
    at, ended = 0, False
    while not ended:
        files, fault = volume(), Fault(at, kind)
        try:
            assert store_on(files.seen_by(fault)).publish(NEW, CONTENT, {}), f"{at}: mine is taken for another's"
            assert visible_faults(files, {NEW: CONTENT}) == [], at
        except OSError:
            operation, path = fault.operations[at]
            assert operation not in ("rename", "sync_folder") or path.name not in (NEW, "kind"), at
            assert visible_faults(files) == [], at
        ended = fault.count <= at
        at += 1


def test_i1_after_a_power_cut_what_is_visible_is_whole_and_what_was_acknowledged_is_there() -> None:
    at, ended = 0, False
    while not ended:
        for seed in range(25):
            files = volume()
            store_on(files).publish(OLD, CONTENT, {})
            acknowledged = {OLD: CONTENT}
            try:
                store_on(files.seen_by(Fault(at))).publish(NEW, CONTENT, {})
                acknowledged[NEW], ended = CONTENT, True
            except Killed:
                pass
            files.power_cut(random.Random(seed))
            assert visible_faults(files, acknowledged) == [], (at, seed)
        at += 1
    assert at > 10


def test_the_manifest_is_the_last_file_written_and_durable_before_the_commit() -> None:
    fault = Fault(-1)
    store_on(volume().seen_by(fault)).publish(NEW, CONTENT, {})
    steps = [(step, path.name) for step, path in fault.operations if step in ("write", "fsync", "rename")]
    names = ["a.bin", "b.bin", MANIFEST]
    assert steps == [(step, name) for name in names for step in ("write", "fsync")] + [("rename", NEW)]


@pytest.mark.parametrize("file", [MANIFEST, *CONTENT])
def test_i6_files_that_are_cut_flipped_or_longer_are_refused_before_use(file: str) -> None:
    files = volume()
    store_on(files).publish(OLD, CONTENT, {})
    node = files._at(ROOT / "kind" / OLD / file)
    whole = node.data
    cut = [whole[:length] for length in range(len(whole))]
    flipped = [
        whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :]
        for place in range(len(whole))
        for bit in range(8)
    ]
    for node.data in [*cut, *flipped, whole + b"\0"]:
        with pytest.raises(CorruptVersionError, match=re.escape(str(ROOT / "kind" / OLD / file))):
            store_on(files).load(OLD)
    node.data = whole
    assert store_on(files).load(OLD).files == CONTENT


def test_a_reader_that_comes_before_any_operation_of_the_collector_keeps_what_it_has_accepted() -> None:
    at, ended = 0, False
    while not ended:
        files, accepted = volume(), []
        store_on(files).publish(OLD, CONTENT, {})
        fault = Fault(at)

        def reader_first(operation: str, path: Path, effect: Callable[[], Any]) -> Any:
            if fault.count == at:  # noqa: B023
                with suppress(FileNotFoundError):  # in the trash: the reader takes another
                    accepted.append(store_on(files, holder="builder-1").load(OLD))  # noqa: B023
            fault.count += 1  # noqa: B023
            return effect()

        collector = store_on(files.seen_by(reader_first))
        collector.collect(set)
        assert bool(accepted) == (OLD in collector.names()), at
        ended = fault.count <= at
        at += 1
    assert at > 8


def test_a_writer_that_wakes_up_before_any_operation_of_the_sweep_commits_its_draft_whole_or_not_at_all() -> None:
    def asleep(operation: str, path: Path, effect: Callable[[], Any]) -> Any:
        if operation == "rename":
            raise Killed
        return effect()

    at, ended = 0, False
    while not ended:
        files, count = volume(), 0

        def writer_first(operation: str, path: Path, effect: Callable[[], Any]) -> Any:
            nonlocal count
            if count == at:  # noqa: B023
                with suppress(OSError):
                    files.rename(draft, ROOT / "kind" / NEW)  # noqa: B023
            count += 1
            return effect()

        with suppress(Killed):
            store_on(files.seen_by(asleep)).publish(NEW, CONTENT, {})
        [entry] = [name for name in files.listdir(ROOT / "kind") if name.startswith(".stage.")]
        draft = ROOT / "kind" / entry
        store_on(files.seen_by(writer_first)).sweep_own()
        assert visible_faults(files) == [], at
        ended = count <= at
        at += 1
    assert at > 5


# What is refused, set aside, swept and removed


def test_a_missing_file_is_damage_after_a_second_read(tmp_path: Path) -> None:
    store = store_on(Files(), root=real_volume(tmp_path))
    store.publish(OLD, CONTENT, {})
    (tmp_path / "kind" / OLD / "0_Transformer/model/b.bin").unlink()
    with pytest.raises(CorruptVersionError, match=r"b\.bin is missing"):
        store.load(OLD)
    with pytest.raises(FileNotFoundError):
        store.load(NEW)
    assert os.listdir(tmp_path / "pins" / "trainer") == []


@pytest.mark.parametrize("linked", ["a.bin", "0_Transformer", "0_Transformer/model", ""])
def test_a_version_of_which_something_is_a_link_is_refused(tmp_path: Path, linked: str) -> None:
    store = store_on(Files(), root=real_volume(tmp_path))
    store.publish(OLD, CONTENT, {})
    (tmp_path / "kind" / OLD / linked).rename(tmp_path / "elsewhere")
    (tmp_path / "kind" / OLD / linked).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptVersionError, match="symbolic link"):
        store.load(OLD)


@pytest.mark.parametrize("name", [".dead.0", ".stage.trainer.0", f".trash.{OLD}"])
def test_what_a_planted_link_points_to_is_not_deleted(tmp_path: Path, name: str) -> None:
    store = store_on(Files(), root=real_volume(tmp_path))
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_bytes(b"mine")
    (tmp_path / "kind" / name).symlink_to(tmp_path / "precious")
    store.sweep_own()
    store.collect(set)
    assert os.listdir(tmp_path / "kind") == []
    assert (tmp_path / "precious" / "file").read_bytes() == b"mine"


def test_a_version_larger_than_the_memory_is_refused_before_it_is_read(tmp_path: Path) -> None:
    store = store_on(Files(), root=real_volume(tmp_path))
    (tmp_path / "kind" / OLD).mkdir()
    (tmp_path / "kind" / OLD / "a.bin").touch()
    os.truncate(tmp_path / "kind" / OLD / "a.bin", 1 << 42)  # takes no room on the disk
    listing = {"a.bin": {"bytes": 1 << 42, "sha256": "0" * 64}}
    (tmp_path / "kind" / OLD / MANIFEST).write_bytes(forged({"files": listing}))
    with pytest.raises(OSError, match="more than the memory of this machine") as caught:
        store.load(OLD)
    assert caught.value.filename == str(tmp_path / "kind" / OLD / MANIFEST)
    assert store.names() == [OLD]


def forged(changes: Mapping[str, Any]) -> bytes:
    """A manifest with other fields and a right digest: the work of another version, or of an enemy."""
    fields = {
        "schema": 3, "kind": "kind", "name": OLD, "nonce": "0", "writer": "trainer", "run": RUN, "files": {},
        "meta": {}, "created_unix": 0.0, **changes,
    }  # fmt: skip
    return canonical_json(add_digest(fields))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run": {**RUN, "corpus": "dead"}}, "corpus is 'dead', expected 'c0ffee'"),
        ({"run": {"corpus": "c0ffee"}}, "dimensions is None, expected 4"),
        ({"schema": 2}, "expected .*another version of realmops"), ({"surprise": 1}, "surprise"),
        ({"kind": "weights"}, "kind and schema are"), ({"name": NEW}, f"describes {NEW}"),
        *[
            ({"files": {name: {"bytes": 1, "sha256": ""}}}, "leaves the folder|lists the file")
            for name in ("../a", "b/../a", "/a", "b//a", "b/.a", "b/", "./a", "a/b/c/d/e", "ä", "")
        ],
        ({"files": {"a": {"bytes": "1", "sha256": ""}}}, "no list of files"),
        ({"files": {"a": {"bytes": -1, "sha256": ""}}}, "no list of files"),
        ({"files": {"a": {"bytes": True, "sha256": ""}}}, "no list of files"), ({"files": [1]}, "no list of files"),
    ],
)  # fmt: skip
def test_i8_a_manifest_that_is_not_ours_is_refused(changes: dict[str, Any], message: str) -> None:
    files = volume()
    files.mkdir(ROOT / "kind" / OLD)
    files.write(ROOT / "kind" / OLD / MANIFEST, forged(changes))
    with pytest.raises(CorruptVersionError, match=message):
        store_on(files).load(OLD)


def test_other_spellings_of_a_manifest_are_refused() -> None:
    files = volume()
    files.mkdir(ROOT / "kind" / OLD)
    node = ROOT / "kind" / OLD / MANIFEST
    files.write(node, forged({}))
    assert store_on(files).load(OLD).files == {}
    twice = forged({}).replace(b'{"created_unix"', b'{"created_unix":1.0,"created_unix"')
    for content in (forged({}) + b" ", twice, b"[" * 5000, b"3", b"null", b'{"a":NaN}', b"\xff"):
        files._at(node).data = content
        with pytest.raises(CorruptVersionError):
            store_on(files).load(OLD)


def test_damaged_versions_are_set_aside_and_only_a_few_are_kept() -> None:
    files = volume()
    store = store_on(files)
    for step in range(6):
        store.publish(version_name(1, step), CONTENT, {})
        store.quarantine(version_name(1, step), "a test")
    assert len(store.quarantined()) == 4
    assert files.listdir(ROOT / "kind") == store.quarantined()
    assert store.publish(OLD, CONTENT, {})


def test_where_a_reader_may_not_write_it_steps_over_what_is_damaged() -> None:
    files = volume()
    store_on(files).publish(OLD, CONTENT, {})

    def read_only(operation: str, path: Path, effect: Callable[[], Any]) -> Any:
        if operation == "rename":
            raise OSError(errno.EROFS, "read-only", str(path))
        return effect()

    reader = store_on(files.seen_by(read_only), holder="builder-1")
    reader.quarantine(OLD, "a test")
    assert reader.names() == []
    assert store_on(files).names() == [OLD]


def test_a_damaged_version_that_has_the_name_makes_way_for_a_sound_one() -> None:
    files = volume()
    store = store_on(files)
    store.publish(OLD, {"a.bin": b"rotten"}, {})
    files._at(ROOT / "kind" / OLD / MANIFEST).data = b"{}"
    assert store.publish(OLD, CONTENT, {})
    assert store.load(OLD).files == CONTENT
    assert len(store.quarantined()) == 1


def test_an_error_of_the_volume_is_no_damage_of_the_version() -> None:
    files = volume()
    store_on(files).publish(OLD, CONTENT, {})
    fault = Fault(5, "EIO")
    with pytest.raises(OSError, match="EIO"):
        store_on(files.seen_by(fault)).load(OLD)
    assert fault.operations[5][0] == "read"
    assert store_on(files).load(OLD).files == CONTENT


def test_the_draft_of_another_is_left_alone_until_it_has_been_still_for_long() -> None:
    files = volume()
    draft = ROOT / "kind" / ".stage.builder-1.ab"
    files.mkdir(draft)
    store = store_on(files)
    store.sweep_own()
    store.collect(set)
    store.clock.sleep(599.0)
    files.write(draft / "a.bin", b"1")
    store.collect(set)
    store.clock.sleep(599.0)
    store.collect(set)
    assert files.listdir(ROOT / "kind") == [draft.name]
    store.clock.sleep(1.0)
    store.collect(set)
    assert files.listdir(ROOT / "kind") == []


def swept_before(files: MemoryFiles, operation: str, most: int = 99) -> MemoryFiles:
    """The volume of a writer under whom drafts are swept before such operations."""
    left = [most]

    def sweep_first(what: str, path: Path, effect: Callable[[], Any]) -> Any:
        if what == operation and left[0]:
            left[0] -= 1
            store_on(files).sweep_own()
        return effect()

    return files.seen_by(sweep_first)


def test_a_draft_that_was_swept_under_its_owner_is_reported_and_never_half_published() -> None:
    files = volume()
    with pytest.raises(OSError, match="the draft was swept"):
        store_on(swept_before(files, "rename")).publish(OLD, CONTENT, {})
    assert files.listdir(ROOT / "kind") == []

    def fenced() -> None:
        raise KeyError("another has taken over")

    with pytest.raises(KeyError):
        store_on(swept_before(files, "sync_folder")).publish(OLD, CONTENT, {}, fenced)
    assert files.listdir(ROOT / "kind") == []


@pytest.mark.parametrize("operation", ["write", "sync_folder", "rename"])
def test_a_draft_that_was_swept_once_is_written_again(operation: str) -> None:
    files = volume()
    assert store_on(swept_before(files, operation, most=1)).publish(OLD, CONTENT, {})
    assert files.listdir(ROOT / "kind") == [OLD]
    assert store_on(files).load(OLD).files == CONTENT


def test_the_pin_of_a_dead_reader_ends_and_that_of_a_living_one_does_not() -> None:
    files = volume()
    store, reader = store_on(files, holder="builder-1"), store_on(files)
    reader.publish(OLD, CONTENT, {})
    reader.load(OLD)
    for beat in range(3):
        files.replace(ROOT / "alive" / "trainer" / "trainer.json", b"%d" % beat)
        store.collect(set)
        store.clock.sleep(500.0)
    assert store.names() == [OLD]
    store.collect(set)
    assert store.names() == [OLD]
    store.clock.sleep(STALE_SECONDS - 501.0)
    store.collect(set)
    assert store.names() == [OLD]
    store.clock.sleep(1.0)
    store.collect(set)
    assert store.names() == [], "as long as that without a change"


def test_what_is_published_while_a_collector_asks_for_needs_is_not_moved() -> None:
    moved: list[Path] = []

    def watched(operation: str, path: Path, effect: Callable[[], Any]) -> Any:
        moved.extend([path] if operation == "rename" else [])
        return effect()

    files = volume()
    writer, collector = store_on(files, holder="builder-1"), store_on(files.seen_by(watched), grace=120.0)
    writer.publish(OLD, CONTENT, {})

    def needs() -> set[str]:
        needed = {*writer.names()}
        writer.publish(NEW, CONTENT, {})
        return needed

    collector.collect(needs)
    assert (writer.names(), moved) == ([OLD, NEW], [])


def test_trash_waits_for_its_grace_and_returns_when_it_is_needed() -> None:
    files = volume()
    store = store_on(files, grace=120.0)
    store.publish(OLD, CONTENT, {})
    store.collect(set)
    assert (store.names(), store.exists(OLD)) == ([], True)
    store.clock.sleep(119.0)
    store.collect(set)
    assert store.exists(OLD)
    store.clock.sleep(1.0)
    store.collect(lambda: {OLD})
    assert store.load(OLD).files == CONTENT
    store.sweep_own()  # gives up the pin
    store.collect(set)
    store.clock.sleep(120.0)
    store.collect(set)
    assert not store.exists(OLD)


def test_a_collector_killed_anywhere_is_finished_by_the_next_and_shows_nothing_half() -> None:
    for kind in FAULTS:
        at, ended = 0, False
        while not ended:
            files, fault = volume(), Fault(at, kind)
            for name in (OLD, NEW):
                store_on(files).publish(name, CONTENT, {})
            with suppress(Killed, OSError):
                store_on(files.seen_by(fault)).collect(lambda: {NEW})
            assert visible_faults(files, {NEW: CONTENT}) == [], (kind, at)
            store_on(files).collect(lambda: {NEW})
            assert files.listdir(ROOT / "kind") == [NEW], (kind, at)
            ended = fault.count <= at
            at += 1


def test_each_rule_that_is_switched_off_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest that is written before the files makes no difference, as nothing is visible before the rename."""

    def unchecked(store: VersionStore, trash: Iterable[str], keep: Any) -> None:
        for entry in trash:
            store.files.discard(store.folder / entry)

    def unclaimed(store: VersionStore) -> None:
        for entry in store.files.listdir(store.folder):
            if entry.startswith(".stage."):
                with suppress(OSError):
                    store.files.delete(store.folder / entry)

    flipped = partial(test_i6_files_that_are_cut_flipped_or_longer_are_refused_before_use, "a.bin")
    one_error = partial(test_i1_one_error_at_any_operation_leaves_the_whole_version_or_nothing, "applied but error")
    power_cut = test_i1_after_a_power_cut_what_is_visible_is_whole_and_what_was_acknowledged_is_there
    sweep = test_a_writer_that_wakes_up_before_any_operation_of_the_sweep_commits_its_draft_whole_or_not_at_all
    pin = test_a_reader_that_comes_before_any_operation_of_the_collector_keeps_what_it_has_accepted
    mutants: list[tuple[Any, str, Any, Callable[[], None]]] = [
        (MemoryFiles, "fsync", lambda volume, node: None, power_cut),
        (MemoryFiles, "fsync_folder", lambda volume, folder: None, power_cut),
        (versions, "_sha256", lambda content: "0" * 64, flipped),
        (VersionStore, "_published_nonce", lambda store, name: "of another", one_error),
        (VersionStore, "_empty_trash", unchecked, pin),
        (VersionStore, "sweep_own", unclaimed, sweep),
    ]
    for place, name, mutant, campaign in mutants:
        with monkeypatch.context() as patch:
            patch.setattr(place, name, mutant)
            with pytest.raises((AssertionError, pytest.fail.Exception)):
                campaign()
        campaign()
