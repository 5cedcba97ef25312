"""Tables with the columns title, text and id: Parquet files, and datasets of Hugging Face saved on disk."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from realmops.corpus.documents import LINE_LIMIT, Format, Outcome, Raw, Rejected, document_or_dropped, unreadable_rest

_ROWS = 256
_SLICE = 1 << 20  # characters and values of rows that are made at a time
_LIST_VALUES = 1 << 25  # of a column in a row group; reading one takes 34 bytes
_DECODED = 512 << 20  # bytes of texts that are decoded at a time
_REQUIRED = ("title", "text")
_TEXTS = (*_REQUIRED, "id")  # bytes in these columns are text that its writer did not mark as such
HUB = "hf:"
_OFFSETS = {pa.string(): np.int32, pa.binary(): np.int32, pa.large_string(): np.int64, pa.large_binary(): np.int64}
Sizes = NDArray[np.int64]


def is_dataset_folder(folder: Path) -> bool:
    """Whether ``datasets`` saved one split here."""
    return (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()


def hub_splits(name: str) -> list[tuple[str, int]]:
    """("hf:owner/name:split", bytes) of the splits that "hf:owner/name" or "hf:owner/name:split" names.

    Raises ValueError when the hub cannot be reached and the dataset is not in its cache on this machine.
    """
    datasets = _datasets(name)
    owner_name, _, split = name.removeprefix(HUB).partition(":")
    try:
        found = datasets.load_dataset(owner_name)
    except Exception as error:  # from the network, the hub, a cache or a file format: the remedy is the same
        raise ValueError(
            f"{name}: the dataset could not be loaded ({type(error).__name__}: {_first_line(error)}); on a "
            f"machine with access to the hub run datasets.load_dataset({owner_name!r}).save_to_disk('FOLDER'), "
            "copy FOLDER to this machine and name it in place of the hub name"
        ) from None
    if split and split not in found:
        raise ValueError(f"{name}: there is no split {split!r}; there are {', '.join(found)}")
    return [(f"{HUB}{owner_name}:{one}", _stored_bytes(found[one])) for one in ([split] if split else found)]


def _datasets(name: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise ValueError(
            f"{name}: reading datasets of Hugging Face needs the package datasets; pip install 'realmops[datasets]'"
        ) from None
    datasets.disable_progress_bars()
    return datasets


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "no details")


def _parquet_records(path: Path) -> Iterator[Raw | Rejected]:
    try:
        metadata = pq.read_metadata(path)
        schema, long = metadata.schema.to_arrow_schema(), _long_lists(metadata)
        wanted = [field.name for field in schema if _is_readable(field) and field.name not in long]
        yield from _rows(path, schema, _batches(path, metadata, wanted), metadata.num_rows, path.stat().st_size)
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise ValueError(f"{path}: cannot be read ({error.strerror}); check the path") from None
        yield unreadable_rest(str(path), f"no valid Parquet data ({_first_line(error)})", "write or copy it again")


def _long_lists(metadata: pq.FileMetaData) -> set[str]:
    """The columns of lists that have more than ``_LIST_VALUES`` values in a row group, which could be those of one row.

    A list that repeats one value takes some bytes in the file.
    """
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    return {
        metadata.schema.column(index).path.partition(".")[0]
        for index in range(metadata.num_columns)
        if metadata.schema.column(index).max_repetition_level
        and any(group.column(index).num_values > _LIST_VALUES for group in groups)
    }


def _batches(path: Path, metadata: pq.FileMetaData, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The rows of a Parquet file, some at a time: one where a group of rows unpacks to much.

    A text that many rows share is in the file once. Where it is long, it stays one text until ``_plain_rows``.
    """
    leaves = [metadata.schema.column(index) for index in range(metadata.num_columns)]
    texts = [
        (index, leaf.path)
        for index, leaf in enumerate(leaves)
        if leaf.physical_type == "BYTE_ARRAY" and leaf.logical_type.type != "DECIMAL"
        if not {leaf.path, leaf.path.partition(".")[0]}.isdisjoint(names)
    ]
    opened = partial(pq.ParquetFile, path, metadata=metadata, memory_map=False, pre_buffer=False)
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        shared = []
        for index, name in texts:
            chunk = group.column(index)
            rows = chunk.num_values if leaves[index].max_repetition_level else min(chunk.num_values, _ROWS)
            if chunk.has_dictionary_page and rows * chunk.total_uncompressed_size > _DECODED:
                first = next(opened(read_dictionary=[name]).iter_batches(1, row_groups=[number], columns=[name]), None)
                if first is not None and rows * _longest(first.column(0)) > _DECODED:
                    shared.append(name)
        unpacked = sum(group.column(index).total_uncompressed_size for index in range(metadata.num_columns))
        rows = _ROWS if unpacked <= _DECODED else 1
        yield from opened(read_dictionary=shared).iter_batches(rows, row_groups=[number], columns=names)


def _longest(column: pa.Array) -> int:
    """Bytes of the longest text that rows of a column of texts, or of lists of texts, may share."""
    if pa.types.is_dictionary(column.type):
        return int(_sizes(column.dictionary).max(initial=0))
    if pa.types.is_struct(column.type):
        return max(map(_longest, column.flatten()))
    return _longest(column.values) if hasattr(column, "offsets") else 0


