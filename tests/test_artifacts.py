"""Artifacts: digests, JSON, atomic files and folders, manifests; what of them survives a power cut."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from click.testing import CliRunner
from power import Disk

from realmops import artifacts
from realmops.artifacts import (
    DIGEST_KEY,
    atomic_folder,
    canonical_json,
    digest_of,
    read_json,
    read_manifest,
    seed_for,
    sha256_file,
    write_bytes,
    write_json,
    write_manifest,
)
from realmops.cli import main
from realmops.journal import Journal
from realmops.train.loop import FolderCheckpoints


def contents(folder: Path) -> dict[str, bytes]:
    """Everything under a folder, hidden names included."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_digests_are_sha256(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, example B.1
    assert sha256_file(tmp_path / "a") == known
    assert digest_of({"b": 1, "a": 2}) == digest_of({"a": 2, "b": 1})


def test_the_digest_of_a_large_file_is_remembered_until_it_may_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A remembered digest (here: a wrong one) counts while size, times, inode and device are those of the reading."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    large, small = tmp_path / os.fsdecode(b"\xff"), tmp_path / "small"  # a name that is not UTF-8
    large.write_bytes(b"a" * artifacts.REMEMBERED_SIZE)
    small.write_bytes(b"a" * (artifacts.REMEMBERED_SIZE - 1))
    digest = sha256_file(large)
    assert not (tmp_path / "cache").exists(), "changed a moment ago: the next change may have the same time"
    monkeypatch.setattr(artifacts, "_SETTLED_NS", -1)
    assert sha256_file(large) == digest
    sha256_file(small)
    [memory] = artifacts.digest_cache().iterdir()
    right = memory.read_text()
    memory.write_text(right.replace(digest, "0" * 64))
    assert sha256_file(large) == "0" * 64
    assert sha256_file(large, reread=True) == digest
    assert memory.read_text() == right
    memory.write_text(right[1:])
    assert sha256_file(large) == digest

    time = large.stat()
    large.write_bytes(b"b" * artifacts.REMEMBERED_SIZE)
    os.utime(large, ns=(time.st_atime_ns, time.st_mtime_ns))  # the time of a change of status cannot be set back
    assert sha256_file(large) != digest
    assert [*artifacts.digest_cache().iterdir()] == [memory], "one for each path, whatever its versions"
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")  # no folder can be created there
    assert sha256_file(large) != digest


def test_verify_reads_every_file_of_a_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(artifacts, "_SETTLED_NS", -1)
    with pytest.raises(ValueError, match=r"has no manifest.json of a stage; name the folder of a run with --root"):
        artifacts.verify_manifests(tmp_path)
    for name in ("a", "b"):
        (folder := tmp_path / "root" / name).mkdir(parents=True)
        (folder / "large").write_bytes(name.encode() * artifacts.REMEMBERED_SIZE)
        write_manifest(folder, name)
    write_json(tmp_path / "root" / "manifest.json", {"name": "of another program"})
    assert artifacts.verify_manifests(tmp_path / "root") == 2
    original = sha256_file(folder / "large")
    (folder / "large").write_bytes(b"c" * artifacts.REMEMBERED_SIZE)
    changed = sha256_file(folder / "large")
    [memory] = [path for path in artifacts.digest_cache().iterdir() if path.read_text().endswith(changed)]
    memory.write_text(memory.read_text().replace(changed, original))  # as after an error of the disk: no time changes
    read_manifest(folder, "b")
    result = CliRunner().invoke(main, ["verify", "--root", str(tmp_path / "root")])
    assert (result.exit_code, "b/large has sha256" in result.output) == (2, True), result.output


