"""Append-only files written in constant memory: plain bytes and .npy arrays."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray


class AppendOnlyFile:
    """A new append-only file; ``size`` is its current length in bytes."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "xb")  # noqa: SIM115 (closed by ``close``)
        self.size = 0

    def write(self, content: Any) -> None:
        """Append bytes."""
        self.size += self._file.write(content)

    def flush(self) -> None:
        """Pass all bytes to the system, so that others can read them."""
        self._file.flush()

    def close(self) -> None:
        """Close the file; further calls do nothing."""
        self._file.close()


class NpyWriter(AppendOnlyFile):
    """A .npy file written row by row; ``len`` is the current number of rows.

    ``close`` rewrites the header with the final length, for which numpy's header leaves room.
    """

    def __init__(self, path: Path, dtype: DTypeLike, row_shape: tuple[int, ...] = ()) -> None:
        super().__init__(path)
        self._dtype: np.dtype[Any] = np.dtype(dtype)
        self._row_shape = row_shape
        self._row_bytes = self._dtype.itemsize * int(np.prod(row_shape))
        self._header_bytes = len(self._header(0))
        self.write(self._header(0))

    def __len__(self) -> int:
        return (self.size - self._header_bytes) // self._row_bytes

    def append(self, rows: NDArray[Any]) -> None:
        """Append rows [n, *row_shape]."""
        assert rows.shape[1:] == self._row_shape, (rows.shape, self._row_shape)
        self.write(np.ascontiguousarray(rows, self._dtype).data)

    def close(self) -> None:
        """Write the final header and close the file; further calls do nothing."""
        if self._file.closed:
            return
        header = self._header(len(self))
        assert len(header) == self._header_bytes, "numpy changed the room for the header"
        with self._file:  # closes the file even if the disk is full
            self._file.seek(0)
            self._file.write(header)

    def _header(self, rows: int) -> bytes:
        content = io.BytesIO()
        header = {
            "descr": np.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (rows, *self._row_shape),
        }
        np.lib.format.write_array_header_1_0(content, header)
        return content.getvalue()


class OffsetsWriter(NpyWriter):
    """Row offsets int64 [P + 1], written item by item: item i has the rows from entry i to entry i + 1."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, np.int64)
        self._last = 0
        self.append(np.zeros(1, np.int64))

    @property
    def items(self) -> int:
        """Number of items."""
        return len(self) - 1

    def append_lengths(self, lengths: Sequence[int] | NDArray[np.int64]) -> None:
        """Append items, each given by its number of rows."""
        offsets = self._last + np.cumsum(np.asarray(lengths, np.int64))
        if len(offsets):
            self._last = int(offsets[-1])
        self.append(offsets)


def load_npy(path: Path) -> NDArray[Any]:
    """Return the array of a .npy file, memory-mapped and read-only; raise ValueError for any other file."""
    return np.asarray(np.lib.format.open_memmap(path, mode="r"))  # a plain array is faster to slice than np.memmap
