"""BERT's AdamW step by step. Numbers that stand here can be checked with a pocket calculator."""

import math

import pytest
import torch
from torch import Tensor, nn

from realmops.train.optimiser import BertAdamW, Group, Schedule

FULL = Schedule(steps=1, ramp=0)  # at step 0 the whole learning rate


class Values(nn.Module):
    """A matrix and a vector as parameters."""

    def __init__(self, matrix: list[list[float]], vector: list[float]) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.tensor(matrix, dtype=torch.float64))
        self.vector = nn.Parameter(torch.tensor(vector, dtype=torch.float64))

    def set_gradients(self, matrix: list[list[float]], vector: list[float]) -> None:
        self.matrix.grad = torch.tensor(matrix, dtype=torch.float64)
        self.vector.grad = torch.tensor(vector, dtype=torch.float64)


def test_thirty_steps_against_the_formula() -> None:
    """One number at a time, as BERT's release writes it; gradients and rates differ in every step."""
    values = Values([[0.7, -1.3], [0.2, 0.0]], [0.4, -0.1, 2.0])
    optimiser = BertAdamW([Group("g", values, 0.02)], weight_decay=0.1, clip=1e9)
    generator = torch.Generator().manual_seed(0)
    p = [0.7, -1.3, 0.2, 0.0, 0.4, -0.1, 2.0]
    decay = [0.1] * 4 + [0.0] * 3
    m, v = [0.0] * 7, [0.0] * 7
    for step in range(30):
        g = torch.randn(7, generator=generator, dtype=torch.float64)
        values.matrix.grad, values.vector.grad = g[:4].view(2, 2).clone(), g[4:].clone()
        factor = (step + 1) / 5 if step < 5 else (30 - step) / 25
        optimiser.step(step, Schedule(steps=30, ramp=5))
        for i in range(7):
            m[i] = 0.9 * m[i] + (1 - 0.9) * g[i].item()
            v[i] = 0.999 * v[i] + (1 - 0.999) * g[i].item() ** 2
            update = m[i] / (math.sqrt(v[i]) + 1e-6)
            p[i] -= 0.02 * factor * (update + decay[i] * p[i])
        found = [*values.matrix.flatten().tolist(), *values.vector.tolist()]
        assert found == pytest.approx(p, rel=1e-10), step


def test_decay_spares_layer_norm_and_biases() -> None:
    """With gradients of 0 only decay is left: 1 - 0.1 * 0.5 * 1 for matrices, nothing for vectors."""
    module = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Embedding(3, 2))
    for parameter in module.parameters():
        nn.init.ones_(parameter)
        parameter.grad = torch.zeros_like(parameter)
    BertAdamW([Group("g", module, 0.1)], weight_decay=0.5, clip=1.0).step(0, FULL)
    left = {name: set(p.flatten().tolist()) for name, p in module.named_parameters()}
    assert {name for name, found in left.items() if found == {1.0}} == {"0.bias", "1.weight", "1.bias"}
    for name in ("0.weight", "2.weight"):
        assert sorted(left[name]) == pytest.approx([0.95])


def moments(optimiser: BertAdamW) -> list[float]:
    return [optimiser.state()[f"m.{name}"].item() for name in optimiser.names]


@pytest.mark.parametrize(("clip", "clipped"), [(1.0, (0.6, 0.8)), (2.5, (1.5, 2.0)), (5.1, (3.0, 4.0))])
def test_the_norm_of_all_gradients_together_is_clipped(clip: float, clipped: tuple[float, float]) -> None:
    """(3, 4) has norm 5, over two parameters of two groups."""
    first, second = Values([[1.0]], [0.0]), Values([[1.0]], [0.0])
    optimiser = BertAdamW([Group("a", first, 0.1), Group("b", second, 0.1)], weight_decay=0.0, clip=clip)
    first.set_gradients([[3.0]], [0.0])
    second.set_gradients([[4.0]], [0.0])
    assert optimiser.step(0, FULL) == pytest.approx(5.0)
    assert moments(optimiser) == pytest.approx([0.1 * clipped[0], 0, 0.1 * clipped[1], 0], rel=1e-6)


def test_a_group_that_begins_later_stays_and_does_not_count() -> None:
    """Until then neither its parameters nor its moments move, and its gradient is no part of the norm."""
    late, early = Values([[1.0]], [1.0]), Values([[1.0]], [1.0])
    groups = [Group("late", late, 0.1, begin=3), Group("early", early, 0.1)]
    optimiser = BertAdamW(groups, weight_decay=0.1, clip=1.0)
    schedule = Schedule(steps=10, ramp=0)
    late.set_gradients([[1e6]], [1e6])
    early.set_gradients([[0.6]], [0.8])
    assert optimiser.step(2, schedule) == pytest.approx(1.0)
    assert (late.matrix.item(), late.vector.item()) == (1.0, 1.0)
    assert moments(optimiser) == pytest.approx([0.0, 0.0, 0.06, 0.08], rel=1e-5)
    assert early.matrix.item() < 1.0
    assert optimiser.step(3, schedule) > 1e6
    assert late.matrix.item() < 1.0


