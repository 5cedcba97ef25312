"""The loop that every training shares: killed anywhere and resumed, it ends with the same bits; its optimiser."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from safetensors.torch import load
from small_world import Killed, MemoryCheckpoints, MemoryJournal, same_parameters, tiny_context
from torch import Tensor, nn

from realmops.options import Optimiser, epoch_steps
from realmops.train.loop import STATE, TENSORS, DeferredMetrics, LossAndMetrics, fit
from realmops.train.optimiser import BertAdamW, Group, Schedule
from realmops.train.parallel import ProcessGroup

STEPS, EVERY = 7, 3


class Net(nn.Module):
    """A net whose loss depends on dropout, so that the state of the random generator counts."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.inner, self.outer = nn.Linear(3, 4), nn.Linear(4, 1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(generator=generator)

    def loss(self, step: int) -> Tensor:
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
        hidden = nn.functional.dropout(self.inner(x).tanh(), 0.5)
        return (self.outer(hidden) - x.sum(1, keepdim=True)).pow(2).mean()


class Fuse:
    """Counts places where the process may end, and ends it at one of them."""

    def __init__(self, at: int) -> None:
        self.at, self.places = at, list[str]()

    def __call__(self, place: str) -> None:
        self.places.append(place)
        if len(self.places) == self.at:
            raise Killed(place)


@dataclass
class Clock:
    """A clock on which a step and a checkpoint take these seconds."""

    step: float
    checkpoint: float = 0.0
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class FusedCheckpoints(MemoryCheckpoints):
    fuse: Fuse

    def save(self, step: int, files: Mapping[str, bytes]) -> None:
        self.fuse(f"before the checkpoint of step {step}")
        super().save(step, files)
        self.fuse(f"after the checkpoint of step {step}")


class FusedJournal(MemoryJournal):
    fuse: Fuse

    def log(self, step: int, **metrics: float) -> None:
        self.fuse(f"before the line of step {step}")
        super().log(step, **metrics)
        self.fuse(f"after the line of step {step}")


def train(
    fuse: Fuse,
    checkpoints: FusedCheckpoints,
    journal: FusedJournal,
    delay: int = 0,
    every: int = EVERY,
    seconds: int = 0,
    **context: Any,
) -> tuple[Net, list[int]]:
    """A new process: new parameters, new optimiser; only checkpoints and journal are from before."""
    checkpoints.fuse = journal.fuse = fuse
    model, begun, clock = Net(), list[int](), Clock(seconds)
    torch.manual_seed(fuse.at)  # a process starts with any state of the global generator

    def step_loss(step: int) -> LossAndMetrics:
        fuse(f"in step {step}")
        clock.now += clock.step
        return model.loss(step), DeferredMetrics((), lambda: {"seen": float(step)})

    def at_step(step: int) -> None:
        fuse(f"before step {step}")
        begun.append(step)

    groups = [Group("inner", model.inner, 0.1, delay), Group("outer", model.outer, 0.05)]
    surroundings = tiny_context(
        checkpoints=checkpoints, journal=journal, checkpoint_every=every, clock=clock, **context
    )
    fit(surroundings, groups, step_loss, steps=STEPS, at_step=at_step)
    return model, begun


def uninterrupted(**changes: Any) -> tuple[Net, FusedCheckpoints, FusedJournal, Fuse]:
    fuse, checkpoints, journal = Fuse(0), FusedCheckpoints(), FusedJournal()
    model, begun = train(fuse, checkpoints, journal, **changes)
    assert begun == list(range(STEPS))
    return model, checkpoints, journal, fuse


PLACES = uninterrupted()[3].places


@pytest.mark.parametrize(("delay", "corrected", "every", "seconds"), [(0, False, EVERY, 0), (4, True, 100, 25)])
@pytest.mark.parametrize("place", PLACES)
def test_killed_anywhere_and_resumed_it_ends_with_the_same_bits(
    place: str, delay: int, corrected: bool, every: int, seconds: int
) -> None:
    """Parameters, moments and journal; four places in each step, and two for each checkpoint: 3, 6 and the end.

    Three steps of 25 seconds take more than a minute.
    """
    assert len(PLACES) == 4 * STEPS + 2 * 3
    changes: dict[str, Any] = {"delay": delay, "optimiser": Optimiser(bias_correction=corrected)}
    expected, expected_checkpoints, expected_journal, _ = uninterrupted(**changes)
    changes |= {"every": every, "seconds": seconds}
    checkpoints, journal = FusedCheckpoints(), FusedJournal()
    with pytest.raises(Killed, match=place):
        train(Fuse(PLACES.index(place) + 1), checkpoints, journal, **changes)
    model, _ = train(Fuse(0), checkpoints, journal, **changes)
    same_parameters(model, expected)
    assert checkpoints.saved[STEPS][TENSORS] == expected_checkpoints.saved[STEPS][TENSORS]
    assert journal.without_times() == expected_journal.without_times()


