"""The file layer: what each operation does on a real folder, and in the memory of the tests."""

import errno
import os
from pathlib import Path

import pytest

from realmops import files as layer
from realmops.files import Files


def test_written_bytes_are_read_and_a_taken_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, content: write(handle, bytes(content)[:2]))  # in parts
    files = Files()
    files.write(tmp_path / "a", b"one")
    with pytest.raises(FileExistsError):
        files.write(tmp_path / "a", b"two")
    assert files.read(tmp_path / "a", 3) == b"one"
    assert files.listdir(tmp_path) == ["a"]
    assert files.listdir(tmp_path / "missing") == []


def test_read_refuses_long_files_links_and_pipes(tmp_path: Path) -> None:
    files = Files()
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="has 5 bytes, more than the expected 4"):
        files.read(tmp_path / "a", 4)
    with pytest.raises(ValueError, match="symbolic link"):
        files.read(tmp_path / "link", 100)
    with pytest.raises(ValueError, match="not a regular file"):
        files.read(tmp_path / "pipe", 100)
    with pytest.raises(FileNotFoundError):
        files.read(tmp_path / "missing", 100)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    (tmp_path / "planted").symlink_to(tmp_path / "folder")
    files.delete(tmp_path / "planted")
    assert os.listdir(tmp_path / "folder") == ["file"], "only the link is deleted"


def test_a_full_volume_is_reported_with_the_room_needed_before_a_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer, "free_bytes", lambda folder: 1_000_000)
    with pytest.raises(OSError, match=r"1\.0 MB are free, this file needs 2\.4 MB") as caught:
        Files().write(tmp_path / "weights", bytes(2_000_000))
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(tmp_path / "weights")
    with pytest.raises(OSError, match=r"1\.0 MB are free, this file needs 1\.1 MB"):
        Files().write(tmp_path / "weights", bytes(900_000))  # it would fit, with nothing to spare
    assert not (tmp_path / "weights").exists()
    Files().write(tmp_path / "weights", bytes(800_000))
