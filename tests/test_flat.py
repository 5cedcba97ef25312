"""Files that grow: closed whatever happens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from realmops.corpus.flat import FlatArray, close_all, load_flat


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
