"""Inputs resolved to paths and identities: local, at addresses, and tracked by DVC."""

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from compiled import init_dvc
from fsspec.implementations.memory import MemoryFileSystem
from small_project import Quiet, toy_values
from stored_objects import object_store, web_server

from realmops.inputs import resolve as module
from realmops.inputs.addresses import InputError, name_of
from realmops.inputs.dvc_project import add_and_push, find_tracked
from realmops.inputs.resolve import (
    PinnedInput,
    ResolvedInput,
    address_identity,
    can_resolve,
    check_hub_name,
    resolve,
)
from realmops.stages.run_inputs import take_inputs

FILES = {"a.txt": b"one\n", "b/c.txt": b"two\n", "b/d/e.txt": b""}
KEYS = {"aws_access_key_id": "id", "aws_secret_access_key": "key"}


def written(folder: Path, files: dict[str, bytes] = FILES) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def fetched(address: str, cache: Path, pinned: PinnedInput | None = None) -> ResolvedInput:
    return resolve(address, cache, cache / "cache", Quiet(), pinned)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of a bucket that the environment gives access to."""
    from s3fs import S3FileSystem

    with object_store("bucket", KEYS) as (endpoint, client):
        for name, value in {**KEYS, "aws_endpoint_url": endpoint, "aws_default_region": "us-east-1"}.items():
            monkeypatch.setenv(name.upper(), value)
        S3FileSystem.clear_instance_cache()
        yield client
        S3FileSystem.clear_instance_cache()


# Local content


def test_a_local_input_is_identified_by_its_content(tmp_path: Path) -> None:
    written(tmp_path / "documents")
    written(tmp_path / "elsewhere" / "copy")
    first, second = (resolve(name, tmp_path, tmp_path, Quiet()) for name in ("documents", "elsewhere/copy"))
    assert first.path == tmp_path / "documents"
    before = first.identity
    assert before == second.identity
    (tmp_path / "documents" / "a.txt").write_bytes(b"six\n")
    assert resolve("documents", tmp_path, tmp_path, Quiet()).identity != before
    identities = set()
    for text in (b"\xff.txt", b"\\xff.txt"):  # names that print alike
        name = tmp_path / "documents" / os.fsdecode(text)
        for content in (b"one", b"two"):
            name.write_bytes(content)
            identities.add(resolve("documents", tmp_path, tmp_path, Quiet()).identity)
    assert len(identities) == 4


# Addresses


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("s3://bucket/documents/", "documents"),
        ("https://host/a/my%20questions.csv?version=x/y#part", "my questions.csv"),
        ("hf://datasets/owner/name/dev.jsonl", "dev.jsonl"),
    ],
)
def test_an_input_is_named_as_at_its_address(address: str, name: str) -> None:
    assert name_of(address) == name


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("https://host/documents/", "names no file"),
        ("s3://", "names no file"),
        ("s3://bucket/..", "names no file"),
        ("simplecache::http://host/a.txt", "chains filesystems .*; download it"),
    ],
)
def test_an_address_without_a_name_or_of_chained_filesystems_is_refused(address: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        name_of(address)


def test_an_address_is_fetched_once_and_again_when_it_changes(tmp_path: Path, memory: MemoryFileSystem) -> None:
    memory.pipe({f"/docs/{name}": text for name, text in FILES.items()})
    first = fetched("memory://docs", tmp_path)
    assert (first.path.name, content(first.path)) == ("docs", FILES)
    before = first.path.stat().st_ino
    assert fetched("memory://docs", tmp_path) == first
    assert first.path.stat().st_ino == before
    memory.pipe_file("/docs/b/c.txt", b"six")
    second = fetched("memory://docs", tmp_path)
    assert content(second.path) == FILES | {"b/c.txt": b"six"}
    assert second.identity != first.identity


@pytest.mark.parametrize("damage", ["removed", "changed", "added"])
def test_a_damaged_copy_in_the_cache_is_fetched_again(damage: str, tmp_path: Path, memory: MemoryFileSystem) -> None:
    memory.pipe({f"/docs/{name}": text for name, text in FILES.items()})
    copy = fetched("memory://docs", tmp_path)
    if damage == "removed":
        (copy.path / "b/c.txt").unlink()
    else:
        written(copy.path, {"a.txt" if damage == "changed" else "new.txt": b"bad\n"})
    assert content(fetched("memory://docs", tmp_path).path) == FILES


@pytest.mark.parametrize("mark", ["ETag", "Last-Modified", ""])
def test_a_web_file_changes_with_its_address_its_header_or_its_content(mark: str, tmp_path: Path) -> None:
    with web_server() as server:
        server.files["/a.jsonl"] = b"first", {mark: "1"} if mark else {}
        first = fetched(f"{server.url}/a.jsonl", tmp_path)
        assert fetched(f"{server.url}/a.jsonl", tmp_path) == first
        for query in ("?split=test", "?split=dev", "#dev"):
            other = fetched(f"{server.url}/a.jsonl{query}", tmp_path)
            assert other.path != first.path
            assert other.identity.startswith(f"{server.url}/a.jsonl{query} ")
        server.files["/a.jsonl"] = b"other", {mark: "2"} if mark else {}
        second = fetched(f"{server.url}/a.jsonl", tmp_path)
    assert [copy.path.read_bytes() for copy in (first, second)] == [b"first", b"other"]


def test_a_pinned_input_is_that_of_the_cache_or_refused(tmp_path: Path, memory: MemoryFileSystem) -> None:
    memory.pipe_file("/a.txt", b"one")
    copy = fetched("memory://a.txt", tmp_path)
    memory.pipe_file("/a.txt", b"two")
    assert fetched("memory://a.txt", tmp_path, PinnedInput(copy.identity)) == copy
    with pytest.raises(InputError, match=r"memory://a.txt was changed since this run was submitted; submit again"):
        fetched("memory://a.txt", tmp_path / "other", PinnedInput(copy.identity))


def test_a_folder_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.pipe({f"/docs/{name}": text for name, text in FILES.items()})
    original = module.copy_address

    def copy_address(*args: Any) -> None:
        original(*args)
        memory.pipe_file("/docs/a.txt", b"new\n")

    monkeypatch.setattr(module, "copy_address", copy_address)
    with pytest.raises(InputError, match=r"memory://docs was changed while it was read; run again"):
        fetched("memory://docs", tmp_path)


def test_two_processes_fetch_once(tmp_path: Path, memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads with separate locks, as two processes have."""
    memory.pipe_file("/a.txt", b"one")
    calls, copies, waiting = [], [], threading.Event()
    original = module.copy_address
    report = Quiet()
    report.log = lambda message: waiting.set() if "waiting" in message else None  # type: ignore[method-assign]
    second = threading.Thread(
        target=lambda: copies.append(resolve("memory://a.txt", tmp_path, tmp_path / "cache", report))
    )

    def copy_address(*args: Any) -> None:
        calls.append(args)
        second.start()
        assert waiting.wait(30)
        original(*args)

    monkeypatch.setattr(module, "copy_address", copy_address)
    copies.append(fetched("memory://a.txt", tmp_path))
    second.join()
    assert copies[0] == copies[1]
    assert len(calls) == 1