@pytest.mark.parametrize(
    ("clock", "saved"),
    [
        (Clock(58, checkpoint=3), [2, 4, 6, 7]),
        (Clock(60), [1, 2, 3, 4, 5, 6, 7]),
        (Clock(60, checkpoint=3), [1, 2, 3, 4, 5, 6, 7]),
        (Clock(60, checkpoint=4), [1, 3, 5, 7]),
    ],
)
def test_checkpoints_are_a_minute_apart_and_take_a_twentieth_of_the_time(clock: Clock, saved: list[int]) -> None:
    class Slow(MemoryCheckpoints):
        def save(self, step: int, files: Mapping[str, bytes]) -> None:
            super().save(step, files)
            clock.now += clock.checkpoint

    def loss(step: int) -> Tensor:
        clock.now += clock.step
        return model.loss(step)

    model, checkpoints = Net(), Slow()
    fit_all(model, loss, checkpoints=checkpoints, clock=clock, checkpoint_every=100)
    assert sorted(checkpoints.saved) == saved


def test_a_finished_training_does_nothing() -> None:
    """No step runs, nothing is logged, and what another loop wrote after its lines stays."""
    model, checkpoints, journal, _ = uninterrupted()
    journal.fuse = Fuse(0)
    journal.log(99, other=1.0)
    fuse = Fuse(0)
    again, begun = train(fuse, checkpoints, journal)
    assert (fuse.places, begun) == ([], [])
    assert journal.lines()[-1] == {"step": 99, "other": 1.0}
    same_parameters(again, model)


def test_the_journal_has_the_steps_with_prefix_and_first_step_of_the_context() -> None:
    """The rate is the schedule's: a ramp of three steps, then down."""
    journal, second = uninterrupted()[2], uninterrupted(prefix="reader_", first_step=100)[2]
    assert [(line["step"], line["seen"]) for line in journal.lines()] == [(n, n) for n in range(STEPS)]
    assert journal.values("rate") == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0, 3 / 4, 2 / 4, 1 / 4])
    for line in journal.lines():
        assert min(line["loss"], line["gradient_norm"]) > 0 <= min(line["step_seconds"], line["between_seconds"])
    assert [line["step"] for line in second.lines()] == list(range(100, 100 + STEPS))
    assert second.values("reader_loss") == journal.values("loss")


def test_a_second_loop_keeps_the_lines_of_the_first() -> None:
    """Killed in the second loop before its first checkpoint, only the second loop's lines are dropped."""
    journal, second = uninterrupted()[2], FusedCheckpoints()
    first, end = journal.content, journal.position()
    with pytest.raises(Killed):
        train(Fuse(7), second, journal, stream="second")
    assert not second.saved
    assert journal.position() > end
    train(Fuse(0), second, journal, stream="second")
    assert journal.content.startswith(first)
    assert [line["step"] for line in journal.lines()] == [*range(STEPS), *range(STEPS)]


def test_seed_and_stream_determine_the_losses() -> None:
    losses = [uninterrupted(**c)[2].values("loss") for c in ({}, {}, {"seed": 1}, {"stream": "other"})]
    assert losses[0] == losses[1]
    assert losses[0] != losses[2] != losses[3] != losses[0]


def test_a_late_group_keeps_its_start_until_its_first_step() -> None:
    saved, start = uninterrupted(delay=4)[1].saved, Net()
    assert (sorted(saved), sorted(saved[3])) == ([3, 6, STEPS], sorted([STATE, TENSORS]))
    assert torch.equal(load(saved[3][TENSORS])["p.inner.weight"], start.inner.weight)
    assert not torch.equal(load(saved[6][TENSORS])["p.inner.weight"], start.inner.weight)
    assert not torch.equal(load(saved[3][TENSORS])["p.outer.weight"], start.outer.weight)


def test_progress_counts_every_step_once() -> None:
    """A resumed process first reports the step of its checkpoint."""
    checkpoints, journal, counted = FusedCheckpoints(), FusedJournal(), list[int]()
    train(Fuse(0), checkpoints, journal, progress=counted.append)
    assert counted == [0] + [1] * STEPS
    del checkpoints.saved[STEPS]
    counted.clear()
    train(Fuse(0), checkpoints, journal, progress=counted.append)
    assert counted == [6, 1]


