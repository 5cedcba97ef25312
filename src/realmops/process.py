"""Threads, malloc and caches of a process that computes with models."""

from __future__ import annotations

import ctypes
import gc
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Literal

import torch

from realmops.devices import NARROW

_PRIMITIVES = "128"  # oneDNN primitives (one per shape) in its cache; its default of 1,024 takes 200 MB
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_MOST_THREADS = 8  # of auto; more were not measured
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENAS = -1, -3, -8  # parameters of mallopt(3)


def resolve_threads(threads: int | Literal["auto"], width: float = math.inf) -> int:
    """Return the number of CPU threads of ``run.threads``; ``auto`` shares the CPUs among torchrun's processes.

    Without AMX it is 1 up to a ``width`` of ``NARROW``: a second thread was slower (benchmarks/LOG.md).
    """
    if threads != "auto":
        return threads
    if (chosen := os.environ.get("OMP_NUM_THREADS", "")).isdecimal() and int(chosen) > 0:
        return int(chosen)
    if width <= NARROW and not torch.cpu._is_amx_tile_supported():
        return 1
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # no cgroup v2, or its quota is "max"
        quota, period = map(int, _CPU_QUOTA.read_text().split())
        cpus = min(cpus, quota // period)
    return max(1, min(cpus // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), _MOST_THREADS))


def configure_process(threads: int | Literal["auto"]) -> None:
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", _PRIMITIVES)
    configure_malloc()
    torch.set_num_threads(resolve_threads(threads))
    # cuDNN attention plans once per shape, which takes longer than a step, and hardly two batches share a shape.
    torch.backends.cuda.enable_cudnn_sdp(False)


def release_memory() -> None:
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    configure_malloc()


def configure_malloc() -> None:
    """Return free memory to the system, and let glibc reuse what is freed later: page faults take longer."""
    with suppress(OSError, AttributeError):  # not glibc
        libc = ctypes.CDLL(None)
        libc.malloc_trim(0)
        libc.mallopt(_ARENAS, 1)  # the backward thread's memory is reused in the next step
        libc.mallopt(_MMAP_THRESHOLD, 32 << 20)  # larger tensors are returned, or memory grows without bound
        libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