def test_a_full_disk_is_reported_with_the_cache_variable(
    tmp_path: Path, memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(*args: Any, **keys: Any) -> None:
        raise OSError(28, "No space left on device")

    memory.pipe_file("/a.txt", b"123")
    monkeypatch.setattr(MemoryFileSystem, "get", get)
    with pytest.raises(ValueError, match=r"memory://a.txt does not fit on the disk .*REALMOPS_CACHE"):
        fetched("memory://a.txt", tmp_path)


def test_an_unreadable_address_is_one_line(tmp_path: Path, memory: MemoryFileSystem) -> None:
    with web_server() as server:
        server.files["/closed.jsonl"] = 403
        for address, problem in {
            "memory://nothing.jsonl": "memory://nothing.jsonl does not exist",
            f"{server.url}/a.jsonl": "does not exist",
            f"{server.url}/closed.jsonl": "403",
            "http://127.0.0.1:1/a.jsonl": "cannot be read: ClientConnectorError",
            "nosuch://bucket/a.jsonl": "Protocol not known: nosuch",
        }.items():
            with pytest.raises(ValueError, match=r"check the address") as refused:
                fetched(address, tmp_path)
            assert problem in str(refused.value)
            assert "\n" not in str(refused.value)


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    with pytest.raises(ValueError, match=r"s3://bucket/a.jsonl cannot be read: .*pip install 'realmops\[remote\]'"):
        fetched("s3://bucket/a.jsonl", tmp_path)


def test_wrong_credentials_are_reported_with_the_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with web_server() as server:
        server.files = dict.fromkeys(["/bucket/a.jsonl", "/bucket"], 403)
        for name, value in {"ACCESS_KEY_ID": "me", "SECRET_ACCESS_KEY": "s3cret", "ENDPOINT_URL": server.url}.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        with pytest.raises(ValueError, match=r"s3://bucket/a.jsonl cannot be read: .*AWS_SECRET_ACCESS_KEY") as refused:
            fetched("s3://bucket/a.jsonl", tmp_path)
        assert "s3cret" not in str(refused.value)


def test_a_key_of_a_store_writes_nothing_outside_of_its_folder(tmp_path: Path, s3: Any) -> None:
    s3.put_object(Bucket="bucket", Key="docs/../../outside", Body=b"x")
    with pytest.raises(ValueError, match="outside of its folder; do not use this address"):
        fetched("s3://bucket/docs", tmp_path)


def test_files_and_folders_of_s3_are_fetched_and_identified_by_their_etags(tmp_path: Path, s3: Any) -> None:
    for name, text in FILES.items():
        s3.put_object(Bucket="bucket", Key=f"docs/{name}", Body=text)
    folder, file = (fetched(f"s3://bucket/docs{name}", tmp_path) for name in ("", "/a.txt"))
    assert (content(folder.path), file.path.read_bytes()) == (FILES, b"one\n")
    s3.put_object(Bucket="bucket", Key="docs/a.txt", Body=b"one\n")
    assert address_identity("s3://bucket/docs") == folder.identity, "equal content"
    s3.put_object(Bucket="bucket", Key="docs/a.txt", Body=b"six\n")
    assert address_identity("s3://bucket/docs") != folder.identity


# Content that DVC tracks


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of DVC with a folder of documents that its remote has."""
    project = tmp_path / "project"
    project.mkdir()
    init_dvc(project)
    push(written(project / "data" / "documents"), project)
    return project


def set_remote(project: Path, url: str) -> None:
    config = project / ".dvc/config"
    config.write_text(config.read_text().replace(f"{project}/.dvc/remote", url))


def push(path: Path, project: Path) -> int:
    return add_and_push(find_tracked(path, project), project)


def pinned_input(path: Path, project: Path) -> PinnedInput:
    tracked = find_tracked(path, project)
    return PinnedInput(tracked.identity, tracked.path.name, tracked.below, tracked.remote)


def test_a_tracked_input_that_is_missing_is_pulled_into_its_place(project: Path, tmp_path: Path) -> None:
    identity = find_tracked(project / "data/documents", project).identity
    shutil.rmtree(project / "data/documents")
    shutil.rmtree(project / ".dvc/cache")
    assert find_tracked(project / "data/documents", project).identity == identity
    resolved = resolve("data/documents", project, tmp_path, Quiet())
    assert (resolved.path, content(resolved.path)) == (project / "data/documents", FILES)


def test_a_missing_folder_differs_from_a_tracked_one_with_its_base_name(project: Path) -> None:
    assert can_resolve("data/documents", project)
    for other in ("documents", "test/documents", "../documents"):
        assert not can_resolve(other, project)
        with pytest.raises(ValueError, match="does not exist, and DVC does not track it"):
            find_tracked(project / other, project)


# Names on the hub


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout of git without the folders that it ignores."""
    files = {".gitignore": b"/models/\n/runs\n", "runs/params.yaml": b"", "folder/a.txt": b"", "file": b""}
    written(tmp_path / "checkout", files)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path / "checkout", check=True)
    return tmp_path / "checkout"


