"""Inputs with an address: fetched once, verified, resumed, and never half."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from stored_objects import store_file, store_folder, web_server

from realmops import config
from realmops.inputs import fetch as module
from realmops.inputs.addresses import parse, replace_inputs, version_of
from realmops.inputs.fetch import fetch, fetch_addresses, local_cache

FILES = {"a.txt": b"one\n", "b/c.txt": b"two\n", "b/d/e.txt": b""}


class Lines:
    """A report that keeps its lines and the bytes of its progress bars."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.bytes: list[int] = []
        self.total = 0

    def log(self, message: str) -> None:
        self.lines.append(message)

    def progress(self, label: str, total: int, unit: str = "") -> Callable[[int], None]:
        self.total = total
        return self.bytes.append


@pytest.fixture
def report() -> Lines:
    return Lines()


@pytest.fixture
def memory() -> Iterator[MemoryFileSystem]:
    fs = MemoryFileSystem()
    yield fs
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths that were fetched from memory://."""
    fetched: list[str] = []
    original = MemoryFileSystem.get_file

    def get_file(self: MemoryFileSystem, path: str, *args: Any, **options: Any) -> None:
        fetched.append(path)
        original(self, path, *args, **options)

    monkeypatch.setattr(MemoryFileSystem, "get_file", get_file)
    return fetched


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def fetch_inputs(values: Any, cache: Path, report: Lines, reads: Any = lambda key: True) -> dict[str, dict[str, Any]]:
    """The options with local paths instead of addresses."""
    fetched = fetch_addresses(values, cache, report, reads)
    return replace_inputs(values, {key: str(copy.path) for key, copy in fetched.items()})


def options(**inputs: str) -> dict[str, dict[str, Any]]:
    return replace_inputs(config.default_options(), {key.replace("__", "."): value for key, value in inputs.items()})


def test_options_get_paths_of_the_cache_for_addresses(
    tmp_path: Path, memory: MemoryFileSystem, report: Lines, reads: list[str]
) -> None:
    memory.pipe({f"/docs/{name}": text for name, text in FILES.items()})
    test = store_file(b'{"question": "?"}\n', "memory://store", "test.jsonl")
    values = options(snapshot__documents="memory://docs", questions__test=test, questions__dev=test, tag__dev="own")
    local = fetch_inputs(values, tmp_path, report)
    documents, questions = Path(local["snapshot"]["documents"]), Path(local["questions"]["test"])
    assert documents == tmp_path / version_of("memory://docs") / "docs"
    assert questions == tmp_path / parse(test).digest / "test.jsonl"
    assert local["questions"]["dev"] == str(questions)
    assert content(documents) == FILES
    assert questions.read_bytes() == b'{"question": "?"}\n'
    assert (
        replace_inputs(
            local,
            {
                key: values[key.split(".")[0]][key.split(".")[1]]
                for key in ("snapshot.documents", "questions.test", "questions.dev")
            },
        )
        == values
    )
    assert len(reads) == len(FILES) + 1
    assert (sum(report.bytes), report.total) == (8 + 18, 18)
    assert fetch_inputs(values, tmp_path, report) == local
    assert len(reads) == len(FILES) + 1, "the second time nothing is fetched"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([documents.parent.name, questions.parent.name])


def test_only_what_is_read_is_fetched(tmp_path: Path, memory: MemoryFileSystem, report: Lines) -> None:
    memory.pipe_file("/test.jsonl", b"x")
    values = options(snapshot__documents="memory://missing", questions__test="memory://test.jsonl")
    local = fetch_inputs(values, tmp_path, report, lambda key: key.startswith("questions."))
    assert local["snapshot"]["documents"] == "memory://missing"
    assert Path(local["questions"]["test"]).read_bytes() == b"x"
    with pytest.raises(ValueError, match=r"^snapshot.documents: memory://missing does not exist; check the address$"):
        fetch_inputs(values, tmp_path, report)


def test_a_folder_and_a_stored_folder_of_equal_content_are_equal_copies(
    tmp_path: Path, memory: MemoryFileSystem, report: Lines
) -> None:
    memory.pipe({f"/docs/{name}": text for name, text in FILES.items()})
    stored = store_folder(FILES, f"file://{tmp_path}/store", "docs")
    copies = [fetch(address, tmp_path / "cache", report) for address in ("memory://docs", stored)]
    assert [content(copy.path) for copy in copies] == [FILES, FILES]
    assert [(copy.path.name, copy.files, copy.bytes) for copy in copies] == [("docs", 3, 8)] * 2
    assert copies[1].version == parse(stored).digest


def test_two_names_of_one_stored_object_are_two_copies(tmp_path: Path, memory: MemoryFileSystem, report: Lines) -> None:
    for name in ("a.csv", "a.tsv"):
        assert fetch(store_file(b"x", "memory://store", name), tmp_path, report).path.name == name


