"""Files that grow at their end in flat memory, and go on after a kill: plain bytes, and .npy arrays row by row.

After a kill a file is cut back to the bytes that it had at the last ``sync`` that somebody wrote down.
"""

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray


class GrowingFile:
    """A file that is only appended to; ``size`` is its number of bytes so far.

    Args:
        size: None makes a new file; a number goes on with an old one, cut back to so many bytes.
    """

    def __init__(self, path: Path, size: int | None = None) -> None:
        self._file = open(path, "xb" if size is None else "r+b")  # noqa: SIM115 (closed by ``close``)
        self.size = size or 0
        if size is not None:
            self._file.truncate(size)
            self._file.seek(size)

    def write(self, content: Any) -> None:
        self.size += self._file.write(content)

    def sync(self) -> int:
        """Make everything so far durable; returns the number of bytes."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self.size

    def close(self) -> None:
        """Close the file; closing again does nothing."""
        self._file.close()


class FlatArray(GrowingFile):
    """A .npy file under construction; ``len`` is the number of rows so far.

    The header is written again with the true length by ``close``: numpy leaves room in it for the first axis.
    """

    def __init__(self, path: Path, dtype: DTypeLike, row_shape: tuple[int, ...] = (), size: int | None = None) -> None:
        super().__init__(path, size)
        self._dtype: np.dtype[Any] = np.dtype(dtype)
        self._row_shape = row_shape
        self._row_bytes = self._dtype.itemsize * int(np.prod(row_shape))
        self._header_bytes = len(self._header(0))
        if size is None:
            self.write(self._header(0))

    def __len__(self) -> int:
        return (self.size - self._header_bytes) // self._row_bytes

    def append(self, rows: NDArray[Any]) -> None:
        """Add rows [n, *row_shape]."""
        assert rows.shape[1:] == self._row_shape, (rows.shape, self._row_shape)
        self.write(np.ascontiguousarray(rows, self._dtype).data)

    def close(self) -> None:
        """Write the final header; closing again does nothing."""
        if self._file.closed:
            return
        header = self._header(len(self))
        assert len(header) == self._header_bytes, "numpy changed the room for the header"
        with self._file:  # closed where there is no room for the last bytes, too
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


class FlatOffsets(FlatArray):
    """Row borders int64 [P + 1] under construction: entry i to entry i + 1 are the rows of item i."""

    def __init__(self, path: Path, size: int | None = None) -> None:
        super().__init__(path, np.int64, size=size)
        if size is None:
            self._last = 0
            self.append(np.zeros(1, np.int64))
        else:
            self._file.seek(size - self._row_bytes)
            self._last = int(np.frombuffer(self._file.read(self._row_bytes), np.int64)[0])

    @property
    def items(self) -> int:
        return len(self) - 1

    def append_lengths(self, lengths: Sequence[int] | NDArray[np.int64]) -> None:
        """Add items by their numbers of rows."""
        borders = self._last + np.cumsum(np.asarray(lengths, np.int64))
        if len(borders):
            self._last = int(borders[-1])
        self.append(borders)


def load_flat(path: Path) -> NDArray[Any]:
    """The array in a .npy file, memory-mapped and read-only; ValueError for anything else."""
    return np.asarray(np.lib.format.open_memmap(path, mode="r"))  # parts of a memmap are slow to take
