"""The store of versions in single steps: refusals, races of readers, writers and collectors, lost replies.

Kills, power cuts and errors at any operation are in test_schedules.py.
"""

import mmap
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from exchange_lab import Fault, Killed, MemoryFiles, StillClock

from realmops import memory_map
from realmops.artifacts import DIGEST_KEY, MANIFEST, SCHEMA, canonical_json, digest_of
from realmops.files import Files
from realmops.refresh import versions
from realmops.refresh.versions import STALE_SECONDS, CorruptVersionError, VersionStore, version_name

RUN = {"corpus": "c0ffee", "dimensions": 4}
OLD, NEW = version_name(1, 10), version_name(1, 20)
CONTENT = {"a.bin": b"alpha" * 3, "0_Transformer/model/b.bin": b"beta" * 2}
ROOT, KIND = Path("/x"), Path("/x/kind")


def volume() -> MemoryFiles:
    """A volume with the folders of one kind, all of it durable."""
    files = MemoryFiles()
    for folder in ("/x", "/x/kind", "/x/pins", "/x/pins/trainer", "/x/pins/builder", "/x/alive", "/x/alive/trainer"):
        files.mkdir(Path(folder))
        files.sync_folder(Path(folder).parent)
    return files


def store_on(files: Files, holder: str = "trainer", root: Path = ROOT, **settings: Any) -> VersionStore:
    return VersionStore(root, "kind", RUN, holder, files, StillClock(), **{"grace": 0.0, **settings})


@pytest.fixture
def real(tmp_path: Path) -> VersionStore:
    """A store on a real folder."""
    for folder in ("kind", "pins/trainer", "pins/builder", "alive/trainer"):
        (tmp_path / folder).mkdir(parents=True)
    return store_on(Files(), root=tmp_path)


def before(at: int | str, act: Callable[[], object]) -> tuple[Callable[..., Any], list[str]]:
    """An ``around`` that acts before the operation of this number or name, and the operations so far."""
    operations: list[str] = []

    def around(operation: str, path: Path, effect: Callable[[], Any]) -> Any:
        if at in (len(operations), operation):
            act()
        operations.append(operation)
        return effect()

    return around, operations


def assert_intact(files: Files, expected: Mapping[str, Mapping[str, bytes]]) -> None:
    """I1: every visible version is whole, and the expected ones are there."""
    store = store_on(files, holder="builder-checker")
    loaded = {name: store.load(name) for name in store.names()}
    for version in loaded.values():
        store.unpin(version)
    contents = {name: version.files for name, version in loaded.items()}
    assert {name: contents.get(name) for name in expected} == expected