def test_each_group_has_its_rate_and_a_shared_parameter_counts_once() -> None:
    first, second = Values([[1.0]], [0.0]), Values([[1.0]], [0.0])
    second.vector = first.vector
    optimiser = BertAdamW([Group("a", first, 0.1), Group("b", second, 0.3)], weight_decay=0.0, clip=1e9)
    assert optimiser.names == ["a.matrix", "a.vector", "b.matrix"]
    first.set_gradients([[0.5]], [0.5])
    second.matrix.grad = torch.tensor([[0.5]], dtype=torch.float64)
    optimiser.step(1, Schedule(steps=2, ramp=0))  # half the learning rate
    length = 0.5 * 0.05 / (math.sqrt(0.00025) + 1e-6)
    assert first.matrix.item() == pytest.approx(1 - 0.1 * length)
    assert second.matrix.item() == pytest.approx(1 - 0.3 * length)
    assert first.vector.item() == pytest.approx(-0.1 * length)


def test_a_parameter_without_a_gradient_stays() -> None:
    values = Values([[1.0]], [1.0])
    optimiser = BertAdamW([Group("g", values, 0.1)], weight_decay=0.1, clip=1.0)
    values.vector.grad = torch.tensor([0.5], dtype=torch.float64)
    optimiser.step(0, FULL)
    assert values.matrix.item() == 1.0
    assert values.vector.item() < 1.0
    optimiser.zero_grad()
    assert values.vector.grad is None


def test_schedule_by_hand() -> None:
    """10 steps, 2 of warm-up: up by halves, then down by eighths; the step behind the last would be 0."""
    schedule = Schedule(steps=10, ramp=2)
    found = [schedule.factor(step) for step in range(11)]
    assert found == pytest.approx([0.5, 1.0, 1.0, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0.0])
    assert Schedule(steps=4, ramp=0).factor(0) == 1.0


def test_a_late_beginner_warms_up_to_the_others_line() -> None:
    """Begun at step 4: half of the others' 6/8, then all of their 5/8, and on with them."""
    schedule = Schedule(steps=10, ramp=2)
    found = [schedule.factor(step, begin=4) for step in range(10)]
    assert found == pytest.approx([0.0] * 4 + [3 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8])


def test_state_comes_back_bit_for_bit() -> None:
    """Four steps, or two steps, a new optimiser with the state of the old, and two more: the same bits."""

    def run(restart: bool) -> list[Tensor]:
        values = Values([[0.7, -1.3]], [0.4])
        optimiser = BertAdamW([Group("g", values, 0.05)], weight_decay=0.01, clip=1.0)
        generator = torch.Generator().manual_seed(0)
        for step in range(4):
            if restart and step == 2:
                state = {name: tensor.clone() for name, tensor in optimiser.state().items()}
                optimiser = BertAdamW([Group("g", values, 0.05)], weight_decay=0.01, clip=1.0)
                optimiser.load_state(state)
            for parameter in values.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            optimiser.step(0, FULL)
        return [*values.parameters(), *optimiser.state().values()]

    names = {"m.g.matrix", "m.g.vector", "v.g.matrix", "v.g.vector"}
    assert set(BertAdamW([Group("g", Values([[1.0]], [1.0]), 1.0)], weight_decay=0, clip=1).state()) == names
    for undisturbed, restarted in zip(run(False), run(True), strict=True):
        assert torch.equal(undisturbed, restarted)


# ---- with bias correction


def walked(steps: int, begin: int = 0, *, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """A matrix after some steps with gradients of any size, by ours and by torch's AdamW."""
    values = Values([[0.7, -1.3], [0.2, 0.0]], [0.4])
    theirs = torch.nn.Parameter(values.matrix.detach().clone())
    ours = BertAdamW([Group("g", values, 0.05, begin)], weight_decay=0.01, clip=1e9, bias_correction=True)
    adamw = torch.optim.AdamW([theirs], lr=0.05, betas=(0.9, 0.999), eps=eps, weight_decay=0.01)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        gradient = torch.randn(2, 2, generator=generator, dtype=torch.float64)
        values.matrix.grad, theirs.grad = gradient.clone(), gradient.clone()
        if step >= begin:
            ours.step(step, Schedule(steps=10**15, ramp=0))
            adamw.step()
    return values.matrix.detach(), theirs.detach()


@pytest.mark.parametrize("begin", [0, 3])
def test_corrected_it_is_torchs_adamw(begin: int) -> None:
    """Both add epsilon to the corrected root of v, and decay what was there before the step; a late beginner too."""
    for steps in (1, 2, 8):
        ours, theirs = walked(begin + steps, begin)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    wrong = walked(begin + 8, begin, eps=1e-2)
    assert (wrong[0] - wrong[1]).abs().max() > 1e-4, "another epsilon would be seen"


def test_corrected_means_are_not_what_is_kept() -> None:
    """The state of a checkpoint is the same with and without."""
    states = []
    for corrected in (True, False):
        values = Values([[0.3]], [0.1])
        optimiser = BertAdamW([Group("g", values, 0.1)], weight_decay=0.01, clip=1e9, bias_correction=corrected)
        for step in range(3):
            for parameter in values.parameters():
                parameter.grad = torch.full_like(parameter, 0.5)
            optimiser.step(step, FULL)
        states.append({name: tensor.tolist() for name, tensor in optimiser.state().items()})
    assert states[0] == states[1]
