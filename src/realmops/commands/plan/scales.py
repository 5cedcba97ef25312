"""What a corpus of a given size takes, from what was measured on this machine (``calibration.py``): arithmetic.

A refresh is embedding alone: what trainer and builders write and read in between is not counted. Memory is what the
code holds when a generation changes hands, in copies of the embeddings (P x E x 4 bytes):

- a trainer has the generation in use and the new one, both mapped: exact search wants them in memory all the same. An
  ``ivf`` index holds a copy of its own of each, ``pq`` an eighth. On a GPU the exact matrices lie there, old and new,
  and of other types the structures alone, of which that of ``pq`` is a sixteenth;
- a builder that merges has one part, the rest is mapped;
- on the disk lie the generations that the exchange keeps, the one that is being written with its parts, the fine-tuned
  model's, and what is mapped: the trainer's two and the builder's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from realmops.config import IndexOptions
from realmops.index.approximate import fitting_type
from realmops.index.exchange import KEPT

if TYPE_CHECKING:
    from rich.table import Table

PASSAGES = (1_000_000, 13_000_000, 100_000_000, 1_000_000_000)
REFRESH_STEPS = 500  # the paper's
STATES = 3  # of each parameter in a checkpoint: itself and Adam's two moments
LINK_BYTES = 256  # of a passage in hnsw's graph


@dataclass(frozen=True)
class Measured:
    """One machine at the shapes of one params file."""

    device: str  # cpu or cuda
    threads: int
    precision: str
    lengths: str  # where the passages' lengths come from
    passage_wordpieces: float  # mean, with title and special tokens
    documents_per_second: float
    batch_size: int
    measured_batch_size: int  # of the steps that were timed; others in proportion
    step_seconds: float  # of a whole batch, search left out
    search_seconds_per_million: float  # a batch's queries over a million passages, exact
    passage_bytes: float  # of a snapshot
    embedding_width: int
    parameter_bytes: int  # of retriever and reader
    trainer_bytes: int  # host memory of a process that trains, without an index
    builder_bytes: int  # and of one that embeds
    host_memory: int
    device_memory: int  # of the GPU, or the host's


@dataclass(frozen=True)
class Scale:
    """What so many passages take."""

    passages: int
    index_type: str
    search_seconds: float
    step_seconds: float  # with search where that is exact; approximate search is not timed
    refresh_seconds: float  # by one builder
    staleness_steps_mean: float  # with that builder
    staleness_steps_most: float
    builders: int  # for a refresh in REFRESH_STEPS steps
    passages_per_second: float  # that they embed together
    trainer_bytes: float  # of the host
    gpu_bytes: float  # for the index on the trainer's GPU
    builder_bytes: float
    disk_bytes: float


def scales_of(measured: Measured, passages: Sequence[int], options: IndexOptions, refresh_every: int) -> list[Scale]:
    """The figures for each size, with the index type that the options name or that fits."""
    found = []
    for count in passages:
        fitting = fitting_type(count, measured.embedding_width, measured.device_memory)
        found.append(scale(count, fitting if options.type == "auto" else options.type, refresh_every, measured))
    return found


def scale(passages: int, index_type: str, refresh_every: int, measured: Measured) -> Scale:
    """The figures for so many passages.

    Staleness: an index is as old as its refresh took when it is adopted, and grows older until the next one, which
    comes after another refresh, but not before ``refresh_every`` steps.
    """
    search = measured.search_seconds_per_million * passages / 1e6
    step = measured.step_seconds + (search if index_type == "exact" else 0.0)
    refresh = passages / measured.documents_per_second
    age = refresh / step
    interval = max(float(refresh_every), age)
    wanted = passages / (REFRESH_STEPS * step)
    embeddings = 4.0 * passages * measured.embedding_width
    graph = 1 + LINK_BYTES / (4 * measured.embedding_width)
    half = 0.5 if measured.precision == "bf16" else 0.0  # the copy that a CPU's exact search multiplies
    on_gpu = measured.device == "cuda"
    structure = {"exact": 0.0, "ivf": 1.0, "hnsw": graph, "pq": 1 / 16 if on_gpu else 1 / 8}[index_type]
    if index_type == "exact":
        host, gpu = (0.0, 2.0) if on_gpu else (2 + 2 * half, 0.0)
    elif on_gpu and index_type != "hnsw":
        host, gpu = 0.0, 2 * structure
    else:
        host, gpu = 2 * structure, 0.0
    return Scale(
        passages,
        index_type,
        search,
        step,
        refresh,
        age + interval / 2,
        age + interval,
        math.ceil(wanted / measured.documents_per_second),
        wanted,
        measured.trainer_bytes + host * embeddings,
        gpu * embeddings,
        float(measured.builder_bytes),
        passages * measured.passage_bytes + (KEPT + 6) * embeddings + (KEPT + 1) * STATES * measured.parameter_bytes,
    )


def table(measured: Measured, scales: Sequence[Scale]) -> Table:
    """For rich's console: a column for each size."""
    from rich.table import Table

    shown = Table(title=f"One machine like this one ({measured.device}, {measured.precision})", title_justify="left")
    shown.add_column("passages")
    for one in scales:
        shown.add_column(_count(one.passages), justify="right")
    rows: list[tuple[str, Callable[[Scale], str]]] = [
        ("index.type", lambda s: s.index_type),
        ("seconds per step", lambda s: ("" if s.index_type == "exact" else "> ") + _seconds(s.step_seconds)),
        ("  exact search of a step", lambda s: _seconds(s.search_seconds)),
        ("refresh by one builder", lambda s: _seconds(s.refresh_seconds)),
        ("  staleness then, mean, steps", lambda s: _count(s.staleness_steps_mean)),
        ("  staleness then, at most, steps", lambda s: _count(s.staleness_steps_most)),
        (f"builders for a refresh in {REFRESH_STEPS} steps", lambda s: f"{s.builders:,}"),
        ("  passages/s, all builders", lambda s: _count(s.passages_per_second)),
        ("host memory, trainer", lambda s: _memory(s.trainer_bytes, measured.host_memory)),
        ("host memory, builder", lambda s: _memory(s.builder_bytes, measured.host_memory)),
        ("disk", lambda s: _bytes(s.disk_bytes)),
    ]
    if measured.device == "cuda":
        rows[-1:-1] = [
            ("GPUs, trainer and builders", lambda s: f"{s.builders + 1:,}"),
            ("GPU memory, trainer's index", lambda s: _memory(s.gpu_bytes, measured.device_memory)),
        ]
    for name, value in rows:
        shown.add_row(name, *map(value, scales))
    return shown


