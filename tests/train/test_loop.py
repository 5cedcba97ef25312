"""The loop that every training shares: killed anywhere and started again, it ends with the same bits."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from safetensors.torch import load
from small_world import Killed, MemoryCheckpoints, MemoryJournal, same_parameters, tiny_context, tiny_optimiser
from torch import Tensor, nn

from realmops.train.loop import STATE, TENSORS, fit
from realmops.train.optimiser import Group
from realmops.train.parallel import ProcessGroup

STEPS, EVERY = 7, 3


class Trainee(nn.Module):
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
        self.at, self.count, self.places = at, 0, list[str]()

    def __call__(self, place: str) -> None:
        self.count += 1
        self.places.append(place)
        if self.count == self.at:
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


def one_process(
    fuse: Fuse, checkpoints: FusedCheckpoints, journal: FusedJournal, delay: int = 0, **context: Any
) -> tuple[Trainee, list[int]]:
    """A fresh process: new parameters, new optimiser; only checkpoints and journal are from before."""
    checkpoints.fuse = journal.fuse = fuse
    model, adopted = Trainee(), list[int]()
    torch.manual_seed(fuse.at)  # a process starts with any state of the global generator

    def step_loss(step: int) -> tuple[Tensor, dict[str, float]]:
        fuse(f"in step {step}")
        return model.loss(step), {"seen": float(step)}

    def at_step(step: int) -> None:
        fuse(f"before step {step}")
        adopted.append(step)

    groups = [Group("inner", model.inner, 0.1, delay), Group("outer", model.outer, 0.05)]
    fit(
        tiny_context(checkpoints=checkpoints, journal=journal, **context),
        groups,
        tiny_optimiser(),
        step_loss,
        steps=STEPS,
        checkpoint_every=EVERY,
        at_step=at_step,
    )
    return model, adopted


def undisturbed(delay: int = 0) -> tuple[Trainee, FusedCheckpoints, FusedJournal, Fuse]:
    fuse, checkpoints, journal = Fuse(0), FusedCheckpoints(), FusedJournal()
    model, adopted = one_process(fuse, checkpoints, journal, delay)
    assert adopted == list(range(STEPS))
    return model, checkpoints, journal, fuse


PLACES = undisturbed()[3].places


def test_there_are_kills_everywhere() -> None:
    """Four places in each step, and two for each checkpoint: those of steps 3 and 6 and the end."""
    assert len(PLACES) == 4 * STEPS + 2 * 3
    assert PLACES[:4] == ["before step 0", "in step 0", "before the line of step 0", "after the line of step 0"]
    assert PLACES[-1] == "after the checkpoint of step 7"


@pytest.mark.parametrize("delay", [0, 4])
@pytest.mark.parametrize("place", PLACES)
def test_killed_anywhere_it_ends_with_the_same_bits(place: str, delay: int) -> None:
    """Parameters, moments and journal; the group that begins late starts before and after the kill."""
    expected, expected_checkpoints, expected_journal, _ = undisturbed(delay)
    checkpoints, journal = FusedCheckpoints(), FusedJournal()
    with pytest.raises(Killed, match=place):
        one_process(Fuse(PLACES.index(place) + 1), checkpoints, journal, delay)
    model, _ = one_process(Fuse(0), checkpoints, journal, delay)
    same_parameters(model, expected)
    assert checkpoints.saved[STEPS][TENSORS] == expected_checkpoints.saved[STEPS][TENSORS]
    assert journal.without_times() == expected_journal.without_times()


def test_a_finished_training_is_not_touched_again() -> None:
    """No step runs, nothing is logged, and what another loop wrote behind its lines stays."""
    model, checkpoints, journal, _ = undisturbed()
    journal.fuse = Fuse(0)
    journal.log(99, other=1.0)
    fuse = Fuse(0)
    again, adopted = one_process(fuse, checkpoints, journal)
    assert (fuse.count, adopted) == (0, [])
    assert journal.lines()[-1] == {"step": 99, "other": 1.0}
    assert all(torch.equal(p, model.get_parameter(name)) for name, p in again.named_parameters())


def test_the_journal_has_the_steps_numbers() -> None:
    """Prefix and first step are those of the context; the rate is the schedule's: a ramp of three steps, then down."""
    _, _, journal, _ = undisturbed()
    lines = journal.lines()
    assert [line["step"] for line in lines] == list(range(STEPS))
    assert [line["seen"] for line in lines] == list(range(STEPS))
    assert journal.values("rate") == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0, 3 / 4, 2 / 4, 1 / 4])
    assert all(line["loss"] > 0 and line["gradient_norm"] > 0 for line in lines)
    assert all(line["step_seconds"] >= 0 and line["between_seconds"] >= 0 for line in lines)
    second = FusedJournal()
    one_process(Fuse(0), FusedCheckpoints(), second, prefix="reader_", first_step=100)
    assert [line["step"] for line in second.lines()] == list(range(100, 100 + STEPS))
    assert second.values("reader_loss") == journal.values("loss")