def test_a_web_file_is_fetched_by_its_etag(tmp_path: Path, report: Lines) -> None:
    with web_server() as server:
        server.files["/a b.jsonl"] = b"first", {"ETag": '"1"'}
        address = f"{server.url}/a%20b.jsonl?token=secret"
        server.files["/a%20b.jsonl"] = server.files["/a b.jsonl"]
        first = fetch(address, tmp_path, report)
        assert fetch(address, tmp_path, report) == first
        assert server.gets == ["/a%20b.jsonl"]
        server.files["/a%20b.jsonl"] = b"other", {"ETag": '"2"'}
        second = fetch(address, tmp_path, report)
    assert [(copy.path.name, copy.path.read_bytes()) for copy in (first, second)] == [
        ("a b.jsonl", b"first"), ("a b.jsonl", b"other")]  # fmt: skip
    assert "secret" not in first.address


def test_a_web_file_without_marks_is_compared_by_its_content(tmp_path: Path, report: Lines) -> None:
    with web_server() as server:
        server.files["/a.jsonl"] = b"first", {}
        copy = fetch(f"{server.url}/a.jsonl", tmp_path, report)
        assert fetch(f"{server.url}/a.jsonl", tmp_path, report) == copy
        assert len(server.gets) == 3, "read for its version, fetched, read for its version"


def test_a_folder_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, memory: MemoryFileSystem, report: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.pipe({f"/docs/{name}": text for name, text in FILES.items()})
    original = MemoryFileSystem.get_file

    def get_file(self: MemoryFileSystem, path: str, *args: Any, **keys: Any) -> None:
        original(self, path, *args, **keys)
        if path.endswith("c.txt"):
            time.sleep(0.01)  # the clock of its files
            self.pipe_file("/docs/a.txt", b"new\n")

    monkeypatch.setattr(MemoryFileSystem, "get_file", get_file)
    with pytest.raises(ValueError, match=r"memory://docs was changed while it was read: .*; run again"):
        fetch("memory://docs", tmp_path, report)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    assert content(fetch("memory://docs", tmp_path, report).path) == FILES | {"a.txt": b"new\n"}


