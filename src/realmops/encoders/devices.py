"""Where models work and in which numbers, what goes there and comes back, and the memory of a process."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from importlib.util import find_spec
from threading import Lock
from types import MappingProxyType
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from realmops.config import RunOptions

# By the names that run.precision has. With int8 many passages are embedded so, and all else is computed as with auto.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
PRECISIONS = {dtype: name for name, dtype in DTYPES.items()}
_TRIAL = 16  # rows
Product = Callable[[Tensor, Tensor | None, str | None], Tensor]
"""x T x D, a bias and the name of a GELU to T x N."""
_PRODUCTS: ContextVar[Mapping[nn.Linear, Product]] = ContextVar("products", default=MappingProxyType({}))
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
    """Keep weights of matrix products in the numbers that :func:`autocast` multiplies, in a module that learns no more.

    The results are the same; without this each batch copies all of these weights, which for one question takes longer
    than the products.  In place.
    """
    for part in module.modules():
        if isinstance(part, nn.Linear):
            part.requires_grad_(False).to(_multiplied(dtype))


def pack_products(module: nn.Module) -> None:
    """Of frozen weights in bf16 on a CPU, hold a copy as oneDNN multiplies it, which a product else makes each time.

    For one question that is a third of its embedding's time. Nothing is copied where a trial gives another result, or
    where torch has no such product. In place.
    """
    for part in module.modules():
        if isinstance(part, nn.Linear) and part.weight.dtype == torch.bfloat16 and part.weight.device.type == "cpu":
            trial = torch.linspace(-1, 1, _TRIAL * part.in_features).view(_TRIAL, -1).bfloat16()
            bias = torch.linspace(-1, 1, part.out_features).bfloat16()
            try:
                packed = torch.ops.mkldnn._reorder_linear_weight(part.weight.detach(), None)
                same = torch.equal(_linear(trial, packed, bias), F.linear(trial, part.weight.detach(), bias))
            except (AttributeError, RuntimeError):
                same = False
            if same:
                part.packed = packed


def _linear(x_TD: Tensor, packed: Tensor, bias: Tensor | None, gelu: str | None = None) -> Tensor:
    """x times a packed weight, and a bias, in bf16; then GELU."""
    name, how = ("none", "") if gelu is None else ("gelu", gelu)
    half = None if bias is None else bias.bfloat16()
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x_TD.bfloat16(), packed, half, name, [], how)
    return out


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


@contextmanager
def passage_products(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Within it :func:`product` multiplies many rows faster, in packed bf16, on a CPU that multiplies it.

    Without gradients, and for this caller alone, as :func:`multiply_by`.
    """
    if _multiplied(dtype) == torch.bfloat16 and multiplies_bf16():
        with multiply_by(module, _in_bf16):
            yield
    else:
        yield


@contextmanager
def multiply_by(module: nn.Module, make: Callable[[nn.Linear], Product | None]) -> Iterator[None]:
    """Within it :func:`product` is what ``make`` makes of a layer, if anything, on a CPU.

    For this thread and those that run in a copy of its context; nothing changes for other callers.
    """
    layers = [part for part in module.modules() if isinstance(part, nn.Linear) and part.weight.device.type == "cpu"]
    made = {layer: multiply for layer in layers if (multiply := make(layer)) is not None}
    before = _PRODUCTS.set({**_PRODUCTS.get(), **made})
    try:
        yield
    finally:
        _PRODUCTS.reset(before)


def _in_bf16(layer: nn.Linear) -> Product | None:
    """By a copy of its weight as oneDNN multiplies it, with GELU in the same pass; None where torch has no such."""

    def multiply(x_TD: Tensor, bias: Tensor | None, gelu: str | None) -> Tensor:
        return _linear(x_TD, packed, bias, gelu)

    weight_ND = layer.weight.detach()
    trial = torch.linspace(-1, 1, _TRIAL * weight_ND.shape[1]).view(_TRIAL, -1)
    plain = F.gelu(F.linear(trial.bfloat16(), weight_ND.bfloat16())).float()
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight_ND.bfloat16(), None)
        found = multiply(trial, None, "none").float()
    except (AttributeError, RuntimeError):
        return None
    return multiply if torch.allclose(found, plain, rtol=0.02, atol=0.02 * float(plain.abs().max())) else None


def product(layer: nn.Linear, x_TD: Tensor, bias: Tensor | None, gelu: str | None = None) -> Tensor:
    """x times the layer's weight, and a bias; then GELU where it is named by torch's approximation.

    As :func:`multiply_by` says, else by the copy of :func:`pack_products` where there is one.
    """
    if (multiply := _PRODUCTS.get().get(layer)) is not None:
        return multiply(x_TD, bias, gelu)
    together = getattr(torch, "_addmm_activation", None)
    if gelu is not None and bias is not None and together and x_TD.is_cuda and x_TD.dtype == torch.float16:
        # Within Encoder.in_fp16. cuBLAS has GELU by tanh, 5e-4 from the other at most: what fp16 rounds from 1 on.
        activated: Tensor = together(bias, x_TD, layer.weight.T, use_gelu=True)
        return activated
    packed = layer.__dict__.get("packed")
    if packed is None or torch.is_grad_enabled():
        found = F.linear(x_TD, layer.weight, bias)
    else:
        found = _linear(x_TD, packed, bias)
    return found if gelu is None else F.gelu(found, approximate=gelu)


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
