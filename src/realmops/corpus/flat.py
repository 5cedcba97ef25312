"""Arrays on disk that grow row by row: plain .npy files, appended to in flat memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


class FlatArray:
    """A .npy file under construction; ``len`` is the number of rows so far.

    The header is written again with the true length by ``close``: numpy leaves room in it for the first axis.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], row_shape: tuple[int, ...] = ()) -> None:
        self._dtype = dtype
        self._row_shape = row_shape
        self._rows = 0
        self._file = open(path, "xb")  # noqa: SIM115 (closed by ``close``)
        self._write_header()
        self._header_bytes = self._file.tell()

    def __len__(self) -> int:
        return self._rows

    def append(self, rows: NDArray[Any]) -> None:
        """Add rows [n, *row_shape]."""
        assert rows.shape[1:] == self._row_shape, (rows.shape, self._row_shape)
        self._file.write(np.ascontiguousarray(rows, self._dtype).data)
        self._rows += len(rows)

    def close(self) -> None:
        """Write the final header; closing again does nothing."""
        if self._file.closed:
            return
        self._file.seek(0)
        self._write_header()
        assert self._file.tell() == self._header_bytes, "numpy changed the room for the header"
        self._file.close()

    def _write_header(self) -> None:
        header = {
            "descr": np.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (self._rows, *self._row_shape),
        }
        np.lib.format.write_array_header_1_0(self._file, header)


class FlatOffsets(FlatArray):
    """Row borders int64 [P + 1] under construction: entry i to entry i + 1 are the rows of item i."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, np.dtype(np.int64))
        self._last = 0
        self.append(np.zeros(1, np.int64))

    @property
    def items(self) -> int:
        """Number of items so far."""
        return len(self) - 1

    def append_lengths(self, lengths: Sequence[int]) -> None:
        """Add items by their numbers of rows."""
        borders = self._last + np.cumsum(np.asarray(lengths, np.int64))
        if len(borders):
            self._last = int(borders[-1])
        self.append(borders)


def load_flat(path: Path) -> NDArray[Any]:
    """The array in a .npy file, memory-mapped and read-only."""
    return np.load(path, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]
