"""BERT's AdamW and its schedule."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-6
UNCORRECTED = 1 << 20  # steps after which bias correction changes nothing: 1 - 0.999 ** steps is 1


@dataclass(frozen=True)
class Group:
    """Parameters that share a learning rate, and the step at which they begin to learn."""

    name: str
    module: nn.Module
    learning_rate: float
    begin: int = 0


@dataclass(frozen=True)
class Schedule:
    """A linear ramp from 0, then linear decay to 0."""

    steps: int
    ramp: int  # steps

    def factor(self, step: int, begin: int = 0) -> float:
        """The factor of a learning rate at ``step`` (from 0); 0 before ``begin``, where a ramp of its own starts."""
        if step < begin:
            return 0.0
        decay = min(1.0, max(0.0, (self.steps - step) / max(1, self.steps - self.ramp)))
        return min(1.0, (step - begin + 1) / self.ramp) * decay if self.ramp else decay


class BertAdamW:
    """Adam with decoupled weight decay and, as BERT was trained, without bias correction unless it is asked for.

    m = 0.9 m + 0.1 g; v = 0.999 v + 0.001 g^2; p -= lr (m / (sqrt(v) + 1e-6) + decay p). No decay for LayerNorm and
    biases (every parameter of one dimension). The norm of all gradients together is clipped first.
    """

    def __init__(
        self, groups: Iterable[Group], *, weight_decay: float, clip: float, bias_correction: bool = False
    ) -> None:
        self.clip, self.bias_correction, self.weight_decay = clip, bias_correction, weight_decay
        self.names: list[str] = []
        self.parameters: list[Tensor] = []
        self._kinds: list[tuple[float, int, bool]] = []  # of each: its rate, when it begins, and whether it decays
        seen: set[int] = set()
        for group in groups:
            for name, parameter in group.module.named_parameters():
                if parameter.requires_grad and id(parameter) not in seen:
                    seen.add(id(parameter))
                    self.names.append(f"{group.name}.{name}")
                    self.parameters.append(parameter)
                    self._kinds.append((group.learning_rate, group.begin, parameter.dim() > 1))
        self.m = [torch.zeros_like(p) for p in self.parameters]
        self.v = [torch.zeros_like(p) for p in self.parameters]

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self, step: int, schedule: Schedule) -> Tensor:
        """One update; returns the norm of the gradients before clipping, where they are.

        Parameters without a gradient, and those that begin later, stay as they are.
        """
        both = enumerate(zip(self.parameters, self._kinds, strict=True))
        gradient_of = {i: p.grad for i, (p, (_, begin, _)) in both if p.grad is not None and step >= begin}
        gradients = list(gradient_of.values())
        norm = torch.nn.utils.get_total_norm(gradients)
        torch._foreach_mul_(gradients, (self.clip / (norm + 1e-6)).clamp(max=1.0))
        kinds: dict[tuple[float, int, bool], list[int]] = {}
        for i in gradient_of:
            kinds.setdefault(self._kinds[i], []).append(i)
        for (rate, begin, decays), some in kinds.items():
            taken = step - begin if self.bias_correction else UNCORRECTED
            adamw(
                [self.parameters[i] for i in some],
                [gradient_of[i] for i in some],
                [self.m[i] for i in some],
                [self.v[i] for i in some],
                [],
                list(torch.full((len(some),), float(taken), device=norm.device).unbind()),
                fused=True,
                amsgrad=False,
                beta1=BETA_1,
                beta2=BETA_2,
                lr=schedule.factor(step, begin) * rate,
                weight_decay=self.weight_decay if decays else 0.0,
                eps=EPSILON,
                maximize=False,
            )
        return norm

    def state(self) -> dict[str, Tensor]:
        """The moments by parameter name, for a checkpoint."""
        return {
            f"{kind}.{name}": t
            for kind, ts in (("m", self.m), ("v", self.v))
            for name, t in zip(self.names, ts, strict=True)
        }

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Put the moments of a checkpoint back."""
        for kind, tensors in (("m", self.m), ("v", self.v)):
            for name, tensor in zip(self.names, tensors, strict=True):
                tensor.copy_(state[f"{kind}.{name}"])
