"""Which options are inputs, how addresses are read, and when their version changes."""

import hashlib
import json
import logging
import socket
import sys
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from stored_objects import store_file, store_folder, web_server

from realmops import config
from realmops.inputs import addresses
from realmops.inputs.addresses import is_address, listed_inputs, parse, replace_inputs, version_of
from realmops.stages import STAGES


def options(**settings: str) -> dict[str, dict[str, object]]:
    layers = config.setting_layers(f"{key.replace('__', '.')}={value}" for key, value in settings.items())
    return config.parse_options(*layers).model_dump()


def test_outputs_and_files_are_those_of_the_stages() -> None:
    assert [*addresses.STAGE_FOLDERS] == [*STAGES]
    assert {*addresses.FILES} == {key for stage in STAGES.values() for key in stage.files}


def test_inputs_are_what_no_stage_makes_and_the_options_use() -> None:
    assert listed_inputs(options()) == {}
    values = options(
        snapshot__documents="s3://bucket/documents",
        snapshot__warmup="more.jsonl",
        questions__dev="questions/own.jsonl",
        tag__train="names.conll",
        retriever__init="owner/encoder",
        closed_book__init="models/t5",
    )
    values["snapshot"]["use_warmup"] = values["tag"]["method"] = ""
    expected = {
        "snapshot.documents": "s3://bucket/documents",
        "questions.dev": "questions/own.jsonl",
        "retriever.init": "owner/encoder",
    }
    assert listed_inputs(values) == expected
    values["finetune"]["reader"] = "t5"
    assert listed_inputs(values) == {**expected, "closed_book.init": "models/t5"}


def test_replaced_inputs_leave_the_options_as_they_were() -> None:
    values = options(questions__test="s3://bucket/test.jsonl")
    replaced = replace_inputs(values, {"questions.test": "/cache/test.jsonl"})
    assert replaced["questions"]["test"] == "/cache/test.jsonl"
    assert values["questions"]["test"] == "s3://bucket/test.jsonl"
    assert replace_inputs(replaced, {"questions.test": "s3://bucket/test.jsonl"}) == values


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("s3://bucket/documents/", "documents"),
        ("gs://bucket/a/b.jsonl.gz", "b.jsonl.gz"),
        ("https://host/a/my%20questions.csv?signature=x/y#part", "my questions.csv"),
        ("hf://datasets/owner/name/dev.jsonl", "dev.jsonl"),
    ],
)
def test_an_input_is_named_as_at_its_address(text: str, name: str) -> None:
    assert is_address(text)
    assert (parse(text).name, parse(text).digest) == (name, "")


def test_a_stored_object_has_its_version_in_its_address() -> None:
    text = "s3://bucket/prefix/files/md5/d4/1d8cd98f00b204e9800998ecf8427e.dir#documents"
    address = parse(text)
    assert (address.store, address.name) == ("s3://bucket/prefix", "documents")
    assert address.location == text.partition("#")[0]
    assert version_of(text) == "d41d8cd98f00b204e9800998ecf8427e.dir", "and no request is made"


@pytest.mark.parametrize("value", ["small", "hf:owner/name:train", "owner/name", "C:/documents", "/realmops/documents"])
def test_paths_and_names_on_the_hub_are_no_addresses(value: str) -> None:
    assert not is_address(value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("s3://bucket/files/md5/d4/1d8cd98f00b204e9800998ecf8427e", "add #NAME"),
        ("s3://bucket/files/md5/d4/1d8cd98f00b204e9800998ecf8427e#", "add #NAME"),
        ("s3://bucket/files/md5/d4/1d8cd98f00b204e9800998ecf8427e#..", "add #NAME"),
        ("s3://bucket/files/md5/d4/1d8cd98f00b204e9800998ecf8427e#a/b", "add #NAME"),
        ("https://name:secret@host/documents/?token=secret", "names no file"),
        ("s3://", "names no file"),
        ("s3://bucket/..", "names no file"),
    ],
)
def test_an_address_without_a_name_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as refused:
        parse(text)
    assert "secret" not in str(refused.value)


def test_the_version_of_a_folder_changes_with_each_of_its_files(memory: MemoryFileSystem) -> None:
    memory.pipe({"/docs/a.txt": b"one", "/docs/b/c.txt": b"two", "/docs/.hidden": b"no input"})
    before = version_of("memory://docs")
    assert version_of("memory://docs/") == before
    memory.pipe_file("/docs/.hidden", b"still none")
    assert version_of("memory://docs") == before
    memory.pipe_file("/docs/b/c.txt", b"six")
    changed = version_of("memory://docs")
    memory.pipe_file("/docs/d.txt", b"")
    assert len({before, changed, version_of("memory://docs")}) == 3


