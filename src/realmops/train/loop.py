"""The training loop that every stage shares: step, schedule, checkpoint, exact resume."""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from realmops.artifacts import seed_for
from realmops.config import Optimiser
from realmops.devices import bring, keep_freed_memory
from realmops.journal import Journal
from realmops.train.optimiser import BertAdamW, Group, Schedule
from realmops.train.parallel import ALONE, Team

STATE, TENSORS = "state.json", "training.safetensors"
_TRIM_SECONDS = 10.0


class Checkpoints(Protocol):
    """Where a loop keeps its state: the newest one that was saved whole comes back."""

    def restore(self) -> dict[str, bytes] | None:
        """The files of the newest good checkpoint, or None before the first."""

    def save(self, step: int, files: Mapping[str, bytes]) -> None:
        """Commit a checkpoint of the state after ``step`` steps."""


@dataclass(frozen=True)
class Context:
    """What a loop needs of its surroundings."""

    stream: str  # name of the stage: part of every seed
    seed: int
    device: torch.device
    dtype: torch.dtype
    checkpoints: Checkpoints
    journal: Journal
    progress: Callable[[int], None]
    prefix: str = ""  # of the metrics' names
    first_step: int = 0  # what the journal calls the loop's first step
    journal_start: int = 0  # where the loop's lines begin
    team: Team = ALONE
    name: str = ""  # of the training, for people

    def rng(self, *names: str | int) -> np.random.Generator:
        """What is random for a use and a step: a function of (seed, stream, ``names``)."""
        return np.random.default_rng(seed_for(self.seed, self.stream, *names))


@dataclass(frozen=True)
class DeferredMetrics:
    """Metrics of a step that are worked out on the CPU at its end: a GPU is waited for once, for all of them together.

    ``metrics`` takes ``tensors`` there.
    """

    tensors: Sequence[Tensor]
    metrics: Callable[..., dict[str, float]]

    def now(self) -> dict[str, float]:
        return self.metrics(*bring(*self.tensors))


StepLoss = Callable[[int], tuple[Tensor, DeferredMetrics | dict[str, float]]]
"""step -> loss and metrics"""


def fit(
    context: Context,
    groups: list[Group],
    options: Optimiser,
    step_loss: StepLoss,
    *,
    steps: int,
    checkpoint_every: int,
    at_step: Callable[[int], None] | None = None,
) -> int:
    """Train for ``steps`` steps, or what is left of them after a kill; returns the journal's length at its end.

    ``step_loss(step)`` gives the loss and the metrics to log; everything random in it is a function of
    (seed, stream, step), so that the state after a resume is the undisturbed run's, bit for bit on one
    machine.  ``at_step(step)`` runs between two steps, after the checkpoint of that step was committed.

    ValueError in all processes at the first step whose loss or gradient is not finite: it teaches NaN, for good.
    """
    optimiser = BertAdamW(
        groups, weight_decay=options.weight_decay, clip=options.clip, bias_correction=options.bias_correction
    )
    ramp = int(min(10_000, max(options.ramp_min, options.ramp_share * steps)))
    schedule = Schedule(steps, ramp)
    team = context.team
    start, position = _restore(context, optimiser) if team.leads else (0, context.journal_start)
    start = int(team.send_numbers([start], context.device)[0])
    team.send([*optimiser.parameters, *optimiser.m, *optimiser.v])
    if start == steps:
        return position
    if team.leads:
        context.journal.truncate(position)
    context.progress(start)
    ended = trimmed = time.perf_counter()
    last = "no step before it in this process"
    for step in range(start, steps):
        if step > start and step % checkpoint_every == 0 and team.leads:
            _save(context, optimiser, step, last)
        if at_step is not None:
            at_step(step)
        began = time.perf_counter()
        torch.manual_seed(seed_for(context.seed, context.stream, "dropout", step, *([team.rank] if team.rank else [])))
        optimiser.zero_grad()
        loss, said = step_loss(step)
        loss.backward()  # type: ignore[no-untyped-call]
        team.average(optimiser.parameters)
        norm = optimiser.step(step, schedule)
        later = said if isinstance(said, DeferredMetrics) else DeferredMetrics((), partial(dict, said))
        loss, norm, *values = bring(loss, norm, *later.tensors)
        whole_loss = team.mean(loss.item(), context.device)
        if not math.isfinite(whole_loss) or not math.isfinite(norm.item()):
            what = f"the loss is {whole_loss:g} and the norm of its gradient {norm.item():g}"
            raise _not_finite(context, step, what, last)
        last = f"{whole_loss:.4g} at step {context.first_step + step}"
        metrics = {**later.metrics(*values), "loss": whole_loss, "gradient_norm": norm.item()}
        metrics["rate"] = schedule.factor(step)
        between, ended = began - ended, time.perf_counter()
        metrics |= {"step_seconds": ended - began, "between_seconds": between}
        named = {context.prefix + name: value for name, value in metrics.items()}
        if team.leads:
            context.journal.log(context.first_step + step, **named)
        context.progress(1)
        if ended - trimmed > _TRIM_SECONDS:  # what steps of many sizes leave free is in pieces, and grows
            keep_freed_memory()
            trimmed = ended
    if team.leads:
        _save(context, optimiser, steps, last)
    return context.journal.position()


def epoch_rows(context: Context, count: int, batch_size: int) -> Callable[[int], np.ndarray]:
    """Which of ``count`` examples a step takes; every epoch sees them in an order of its own."""
    per_epoch = -(-count // batch_size)
    orders: dict[int, np.ndarray] = {}

    def rows(step: int) -> np.ndarray:
        epoch, place = divmod(step, per_epoch)
        if epoch not in orders:
            orders.clear()
            orders[epoch] = context.rng("order", epoch).permutation(count)
        return orders[epoch][place * batch_size : (place + 1) * batch_size]

    return rows


def _not_finite(context: Context, step: int, what: str, last: str) -> ValueError:
    return ValueError(
        f"{context.name or context.stream}, step {context.first_step + step}: {what}, where finite numbers are wanted; "
        f"the last finite loss: {last}. Lower the learning rate, set run.precision=fp32, or look for what is odd in "
        "the data; nothing of this step was kept"
    )


def _save(context: Context, optimiser: BertAdamW, step: int, last: str) -> None:
    """Commit a checkpoint; ValueError where an update of finite numbers was too large for the weights."""
    keep_freed_memory()  # a checkpoint takes as much as the optimiser, beside what steps have left free
    tensors = {f"p.{name}": p.detach() for name, p in zip(optimiser.names, optimiser.parameters, strict=True)}
    tensors = {name: tensor.cpu().contiguous() for name, tensor in (tensors | optimiser.state()).items()}
    broken = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if broken:
        raise _not_finite(context, step, f"{broken[0].removeprefix('p.')} has values that are NaN or infinite", last)
    state = {"step": step, "journal": context.journal.position()}
    files = {TENSORS: save_tensors(tensors), STATE: json.dumps(state, sort_keys=True).encode()}
    context.checkpoints.save(step, files)


def _restore(context: Context, optimiser: BertAdamW) -> tuple[int, int]:
    """Put the newest checkpoint back; its step, and the journal's length then."""
    files = context.checkpoints.restore()
    if files is None:
        return 0, context.journal_start
    tensors, state = load_tensors(files[TENSORS]), json.loads(files[STATE])
    with torch.no_grad():
        for name, parameter in zip(optimiser.names, optimiser.parameters, strict=True):
            parameter.copy_(tensors[f"p.{name}"])
    optimiser.load_state(tensors)
    return int(state["step"]), int(state["journal"])