def test_a_published_version_is_loaded_and_pinned_until_it_is_unpinned(
    real: VersionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large file is memory-mapped from a local copy on request: a truncation on the volume does not reach it."""
    monkeypatch.setattr(memory_map, "MIN_BYTES", 1)
    assert real.publish(OLD, CONTENT, {"loss": 0.5})
    version = real.load(OLD, mapped=("a.bin",))
    assert [type(version.files[name]) for name in CONTENT] == [mmap.mmap, bytes]
    for file in CONTENT:
        os.truncate(real.folder / OLD / file, 0)
    assert {name: bytes(content) for name, content in version.files.items()} == CONTENT
    assert (version.meta, version.run, version.writer, version.step) == ({"loss": 0.5}, RUN, "trainer", 10)
    pins = real.root / "pins" / "trainer"
    assert os.listdir(pins) == [version.pin.name]  # type: ignore[union-attr]
    real.unpin(version)
    assert os.listdir(pins) == []


# Publishing


@pytest.mark.parametrize("kind", ["EIO", "applied but error"])
def test_i1_an_error_at_any_operation_leaves_the_whole_version_or_none(kind: str) -> None:
    """A commit that was applied, or that a retry commits, does not fail."""
    at, ended = 0, False
    while not ended:
        files, fault = volume(), Fault(at, kind)
        try:
            assert store_on(files.seen_by(fault)).publish(NEW, CONTENT, {}), f"{at}: taken for another writer's"
            assert_intact(files, {NEW: CONTENT})
        except OSError:
            operation, path = fault.operations[at]
            assert operation not in ("rename", "sync_folder") or path.name not in (NEW, "kind"), at
            assert_intact(files, {})
        ended = len(fault.operations) <= at
        at += 1


@pytest.mark.parametrize("file", [MANIFEST, *CONTENT])
def test_i6_truncated_flipped_and_longer_files_are_refused_before_use(file: str) -> None:
    files = volume()
    store_on(files).publish(OLD, CONTENT, {})
    node = files._at(KIND / OLD / file)
    whole = node.data
    truncated = [whole[:length] for length in range(len(whole))]
    flipped = [
        whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :]
        for place in range(len(whole))
        for bit in range(8)
    ]
    for node.data in [*truncated, *flipped, whole + b"\0"]:
        with pytest.raises(CorruptVersionError, match=re.escape(str(KIND / OLD / file))):
            store_on(files).load(OLD)
    node.data = whole
    assert store_on(files).load(OLD).files == CONTENT


def test_a_reader_before_any_operation_of_the_collector_keeps_its_version() -> None:
    for at in range(30):
        files, accepted = volume(), []
        store_on(files).publish(OLD, CONTENT, {})

        def read() -> None:
            with suppress(FileNotFoundError):  # in the trash: the reader takes another
                accepted.append(store_on(files, holder="builder-1").load(OLD))  # noqa: B023

        around, operations = before(at, read)
        collector = store_on(files.seen_by(around))
        collector.collect(set)
        assert bool(accepted) == (OLD in collector.names()), at
    assert 8 < len(operations) < at


def test_a_writer_that_resumes_before_any_operation_of_the_sweep_commits_a_whole_draft_or_none() -> None:
    for at in range(30):
        files = volume()
        with suppress(Killed):
            store_on(files.seen_by(Fault(12))).publish(NEW, CONTENT, {})
        [draft] = [KIND / name for name in files.listdir(KIND) if name.startswith(".stage.")]
        assert MANIFEST in files.listdir(draft)

        def commit() -> None:
            with suppress(OSError):
                files.rename(draft, KIND / NEW)  # noqa: B023

        around, operations = before(at, commit)
        store_on(files.seen_by(around)).sweep_own()
        assert_intact(files, {})
    assert 5 < len(operations) < at


def test_a_swept_draft_is_an_error_and_never_published_in_part() -> None:
    files = volume()
    around, _ = before("rename", lambda: store_on(files).sweep_own())
    with pytest.raises(FileNotFoundError):
        store_on(files.seen_by(around)).publish(OLD, CONTENT, {})
    assert files.listdir(KIND) == []


# Refusals


@pytest.mark.parametrize("linked", ["a.bin", "0_Transformer", "0_Transformer/model", ""])
def test_symbolic_links_in_a_version_are_refused(real: VersionStore, linked: str) -> None:
    real.publish(OLD, CONTENT, {})
    (real.folder / OLD / linked).rename(real.root / "elsewhere")
    (real.folder / OLD / linked).symlink_to(real.root / "elsewhere")
    with pytest.raises(CorruptVersionError, match="symbolic link"):
        real.load(OLD)


def forged(changes: Mapping[str, Any]) -> bytes:
    """A manifest with other fields and a valid digest, as of another version or of an attacker."""
    fields = {
        "schema": SCHEMA, "kind": "kind", "name": OLD, "nonce": "0", "writer": "trainer", "run": RUN, "files": {},
        "meta": {}, "created_unix": 0.0, **changes,
    }  # fmt: skip
    return canonical_json({**fields, DIGEST_KEY: digest_of(fields)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run": {**RUN, "corpus": "dead"}}, "corpus is 'dead', expected 'c0ffee'"),
        ({"run": {"corpus": "c0ffee"}}, "dimensions is None, expected 4"),
        ({"schema": 2}, "expected .*another version of realmops"), ({"surprise": 1}, "surprise"),
        ({"kind": "weights"}, "kind and schema are"), ({"name": NEW}, f"describes {NEW}"),
        *[
            ({"files": {name: {"bytes": 1, "sha256": ""}}}, "leaves the folder|lists the file")
            for name in ("../a", "b/../a", "/a", "b//a", "b/.a", "a/b/c/d/e", "")
        ],
        ({"files": {"a": {"bytes": "1", "sha256": ""}}}, "no list of files"),
        ({"files": {"a": {"bytes": -1, "sha256": ""}}}, "no list of files"),
        ({"files": {"a": {"bytes": True, "sha256": ""}}}, "no list of files"), ({"files": [1]}, "no list of files"),
    ],
)  # fmt: skip
def test_i8_forged_manifests_are_refused(changes: dict[str, Any], message: str) -> None:
    files = volume()
    files.mkdir(KIND / OLD)
    files.write(KIND / OLD / MANIFEST, forged(changes))
    with pytest.raises(CorruptVersionError, match=message):
        store_on(files).load(OLD)


def test_a_damaged_version_is_quarantined_and_published_again() -> None:
    files = volume()
    store = store_on(files)
    for count in range(1, 8):
        store.publish(OLD, {"a.bin": b"damaged"}, {})
        files._at(KIND / OLD / MANIFEST).data = b"{}"
        assert store.publish(OLD, CONTENT, {})
        assert store.load(OLD).files == CONTENT
        assert len(store.quarantined()) == min(count, versions.MAX_QUARANTINED)
        store.quarantine(OLD, "a test") if count == 4 else files.delete(KIND / OLD)


# Garbage


def test_the_pin_of_a_dead_reader_expires_and_that_of_a_living_one_does_not() -> None:
    files = volume()
    store, reader = store_on(files, holder="builder-1"), store_on(files)
    reader.publish(OLD, CONTENT, {})
    reader.load(OLD)
    for beat in range(3):
        files.replace(ROOT / "alive" / "trainer" / "trainer.json", b"%d" % beat)
        store.collect(set)
        store.clock.sleep(500.0)
    for seconds, left in ((0.0, [OLD]), (STALE_SECONDS - 501.0, [OLD]), (1.0, [])):
        store.clock.sleep(seconds)
        store.collect(set)
        assert store.names() == left


def test_trash_is_kept_for_its_grace_period_and_restored_when_needed() -> None:
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