def test_a_pipe_has_no_digest(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe: cannot be read: it is a pipe, expected a regular file"):
        sha256_file(tmp_path / "pipe")


def test_canonical_json_has_one_form() -> None:
    assert canonical_json({"b": [1, 2.5], "a": "é"}) == '{"a":"é","b":[1,2.5]}'.encode()
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json(float("nan"))


def test_seeds_are_fixed_and_differ_by_stream() -> None:
    """The first 8 bytes of sha256('[0,"masks",3]'), shifted by one bit."""
    assert seed_for(0, "masks", 3) == int(digest_of([0, "masks", 3])[:16], 16) >> 1
    streams: list[tuple[Any, ...]] = [(0,), (1,), (0, "a"), (0, "b"), (0, "a", 1), (0, "a1"), (0, "a", "1")]
    assert len({seed_for(*stream) for stream in streams}) == len(streams)


def test_json_files_read_back_and_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    name = os.fsdecode(b"\xff")  # of a file
    write_json(path, {"b": ["é", name], "a": [1, None]})
    assert read_json(path) == {"b": ["é", name], "a": [1, None]}
    with pytest.raises(UnicodeEncodeError):
        canonical_json(name)
    assert path.read_bytes().endswith(b"\n")
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, float("inf"))
    assert read_json(path)["a"] == [1, None], "the old value stays"
    for damaged in (path.read_bytes()[:-4], b"", b"\xff\xfe"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"{path} is not valid JSON"):
            read_json(path)


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    write_bytes(tmp_path / "a", b"old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(artifacts.os, broken, fail)
        with pytest.raises(OSError, match="No space"):
            write_bytes(tmp_path / "a", b"new")
    assert contents(tmp_path) == {"a": b"old"}
    write_bytes(tmp_path / "a", b"new")
    assert contents(tmp_path) == {"a": b"new"}


@pytest.mark.parametrize("exists", [False, True])
def test_an_error_in_the_block_leaves_the_old_folder(tmp_path: Path, exists: bool) -> None:
    final = tmp_path / "final"
    if exists:
        final.mkdir()
        (final / "a").write_bytes(b"old")
    before = contents(tmp_path)
    with ExitStack() as stack:
        stack.enter_context(pytest.raises(KeyboardInterrupt))
        stage = stack.enter_context(atomic_folder(final, None))
        (stage / "a").write_bytes(b"half")
        raise KeyboardInterrupt
    assert contents(tmp_path) == before
    assert [p.name for p in tmp_path.iterdir()] == (["final"] if exists else [])


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_fault_at_any_call_of_the_commit_leaves_the_old_folder_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, exists: bool
) -> None:
    """The n-th fsync or rename fails, for every n: the folder is the old one whole, or the new one whole."""
    real = getattr(os, call)
    for failing in range(10):
        root = tmp_path / str(failing)
        final = root / "final"
        root.mkdir()
        if exists:
            final.mkdir()
            (final / "a").write_bytes(b"old")
        before, calls = contents(root), 0

        def faulty(*arguments: Any, failing: int = failing) -> Any:
            nonlocal calls
            calls += 1
            if calls == failing + 1:
                raise OSError(5, "Input/output error")
            return real(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(artifacts.os, call, faulty)
            try:
                with atomic_folder(final, None) as stage:
                    (stage / "a").write_bytes(b"new")
                    (stage / "b").write_bytes(b"new")
            except OSError:
                visible = {name: c for name, c in contents(root).items() if name.startswith("final/")}
                assert visible in (before, {"final/a": b"new", "final/b": b"new"})
            else:
                assert calls <= failing, "an error of the disk is raised"
                assert contents(root) == {"final/a": b"new", "final/b": b"new"}
                break
    # two files, the stage folder and its parent; the old folder's name and the new one's
    assert failing == {"fsync": 4, "rename": 1 + exists}[call]


def test_a_volume_without_locks_delays_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lock").touch()
    monkeypatch.setattr("fcntl.flock", mock.Mock(side_effect=OSError(errno.ENOTSUP, "no locks")))
    with open(tmp_path / "lock", "rb") as file:
        artifacts.wait_for_lock(file)
        assert artifacts.try_lock(file) is None


@pytest.mark.parametrize("locks", ["shared", "not shared", "none"])
def test_another_process_deletes_abandoned_drafts_and_no_part_of_one_that_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: str
) -> None:
    """Where locks are not shared between machines, a draft in work is taken for abandoned."""
    final, delete = tmp_path / "final", shutil.rmtree
    (tmp_path / f".final.{'0' * 32}").mkdir()
    if locks != "shared":
        monkeypatch.setattr(artifacts, "try_lock", lambda *_: None if locks == "none" else True)

    def commit_meanwhile(folder: Path, **options: Any) -> None:
        (folder / "a").unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            os.rename(draft, final)
        delete(folder, **options)

    with suppress(FileNotFoundError), atomic_folder(final, None) as draft:
        (draft / "a").write_bytes(b"whole")
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", commit_meanwhile)
            artifacts._remove_abandoned(final)
    left = {path.name: contents(path) for path in tmp_path.iterdir()}
    whole = {"final": {"a": b"whole"}}
    assert left == {"shared": whole, "not shared": {}, "none": left | whole}[locks]


