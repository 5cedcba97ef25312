"""Training by several processes, as torchrun starts them: each takes its share of a batch, and gradients are averaged.

The first process alone has checkpoints, journal and exchange; the others are sent what they need of them.

Shape suffixes: B rows of one process, N those of all, D width.
"""

import atexit
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn.functional import all_gather

T = TypeVar("T")
# A process waits for the others while the first one waits for an index or measures it; torchrun ends all when one ends.
PATIENCE = timedelta(days=7)


@dataclass(frozen=True)
class Team:
    """This process among all that train together."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this is the process with the checkpoints, the journal and the exchange."""
        return self.rank == 0

    def wait(self) -> None:
        """Go on when all have come so far."""
        if self.size > 1:
            dist.barrier()

    def share(self, batch: Sequence[T], weights: Sequence[float] | None = None) -> tuple[Sequence[T], float]:
        """This process's part of a batch, and the factor of its mean loss by which all parts give that of the batch.

        ``weights`` are what examples count in the mean; without them all count the same. A process for which there
        is none takes the first, which then counts nothing.
        """
        if self.size == 1:
            return batch, 1.0
        mine = range(len(batch))[self.rank :: self.size]
        weights = weights or [1.0] * len(batch)
        factor = self.size * sum(weights[i] for i in mine) / sum(weights)
        return [batch[i] for i in mine] or batch[:1], factor

    def order(self, batch: Sequence[T], each: int) -> list[T | None]:
        """A batch in the order in which :meth:`gather` puts the parts of :meth:`share`, each filled up to ``each``.

        None stands for what a process fills its part up with.
        """
        parts = [list(batch[rank :: self.size]) for rank in range(self.size)]
        return [item for part in parts for item in [*part, *[None] * (each - len(part))]]

    @torch.no_grad()
    def average(self, parameters: Sequence[Tensor]) -> None:
        """Give all the mean of their gradients; a parameter that has none anywhere stays without."""
        if self.size == 1:
            return
        device = parameters[0].device
        has = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=device)
        dist.all_reduce(has, dist.ReduceOp.MAX)
        gradients = []
        for parameter, one_has in zip(parameters, has.tolist(), strict=True):
            if one_has:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
                gradients.append(parameter.grad)
        for work in [dist.all_reduce(gradient, async_op=True) for gradient in gradients]:
            work.wait()
        torch._foreach_div_(gradients, self.size)

    def mean(self, value: float, device: torch.device) -> float:
        """The mean of a number over all."""
        if self.size == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=device)
        dist.all_reduce(total)
        return float(total) / self.size

    @torch.no_grad()
    def send(self, tensors: Iterable[Tensor]) -> None:
        """Put the first process's values into the tensors of the others."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor.detach(), 0)

    def send_numbers(self, numbers: Sequence[float], device: torch.device) -> list[float]:
        """The first process's numbers, for all."""
        tensor = torch.tensor(numbers, dtype=torch.float64, device=device)
        self.send([tensor])
        found: list[float] = tensor.tolist()
        return found

    def most(self, count: int, device: torch.device) -> int:
        """The largest of the processes' numbers, for all."""
        if self.size == 1:
            return count
        tensor = torch.tensor(count, device=device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return int(tensor)

    def gather(self, x_BD: Tensor) -> Tensor:
        """The rows of all processes, N x D, each process's behind those of the one before; gradients find their way."""
        if self.size == 1:
            return x_BD
        return torch.cat(all_gather(x_BD))  # type: ignore[no-untyped-call]


ALONE = Team()


def join(device: torch.device) -> None:
    """Join the processes that torchrun started with this one, once.

    Each has a GPU of its own where ``device`` is one; ValueError when there are more processes than GPUs.
    """
    if dist.is_initialized():
        return
    backend = "gloo"
    if device.type == "cuda":
        processes, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
        if processes > gpus:  # said by all, as one that went on would wait for the others
            raise ValueError(
                f"torchrun started {processes} processes on this machine, one for each GPU, and torch finds {gpus}; "
                f"give torchrun --nproc-per-node={gpus}, or set run.device=cpu"
            )
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=PATIENCE)
    atexit.register(dist.destroy_process_group)


def team() -> Team:
    """The processes that this one has joined; alone without them."""
    return Team(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else ALONE