def fit_all(model: Net, loss: Callable[[int], Tensor], steps: int = STEPS, rate: float = 0.1, **context: Any) -> None:
    def step_loss(step: int) -> LossAndMetrics:
        return loss(step), DeferredMetrics((), dict)

    surroundings = tiny_context(**{"checkpoint_every": EVERY, **context})
    fit(surroundings, [Group("all", model, rate)], step_loss, steps=steps)


@pytest.mark.parametrize(("epochs", "steps"), [(0, 0), (1, 3), (2, 6), (0.5, 2), (0.01, 1)])
def test_a_part_of_an_epoch_is_some_of_its_batches(epochs: float, steps: int) -> None:
    """Nine items, four at a time, are three batches."""
    assert epoch_steps(9, 4, epochs) == steps


# ---- numbers that are not finite


class Others(ProcessGroup):
    """Processes of which another one has a loss that is not finite."""

    def mean(self, value: float, device: torch.device) -> float:
        return math.nan


@pytest.mark.parametrize(
    ("loss", "context", "last", "message"),
    [
        *(
            (lambda m, step, value=value: m.loss(step) * (value if step == 4 else 1.0), {}, 3,
             f"step 104: the loss is {value:g} and .*; the last finite loss: .* at step 103")
            for value in (math.nan, math.inf, -math.inf)
        ),
        # The square root of 0 has a gradient of infinity times 0.
        (lambda m, step: m.loss(step) + (0.0 * m.inner.weight.sum()).sqrt(), {}, None,
         r"step 100: the loss is 5\.51.* the norm of its gradient nan; finite .* loss: no earlier step"),
        (lambda m, step: m.loss(step), {"processes": Others()}, None, "step 100: the loss is nan"),
        # The gradient is finite and the update is not: the next step would show it, after the checkpoint.
        (lambda m, step: m.loss(step), {"rate": 1e39, "checkpoint_every": 1}, None,
         r"step 101: all\.inner\.weight has values that are NaN or infinite"),
    ],
    ids=["nan", "inf", "-inf", "gradient", "another process", "weights"],
)  # fmt: skip
def test_a_training_ends_at_a_number_that_is_not_finite_and_keeps_the_checkpoint_before(
    loss: Callable[[Net, int], Tensor], context: dict[str, Any], last: int | None, message: str
) -> None:
    model, checkpoints = Net(), MemoryCheckpoints()
    with pytest.raises(ValueError, match=f"ict: crops, {message}.*run.precision=fp32"):
        fit_all(
            model, lambda step: loss(model, step), checkpoints=checkpoints, name="ict: crops", first_step=100, **context
        )
    assert list(checkpoints.saved) == ([] if last is None else [last])
    for files in checkpoints.saved.values():
        assert all(tensor.isfinite().all() for tensor in load(files[TENSORS]).values())


# ---- the optimiser: BERT's formula one number at a time, and torch's AdamW


FULL = Schedule(steps=1, ramp=0)  # at step 0 the whole learning rate


class Values(nn.Module):
    """A matrix and a vector as parameters."""

    def __init__(self, matrix: list[list[float]], vector: list[float]) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.tensor(matrix, dtype=torch.float64))
        self.vector = nn.Parameter(torch.tensor(vector, dtype=torch.float64))

    def draw_gradients(self, generator: torch.Generator, scale: float = 1.0) -> None:
        for parameter in self.parameters():
            parameter.grad = scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("scale", [0.1, 1.0], ids=["within the norm", "clipped"])
def test_thirty_steps_follow_the_formula(scale: float) -> None:
    """As BERT's release writes it; vectors do not decay, and the norm is that of all gradients together."""
    values = Values([[0.7, -1.3], [0.2, 0.0]], [0.4, -0.1, 2.0])
    optimiser, generator = BertAdamW([Group("g", values, 0.02)]), torch.Generator().manual_seed(0)
    p, decay = [0.7, -1.3, 0.2, 0.0, 0.4, -0.1, 2.0], [0.01] * 4 + [0.0] * 3
    m, v = [0.0] * 7, [0.0] * 7
    for step in range(30):
        values.draw_gradients(generator, scale)
        g = [x for parameter in values.parameters() for x in parameter.grad.flatten().tolist()]  # type: ignore[union-attr]
        norm = math.hypot(*g)
        assert optimiser.step(step, Schedule(steps=30, ramp=5)).item() == pytest.approx(norm)
        rate = 0.02 * ((step + 1) / 5 if step < 5 else (30 - step) / 25)
        for i in range(7):
            clipped = g[i] * min(1.0, 1 / (norm + 1e-6))
            m[i] = 0.9 * m[i] + (1 - 0.9) * clipped
            v[i] = 0.999 * v[i] + (1 - 0.999) * clipped**2
            p[i] -= rate * (m[i] / (math.sqrt(v[i]) + 1e-6) + decay[i] * p[i])
        found = [*values.matrix.flatten().tolist(), *values.vector.tolist()]
        assert found == pytest.approx(p, rel=1e-9), step