def test_files_and_folders_survive_a_power_cut_from_their_commit_on(tmp_path: Path) -> None:
    final = tmp_path / "build" / "deep" / "stage"
    with Disk(tmp_path) as disk:
        for content in (b"old", b"new"):
            write_bytes(tmp_path / "bytes", content)
            assert not disk.lost(tmp_path / "bytes")
            with atomic_folder(final, None) as stage:
                assert stage.parent == final.parent, "a rename must not cross file systems"
                (stage / "part" / "below").mkdir(parents=True)
                (stage / "part" / "below" / content.decode()).write_bytes(content)
                (stage / "file").write_bytes(content)
            assert not disk.lost(final)
    assert disk.commits.count(final) == 2
    expected = {"part/below/new": b"new", "file": b"new"}
    assert contents(tmp_path) == {"bytes": b"new", **{f"build/deep/stage/{name}": c for name, c in expected.items()}}


def test_a_checkpoint_and_the_journal_up_to_it_survive_a_power_cut_before_older_ones_are_deleted(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "work" / "checkpoints"
    with Disk(tmp_path) as disk, Journal(tmp_path / "work" / "metrics.jsonl", "test") as journal:
        for step in range(1, 5):
            journal.log(step, loss=1.0)
            journal.position()
            assert not disk.lost(journal.path)
            FolderCheckpoints(folder).save(step, {"state.json": b"%d" % step, "tensors": b"0" * step})
            assert not disk.lost(folder / f"step-{step:08d}")
    assert sorted(os.listdir(folder)) == ["step-00000003", "step-00000004"]
    for damaged, step in (("4", 3), ("3", None)):
        assert (FolderCheckpoints(folder).restore() or {})["state.json"] == damaged.encode(), "the newest intact one"
        (folder / f"step-0000000{damaged}" / "tensors").write_bytes(b"")
        assert (FolderCheckpoints(folder).restore() or {}).get("state.json") == (step and b"%d" % step)


def folder_with_manifest(folder: Path) -> Path:
    (folder / "sub").mkdir(parents=True)
    (folder / "a.bin").write_bytes(bytes(range(256)))
    (folder / "sub" / "b.txt").write_bytes(b"bb")
    write_manifest(folder, "thing", corpus_hash="c0ffee")
    return folder


def test_a_manifest_lists_all_files(tmp_path: Path) -> None:
    folder = folder_with_manifest(tmp_path / "x")
    manifest = read_manifest(folder, "thing")
    assert manifest == json.loads((folder / "manifest.json").read_text())
    assert manifest["corpus_hash"] == "c0ffee"
    assert manifest["files"] == {
        "a.bin": {"bytes": 256, "sha256": sha256_file(folder / "a.bin")},
        "sub/b.txt": {"bytes": 2, "sha256": sha256_file(folder / "sub" / "b.txt")},
    }
    first = (folder / "manifest.json").read_bytes()
    write_manifest(folder, "thing", corpus_hash="c0ffee")
    assert (folder / "manifest.json").read_bytes() == first, "the manifest does not list itself"


def change_manifest(folder: Path, **changes: Any) -> None:
    manifest = {**json.loads((folder / "manifest.json").read_text()), **changes}
    kept = {key: value for key, value in manifest.items() if value is not None and key != DIGEST_KEY}
    (folder / "manifest.json").write_text(json.dumps({**kept, DIGEST_KEY: digest_of(kept)}))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut": (
        lambda x: os.truncate(x / "a.bin", 255),
        r"a\.bin has 255 bytes, its manifest lists 256; it was truncated or changed: run the stage",
    ),
    "longer": (lambda x: os.truncate(x / "a.bin", 257), r"a\.bin has 257 bytes, its manifest lists 256"),
    "missing": (
        lambda x: (x / "sub/b.txt").unlink(),
        r"sub/b\.txt is missing \(named in .*manifest\.json\): run the stage",
    ),
    "no manifest": (lambda x: (x / "manifest.json").unlink(), r"x holds no manifest\.json: it is no finished thing"),
    "cut manifest": (lambda x: os.truncate(x / "manifest.json", 60), r"manifest\.json is not valid JSON"),
    "no object": (lambda x: (x / "manifest.json").write_text("[1]"), r"kind and schema are list"),
    "kind": (lambda x: change_manifest(x, kind="other"), r"are \('other', 5\), expected \('thing', 5\)"),
    "schema": (lambda x: change_manifest(x, schema=3), "written by another version of realmops; run the stage"),
    "no files": (lambda x: change_manifest(x, files=None), r"json: it has no list of files"),
    "entry": (
        lambda x: change_manifest(x, files={"a.bin": {"bytes": 256}}),
        r"manifest\.json: it has no list of files",
    ),
    "long name": (
        lambda x: change_manifest(x, files={"x" * 5000: {"bytes": 1, "sha256": "0"}}),
        r"xxx is missing \(named in",
    ),
    "flip": (
        lambda x: (x / "a.bin").write_bytes(b"\1" + (x / "a.bin").read_bytes()[1:]),
        r"a\.bin has sha256 .*, its manifest lists",
    ),
    "digest": (
        lambda x: write_json(x / "manifest.json", {**read_json(x / "manifest.json"), "corpus_hash": "0ff1ce"}),
        r"manifest\.json: it does not match its own digest",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_and_only_flips_need_the_bytes_of_files(tmp_path: Path, damage: str) -> None:
    folder = folder_with_manifest(tmp_path / "x")
    change, message = DAMAGE[damage]
    change(folder)
    for verify in (True, False) if damage != "flip" else (True,):
        with pytest.raises(ValueError, match=message):
            read_manifest(folder, "thing", verify=verify)


@pytest.mark.parametrize("verify", [True, False])
def test_a_file_may_be_a_link_to_the_same_bytes_and_to_no_others(tmp_path: Path, verify: bool) -> None:
    folder = folder_with_manifest(tmp_path / "x")
    cached = tmp_path / "cached"
    (folder / "sub" / "b.txt").rename(cached)
    (folder / "sub" / "b.txt").symlink_to(cached)
    assert read_manifest(folder, "thing", verify=verify)
    cached.write_bytes(b"cc")
    with pytest.raises(ValueError, match=r"sub/b\.txt has sha256"):
        read_manifest(folder, "thing", verify=verify)


def test_a_file_in_a_linked_folder_is_refused(tmp_path: Path) -> None:
    folder = folder_with_manifest(tmp_path / "x")
    (folder / "sub").rename(tmp_path / "elsewhere")
    (folder / "sub").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"sub/b\.txt is in a folder that is a symbolic link"):
        read_manifest(folder, "thing")
    (folder / "sub").unlink()
    (tmp_path / "elsewhere").rename(folder / "sub")
    (tmp_path / "y").symlink_to(folder)
    assert read_manifest(tmp_path / "y", "thing")  # the folder itself may be a link