MISSING = "encoder", "./some/encoder", "../some/encoder", "a/b/c", "/some/encoder", "file/encoder", "folder/encoder"


@pytest.mark.parametrize("value", [*MISSING, "models/encoder", "some/../encoder"])
def test_a_missing_folder_is_no_name_on_the_hub(value: str, checkout: Path) -> None:
    with pytest.raises(ValueError, match=r"is a folder that .* does not have; restore it .*, or write hf:OWNER/NAME"):
        check_hub_name(value, checkout)
    options = toy_values(retriever={"init": value})
    with pytest.raises(ValueError, match=r"retriever.init: .* is a folder that"):
        take_inputs(options, checkout, checkout, checkout, Quiet())


def test_a_name_with_an_owner_or_a_prefix_is_one_on_the_hub(checkout: Path, tmp_path: Path) -> None:
    for value in ("sentence-transformers/all-MiniLM-L6-v2", "hf:folder/encoder", "hf:encoder"):
        check_hub_name(value, checkout)
        check_hub_name(value, tmp_path)
    check_hub_name("some/encoder", checkout / "runs")
    check_hub_name("models/encoder", tmp_path / "without-git")


# Changes and pods


def test_changed_content_is_pushed_unless_it_changes_meanwhile(project: Path) -> None:
    assert push(project / "data/documents", project) == 0
    written(project / "data/documents", {"new.txt": b"new\n"})
    changed = find_tracked(project / "data/documents", project)
    written(project / "data/documents", {"new.txt": b"newer\n"})
    with pytest.raises(ValueError, match="was changed while it was uploaded; run the same command again"):
        add_and_push(changed, project)
    assert push(project / "data/documents", project) == 2, "the file, and the list of files"


