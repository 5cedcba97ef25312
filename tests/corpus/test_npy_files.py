"""Files that grow: closed whatever happens."""

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from realmops.corpus import snapshot_writer
from realmops.corpus.npy_files import AppendOnlyFile, load_npy
from realmops.corpus.spans import SpansWriter


def test_a_disk_without_room_for_the_last_bytes_keeps_no_file_open(tmp_path: Path) -> None:
    writer = SpansWriter(tmp_path)
    writer.add_without(5)
    for file in (writer._spans, writer._labels, writer._offsets):
        file.flush()
    files = (writer._spans, writer._labels, writer._offsets)
    files[1]._file.close()
    files[1]._file = open("/dev/full", "r+b")  # noqa: SIM115 (a write there finds the disk full)
    with pytest.raises(OSError, match="No space left"):
        writer.abandon()
    assert [file._file.closed for file in files] == [True, True, True]
    assert load_npy(tmp_path / "spans.npy").shape == (0, 6)
    np.testing.assert_array_equal(load_npy(tmp_path / "span_offsets.npy"), np.zeros(6))
    files[0].close()
    assert (tmp_path / "spans.npy").stat().st_size == files[0].size, "closed again, nothing happens"


@pytest.mark.parametrize("fails_at", [*range(11), "database", "ids"])
def test_a_snapshot_that_finds_its_disk_full_as_it_begins_keeps_no_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int | str
) -> None:
    opened: list[AppendOnlyFile] = []
    start = AppendOnlyFile.__init__

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def recorded(self: AppendOnlyFile, *arguments: Any, **settings: Any) -> None:
        if len(opened) == fails_at:
            full()
        start(self, *arguments, **settings)
        opened.append(self)

    monkeypatch.setattr(AppendOnlyFile, "__init__", recorded)
    if fails_at == "database":
        monkeypatch.setattr(snapshot_writer.SeenIds, "_execute", full)
    if fails_at == "ids":
        monkeypatch.setattr(snapshot_writer, "SeenIds", full)
    with pytest.raises(OSError, match="No space left"):
        snapshot_writer._Writer(tmp_path, ["[PAD]"], None, [], 0.0, languages=False)
    assert len(opened) == (fails_at if isinstance(fails_at, int) else 11)
    assert all(file._file.closed for file in opened)
    assert not (tmp_path / snapshot_writer._IDS).exists()


@pytest.mark.parametrize("content", [b"no array", b"\x80\x04N.", "zip"])
def test_what_is_no_array_is_refused_and_left_closed(tmp_path: Path, content: bytes | str) -> None:
    """NumPy itself takes an archive of arrays for one too, and leaves its file open."""
    path = tmp_path / "places.npy"
    if content == "zip":
        np.savez(tmp_path / "several.npz", np.zeros(3))
        (tmp_path / "several.npz").rename(path)
    else:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"magic string|expected"):
        load_npy(path)
