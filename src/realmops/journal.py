"""Metrics of a stage as JSON lines: writer, reader, series and means."""

import json
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from realmops.artifacts import make_folder, sync_folder

JOURNAL, METRICS = "metrics.jsonl", "metrics.json"  # in the folder of a stage: by step, and in the end
NAME = re.compile(r"[A-Za-z0-9_-]+")
RESERVED = ("stage", "step", "time")


@dataclass(frozen=True)
class Series:
    """One curve of a metric: ``steps`` ascending, with a finite value for each."""

    name: str
    steps: Sequence[float]
    values: Sequence[float]


class Journal:
    """The metrics file of one stage, with lines ``{"stage": ..., "step": ..., "time": seconds, name: value, ...}``.

    A line is one system call; an unfinished last one is truncated. NaN and infinities are null, which MLflow omits.
    """

    def __init__(self, path: Path, stage: str) -> None:
        self.path = path
        self.stage = stage
        self.on_checkpoint: Callable[[], None] | None = None  # called once a checkpoint's lines are on the disk
        self.finished = 0  # length of the lines of finished trainings
        self._last_step = -1
        make_folder(path.parent)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        sync_folder(path.parent)
        self._file.truncate(path.read_bytes().rfind(b"\n") + 1)

    def log(self, step: int, **metrics: float) -> None:
        """Append one line; steps must not decrease, except after ``truncate``."""
        assert step >= self._last_step, (step, self._last_step)
        assert not set(metrics) & set(RESERVED), sorted(metrics)
        self._last_step = step
        values = {name: _finite(value) for name, value in metrics.items()}
        record = {"stage": self.stage, "step": int(step), "time": round(time.time(), 3), **values}
        self._file.write(json.dumps(record, allow_nan=False).encode() + b"\n")

    def position(self) -> int:
        """Sync the journal and return its length in bytes, to be stored in a checkpoint."""
        os.fsync(self._file.fileno())
        if self.on_checkpoint is not None:
            self.on_checkpoint()
        return self.path.stat().st_size

    def truncate(self, position: int) -> None:
        """Truncate the journal to the position of a checkpoint; the later steps will be logged again."""
        size = self.path.stat().st_size
        if position > size:
            raise ValueError(
                f"{self.path} has {size} bytes, its checkpoint recorded {position}: the file was truncated or "
                "replaced; restore it, or remove the checkpoint to start the stage again"
            )
        self._file.truncate(position)
        self._last_step = -1

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _finite(value: float) -> float | int | None:
    if isinstance(value, int):
        return int(value)
    return float(value) if math.isfinite(value) else None


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Read the records of a metrics.jsonl, without an unfinished last line; ValueError names a damaged line."""
    records = []
    lines = path.read_bytes().split(b"\n")
    for line_number, line in enumerate(lines[:-1], 1):
        try:
            record = json.loads(line)
            record["stage"], record["step"] = str(record["stage"]), int(record["step"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(
                f"{path}, line {line_number}: {error!r}; "
                'a line is {"stage": ..., "step": ..., name: number}; it is damaged: run its stage again'
            ) from None
        records.append(record)
    return records


def metric_series(records: Iterable[Mapping[str, Any]], stage: str, metric: str) -> Series:
    points = [(r["step"], r[metric]) for r in records if r["stage"] == stage and r.get(metric) is not None]
    return Series(metric, [step for step, _ in points], [float(value) for _, value in points])


class JournalValues:
    """The metrics that a stage has logged so far, read once."""

    def __init__(self, journal: Journal) -> None:
        self._records = [record for record in read_journal(journal.path) if record["stage"] == journal.stage]

    def of(self, metric: str) -> Sequence[float]:
        return [float(record[metric]) for record in self._records if record.get(metric) is not None]

    def mean(self, metric: str, last: int = 0) -> float:
        """Return the mean of all or the ``last`` values of a metric; NaN if there is none, or if one is not finite."""
        values = [record[metric] for record in self._records if metric in record][-last:]
        return sum(values) / len(values) if values and None not in values else float("nan")
