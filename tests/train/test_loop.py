"""The loop that every training shares: killed anywhere and resumed, it ends with the same bits."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from safetensors.torch import load
from small_world import Killed, MemoryCheckpoints, MemoryJournal, same_parameters, tiny_context
from torch import Tensor, nn

from realmops.options import epoch_steps
from realmops.train.loop import STATE, TENSORS, DeferredMetrics, LossAndMetrics, fit
from realmops.train.optimiser import Group
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
    fuse: Fuse, checkpoints: FusedCheckpoints, journal: FusedJournal, delay: int = 0, **context: Any
) -> tuple[Net, list[int]]:
    """A new process: new parameters, new optimiser; only checkpoints and journal are from before."""
    checkpoints.fuse = journal.fuse = fuse
    model, begun = Net(), list[int]()
    torch.manual_seed(fuse.at)  # a process starts with any state of the global generator

    def step_loss(step: int) -> LossAndMetrics:
        fuse(f"in step {step}")
        return model.loss(step), DeferredMetrics((), lambda: {"seen": float(step)})

    def at_step(step: int) -> None:
        fuse(f"before step {step}")
        begun.append(step)

    groups = [Group("inner", model.inner, 0.1, delay), Group("outer", model.outer, 0.05)]
    surroundings = tiny_context(checkpoints=checkpoints, journal=journal, checkpoint_every=EVERY, **context)
    fit(surroundings, groups, step_loss, steps=STEPS, at_step=at_step)
    return model, begun


def uninterrupted(**changes: Any) -> tuple[Net, FusedCheckpoints, FusedJournal, Fuse]:
    fuse, checkpoints, journal = Fuse(0), FusedCheckpoints(), FusedJournal()
    model, begun = train(fuse, checkpoints, journal, **changes)
    assert begun == list(range(STEPS))
    return model, checkpoints, journal, fuse


PLACES = uninterrupted()[3].places


@pytest.mark.parametrize("delay", [0, 4])
@pytest.mark.parametrize("place", PLACES)
def test_killed_anywhere_and_resumed_it_ends_with_the_same_bits(place: str, delay: int) -> None:
    """Parameters, moments and journal; four places in each step, and two for each checkpoint: 3, 6 and the end."""
    assert len(PLACES) == 4 * STEPS + 2 * 3
    expected, expected_checkpoints, expected_journal, _ = uninterrupted(delay=delay)
    checkpoints, journal = FusedCheckpoints(), FusedJournal()
    with pytest.raises(Killed, match=place):
        train(Fuse(PLACES.index(place) + 1), checkpoints, journal, delay)
    model, _ = train(Fuse(0), checkpoints, journal, delay)
    same_parameters(model, expected)
    assert checkpoints.saved[STEPS][TENSORS] == expected_checkpoints.saved[STEPS][TENSORS]
    assert journal.without_times() == expected_journal.without_times()


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


def test_no_steps_change_nothing() -> None:
    model, journal = Net(), MemoryJournal()
    journal.log(0, other=1.0)
    journal.finished = journal.position()
    fit_all(model, model.loss, 0, journal=journal)
    assert len(journal.lines()) == 1
    same_parameters(model, Net())


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
