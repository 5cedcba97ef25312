"""The training loop of all stages: step, learning-rate schedule, checkpoints and exact resume."""

import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from realmops import artifacts
from realmops.artifacts import seed_for
from realmops.devices import to_host
from realmops.journal import Journal
from realmops.options import Optimiser, epoch_steps
from realmops.process import configure_malloc
from realmops.train.optimiser import BertAdamW, Group, Schedule
from realmops.train.parallel import SINGLE_PROCESS, ProcessGroup

T = TypeVar("T")
U = TypeVar("U")
STATE, TENSORS = "state.json", "training.safetensors"
RAMP_STEPS = (10, 10_000)  # minimum, unless it is more than half of the steps, and maximum of the learning rate's ramp
_TRIM_SECONDS = 10.0  # between two releases of freed memory
CHECKPOINT_SECONDS, CHECKPOINT_SHARE = 60.0, 0.05  # between two checkpoints; most of the time that they may take
_CHECKPOINT, _KEPT = "checkpoint", 2  # kind of manifest; checkpoints that are kept


class Checkpoints(Protocol):
    """Protocol of a checkpoint store."""

    def restore(self) -> dict[str, bytes] | None:
        """Return the files of the newest intact checkpoint, or None before the first."""

    def save(self, step: int, files: Mapping[str, bytes]) -> None:
        """Commit a checkpoint of the state after ``step`` steps."""


@dataclass(frozen=True)
class FolderCheckpoints:
    """Checkpoints of a training without an exchange: the newest two, each a folder with digests."""

    folder: Path

    def restore(self) -> dict[str, bytes] | None:
        for path in sorted(self.folder.glob("step-*"), reverse=True):
            try:
                names = artifacts.read_manifest(path, _CHECKPOINT)["files"]
            except ValueError:  # damaged
                continue
            return {name: (path / name).read_bytes() for name in names}
        return None

    def save(self, step: int, files: Mapping[str, bytes]) -> None:
        with artifacts.atomic_folder(self.folder / f"step-{step:08d}", None) as stage:
            for name, content in files.items():
                (stage / name).write_bytes(content)
            artifacts.write_manifest(stage, _CHECKPOINT, step=step)
        for old in sorted(self.folder.glob("step-*"))[:-_KEPT]:
            shutil.rmtree(old)


@dataclass(frozen=True)
class TrainingContext:
    """Environment of a training loop."""

    stream: str  # name of the stage, part of every seed
    seed: int
    device: torch.device
    dtype: torch.dtype
    checkpoints: Checkpoints
    journal: Journal
    progress: Callable[[int], None]
    optimiser: Optimiser = field(default_factory=Optimiser)
    prefix: str = ""  # of metric names
    first_step: int = 0  # the first step's number in the journal
    processes: ProcessGroup = SINGLE_PROCESS
    name: str = ""  # of the training, for messages
    checkpoint_every: int = 100  # most steps between two checkpoints
    clock: Callable[[], float] = time.monotonic  # of checkpoints by time

    def rng(self, *names: str | int) -> np.random.Generator:
        """Return a generator seeded by (seed, stream, ``names``), for one use at one step."""
        return np.random.default_rng(seed_for(self.seed, self.stream, *names))


@dataclass(frozen=True)
class DeferredMetrics:
    """Metrics computed on the CPU at the end of a step, so that a step synchronises with the GPU once."""

    tensors: Sequence[Tensor]
    metrics: Callable[..., dict[str, float]]  # called with ``tensors`` on the CPU

    def now(self) -> dict[str, float]:
        return self.metrics(*to_host(*self.tensors))


LossAndMetrics = tuple[Tensor, DeferredMetrics]


