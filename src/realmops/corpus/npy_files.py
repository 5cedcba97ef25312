"""Arrays in .npy files: written row by row in constant memory, and memory-mapped."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray


class NpyWriter:
    """A new .npy file, whose header is rewritten with the final length; ``len`` is the current number of rows."""

    def __init__(self, path: Path, dtype: DTypeLike, row_shape: tuple[int, ...] = ()) -> None:
        self._file = open(path, "xb")  # noqa: SIM115 (closed by ``close``)
        self._dtype: np.dtype[Any] = np.dtype(dtype)
        self._row_shape = row_shape
        self._rows = 0
        self._header_bytes = self._write_header()

    def __len__(self) -> int:
        return self._rows

    def append(self, rows: NDArray[Any]) -> None:
        assert rows.shape[1:] == self._row_shape, (rows.shape, self._row_shape)
        self._file.write(np.ascontiguousarray(rows, self._dtype).data)
        self._rows += len(rows)

    def close(self) -> None:
        if not self._file.closed:
            with self._file:  # closes the file even if the disk is full
                self._file.seek(0)
                assert self._write_header() == self._header_bytes, "numpy changed the room for the header"

    def _write_header(self) -> int:
        header = {
            "descr": np.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (self._rows, *self._row_shape),
        }
        np.lib.format.write_array_header_1_0(self._file, header)
        return self._file.tell()


class OffsetsWriter(NpyWriter):
    """Row offsets int64 [P + 1], written item by item: item i has the rows from entry i to entry i + 1."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, np.int64)
        self._last = 0
        self.append(np.zeros(1, np.int64))

    @property
    def items(self) -> int:
        return len(self) - 1

    def append_lengths(self, lengths: Sequence[int] | NDArray[np.int64]) -> None:
        offsets = self._last + np.cumsum(np.asarray(lengths, np.int64))
        if len(offsets):
            self._last = int(offsets[-1])
        self.append(offsets)


def load_npy(path: Path) -> NDArray[Any]:
    """Return the array of a .npy file, memory-mapped and read-only; raise ValueError for any other file."""
    return np.asarray(np.lib.format.open_memmap(path, mode="r"))  # a plain array is faster to slice than np.memmap
