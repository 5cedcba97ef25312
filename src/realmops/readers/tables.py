"""Tables with the columns text and, if present, title and id: Parquet files and Hugging Face datasets."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from realmops.compressed import open_raw
from realmops.credentials import error_line
from realmops.hub import HUB
from realmops.readers.documents import (
    LINE_LIMIT,
    TEXT_KEYS,
    Format,
    Outcome,
    RawRecord,
    Rejected,
    parse_document,
    reject_remainder,
    text_key,
)

_ROWS = 256  # per batch
_SLICE = 1 << 20  # characters and values that are converted to Python objects at a time
_LIST_VALUES = 1 << 25  # of a column in a row group; reading takes 34 bytes per value
_DECODED = 512 << 20  # bytes of text that are decoded at a time
_TEXTS = ("title", "id", *TEXT_KEYS)  # bytes in these columns are text without the logical type for strings
_OFFSETS = {pa.string(): np.int32, pa.binary(): np.int32, pa.large_string(): np.int64, pa.large_binary(): np.int64}
Sizes = NDArray[np.int64]


def list_splits(documents: Path) -> list[tuple[Path, int]]:
    """Return (path, bytes) of the splits of a Hugging Face dataset: a folder, "hf:owner/name" or "hf:owner/name:split".

    Other paths have none.
    """
    name = str(documents)
    if not name.startswith(HUB):
        pattern = "*/state.json" if (documents / "dataset_dict.json").is_file() else "state.json"
        states = [file for file in sorted(documents.glob(pattern)) if file.with_name("dataset_info.json").is_file()]
        return [(file.parent, sum(part.stat().st_size for part in file.parent.iterdir())) for file in states]
    datasets = _datasets(name)
    owner_name, _, split = name.removeprefix(HUB).partition(":")
    try:
        dataset = datasets.load_dataset(owner_name)
    except Exception as error:  # network, hub, cache or file format: the remedy is the same
        raise ValueError(
            f"{name}: the dataset could not be loaded ({error_line(error)}); on a "
            f"machine with access to the hub run datasets.load_dataset({owner_name!r}).save_to_disk('FOLDER'), "
            "copy FOLDER to this machine and set the path to it"
        ) from None
    if split and split not in dataset:
        raise ValueError(f"{name}: no split {split!r}; the dataset has {', '.join(dataset)}")
    parts = [split] if split else dataset
    return [(Path(f"{HUB}{owner_name}:{part}"), _stored_bytes(dataset[part])) for part in parts]


def _datasets(name: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise ValueError(
            f"{name}: reading datasets of Hugging Face needs the package datasets; pip install 'realmops[datasets]'"
        ) from None
    datasets.disable_progress_bars()
    return datasets


def _parquet_records(path: Path) -> Iterator[RawRecord | Rejected]:
    open_raw(path).close()  # raises ValueError
    try:
        metadata = pq.read_metadata(path)
        schema, oversized = metadata.schema.to_arrow_schema(), _oversized_lists(metadata)
        columns = [field.name for field in schema if _is_readable(field) and field.name not in oversized]
        yield from _rows(path, schema, _batches(path, metadata, columns), metadata.num_rows, path.stat().st_size)
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        yield reject_remainder(str(path), f"no valid Parquet data ({error_line(error)})", "write or copy it again")


def _oversized_lists(metadata: pq.FileMetaData) -> set[str]:
    """Return list columns over ``_LIST_VALUES`` in a row group: a repeated value takes a few bytes of the file."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    return {
        metadata.schema.column(index).path.partition(".")[0]
        for index in range(metadata.num_columns)
        if metadata.schema.column(index).max_repetition_level
        and any(group.column(index).num_values > _LIST_VALUES for group in groups)
    }


