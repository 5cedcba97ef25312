"""Uploads to a store on a disk, in memory and on S3: what is named is complete, whatever happens meanwhile."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from stored_objects import object_store, store_file, store_folder

from realmops.inputs import store as module
from realmops.inputs.addresses import InputError, object_address
from realmops.inputs.fetch import fetch
from realmops.inputs.store import LocalInput, read_input, stored_address, upload, walk_content
from realmops.stages import SilentReport

FILES = {"a.txt": b"1\n", "b/c.txt": b"two\n", "b/d/e.txt": b"", "f.txt": b"three\n"}
KEYS = {"aws_access_key_id": "id", "aws_secret_access_key": "key"}


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    """A client of a bucket that the environment gives access to."""
    from s3fs import S3FileSystem

    with pytest.MonkeyPatch.context() as patch, object_store("bucket", KEYS) as (endpoint, client):
        for name, value in {**KEYS, "aws_endpoint_url": endpoint, "aws_default_region": "us-east-1"}.items():
            patch.setenv(name.upper(), value)
        S3FileSystem.clear_instance_cache()
        yield client
        S3FileSystem.clear_instance_cache()


@pytest.fixture(params=["file", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "s3":
        request.getfixturevalue("s3")
    yield {"file": f"file://{tmp_path}/store", "memory": "memory://store", "s3": f"s3://bucket{tmp_path}"}[
        request.param
    ]
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    return written(tmp_path / "documents", FILES)


def written(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def bar(label: str, total: int, unit: str) -> Callable[[int], None]:
    return lambda units: None


def local(path: Path) -> LocalInput:
    return read_input(path.name, path.parent, bar, walk_content)


def objects(store: str) -> dict[str, bytes]:
    """All files of a store by name, with drafts."""
    fs, path = fsspec.core.url_to_fs(store)
    fs.invalidate_cache()
    return {name.removeprefix(path): fs.cat_file(name) for name in fs.find(path)}


def expected(tmp_path: Path, files: dict[str, bytes]) -> dict[str, bytes]:
    store_folder(files, f"file://{tmp_path}/expected", "documents")
    return objects(f"file://{tmp_path}/expected")


def put(address: str, content: bytes) -> None:
    fs, path = fsspec.core.url_to_fs(address)
    fs.pipe_file(path, content)


def test_a_folder_is_uploaded_once_and_fetched_again(store: str, documents: Path, tmp_path: Path) -> None:
    item = local(documents)
    count, size = upload(item, store, bar)
    assert (count, size) == (5, item.size + len(module._directory(item.files)))
    assert objects(store) == expected(tmp_path, FILES)
    assert upload(item, store, bar) == (0, 0)
    copy = fetch(stored_address(store, item.digest, "documents"), tmp_path / "cache", SilentReport())
    assert local(copy.path).digest == item.digest


@pytest.mark.parametrize("damage", ["deleted file", "damaged file", "damaged list", "short file"])
def test_a_damaged_or_deleted_object_is_uploaded_again(
    damage: str, store: str, documents: Path, tmp_path: Path
) -> None:
    """Though the list of the folder is there."""
    item = local(documents)
    upload(item, store, bar)
    digest = item.digest if damage == "damaged list" else item.files[0].md5
    fs, path = fsspec.core.url_to_fs(object_address(store, digest))
    content = fs.cat_file(path)
    fs.rm_file(path)
    if damage != "deleted file":
        fs.pipe_file(path, content[:-1] if damage == "short file" else content[:-1] + b"#")
    assert upload(item, store, bar) == (1, len(content))
    assert objects(store) == expected(tmp_path, FILES)


def test_a_file_that_changed_gets_no_name(store: str, documents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the object that another upload has made of the former content stays."""
    item = local(documents)
    times = (documents / "f.txt").stat()
    (documents / "f.txt").write_bytes(b"THREE\n")
    os.utime(documents / "f.txt", ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(InputError, match=r"f.txt was changed while it was uploaded; run the same command again"):
        upload(item, store, bar)
    assert b"THREE\n" not in objects(store).values()
    assert not any(name.endswith(".dir") for name in objects(store))
    original = module._changed

    def changed(path: Path) -> InputError:
        store_file(b"three\n", store, "")
        return original(path)

    monkeypatch.setattr(module, "_changed", changed)
    with pytest.raises(InputError):
        upload(item, store, bar)
    assert b"three\n" in objects(store).values()
    (documents / "f.txt").unlink()
    fs, path = fsspec.core.url_to_fs(object_address(store, item.files[-1].md5))
    fs.rm_file(path)
    with pytest.raises(InputError, match="was changed while it was uploaded"):
        upload(item, store, bar)
    again = local(documents)
    upload(again, store, bar)
    assert object_address("", again.digest) in objects(store)


def test_a_large_object_on_s3_is_sent_in_parts_and_named_at_the_end(
    s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from s3fs import S3FileSystem

    monkeypatch.setattr(module, "LARGE", 1)
    monkeypatch.setattr(S3FileSystem, "default_block_size", 5 << 20)
    file, store = tmp_path / "large.jsonl", "s3://bucket/large"
    file.write_bytes(os.urandom(11 << 20))
    item = local(file)
    S3FileSystem.clear_instance_cache()
    file.write_bytes(os.urandom(11 << 20))
    with pytest.raises(InputError, match="was changed while it was uploaded"):
        upload(item, store, bar)
    assert objects(store) == {}
    assert "Uploads" not in s3.list_multipart_uploads(Bucket="bucket")
    item = local(file)
    assert upload(item, store, bar) == (1, 11 << 20)
    assert [*objects(store).values()] == [file.read_bytes()]
    assert "-3" in s3.head_object(Bucket="bucket", Key=f"large{object_address('', item.digest)}")["ETag"]
    assert upload(item, store, bar) == (0, 0)
    s3.delete_object(Bucket="bucket", Key=f"large{object_address('', item.digest)}")
    assert upload(item, store, bar)[0] == 1
    S3FileSystem.clear_instance_cache()


def test_etags_that_are_no_md5_are_no_damage(documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a bucket with encryption keys of its own; its smallest object is read."""
    store, original = f"file://{tmp_path}/store", fsspec.implementations.local.LocalFileSystem.ls

    def ls(self: Any, path: str, detail: bool = True) -> list[dict[str, Any]]:
        return [entry | {"ETag": f'"{"0" * 32}"'} for entry in original(self, path, detail=True)]

    item = local(documents)
    upload(item, store, bar)
    monkeypatch.setattr(fsspec.implementations.local.LocalFileSystem, "ls", ls)
    assert upload(item, store, bar) == (0, 0)
    (tmp_path / "store" / object_address("", item.files[0].md5)[1:]).write_bytes(b"2\n")
    (documents / "b" / "d" / "e.txt").unlink()
    assert upload(local(documents), store, bar)[0] == 4, "the smallest is damaged, so that all are sent again"


def test_what_cannot_be_written_is_named_so(s3: Any, documents: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^s3://nowhere/x cannot be written: .*bucket does not exist; check"):
        upload(local(documents), "s3://nowhere/x", bar)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"^file://.*/file/store cannot be written: "):
        upload(local(documents), f"file://{tmp_path}/file/store", bar)


CHILD = """
import os, signal, sys
from pathlib import Path
from realmops.inputs import store
store.THREADS = 1
def progress(label, total, unit):
    left = total // 2
    def advance(units):
        global left
        left -= units
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
    globals()["left"] = left
    return advance
path = Path(sys.argv[1])
store.upload(store.read_input(path.name, path.parent, lambda *_: lambda units: None, store.walk_content),
    sys.argv[2], progress)
"""


@pytest.mark.parametrize("scheme", ["file", "s3"])
def test_an_upload_after_a_killed_one_sends_the_rest(scheme: str, s3: Any, tmp_path: Path) -> None:
    """A process that is killed while it sends the third file of five."""
    files = {f"{number}.txt": f"document {number}\n".encode() * 1000 for number in range(5)}
    documents = written(tmp_path / "documents", files)
    store = f"{scheme}://{'bucket' if scheme == 's3' else ''}{tmp_path}/store"
    killed = subprocess.run([sys.executable, "-c", CHILD, documents, store], check=False)
    assert killed.returncode == -signal.SIGKILL
    left = objects(store)
    named = {name for name in left if "/." not in name}
    assert len(named) == 2
    assert named < expected(tmp_path, files).keys()
    assert upload(local(documents), store, bar)[0] == 4
    assert objects(store) == expected(tmp_path, files), "and no draft"


def test_two_uploads_at_once_leave_what_one_leaves(store: str, documents: Path, tmp_path: Path) -> None:
    """One waits in the middle of a file until the other has ended."""
    begun, ended = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def slow(label: str, total: int, unit: str) -> Callable[[int], None]:
        def advance(units: int) -> None:
            begun.set()
            assert ended.wait(60)

        return advance

    def first() -> None:
        try:
            upload(local(documents), store, slow)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=first)
    thread.start()
    assert begun.wait(60)
    other = written(tmp_path / "other" / "documents", {**FILES, "g.txt": b"four\n"})
    upload(local(other), store, bar)
    ended.set()
    thread.join()
    assert errors == []
    assert objects(store) == expected(tmp_path, FILES) | expected(tmp_path, {**FILES, "g.txt": b"four\n"})