def test_a_file_of_another_length_than_listed_is_refused(
    tmp_path: Path, memory: MemoryFileSystem, report: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.pipe_file("/a.txt", b"one")
    monkeypatch.setattr(MemoryFileSystem, "get_file", lambda self, path, local, **keys: Path(local).write_bytes(b"o"))
    with pytest.raises(ValueError, match=r"memory://a.txt was changed .*: 1 bytes came, 3 were listed; run again"):
        fetch("memory://a.txt", tmp_path, report)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damaged", ["a.txt", "b/c.txt"])
def test_a_damaged_stored_object_is_refused_and_the_others_are_kept(
    damaged: str, tmp_path: Path, memory: MemoryFileSystem, report: Lines, reads: list[str]
) -> None:
    address = store_folder(FILES, "memory://store", "docs")
    path = parse(store_file(FILES[damaged], "memory://store", "")[:-1] + "#x").location.removeprefix("memory:/")
    memory.pipe_file(path, b"bad\n")
    with pytest.raises(ValueError, match=f"#docs/{damaged} is damaged: its md5 is .*; delete the object "):
        fetch(address, tmp_path, report)
    assert not (tmp_path / parse(address).digest).exists()
    memory.pipe_file(path, FILES[damaged])
    reads.clear()
    assert content(fetch(address, tmp_path, report).path) == FILES
    assert path in reads


def test_a_killed_fetch_goes_on_with_the_rest(tmp_path: Path, report: Lines) -> None:
    """A process that is killed within its third file of four; a damaged file of its partial copy is fetched again."""
    source, cache = tmp_path / "documents", tmp_path / "cache"
    source.mkdir()
    for number in range(4):
        (source / f"{number}.txt").write_text(f"{number}\n")
    code = """
import os, signal, sys
from pathlib import Path
from fsspec.implementations.local import LocalFileSystem
from realmops.inputs import fetch
from realmops.stages import SilentReport
fetch.THREADS = 1
original = LocalFileSystem.get_file
def get_file(self, path, local, **keys):
    if path.endswith("2.txt"):
        Path(local).write_bytes(b"h")
        os.kill(os.getpid(), signal.SIGKILL)
    original(self, path, local, **keys)
LocalFileSystem.get_file = get_file
fetch.fetch(sys.argv[1], Path(sys.argv[2]), SilentReport())
"""
    address = f"file://{source}"
    killed = subprocess.run([sys.executable, "-c", code, address, cache], env=os.environ, check=False)
    assert killed.returncode == -signal.SIGKILL
    [partial] = cache.iterdir()
    assert content(partial / "documents") == {"0.txt": b"0\n", "1.txt": b"1\n"}
    (partial / "documents" / "1.txt").chmod(0o600)
    (partial / "documents" / "1.txt").write_bytes(b"")
    assert content(fetch(address, cache, report).path) == {f"{n}.txt": f"{n}\n".encode() for n in range(4)}
    assert report.total == 6, "bytes of the damaged file and of the two that were missing"
    assert [path.name for path in cache.iterdir()] == [version_of(address)]


def test_partial_copies_of_other_versions_are_removed_unless_a_process_writes_them(
    tmp_path: Path, memory: MemoryFileSystem, report: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get_file(*args: Any, **keys: Any) -> None:
        raise RuntimeError("away")

    for name in ("a.txt", "b.txt"):
        memory.pipe_file(f"/{name}", b"first")
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "get_file", get_file)
        for name in ("a.txt", "b.txt"):
            with pytest.raises(ValueError, match="away"):
                fetch(f"memory://{name}", tmp_path, report)
    partial, other = sorted(
        tmp_path.glob(".partial-*"), key=lambda path: path.name.endswith(version_of("memory://b.txt"))
    )
    memory.pipe_file("/a.txt", b"second")
    handle = os.open(partial, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    first = fetch("memory://a.txt", tmp_path, report)
    assert {path.name for path in tmp_path.iterdir()} == {partial.name, other.name, first.version}
    os.close(handle)
    fetch("memory://a.txt", tmp_path, report)
    assert {path.name for path in tmp_path.iterdir()} == {other.name, first.version}, "another address"


def test_the_part_of_a_file_that_a_killed_fetch_left_takes_no_space(
    tmp_path: Path, memory: MemoryFileSystem, report: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft that a SIGKILL leaves is deleted before the free space is compared with what is missing."""
    memory.pipe_file("/a.txt", b"123")
    source = fetch("memory://a.txt", tmp_path / "first", report)
    usage, original = module.shutil.disk_usage(tmp_path), MemoryFileSystem.get_file

    def die(self: MemoryFileSystem, path: str, local: str, **options: Any) -> None:
        original(self, path, local, **options)
        os.link(local, f"{local}-kept")  # what a killed process cannot delete
        raise KeyboardInterrupt

    def free(path: Path) -> Any:
        return usage._replace(free=3 - sum(file.stat().st_size for file in path.rglob("*") if file.is_file()))

    monkeypatch.setattr(MemoryFileSystem, "get_file", die)
    with pytest.raises(KeyboardInterrupt):
        fetch("memory://a.txt", tmp_path / "cache", report)
    [partial] = (tmp_path / "cache").iterdir()
    assert list(content(partial).values()) == [b"123"]
    monkeypatch.setattr(MemoryFileSystem, "get_file", original)
    monkeypatch.setattr(module.shutil, "disk_usage", free)
    assert fetch("memory://a.txt", tmp_path / "cache", report).version == source.version


def test_two_processes_fetch_once(
    tmp_path: Path, memory: MemoryFileSystem, report: Lines, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads with a lock each, as two processes have."""
    memory.pipe({f"/docs/{name}": text for name, text in FILES.items()})
    waiting, other = threading.Event(), Lines()
    other.log = lambda message: waiting.set() if "waiting" in message else None  # type: ignore[method-assign]
    original = module._commit

    def commit(partial: Path, final: Path) -> None:
        if not second.is_alive():
            second.start()
            assert waiting.wait(30)
        original(partial, final)

    copies = []
    second = threading.Thread(target=lambda: copies.append(fetch("memory://docs", tmp_path, other)))
    monkeypatch.setattr(module, "_commit", commit)
    copies.append(fetch("memory://docs", tmp_path, report))
    second.join()
    assert copies[0] == copies[1]
    assert len(reads) == len(FILES)
    assert [path.name for path in tmp_path.iterdir()] == [copies[0].version]


def test_what_does_not_fit_is_not_begun(
    tmp_path: Path, memory: MemoryFileSystem, report: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.pipe_file("/a.txt", b"123")
    free = module.shutil.disk_usage(tmp_path)._replace(free=2)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: free)
    with pytest.raises(ValueError, match=r"memory://a.txt has .* left to fetch, but .*REALMOPS_CACHE.* run again"):
        fetch("memory://a.txt", tmp_path, report)


def test_a_disk_that_fills_up_is_named(
    tmp_path: Path, memory: MemoryFileSystem, report: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get_file(*args: Any, **keys: Any) -> None:
        raise OSError(28, "No space left on device")

    memory.pipe_file("/a.txt", b"123")
    monkeypatch.setattr(MemoryFileSystem, "get_file", get_file)
    with pytest.raises(ValueError, match=r"memory://a.txt does not fit: .* free disk space"):
        fetch("memory://a.txt", tmp_path, report)


def test_copies_cannot_be_edited_by_mistake(tmp_path: Path, memory: MemoryFileSystem, report: Lines) -> None:
    memory.pipe_file("/a.txt", b"123")
    assert fetch("memory://a.txt", tmp_path, report).path.stat().st_mode & 0o222 == 0


def test_the_cache_is_chosen_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("REALMOPS_CACHE", raising=False)
    assert local_cache() == tmp_path / ".cache" / "realmops" / "inputs"
    monkeypatch.setenv("REALMOPS_CACHE", str(tmp_path / "other"))
    assert local_cache() == tmp_path / "other"