def _batches(path: Path, metadata: pq.FileMetaData, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield the rows in batches, one at a time from large row groups; shared long texts stay dictionary-encoded."""
    leaves = [metadata.schema.column(index) for index in range(metadata.num_columns)]
    read = set(names)
    texts = [
        (index, leaf.path)
        for index, leaf in enumerate(leaves)
        if leaf.physical_type == "BYTE_ARRAY" and leaf.logical_type.type != "DECIMAL"
        if not read.isdisjoint((leaf.path, leaf.path.partition(".")[0]))
    ]
    reader = partial(pq.ParquetFile, path, metadata=metadata, memory_map=False, pre_buffer=False)
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        shared = []
        for index, name in texts:
            chunk = group.column(index)
            rows = chunk.num_values if leaves[index].max_repetition_level else min(chunk.num_values, _ROWS)
            if chunk.has_dictionary_page and rows * chunk.total_uncompressed_size > _DECODED:
                first = next(reader(read_dictionary=[name]).iter_batches(1, row_groups=[number], columns=[name]), None)
                if first is not None and rows * _longest(first.column(0)) > _DECODED:
                    shared.append(name)
        unpacked = sum(group.column(index).total_uncompressed_size for index in range(metadata.num_columns))
        rows = _ROWS if unpacked <= _DECODED else 1
        yield from reader(read_dictionary=shared).iter_batches(rows, row_groups=[number], columns=names)


def _longest(column: pa.Array) -> int:
    """Return the bytes of the longest dictionary entry in a column, nested columns included."""
    if pa.types.is_dictionary(column.type):
        return int(_sizes(column.dictionary).max(initial=0))
    if pa.types.is_struct(column.type):
        return max(map(_longest, column.flatten()))
    return _longest(column.values) if hasattr(column, "offsets") else 0


def _dataset_records(path: Path) -> Iterator[RawRecord | Rejected]:
    name = str(path)
    datasets = _datasets(name)
    try:
        if name.startswith(HUB):
            owner_name, _, split = name.removeprefix(HUB).partition(":")
            rows = datasets.load_dataset(owner_name, split=split)
        else:
            rows = datasets.load_from_disk(name)
        columns = [field.name for field in rows.features.arrow_schema if _is_readable(field)]
        rows = rows.select_columns(columns).with_format("arrow")
        batches = (batch for table in rows.iter(batch_size=_ROWS) for batch in table.to_batches())
        yield from _rows(path, rows.features.arrow_schema, batches, len(rows), _stored_bytes(rows))
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, AttributeError, MemoryError) as error:
        problem = f"no valid dataset ({error_line(error)})"
        yield reject_remainder(name, problem, "save the dataset again with save_to_disk")


def _stored_bytes(rows: Any) -> int:
    return sum(Path(file["filename"]).stat().st_size for file in rows.cache_files)


def _is_readable(column: pa.Field) -> bool:
    return column.name in _TEXTS or not (pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type))


def _rows(
    path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch], total: int, size: int
) -> Iterator[RawRecord | Rejected]:
    """Yield a record for each of the ``total`` rows; positions are estimated as a share of ``size`` bytes."""
    if text_key(schema.names) not in schema.names:
        problem = f"the column 'text' is missing (columns found: {', '.join(schema.names) or 'none'})"
        yield Rejected(str(path), f"{problem}; rename the columns to text and title", ends_file=True)
        return
    number = rows_read = 0
    for batch in batches:
        rows_read += batch.num_rows
        for row in _to_dicts(batch):
            number += 1
            place = f"{path}:row {number}"
            if isinstance(row, dict):
                yield RawRecord(place, row, size * rows_read // max(total, 1))
            else:
                yield Rejected(place, f"the row cannot be read ({error_line(row)}); write the file again")


def _to_dicts(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | Exception]:
    """Yield each row as a dict, or its error; slices of about ``_SLICE`` characters and values bound the memory."""
    try:
        size_R = sum(map(_sizes, batch.columns), np.zeros(batch.num_rows, np.int64))
    except (IndexError, ValueError, pa.ArrowException):  # damaged: check each row separately
        size_R = np.full(batch.num_rows, _SLICE)
    end_R = np.concatenate([[0], np.cumsum(size_R)])
    first = 0
    while first < batch.num_rows:
        end = max(first + 1, int(np.searchsorted(end_R, end_R[first] + _SLICE, side="right")) - 1)
        if end_R[end] - end_R[first] > LINE_LIMIT:
            yield ValueError(f"it has more than {LINE_LIMIT >> 20} Mi characters and values")
        else:
            yield from _convert_rows(batch.slice(first, end - first))
        first = end


def _sizes(column: pa.Array) -> Sizes:
    """Return the characters or bytes plus other values of each row [R]; a shared text counts for every row."""
    kind = column.type
    sizes: Sizes = np.ones(len(column), np.int64)
    if pa.types.is_dictionary(kind):
        entry_sizes = _sizes(column.dictionary)
        if len(entry_sizes):  # the index of a null is arbitrary
            sizes = entry_sizes[np.clip(_integers(column.indices), 0, len(entry_sizes) - 1)]
    elif pa.types.is_struct(kind):
        sizes = sum(map(_sizes, column.flatten()), sizes)
    elif hasattr(column, "offsets"):  # lists and maps
        children = [column.keys, column.items] if pa.types.is_map(kind) else [column.values]
        ends = np.concatenate([[0], np.cumsum(sum(map(_sizes, children)))])
        sizes += np.maximum(np.diff(ends[_integers(column.offsets)]), 0)
    elif kind in _OFFSETS and len(column):
        ends = np.frombuffer(column.buffers()[1], _OFFSETS[kind])[column.offset :][: len(column) + 1]
        sizes += np.maximum(np.diff(ends), 0)
    return sizes


def _integers(column: pa.Array) -> NDArray[Any]:
    """Return an integer column as an array, without pyarrow's own conversion, which imports pandas."""
    if not len(column):
        return np.zeros(0, np.int64)
    return np.frombuffer(column.buffers()[1], f"i{column.type.bit_width // 8}")[column.offset :][: len(column)]


def _convert_rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | Exception]:
    try:
        batch = _plain_columns(batch)
        batch.validate(full=True)  # else offsets out of bounds are read
        yield from batch.to_pylist()
    except (ValueError, OverflowError, pa.ArrowException) as error:
        if batch.num_rows == 1:
            yield error
        else:
            for index in range(batch.num_rows):
                yield from _convert_rows(batch.slice(index, 1))


def _plain_columns(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Decode dictionaries, and convert times to text: Python's types lack nanoseconds and years above 9999."""
    for index, column in enumerate(batch.columns):
        plain = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
        if pa.types.is_temporal(plain.type) and not pa.types.is_interval(plain.type):
            plain = plain.cast(pa.string())
        if plain is not column:
            batch = batch.set_column(index, batch.schema.field(index).name, plain)
    return batch


def _parse_record(raw: RawRecord) -> Outcome:
    columns = {key: value for key, value in raw.data.items() if key != "spans"}
    texts = {key: value.decode(errors="surrogateescape") for key, value in columns.items() if isinstance(value, bytes)}
    return parse_document(columns | texts, raw.place)


PARQUET = Format("parquet", _parquet_records, _parse_record, suffixes=(".parquet",))
DATASET = Format("dataset", _dataset_records, _parse_record)
