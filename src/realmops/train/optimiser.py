"""BERT's AdamW and its learning-rate schedule."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-6
WEIGHT_DECAY, CLIP = 0.01, 1.0  # as in the paper
UNCORRECTED = 1 << 20  # a step count at which bias correction is 1: 1 - 0.999 ** steps


@dataclass(frozen=True)
class Group:
    """Parameter group: a module, its learning rate and the step at which its training begins."""

    name: str
    module: nn.Module
    learning_rate: float
    begin: int = 0


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up from 0, then linear decay to 0."""

    steps: int
    ramp: int  # steps

    def factor(self, step: int, begin: int = 0) -> float:
        """Return the learning-rate factor at ``step`` (from 0); it is 0 before ``begin``, where the warm-up starts."""
        if step < begin:
            return 0.0
        decay = min(1.0, max(0.0, (self.steps - step) / max(1, self.steps - self.ramp)))
        return min(1.0, (step - begin + 1) / self.ramp) * decay if self.ramp else decay


class BertAdamW:
    """Adam with decoupled weight decay and, as for BERT, without bias correction by default.

    m = 0.9 m + 0.1 g; v = 0.999 v + 0.001 g^2; p -= lr (m / (sqrt(v) + 1e-6) + decay p). LayerNorm and biases (every
    parameter of one dimension) are not decayed. The global gradient norm is clipped first.
    """

    def __init__(self, groups: Iterable[Group], *, bias_correction: bool = False) -> None:
        self.bias_correction = bias_correction
        self.names: list[str] = []
        self.parameters: list[Tensor] = []
        self._settings: list[tuple[float, int, float]] = []  # learning rate, first step and weight decay of each
        registered: set[int] = set()
        for group in groups:
            for name, parameter in group.module.named_parameters():
                if parameter.requires_grad and id(parameter) not in registered:
                    registered.add(id(parameter))
                    self.names.append(f"{group.name}.{name}")
                    self.parameters.append(parameter)
                    decay = WEIGHT_DECAY if parameter.dim() > 1 else 0.0
                    self._settings.append((group.learning_rate, group.begin, decay))
        self.m = [torch.zeros_like(p) for p in self.parameters]
        self.v = [torch.zeros_like(p) for p in self.parameters]

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self, step: int, schedule: Schedule) -> Tensor:
        """Update the parameters with a gradient whose group has begun; return the gradient norm before clipping."""
        numbered = enumerate(zip(self.parameters, self._settings, strict=True))
        gradient_of = {i: p.grad for i, (p, (_, begin, _)) in numbered if p.grad is not None and step >= begin}
        gradients = list(gradient_of.values())
        norm = torch.nn.utils.get_total_norm(gradients)
        torch._foreach_mul_(gradients, (CLIP / (norm + 1e-6)).clamp(max=1.0))
        batches: dict[tuple[float, int, float], list[int]] = {}
        for i in gradient_of:
            batches.setdefault(self._settings[i], []).append(i)
        for (rate, begin, decay), rows in batches.items():
            steps = step - begin if self.bias_correction else UNCORRECTED
            adamw(
                [self.parameters[i] for i in rows],
                [gradient_of[i] for i in rows],
                [self.m[i] for i in rows],
                [self.v[i] for i in rows],
                [],
                list(torch.full((len(rows),), float(steps), device=norm.device).unbind()),
                fused=True,
                amsgrad=False,
                beta1=BETA_1,
                beta2=BETA_2,
                lr=schedule.factor(step, begin) * rate,
                weight_decay=decay,
                eps=EPSILON,
                maximize=False,
            )
        return norm

    def state(self) -> dict[str, Tensor]:
        """Return the moments by parameter name, for a checkpoint."""
        moments = (("m", self.m), ("v", self.v))
        return {f"{kind}.{name}": t for kind, ts in moments for name, t in zip(self.names, ts, strict=True)}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