def test_a_second_loop_appends_behind_the_first_and_keeps_its_lines() -> None:
    """Killed in the second loop before its first checkpoint, only the second loop's lines are forgotten."""
    _, _, journal, _ = undisturbed()
    first, end = journal.content, journal.position()
    second = FusedCheckpoints()
    with pytest.raises(Killed):
        one_process(Fuse(7), second, journal, stream="second", journal_start=end)
    assert not second.saved
    assert journal.position() > end
    one_process(Fuse(0), second, journal, stream="second", journal_start=end)
    assert journal.content.startswith(first)
    assert [line["step"] for line in journal.lines()] == [*range(STEPS), *range(STEPS)]


def test_equal_seeds_repeat_and_others_do_not() -> None:
    def losses(**context: Any) -> list[float]:
        journal = FusedJournal()
        one_process(Fuse(0), FusedCheckpoints(), journal, **context)
        return journal.values("loss")

    assert losses() == losses()
    assert losses() != losses(seed=1)
    assert losses() != losses(stream="other")


def test_a_group_that_begins_late_keeps_its_start_until_then() -> None:
    """Its parameters in the checkpoint of step 3 are those it began with; in that of step 6 they are not."""
    _, checkpoints, _, _ = undisturbed(delay=4)
    start = Trainee().inner.weight
    assert torch.equal(load(checkpoints.saved[3][TENSORS])["p.inner.weight"], start)
    assert not torch.equal(load(checkpoints.saved[6][TENSORS])["p.inner.weight"], start)
    assert not torch.equal(load(checkpoints.saved[3][TENSORS])["p.outer.weight"], Trainee().outer.weight)
    assert sorted(checkpoints.saved) == [3, 6, STEPS]
    assert sorted(checkpoints.saved[3]) == sorted([STATE, TENSORS])


def test_progress_counts_every_step_once() -> None:
    """A resumed process tells at once how far it was: the checkpoint of step 6, then one step."""
    checkpoints, journal, told = FusedCheckpoints(), FusedJournal(), list[int]()
    one_process(Fuse(0), checkpoints, journal, progress=told.append)
    assert told == [0] + [1] * STEPS
    del checkpoints.saved[STEPS]
    told.clear()
    one_process(Fuse(0), checkpoints, journal, progress=told.append)
    assert told == [6, 1]


def test_no_steps_leave_everything_as_it_is() -> None:
    model, journal = Trainee(), MemoryJournal()
    journal.log(0, other=1.0)
    context = tiny_context(journal=journal, journal_start=journal.position())
    end = fit(
        context,
        [Group("all", model, 0.1)],
        tiny_optimiser(),
        lambda step: (model.loss(step), {}),
        steps=0,
        checkpoint_every=1,
    )
    assert end == journal.position()
    assert all(torch.equal(p, Trainee().get_parameter(name)) for name, p in model.named_parameters())


# ---- numbers that are none


def trained(
    step_loss: Callable[[Trainee, int], Tensor], rate: float = 0.1, every: int = EVERY, **context: Any
) -> tuple[dict[int, dict[str, bytes]], str]:
    """The checkpoints of a training that fails, and what it says."""
    model, checkpoints = Trainee(), MemoryCheckpoints()
    surroundings = tiny_context(checkpoints=checkpoints, name="ict: crops", first_step=100, **context)
    groups = [Group("all", model, rate)]
    with pytest.raises(ValueError, match="ict: crops, step 1") as raised:
        fit(
            surroundings,
            groups,
            tiny_optimiser(),
            lambda step: (step_loss(model, step), {}),
            steps=STEPS,
            checkpoint_every=every,
        )
    assert "run.precision=fp32" in str(raised.value)
    return checkpoints.saved, str(raised.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_ends_the_training_and_leaves_the_checkpoint_before(value: float) -> None:
    saved, said = trained(lambda model, step: model.loss(step) * (value if step == 4 else 1.0))
    assert list(saved) == [3]
    assert all(tensor.isfinite().all() for tensor in load(saved[3][TENSORS]).values())
    assert f"step 104: the loss is {value:g} and " in said
    assert "at step 103" in said


def test_a_gradient_that_is_not_finite_ends_it_at_the_first_step() -> None:
    """The loss is finite: the square root of 0 has a gradient of infinity times 0."""
    saved, said = trained(lambda model, step: model.loss(step) + (0.0 * model.inner.weight.sum()).sqrt())
    assert not saved
    assert "step 100: the loss is 5.51" in said
    assert "the norm of its gradient nan; finite numbers are required; the last finite loss: no earlier step" in said


def test_a_loss_that_is_not_finite_in_another_process_ends_this_one_too() -> None:
    class Others(ProcessGroup):
        def mean(self, value: float, device: torch.device) -> float:
            return math.nan

    saved, said = trained(lambda model, step: model.loss(step), processes=Others())
    assert not saved
    assert "step 100: the loss is nan" in said


def test_no_checkpoint_holds_weights_that_are_not_finite() -> None:
    """The gradient is finite and the update is not: that would show in the next step, behind the checkpoint."""
    saved, said = trained(lambda model, step: model.loss(step), rate=1e39, every=1)
    assert not saved
    assert "step 101: all.inner.weight has values that are NaN or infinite" in said