def _dataset_records(path: Path) -> Iterator[Raw | Rejected]:
    name = str(path)
    datasets = _datasets(name)
    try:
        if name.startswith(HUB):
            owner_name, _, split = name.removeprefix(HUB).partition(":")
            rows = datasets.load_dataset(owner_name, split=split)
        else:
            rows = datasets.load_from_disk(name)
        wanted = [field.name for field in rows.features.arrow_schema if _is_readable(field)]
        rows = rows.select_columns(wanted).with_format("arrow")
        batches = (batch for table in rows.iter(batch_size=_ROWS) for batch in table.to_batches())
        yield from _rows(path, rows.features.arrow_schema, batches, len(rows), _stored_bytes(rows))
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, AttributeError, MemoryError) as error:
        found = f"no valid dataset ({type(error).__name__}: {_first_line(error)})"
        yield unreadable_rest(name, found, "save the dataset again with save_to_disk")


def _stored_bytes(rows: Any) -> int:
    return sum(Path(file["filename"]).stat().st_size for file in rows.cache_files)


def _is_readable(column: pa.Field) -> bool:
    """Other columns of bytes (images, sound) are no text and would be copied for nothing."""
    return column.name in _TEXTS or not (pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type))


def _rows(
    path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch], total: int, size: int
) -> Iterator[Raw | Rejected]:
    """The rows of a table of ``total``; of its ``size`` in bytes, those of a batch count as read by their share."""
    missing = [name for name in _REQUIRED if name not in schema.names]
    if missing:
        found = f"the column {missing[0]!r} is missing (columns found: {', '.join(schema.names) or 'none'})"
        yield Rejected(str(path), f"{found}; rename the columns to title and text", ends_file=True)
        return
    number = done = 0
    for batch in batches:
        done += batch.num_rows
        for row in _plain_rows(batch):
            number += 1
            place = f"{path}:row {number}"
            if isinstance(row, dict):
                yield Raw(place, row, size * done // max(total, 1))
            else:
                yield Rejected(place, f"the row cannot be read ({_first_line(row)}); write the file again")


def _plain_rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | Exception]:
    """Each row as a dict, or what is wrong with it: rows of about ``_SLICE`` characters and values at a time."""
    try:
        size_R = sum(map(_sizes, batch.columns), np.zeros(batch.num_rows, np.int64))
    except (IndexError, ValueError, pa.ArrowException):  # it is damaged: each row is checked on its own
        size_R = np.full(batch.num_rows, _SLICE)
    end_R = np.concatenate([[0], np.cumsum(size_R)])
    first = 0
    while first < batch.num_rows:
        end = max(first + 1, int(np.searchsorted(end_R, end_R[first] + _SLICE, side="right")) - 1)
        if end_R[end] - end_R[first] > LINE_LIMIT:
            yield ValueError(f"it holds more than {LINE_LIMIT >> 20} Mi characters and values")
        else:
            yield from _some_rows(batch.slice(first, end - first))
        first = end


def _sizes(column: pa.Array) -> Sizes:
    """Return the characters or bytes, and other values, of each row [R]; a text that rows share counts for each."""
    kind = column.type
    sizes: Sizes = np.ones(len(column), np.int64)
    if pa.types.is_dictionary(kind):
        of_values = _sizes(column.dictionary)
        if len(of_values):  # what null has for a number may be any
            sizes = of_values[np.clip(_integers(column.indices), 0, len(of_values) - 1)]
    elif pa.types.is_struct(kind):
        sizes = sum(map(_sizes, column.flatten()), sizes)
    elif hasattr(column, "offsets"):  # lists and maps
        inside = [column.keys, column.items] if pa.types.is_map(kind) else [column.values]
        ends = np.concatenate([[0], np.cumsum(sum(map(_sizes, inside)))])
        sizes += np.maximum(np.diff(ends[_integers(column.offsets)]), 0)
    elif kind in _OFFSETS and len(column):
        ends = np.frombuffer(column.buffers()[1], _OFFSETS[kind])[column.offset :][: len(column) + 1]
        sizes += np.maximum(np.diff(ends), 0)
    return sizes


def _integers(column: pa.Array) -> NDArray[Any]:
    """The integers of a column; pyarrow itself would load pandas."""
    if not len(column):
        return np.zeros(0, np.int64)
    return np.frombuffer(column.buffers()[1], f"i{column.type.bit_width // 8}")[column.offset :][: len(column)]


def _some_rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | Exception]:
    try:
        batch = _decoded(batch)
        batch.validate(full=True)  # offsets that point anywhere are believed otherwise
        yield from _without_times(batch).to_pylist()
    except (ValueError, OverflowError, pa.ArrowException) as error:
        if batch.num_rows == 1:
            yield error
        else:
            for index in range(batch.num_rows):
                yield from _some_rows(batch.slice(index, 1))


def _decoded(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Texts that rows share as texts of each row."""
    for index, field in enumerate(batch.schema):
        if pa.types.is_dictionary(field.type):
            batch = batch.set_column(index, field.name, batch.column(index).dictionary_decode())
    return batch


def _without_times(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Dates and times as text: Python's know neither nanoseconds nor the year 10000."""
    for index, field in enumerate(batch.schema):
        if pa.types.is_temporal(field.type) and not pa.types.is_interval(field.type):
            batch = batch.set_column(index, field.name, batch.column(index).cast(pa.string()))
    return batch


def _understand(raw: Raw) -> Outcome:
    record = {key: value for key, value in raw.data.items() if key != "spans"}
    for key in _TEXTS:
        if isinstance(value := record.get(key), bytes):
            try:
                record[key] = value.decode()
            except UnicodeDecodeError as error:
                what = f"{key!r} is invalid UTF-8 at byte {error.start}"
                raise ValueError(f"{what}; write it as a column of text") from None
    return document_or_dropped(record, raw.place)


PARQUET = Format("parquet", _parquet_records, _understand)
DATASET = Format("dataset", _dataset_records, _understand)
