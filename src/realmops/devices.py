"""Where models work and in which numbers, what goes there and comes back, and the memory of a process."""

from __future__ import annotations

import copy
import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from importlib.util import find_spec
from threading import Lock
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from realmops.config import RunOptions

# By the names that run.precision has. With int8 many passages are embedded so, and all else is computed as with auto.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
PRECISIONS = {dtype: name for name, dtype in DTYPES.items()}
_EVALUATING: WeakKeyDictionary[nn.Module, tuple[int, bool]] = WeakKeyDictionary()  # callers; mode before the first
_MODES = Lock()  # of what is evaluated
_PREPARED = "128"  # products that oneDNN keeps prepared, each of one shape; its 1,024 take 200 MB and as long
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENAS = -1, -3, -8  # of mallopt(3)


def resolve_device(name: str) -> torch.device:
    """``auto`` takes the GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("run.device is 'cuda', but torch finds no GPU here; set run.device=auto or cpu")
    return torch.device(name)


def resolve_precision(name: str, device: torch.device) -> torch.dtype:
    """``auto`` is bf16 where the processor multiplies it in hardware, fp32 elsewhere.

    So is int8 where it cannot be multiplied: a model that was trained with it answers on any machine.
    """
    if name == "int8" and (device.type != "cpu" or not multiplies_int8()):
        name = "auto"
    if name == "int8" and find_spec("openvino") is None:
        raise ValueError(
            "run.precision is 'int8', for which OpenVINO is missing: pip install 'realmops[openvino]', or set "
            "run.precision=auto"
        )
    if name != "auto":
        return DTYPES[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    return torch.bfloat16 if multiplies_bf16() else torch.float32


def multiplies_bf16() -> bool:
    """Whether this processor multiplies bf16 in hardware."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def multiplies_int8() -> bool:
    """Whether this processor multiplies int8 in hardware, and oneDNN uses that: without it sums are cut off."""
    most = torch.full((16, 64), 127, dtype=torch.int8)
    return torch.cpu._is_vnni_supported() and bool((torch._int_mm(most, most.T) == 64 * 127**2).all())


def device_and_dtype(run: RunOptions) -> tuple[torch.device, torch.dtype]:
    """Where ``run.device`` and ``run.precision`` let models work, and in which numbers."""
    device = resolve_device(run.device)
    return device, resolve_precision(run.precision, device)


