"""Data-parallel training with torchrun: each process takes its part of a batch, and gradients are averaged.

Only the first process has checkpoints, journal and exchange; it broadcasts what the others need.

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
# Long, because the first process may wait for an index or evaluate it; torchrun ends all processes when one ends.
PATIENCE = timedelta(days=7)


@dataclass(frozen=True)
class ProcessGroup:
    """Rank of this process and collective operations among all processes of a training."""

    rank: int = 0
    size: int = 1

    @property
    def is_main_process(self) -> bool:
        return self.rank == 0

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()

    def split_batch(self, batch: Sequence[T], weights: Sequence[float] | None = None) -> tuple[Sequence[T], float]:
        """Return this process's part of a batch, and the factor for its mean loss.

        The mean over processes of (factor x mean loss of the part) is the mean loss of the batch, in which each example
        has its weight. A process without an example gets the first one, with factor 0.
        """
        if self.size == 1:
            return batch, 1.0
        rows = range(len(batch))[self.rank :: self.size]
        weights = weights or [1.0] * len(batch)
        factor = self.size * sum(weights[i] for i in rows) / sum(weights)
        return [batch[i] for i in rows] or batch[:1], factor

    def gathered_order(self, batch: Sequence[T], part_size: int) -> list[T | None]:
        """Return a batch in the order of its gathered parts, each padded by None to ``part_size``."""
        parts = [batch[rank :: self.size] for rank in range(self.size)]
        return [item for part in parts for item in [*part, *[None] * (part_size - len(part))]]

    @torch.no_grad()
    def average_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Replace gradients by their mean over all processes; parameters without one in any process keep none."""
        if self.size == 1:
            return
        device = parameters[0].device
        has_gradient = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=device)
        dist.all_reduce(has_gradient, dist.ReduceOp.MAX)
        gradients = []
        for parameter, is_used in zip(parameters, has_gradient.tolist(), strict=True):
            if is_used:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
                gradients.append(parameter.grad)
        for work in [dist.all_reduce(gradient, async_op=True) for gradient in gradients]:
            work.wait()
        torch._foreach_div_(gradients, self.size)

    def mean(self, value: float, device: torch.device) -> float:
        if self.size == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=device)
        dist.all_reduce(total)
        return float(total) / self.size

    @torch.no_grad()
    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Copy the first process's values into the tensors of the others."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor.detach(), 0)

    def broadcast_numbers(self, numbers: Sequence[float], device: torch.device) -> list[float]:
        tensor = torch.tensor(numbers, dtype=torch.float64, device=device)
        self.broadcast([tensor])
        values: list[float] = tensor.tolist()
        return values

    def max(self, count: int, device: torch.device) -> int:
        if self.size == 1:
            return count
        tensor = torch.tensor(count, device=device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return int(tensor)

    def gather(self, x_BD: Tensor) -> Tensor:
        """Concatenate the rows of all processes by rank: B x D to N x D, differentiable."""
        return x_BD if self.size == 1 else torch.cat(all_gather(x_BD))  # type: ignore[no-untyped-call]


SINGLE_PROCESS = ProcessGroup()


def join_process_group(device: torch.device) -> None:
    """Join the process group that torchrun started, once; with a GPU device, each process gets one GPU.

    Raises:
        ValueError: there are more processes than GPUs on this machine.
    """
    if dist.is_initialized():
        return
    backend = "gloo"
    if device.type == "cuda":
        processes, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
        if processes > gpus:  # raised in all processes: one that continued would wait for the others
            raise ValueError(
                f"torchrun started {processes} processes on this machine, but torch finds {gpus} GPUs; one GPU per "
                f"process is required: use torchrun --nproc-per-node={gpus}, or set run.device=cpu"
            )
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=PATIENCE)
    atexit.register(dist.destroy_process_group)


def process_group() -> ProcessGroup:
    """Return the process group that this process joined, ``SINGLE_PROCESS`` without one."""
    return ProcessGroup(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else SINGLE_PROCESS
