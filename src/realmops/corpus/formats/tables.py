"""Tables with the columns title, text and id: Parquet files, and datasets of Hugging Face saved on disk."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from realmops.corpus.documents import LINE_LIMIT, Format, Outcome, Raw, Rejected, document_or_dropped

_ROWS = 256
_REQUIRED = ("title", "text")
_TEXTS = (*_REQUIRED, "id")  # bytes in these columns are text that its writer did not mark as such
HUB = "hf:"


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
        file = pq.ParquetFile(path, memory_map=False, pre_buffer=False)
        wanted = [field.name for field in file.schema_arrow if _is_readable(field)]
        batches = file.iter_batches(batch_size=_ROWS, columns=wanted)
        yield from _rows(path, file.schema_arrow, batches, file.metadata.num_rows, path.stat().st_size)
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise ValueError(f"{path}: cannot be read ({error.strerror}); check the path") from None
        yield Rejected(
            str(path),
            f"no valid Parquet data ({_first_line(error)}), so that the rest of the file cannot be read; "
            "write or copy the file again",
            ends_file=True,
        )


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
        yield Rejected(
            name,
            f"no valid dataset ({type(error).__name__}: {_first_line(error)}), so that the rest of it cannot be "
            "read; save it again with save_to_disk",
            ends_file=True,
        )


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
        yield Rejected(
            str(path),
            f"the column {missing[0]!r} is missing (columns found: {', '.join(schema.names) or 'none'}); "
            "rename the columns to title and text",
            ends_file=True,
        )
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
    """Each row as a dict, or what is wrong with it."""
    try:
        batch.validate(full=True)  # offsets that point anywhere are believed otherwise
        yield from _without_times(batch).to_pylist()
    except (ValueError, OverflowError, pa.ArrowException) as error:
        if batch.num_rows == 1:
            yield error
        else:
            for index in range(batch.num_rows):
                yield from _plain_rows(batch.slice(index, 1))


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
                problem = f"{key!r} is invalid UTF-8 at byte {error.start}; write it as a column of text"
                raise ValueError(problem) from None
    if isinstance(text := record["text"], str) and len(text) > LINE_LIMIT:
        raise ValueError(f"'text' is longer than {LINE_LIMIT >> 20} Mi characters; split it")
    return document_or_dropped(record, raw.place)


PARQUET = Format("parquet", _parquet_records, _understand)
DATASET = Format("dataset", _dataset_records, _understand)
