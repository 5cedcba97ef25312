"""Devices and dtypes of models, transfers between CPU and GPU, and tuning of the process."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import Lock
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from realmops.options import RunOptions

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}  # by the names of run.precision
BF16_IF_WIDE = "bf16 if wide"
PRECISIONS = {dtype: name for name, dtype in DTYPES.items()}
_EVALUATING: WeakKeyDictionary[nn.Module, tuple[int, bool]] = WeakKeyDictionary()  # callers; mode before them
_EVALUATING_LOCK = Lock()
NARROW = 128  # width of encoders up to which fp32 is faster where AMX has the bf16 products


def resolve_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("run.device is 'cuda', but torch finds no GPU here; set run.device=auto or cpu")
    return torch.device(name)


def precision_rule(name: str, device: torch.device) -> str:
    """Return ``run.precision`` on this machine; ``auto`` is bf16 on hardware with bf16 products, else fp32.

    With AMX it is ``BF16_IF_WIDE``: fp32 up to a width of ``NARROW``, where that was measured faster
    (benchmarks/LOG.md).
    """
    if name != "auto":
        return name
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported() else "fp32"
    if torch.cpu._is_amx_tile_supported():
        return BF16_IF_WIDE
    return "bf16" if supports_bf16() else "fp32"


def resolve_precision(name: str, device: torch.device, width: float = math.inf) -> torch.dtype:
    """Return the dtype of ``run.precision``, or of the rule that a machine has made of it, for a model's width."""
    rule = precision_rule(name, device)
    if rule == BF16_IF_WIDE:
        rule = "bf16" if width > NARROW else "fp32"
    return DTYPES[rule]


def supports_bf16() -> bool:
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def supports_int8() -> bool:
    """Return whether this processor multiplies int8 in hardware through oneDNN; otherwise sums saturate."""
    largest = torch.full((16, 64), 127, dtype=torch.int8)
    return torch.cpu._is_vnni_supported() and bool((torch._int_mm(largest, largest.T) == 64 * 127**2).all())


def device_and_dtype(run: RunOptions, *models: nn.Module | None) -> tuple[torch.device, torch.dtype]:
    device = resolve_device(run.device)
    weights = (weight for model in models if model is not None for weight in model.parameters())
    width = max((min(weight.shape) for weight in weights if weight.ndim == 2), default=0)
    return device, resolve_precision(run.precision, device, width)


@contextmanager
def autocast(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    with torch.autocast(device.type, dtype) if dtype != torch.float32 else nullcontext():
        yield


@contextmanager
def disable_autocast(device: torch.device) -> Iterator[None]:
    has_autocast = torch.amp.is_autocast_available(device.type)
    with torch.autocast(device.type, enabled=False) if has_autocast else nullcontext():
        yield


def freeze_linear_weights(module: nn.Module, dtype: torch.dtype) -> None:
    """Freeze and cast linear layers in place; otherwise every batch casts all weights again."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            part.requires_grad_(False).to(dtype)


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Context manager: switch a module to eval mode; the last of concurrent callers restores its mode."""
    with _EVALUATING_LOCK:
        callers, was_training = _EVALUATING.get(module, (0, module.training))
        _EVALUATING[module] = callers + 1, was_training
        if module.training:
            module.eval()
    try:
        yield
    finally:
        with _EVALUATING_LOCK:
            callers, was_training = _EVALUATING.pop(module)
            if callers > 1:
                _EVALUATING[module] = callers - 1, was_training
            elif was_training:
                module.train()


def async_to(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device, asynchronously from pinned memory if it is a GPU."""
    if tensor.device == device:
        return tensor
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def to_device(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    """Copy int64, bool and fp32 tensors from the CPU to a device, in one asynchronous transfer."""
    if device.type == "cpu":
        return list(tensors)
    # fp32 travels as its bit pattern
    integers = [tensor.view(torch.int32) if tensor.dtype == torch.float32 else tensor for tensor in tensors]
    flat = async_to(torch.cat([tensor.reshape(-1).to(torch.int64) for tensor in integers]), device)
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    shaped = [part.view(tensor.shape).to(tensor.dtype) for part, tensor in zip(parts, integers, strict=True)]
    return [part.view(tensor.dtype) for part, tensor in zip(shaped, tensors, strict=True)]


def to_host(*tensors: Tensor) -> list[Tensor]:
    """Copy small detached tensors, exact in fp64, to the CPU in one transfer, which waits for the device."""
    on_device = [tensor.detach() for tensor in tensors if tensor.device.type != "cpu"]
    if not on_device:
        return [tensor.detach() for tensor in tensors]
    flat = torch.cat([tensor.reshape(-1).double() for tensor in on_device]).cpu()
    parts = iter(torch.split(flat, [tensor.numel() for tensor in on_device]))
    return [
        tensor.detach() if tensor.device.type == "cpu" else next(parts).view(tensor.shape).to(tensor.dtype)
        for tensor in tensors
    ]
