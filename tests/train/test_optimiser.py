"""BERT's AdamW and its schedule: the formula one number at a time, and torch's AdamW."""

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


def test_layer_norm_and_biases_do_not_decay() -> None:
    """With gradients of 0 only decay is left: 1 - 0.1 * 0.01 for matrices."""
    module = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Embedding(3, 2))
    for parameter in module.parameters():
        nn.init.ones_(parameter)
        parameter.grad = torch.zeros_like(parameter)
    BertAdamW([Group("g", module, 0.1)]).step(0, FULL)
    for name, parameter in module.named_parameters():
        expected = 0.999 if name in ("0.weight", "2.weight") else 1.0
        assert parameter.flatten().tolist() == pytest.approx([expected] * parameter.numel()), name


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


@pytest.mark.parametrize("corrected", [False, True])
def test_a_restored_state_continues_bit_for_bit(corrected: bool) -> None:
    def run(restart: bool) -> list[Tensor]:
        values, generator = Values([[0.7, -1.3]], [0.4]), torch.Generator().manual_seed(0)
        optimiser = BertAdamW([Group("g", values, 0.05)], bias_correction=corrected)
        for step in range(4):
            if restart and step == 2:
                state = {name: tensor.clone() for name, tensor in optimiser.state().items()}
                optimiser = BertAdamW([Group("g", values, 0.05)], bias_correction=corrected)
                optimiser.load_state(state)
            values.draw_gradients(generator)
            optimiser.step(step, Schedule(5, 0))
        return [*values.parameters(), *optimiser.state().values()]

    for uninterrupted, restarted in zip(run(False), run(True), strict=True):
        assert torch.equal(uninterrupted, restarted)


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