def test_a_manifest_with_a_flipped_bit_is_refused_or_means_the_same(tmp_path: Path) -> None:
    folder = folder_with_manifest(tmp_path / "x")
    whole = (folder / "manifest.json").read_bytes()
    for place in range(len(whole)):
        flipped = whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :]
        (folder / "manifest.json").write_bytes(flipped)
        with suppress(ValueError):
            assert read_manifest(folder, "thing") == json.loads(whole), place


@pytest.mark.parametrize("content", [b"[" * 100_000, None], ids=["nested", "terabytes"])
def test_deeply_nested_and_huge_json_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content or b"{")
    if content is None:
        os.truncate(path, 1 << 42)
    with pytest.raises(ValueError, match=f"{path} is not valid JSON"):
        read_json(path)


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "sub/../../secret"])
def test_a_name_that_leaves_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    """Before the file is opened: whether it exists makes no difference."""
    folder = folder_with_manifest(tmp_path / "x")
    (tmp_path / "secret").write_bytes(b"s")
    change_manifest(folder, files={name: {"bytes": 1, "sha256": sha256_file(tmp_path / "secret")}})
    with pytest.raises(ValueError, match="leaves the folder"):
        read_manifest(folder, "thing")


def test_the_target_of_a_link_to_a_folder_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk/old").write_text("old")
    (tmp_path / "out").symlink_to("disk")
    with atomic_folder(tmp_path / "out", None) as stage:
        (stage / "new").write_text("new")
    assert (tmp_path / "out").is_symlink()
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["new"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "out"]