@contextmanager
def autocast(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Matrix products in ``dtype``, for int8 in what ``auto`` is; nothing at all for fp32."""
    dtype = _multiplied(dtype)
    with torch.autocast(device.type, dtype) if dtype != torch.float32 else nullcontext():
        yield


def _multiplied(dtype: torch.dtype) -> torch.dtype:
    return resolve_precision("auto", torch.device("cpu")) if dtype == torch.int8 else dtype


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Matrix products of fp32 in fp32 within :func:`autocast`."""
    known = torch.amp.is_autocast_available(device.type)
    with torch.autocast(device.type, enabled=False) if known else nullcontext():
        yield


def freeze_products(module: nn.Module, dtype: torch.dtype) -> None:
    """Keep weights of linear layers in the dtype that :func:`autocast` multiplies in, in a module that learns no more.

    The results are equal; without it each batch casts all of these weights, which for one question takes longer than
    the products. In place.
    """
    for part in module.modules():
        if isinstance(part, nn.Linear):
            part.requires_grad_(False).to(_multiplied(dtype))


class PackedLinear(nn.Module):
    """A linear layer in bf16 on a CPU, without gradients, with its weight in the layout that oneDNN multiplies.

    Args:
        layer: the linear layer; its weight is copied, its bias shared.

    Raises:
        AttributeError, RuntimeError: where this build of torch has no such product.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach().bfloat16(), None)
        bias: Tensor | None = layer.bias
        self.bias = None if bias is None else bias.detach().bfloat16()
        self(torch.zeros(1, layer.in_features))

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return x W + b, T x N, in bf16."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x_TD.bfloat16(), self.packed, self.bias, "none", [], "")
        return out


Module = TypeVar("Module", bound=nn.Module)


def with_replaced(module: Module, replace: Callable[[nn.Module], nn.Module | None]) -> Module:
    """Return a copy of a module with other submodules; the copy shares all else.

    Args:
        replace: returns what a submodule is replaced by, None where it stays.
    """
    other = copy.copy(module)
    other._modules = {}
    for name, part in module._modules.items():
        made = None if part is None else replace(part)
        other._modules[name] = with_replaced(part, replace) if part is not None and made is None else made
    return other


def with_linears(module: Module, make: Callable[[nn.Linear], nn.Module]) -> Module:
    """Return a copy of a module with each linear layer replaced by ``make`` of it; the copy shares all else.

    A layer without a weight of its own stays: a masked word head's, which gets the word vectors with each call.
    """
    return with_replaced(
        module, lambda part: make(part) if type(part) is nn.Linear and "weight" in part._parameters else None
    )


def with_packed_linears(module: Module, dtype: torch.dtype) -> Module:
    """Return a copy for inference that multiplies faster in bf16, on a CPU that does so in hardware; else the module.

    Without it oneDNN brings each weight into its layout for each batch, a third of the time that one question takes.
    """
    on_cpu = next(module.parameters()).device.type == "cpu"
    if on_cpu and _multiplied(dtype) == torch.bfloat16 and multiplies_bf16():
        with suppress(AttributeError, RuntimeError):
            return with_linears(module, PackedLinear)
    return module


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Switch a module to evaluation mode, then restore its mode: the last of several callers in threads does."""
    with _MODES:
        callers, was_training = _EVALUATING.get(module, (0, module.training))
        _EVALUATING[module] = callers + 1, was_training
        if module.training:
            module.eval()
    try:
        yield
    finally:
        with _MODES:
            callers, was_training = _EVALUATING.pop(module)
            if callers > 1:
                _EVALUATING[module] = callers - 1, was_training
            elif was_training:
                module.train()


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device == device:
        return tensor
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def send(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    """Whole numbers (int64), truth values and fp32 from the CPU to a device, by one copy that nothing waits for."""
    if device.type == "cpu":
        return list(tensors)
    whole = [tensor.view(torch.int32) if tensor.dtype == torch.float32 else tensor for tensor in tensors]  # by its bits
    flat = moved(torch.cat([tensor.reshape(-1).to(torch.int64) for tensor in whole]), device)
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    there = [part.view(tensor.shape).to(tensor.dtype) for part, tensor in zip(parts, whole, strict=True)]
    return [part.view(tensor.dtype) for part, tensor in zip(there, tensors, strict=True)]


def bring(*tensors: Tensor) -> list[Tensor]:
    """Small tensors to the CPU without their gradients, by one copy, which waits for the device.

    Their values must be exact as doubles: floats, truth values, and whole numbers below 2 ** 53.
    """
    away = [tensor.detach() for tensor in tensors if tensor.device.type != "cpu"]
    if not away:
        return [tensor.detach() for tensor in tensors]
    flat = torch.cat([tensor.reshape(-1).double() for tensor in away]).cpu()
    parts = iter(torch.split(flat, [tensor.numel() for tensor in away]))
    return [
        tensor.detach() if tensor.device.type == "cpu" else next(parts).view(tensor.shape).to(tensor.dtype)
        for tensor in tensors
    ]


def tune_process(threads: int) -> None:
    """What every process that works with models wants, once, before it computes."""
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", _PREPARED)
    keep_freed_memory()
    torch.set_num_threads(threads)
    # cuDNN's attention plans anew for every shape, and no two batches here have one: a plan takes longer than a step.
    torch.backends.cuda.enable_cudnn_sdp(False)


def keep_freed_memory() -> None:
    """Let glibc keep what a step frees for the next: fresh pages for every tensor cost more than its use.

    What the process kept until now, as an earlier stage, goes back.
    """
    with suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.malloc_trim(0)
        libc.mallopt(_ARENAS, 1)  # what the way back frees is the next step's
        libc.mallopt(_MMAP_THRESHOLD, 32 << 20)  # larger tensors go back at once, or memory would grow without end
        libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