def notes(measured: Measured, scales: Sequence[Scale]) -> Iterator[str]:
    """What was measured, what was extrapolated, and what is left out."""
    where = f"{measured.device}, {measured.precision}, {measured.threads} CPU threads"
    yield (
        f"Measured here ({where}), one after the other: {measured.documents_per_second:.3g} passages/s embedded, "
        f"{measured.passage_wordpieces:.0f} wordpieces each on average ({measured.lengths}); "
        f"{_seconds(measured.step_seconds)} per step of {measured.batch_size} examples without search"
        + (
            ""
            if measured.measured_batch_size == measured.batch_size
            else f", in proportion from steps of {measured.measured_batch_size}"
        )
        + f"; {_seconds(measured.search_seconds_per_million)} of exact search per step and million passages."
    )
    yield (
        "Extrapolated: everything in the table, in proportion to the number of passages. A refresh is embedding alone, "
        "without reading and writing; builders are as fast as this machine and do not share its cores with the trainer."
    )
    if any(one.index_type != "exact" for one in scales):
        yield (
            "Approximate search was not timed: where index.type is not exact, steps are without any search and so are "
            "staleness and builders, which are upper bounds then."
        )
    yield (
        "Staleness is that of pretrain.adopt=as_soon_as_ready; with fixed_lag the trainer waits where a refresh takes "
        "more than pretrain.lag steps."
    )
    yield (
        "Memory when a generation changes hands: the trainer has it beside the one in use; activations of the step are "
        "in it as measured, embeddings that lie on the disk are not, except for exact search, which reads them all. "
        "Disk: snapshot, checkpoints, the generations that the exchange keeps with the one in the making, the "
        "fine-tuned model's, and in the folder for temporary files two of the trainer and one of the builder."
    )
    needed = [n for one in scales for n in (one.trainer_bytes, one.builder_bytes)]
    if max(needed, default=0) > measured.host_memory:
        yield f"* more than this machine has ({_bytes(measured.host_memory)})."
    if measured.device == "cpu":
        yield (
            "For the number of GPUs run this on a machine with one, or divide passages/s by the rate of one: another "
            f"device has another step, and the refresh in {REFRESH_STEPS} steps is one of its steps."
        )


def as_values(measured: Measured, scales: Sequence[Scale]) -> dict[str, Any]:
    """Everything, for other programs."""
    return {
        "measured": asdict(measured),
        "scales": [asdict(one) for one in scales],
        "notes": list(notes(measured, scales)),
    }


def _count(number: float) -> str:
    for size, letter in ((1e9, " B"), (1e6, " M"), (1e4, " k")):
        if number >= size:
            return f"{number / (1e3 if letter == ' k' else size):.3g}{letter}"
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _seconds(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def _memory(number: float, there: int) -> str:
    return _bytes(number) + (" *" if number > there else "")


def _bytes(number: float) -> str:
    for size, unit in ((1e12, "TB"), (1e9, "GB")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number / 1e6:.3g} MB"