FOREIGN: dict[str, Callable[[Path], Any]] = {
    "no manifest": lambda x: (x / "manifest.json").unlink(),
    "another kind": lambda x: change_manifest(x, kind="other"),
    "damaged manifest": lambda x: os.truncate(x / "manifest.json", 60),
    "edited manifest": lambda x: [
        (x / "sub" / "b.txt").rename(x / "mine.txt"),
        (x / "manifest.json").write_text((x / "manifest.json").read_text().replace("sub/b.txt", "mine.txt")),
    ],
    "copied manifest": lambda x: [(x / "a.bin").rename(x / "thesis.bin"), (x / "sub" / "b.txt").unlink()],
    "added file": lambda x: (x / "sub" / "notes.txt").write_text("mine"),
    "hidden file": lambda x: write_bytes(x / ".git", b"gitdir: elsewhere"),
    "link": lambda x: (x / "mine").symlink_to("/etc"),
    "a file": lambda x: x.rename(x.with_name("y")) and x.write_text("mine"),
}


@pytest.mark.parametrize("case", FOREIGN)
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_folder_with_files_that_its_manifest_does_not_list_is_not_replaced(
    tmp_path: Path, case: str, when: str
) -> None:
    final = folder_with_manifest(tmp_path / "x")
    with ExitStack() as stack:
        if when == "before":
            FOREIGN[case](final)
        kept = contents(tmp_path)
        stack.enter_context(pytest.raises(ValueError, match=r"x.* was not written by this command"))
        out = stack.enter_context(atomic_folder(final, "thing"))
        assert when == "meanwhile"
        FOREIGN[case](final)
        kept = contents(tmp_path)
        (out / "new").write_text("new")
    assert contents(tmp_path) == kept


def test_a_folder_of_listed_files_is_replaced_also_if_they_are_damaged(tmp_path: Path) -> None:
    """By a command whose user names the folder only if they are as it wrote them: they may have been corrected."""
    final = folder_with_manifest(tmp_path / "x")
    artifacts.check_replaceable(final, "thing")
    (final / "a.bin").write_bytes(b"changed")
    (final / "sub" / "b.txt").unlink()
    (final / "empty").mkdir()
    with pytest.raises(ValueError, match=r"a\.bin was not written by this command"):
        artifacts.check_replaceable(final, "thing")
    with atomic_folder(final, "thing") as out:
        (out / "new").write_text("new")
    assert contents(tmp_path) == {"x/new": b"new"}


def test_drafts_of_killed_processes_are_deleted_and_folders_with_similar_names_are_kept(tmp_path: Path) -> None:
    draft, similar = f".x.{'0' * 32}", [f".x.{'0' * 32}.backup", f".x.{'0' * 31}", f"x.{'0' * 32}", f".xx.{'0' * 32}"]
    for name in (draft, *similar):
        (tmp_path / name).mkdir()
    with atomic_folder(tmp_path / "x", "thing"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*similar, "x"])