def fit(
    context: TrainingContext,
    groups: list[Group],
    step_loss: Callable[[int], LossAndMetrics],
    *,
    steps: int,
    at_step: Callable[[int], None] | None = None,
) -> None:
    """Train until step ``steps``, resuming from the newest checkpoint.

    All randomness of ``step_loss`` is a function of (seed, stream, step), so that a resumed training is bit-identical
    to an uninterrupted one on the same machine. A checkpoint is due every ``context.checkpoint_every`` steps and every
    ``CHECKPOINT_SECONDS``. ``at_step`` is called before each step, after the checkpoint of that step was committed.

    Raises:
        ValueError: in all processes, at the first step whose loss or gradient is not finite.
    """
    optimiser = BertAdamW(groups, bias_correction=context.optimiser.bias_correction)
    ramp = max(context.optimiser.ramp_share * steps, min(RAMP_STEPS[0], steps // 2))
    schedule = Schedule(steps, int(min(RAMP_STEPS[1], ramp)))
    processes = context.processes
    start, position = _restore(context, optimiser) if processes.is_main_process else (0, 0)
    start = int(processes.broadcast_numbers([start], context.device)[0])
    processes.broadcast([*optimiser.parameters, *optimiser.m, *optimiser.v])
    if start == steps:
        context.journal.finished = position
        return
    if processes.is_main_process:
        context.journal.truncate(position)
    context.progress(start)
    ended = trimmed = time.perf_counter()
    last = "no earlier step in this process"
    next_save = context.clock() + CHECKPOINT_SECONDS
    for step in range(start, steps):
        is_due = step % context.checkpoint_every == 0 or context.clock() >= next_save
        if is_due and step > start and processes.is_main_process:
            began = context.clock()
            _save(context, optimiser, step, last)
            saved = context.clock()
            next_save = saved + max(CHECKPOINT_SECONDS, (saved - began) / CHECKPOINT_SHARE)
        if at_step is not None:
            at_step(step)
        began = time.perf_counter()
        torch.manual_seed(
            seed_for(context.seed, context.stream, "dropout", step, *([processes.rank] if processes.rank else []))
        )
        optimiser.zero_grad()
        loss, deferred = step_loss(step)
        loss.backward()  # type: ignore[no-untyped-call]
        processes.average_gradients(optimiser.parameters)
        norm = optimiser.step(step, schedule)
        loss, norm, *values = to_host(loss, norm, *deferred.tensors)
        mean_loss = processes.mean(loss.item(), context.device)
        if not math.isfinite(mean_loss) or not math.isfinite(norm.item()):
            cause = f"the loss is {mean_loss:g} and the norm of its gradient {norm.item():g}"
            raise _not_finite(context, step, cause, last)
        last = f"{mean_loss:.4g} at step {context.first_step + step}"
        metrics = {**deferred.metrics(*values), "loss": mean_loss, "gradient_norm": norm.item()}
        metrics["rate"] = schedule.factor(step)
        between, ended = began - ended, time.perf_counter()
        metrics |= {"step_seconds": ended - began, "between_seconds": between}
        logged = {context.prefix + name: value for name, value in metrics.items()}
        if processes.is_main_process:
            context.journal.log(context.first_step + step, **logged)
        context.progress(1)
        if ended - trimmed > _TRIM_SECONDS:  # batches of varying size fragment the freed memory
            configure_malloc()
            trimmed = ended
    if processes.is_main_process:
        context.journal.finished = _save(context, optimiser, steps, last)


def fit_epochs(
    context: TrainingContext,
    groups: list[Group],
    items: Sequence[T],
    draw: Callable[[Sequence[T], int], Sequence[U]],
    loss: Callable[[Sequence[U]], LossAndMetrics],
    *,
    batch_size: int,
    epochs: float,
) -> None:
    """Train in epochs over ``items`` by :func:`fit`; every epoch shuffles them.

    ``draw`` maps the items of the batch of all processes and the step to its examples; ``loss`` is the mean loss of
    this process's part of these.
    """
    per_epoch = epoch_steps(len(items), batch_size, 1)

    @lru_cache(1)
    def order(epoch: int) -> np.ndarray:
        return context.rng("order", epoch).permutation(len(items))

    def step_loss(step: int) -> LossAndMetrics:
        epoch, batch = divmod(step, per_epoch)
        rows = order(epoch)[batch * batch_size : (batch + 1) * batch_size]
        local, weight = context.processes.split_batch(draw([items[row] for row in rows], step))
        mean_loss, metrics = loss(local)
        return weight * mean_loss, metrics

    steps = epoch_steps(len(items), batch_size, epochs)
    fit(context, groups, step_loss, steps=steps)


def _not_finite(context: TrainingContext, step: int, cause: str, last: str) -> ValueError:
    return ValueError(
        f"{context.name or context.stream}, step {context.first_step + step}: {cause}; finite numbers are required; "
        f"the last finite loss: {last}. Lower the learning rate, set run.precision=fp32, or check the data for "
        "outliers; this step was not saved"
    )


def _save(context: TrainingContext, optimiser: BertAdamW, step: int, last: str) -> int:
    """Commit a checkpoint; return the journal's length.

    Raises:
        ValueError: a weight overflowed although loss and gradient were finite.
    """
    configure_malloc()  # a checkpoint takes as much memory as the optimiser
    tensors = {f"p.{name}": p.detach() for name, p in zip(optimiser.names, optimiser.parameters, strict=True)}
    tensors = {name: tensor.cpu().contiguous() for name, tensor in (tensors | optimiser.state()).items()}
    broken = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if broken:
        raise _not_finite(context, step, f"{broken[0].removeprefix('p.')} has values that are NaN or infinite", last)
    position = context.journal.position()
    state = {"step": step, "journal": position}
    files = {TENSORS: save_tensors(tensors), STATE: json.dumps(state, sort_keys=True).encode()}
    context.checkpoints.save(step, files)
    return position


def _restore(context: TrainingContext, optimiser: BertAdamW) -> tuple[int, int]:
    """Restore the newest checkpoint. Return (step, journal length)."""
    files = context.checkpoints.restore()
    if files is None:
        return 0, context.journal.finished
    tensors, state = load_tensors(files[TENSORS]), json.loads(files[STATE])
    with torch.no_grad():
        for name, parameter in zip(optimiser.names, optimiser.parameters, strict=True):
            parameter.copy_(tensors[f"p.{name}"])
    optimiser.load_state(tensors)
    return int(state["step"]), int(state["journal"])
