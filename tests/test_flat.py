"""Files that grow: closed whatever happens."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from realmops.corpus import snapshot_writer
from realmops.corpus.flat import FlatArray, GrowingFile, close_all, load_flat


def test_a_disk_without_room_for_the_last_bytes_keeps_no_file_open(tmp_path: Path) -> None:
    arrays = [FlatArray(tmp_path / f"{n}.npy", np.int32) for n in range(3)]
    for array in arrays:
        array.append(np.arange(5))
    arrays[1].sync()
    arrays[1]._file.close()
    arrays[1]._file = open("/dev/full", "r+b")  # noqa: SIM115 (a write there finds the disk full)
    with pytest.raises(OSError, match="No space left"):
        close_all(arrays)
    assert [array._file.closed for array in arrays] == [True, True, True]
    for n in (0, 2):
        np.testing.assert_array_equal(load_flat(tmp_path / f"{n}.npy"), np.arange(5))
    arrays[0].close()
    assert (tmp_path / "0.npy").stat().st_size == arrays[0].size, "closed again, nothing happens"


@pytest.mark.parametrize("fails_at", [*range(14), "database", "ids", "schema"])
def test_a_snapshot_that_finds_its_disk_full_as_it_begins_keeps_no_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int | str
) -> None:
    opened: list[GrowingFile] = []
    start, write = GrowingFile.__init__, GrowingFile.write

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def recorded(self: GrowingFile, *arguments: Any, **settings: Any) -> None:
        if len(opened) == fails_at:
            full()
        start(self, *arguments, **settings)
        opened.append(self)

    monkeypatch.setattr(GrowingFile, "__init__", recorded)
    if fails_at == "database":
        monkeypatch.setattr(snapshot_writer._SeenIds, "_execute", full)
    if fails_at == "ids":
        monkeypatch.setattr(snapshot_writer, "_SeenIds", full)
    if fails_at == "schema":
        schema = snapshot_writer._SCHEMA.serialize()
        monkeypatch.setattr(GrowingFile, "write", lambda self, what: full() if what == schema else write(self, what))
    with pytest.raises(OSError, match="No space left"):
        snapshot_writer._Writer(tmp_path, ["[PAD]"], [], 0.0)
    assert len(opened) == (fails_at if isinstance(fails_at, int) else 14)
    assert all(file._file.closed for file in opened)
    assert not (tmp_path / snapshot_writer._IDS).exists()
