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


def test_a_snapshot_without_room_for_its_scratch_database_keeps_no_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[GrowingFile] = []
    start = GrowingFile.__init__

    def recorded(self: GrowingFile, *arguments: Any, **settings: Any) -> None:
        start(self, *arguments, **settings)
        opened.append(self)

    def full(self: Any, statement: str, *values: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(GrowingFile, "__init__", recorded)
    monkeypatch.setattr(snapshot_writer._SeenIds, "_execute", full)
    with pytest.raises(OSError, match="No space left"):
        snapshot_writer._Writer(tmp_path, ["[PAD]"], [], 0.0)
    assert len(opened) == 14
    assert all(file._file.closed for file in opened)
    assert not (tmp_path / snapshot_writer._IDS).exists()