def test_a_web_server_marks_its_files_or_they_are_read() -> None:
    with web_server() as server:
        server.files["/a.jsonl"] = b"content", {"ETag": '"1"'}
        address = f"{server.url}/a.jsonl"
        first = version_of(address)
        assert server.gets == [], "its ETag is enough"
        server.files["/a.jsonl"] = b"changed", {"ETag": '"2"'}
        second = version_of(address)
        server.files["/a.jsonl"] = b"content", {}
        third = version_of(address)
        assert server.gets == ["/a.jsonl"]
        server.files["/a.jsonl"] = b"changed", {}
        assert len({first, second, third, version_of(address)}) == 4


def test_what_is_missing_or_refused_is_one_line_without_the_secret(memory: MemoryFileSystem) -> None:
    with web_server() as server:
        host = server.url.partition("://")[2]
        server.files["/closed.jsonl"] = 403
        for address, problem in {
            "memory://nothing.jsonl": "memory://nothing.jsonl does not exist; check the address",
            f"http://me:secret@{host}/a.jsonl?key=secret": f"http://{host}/a.jsonl does not exist; check the address",
            f"http://{host}/closed.jsonl?key=secret": "403",
            "http://127.0.0.1:1/a.jsonl?key=secret": "cannot be read: ClientConnectorError",
            "nosuch://bucket/a.jsonl": "Protocol not known: nosuch",
        }.items():
            with pytest.raises(ValueError, match=r"check the address") as refused:
                version_of(address)
            assert problem in str(refused.value)
            assert "secret" not in str(refused.value)
            assert "\n" not in str(refused.value)


def test_a_missing_library_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    with pytest.raises(ValueError, match=r"s3://bucket/a.jsonl cannot be read: .*pip install 'realmops\[remote\]'"):
        version_of("s3://bucket/a.jsonl")


def test_google_without_a_network_is_one_line_at_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def getaddrinfo(*args: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setitem(sys.modules, "gcsfs", None)  # is not reached
    with pytest.raises(ValueError, match=r"gs://bucket/a cannot be read: .*googleapis.com: Name or service not known"):
        version_of("gs://bucket/a")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    with pytest.raises(ValueError, match="pip install"):
        version_of("gs://bucket/a")
    logging.getLogger("gcsfs").error("raised anyway")
    assert capfd.readouterr().err == ""


def test_wrong_credentials_name_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    with web_server() as server:
        server.files = dict.fromkeys(["/bucket/a.jsonl", "/bucket"], 403)
        for name, value in {"ACCESS_KEY_ID": "me", "SECRET_ACCESS_KEY": "secret", "ENDPOINT_URL": server.url}.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        with pytest.raises(ValueError, match=r"s3://bucket/a.jsonl cannot be read: .*AWS_SECRET_ACCESS_KEY") as refused:
            version_of("s3://bucket/a.jsonl")
        assert "secret" not in str(refused.value).replace("secret_access", "")


def test_the_list_of_a_stored_folder_must_have_the_md5_of_its_address(tmp_path: Path, memory: MemoryFileSystem) -> None:
    address = store_folder({"a.txt": b"one"}, "memory://store", "docs")
    entry = parse(address).location.removeprefix("memory:/")
    memory.pipe_file(entry, memory.cat_file(entry).replace(b"a.txt", b"b.txt"))
    with pytest.raises(ValueError, match="is damaged: its list of files"):
        addresses.list_files(parse(address))
    memory.pipe_file(entry, b"[]]")
    with pytest.raises(ValueError, match="is damaged: its list of files"):
        addresses.list_files(parse(address))


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["../outside"], "no path below its folder"),
        (["/etc/passwd"], "no path below its folder"),
        (["a/../../b"], "no path below its folder"),
        (["a\0b"], "no path below its folder"),
        (["a", "a/b", "a.txt"], "'a' twice, or as a file and as a folder"),
    ],
)
def test_a_stored_folder_writes_nothing_outside(names: list[str], problem: str, memory: MemoryFileSystem) -> None:
    address = store_folder(dict.fromkeys(names, b"x"), "memory://store", "docs")
    with pytest.raises(ValueError, match=problem):
        addresses.list_files(parse(address))


def test_stored_objects_are_what_dvc_writes(tmp_path: Path) -> None:
    """The md5 of DVC's own code, of a file and of a folder with names outside ASCII."""
    from dvc_data.hashfile.build import build
    from dvc_data.hashfile.db import HashFileDB
    from dvc_objects.fs.local import localfs

    folder = tmp_path / "documents"
    (folder / "below").mkdir(parents=True)
    files = {"a.txt": b"one\r\n", "below/é.txt": b"two"}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    store = tmp_path / "store"
    odb = HashFileDB(localfs, str(store / "files" / "md5"))
    _, _, tree = build(odb, str(folder), localfs, "md5")
    assert version_of(store_folder(files, f"file://{tmp_path}/ours", "documents")) == tree.hash_info.value
    content = hashlib.md5(files["a.txt"]).hexdigest()
    assert version_of(store_file(files["a.txt"], f"file://{tmp_path}/ours", "a.txt")) == content
    assert json.loads(tree.as_bytes())[0] == {"md5": content, "relpath": "a.txt"}