@pytest.mark.parametrize("below", ["", "b/c.txt", "b"])
def test_a_pod_fetches_tracked_content_from_the_remote(below: str, project: Path, tmp_path: Path) -> None:
    path = project / "data/documents" / below
    pinned = pinned_input(path, project)
    expected = content(path) if path.is_dir() else path.read_bytes()
    shutil.rmtree(project / "data")
    copy = fetched("data/documents", tmp_path / "pod", pinned)
    assert copy.path.name == path.name
    assert (content(copy.path) if copy.path.is_dir() else copy.path.read_bytes()) == expected


def test_a_damaged_object_of_the_remote_is_refused(project: Path, tmp_path: Path) -> None:
    pinned = pinned_input(project / "data/documents", project)
    [damaged] = [
        file for file in (project / ".dvc/remote").rglob("*") if file.is_file() and file.read_bytes() == b"one\n"
    ]
    damaged.chmod(0o600)
    damaged.write_bytes(b"bad\n")
    with pytest.raises(ValueError, match=r"DVC project .*: CheckoutError: Checkout failed"):
        fetched("data/documents", tmp_path / "pod", pinned)
    damaged.write_bytes(b"one\n")
    assert content(fetched("data/documents", tmp_path / "pod", pinned).path) == FILES


def test_credentials_of_a_remote_stay_in_the_files_of_the_user(project: Path) -> None:
    set_remote(project, "s3://bucket/store")
    secrets = "    endpointurl = http://host\n    secret_access_key = s3cret\n"
    (project / ".dvc/config.local").write_text(f"['remote \"store\"']\n{secrets}")
    remote = {"url": "s3://bucket/store", "endpointurl": "http://host"}
    assert find_tracked(project / "data/documents", project).remote == remote
    config = project / ".dvc/config"
    config.write_text(config.read_text().replace("s3://bucket/store", "s3://me:s3cret@bucket/x"))
    with pytest.raises(ValueError, match=r"the DVC remote store has an address .* with credentials") as refused:
        find_tracked(project / "data/documents", project)
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize("kind", ["pipe", "link to a folder", "pipe in a folder"])
def test_pipes_and_links_to_folders_are_refused(kind: str, project: Path) -> None:
    folder = written(project / "more")
    path = folder if kind != "pipe" else project / "pipe"
    if kind == "link to a folder":
        (folder / "linked").symlink_to(project / "data")
    else:
        os.mkfifo(path / "pipe" if path == folder else path)
    with pytest.raises(ValueError, match=r"a pipe, expected a regular file|link to a folder|is no regular file"):
        find_tracked(path, project)


def test_a_project_without_dvc_or_a_remote_is_refused_with_both_commands(project: Path, tmp_path: Path) -> None:
    written(tmp_path / "other" / "documents")
    with pytest.raises(ValueError, match=r"is in no project of DVC, .*dvc init.*dvc remote add --default"):
        find_tracked(tmp_path / "other" / "documents", tmp_path / "other")
    (project / ".dvc/config").write_text("[core]\n    no_scm = True\n")
    with pytest.raises(ValueError, match=r"has no default remote of DVC, .*dvc remote add --default"):
        find_tracked(project / "data/documents", project)


def test_a_remote_on_s3_serves_pods(project: Path, tmp_path: Path, s3: Any) -> None:
    pytest.importorskip("dvc_s3")
    set_remote(project, "s3://bucket/store")
    assert push(project / "data/documents", project) == 4
    copy = fetched("data/documents", tmp_path / "pod", pinned_input(project / "data/documents", project))
    assert content(copy.path) == FILES
