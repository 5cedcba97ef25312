"""Arrays written row by row, and files that are no arrays."""

from pathlib import Path

import numpy as np
import pytest

from realmops.corpus.npy_files import NpyWriter, load_npy


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    writer = NpyWriter(tmp_path / "a.npy", np.int32, (2,))
    for first in range(0, 300, 100):
        writer.append(np.arange(2 * first, 2 * first + 200).reshape(-1, 2))
    assert len(writer) == 300
    for _ in range(2):
        writer.close()
    np.testing.assert_array_equal(load_npy(tmp_path / "a.npy"), np.arange(600).reshape(-1, 2))


@pytest.mark.parametrize("content", [b"no array", b"\x80\x04N.", "zip"])
def test_file_that_is_no_array_is_refused(tmp_path: Path, content: bytes | str) -> None:
    """NumPy itself accepts an archive of arrays, too, and leaves its file open."""
    path = tmp_path / "places.npy"
    if content == "zip":
        np.savez(tmp_path / "several.npz", np.zeros(3))
        (tmp_path / "several.npz").rename(path)
    else:
        path.write_bytes(content)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"magic string|expected"):
        load_npy(path)