def test_a_group_before_its_first_step_stays_and_does_not_count_in_the_norm() -> None:
    late, early = Values([[1.0]], [1.0]), Values([[1.0]], [1.0])
    optimiser = BertAdamW([Group("late", late, 0.1, begin=3), Group("early", early, 0.1)])
    for values, gradient in ((late, 1e6), (early, 0.6)):
        for parameter in values.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
    assert optimiser.step(2, Schedule(10, 0)).item() == pytest.approx(0.6 * math.sqrt(2))
    assert (late.matrix.item(), late.vector.item()) == (1.0, 1.0)
    assert [optimiser.state()[f"m.{name}"].item() for name in optimiser.names] == pytest.approx([0, 0, 0.06, 0.06])
    assert optimiser.step(3, Schedule(10, 0)) > 1e6
    assert late.matrix.item() < 1.0


def test_a_shared_parameter_counts_once_with_the_first_groups_rate() -> None:
    first, second = Values([[1.0]], [0.0]), Values([[1.0]], [0.0])
    second.vector = first.vector
    optimiser = BertAdamW([Group("a", first, 0.1), Group("b", second, 0.3)])
    assert optimiser.names == ["a.matrix", "a.vector", "b.matrix"]
    for parameter in (first.matrix, first.vector, second.matrix):
        parameter.grad = torch.full_like(parameter, 0.5)
    optimiser.step(1, Schedule(steps=2, ramp=0))  # half the learning rate
    update = 0.05 / (math.sqrt(0.00025) + 1e-6)
    assert first.matrix.item() == pytest.approx(1 - 0.5 * 0.1 * (update + 0.01))
    assert second.matrix.item() == pytest.approx(1 - 0.5 * 0.3 * (update + 0.01))
    assert first.vector.item() == pytest.approx(-0.5 * 0.1 * update)


def test_a_parameter_without_a_gradient_stays() -> None:
    values = Values([[1.0]], [1.0])
    optimiser = BertAdamW([Group("g", values, 0.1)])
    values.vector.grad = torch.tensor([0.5], dtype=torch.float64)
    optimiser.step(0, FULL)
    assert (values.matrix.item(), values.vector.item() < 1.0) == (1.0, True)
    optimiser.zero_grad()
    assert values.vector.grad is None


@pytest.mark.parametrize(
    ("begin", "factors"),
    [
        (0, [0.5, 1.0, 1.0, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0.0]),
        (4, [0.0, 0.0, 0.0, 0.0, 3 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0.0]),
    ],
)
def test_the_rate_warms_up_and_decays_linearly_also_of_a_late_group(begin: int, factors: list[float]) -> None:
    """10 steps, 2 of warm-up; a late group warms up to the line of the others."""
    assert [Schedule(10, 2).factor(step, begin) for step in range(11)] == pytest.approx(factors)


@pytest.mark.parametrize("begin", [0, 3])
def test_with_bias_correction_it_is_torchs_adamw(begin: int) -> None:
    values = Values([[0.7, -1.3], [0.2, 0.0]], [0.4])
    theirs = torch.nn.Parameter(values.matrix.detach().clone())
    ours = BertAdamW([Group("g", values, 0.05, begin)], bias_correction=True)
    adamw = torch.optim.AdamW([theirs], lr=0.05, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01)
    generator = torch.Generator().manual_seed(0)
    for step in range(begin + 8):
        gradient = 0.2 * torch.randn(2, 2, generator=generator, dtype=torch.float64)
        values.matrix.grad, theirs.grad = gradient.clone(), gradient.clone()
        if step >= begin:
            ours.step(step, Schedule(steps=10**15, ramp=0))
            torch.nn.utils.clip_grad_norm_([theirs], 1.0)
            adamw.step()
    torch.testing.assert_close(values.matrix, theirs, rtol=0, atol=1e-9)
