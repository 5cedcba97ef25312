"""FAISS on a GPU: whether it works there, what it supports, and an index safe to share between threads.

Only approximate.py imports ``faiss``; the functions here take the module as an argument.
"""

import os
import subprocess
import sys
import threading
from functools import cache
from typing import Any

import numpy as np
import torch

MAX_SELECTED = 2048  # results, and nprobe, of a query: FAISS's limit on a GPU
_TEMPORARY_BYTES = 512 << 20  # GPU memory per index; FAISS's default is 1.5 GiB
_CODE_BYTES = (1, 2, 3, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 96)  # pq code sizes that FAISS has on GPUs
_FP32_CODE_BYTES = 48  # above, lookup tables fit a block's shared memory (48 KiB) only in fp16
_DIMENSIONS_PER_CODE_BYTE = (2, 8)  # 2: half a byte per dimension, as on a CPU, where such a code exists
_TRIAL_SECONDS = 300  # timeout; a GPU newer than FAISS compiles its kernels first
_TRIAL = """
import sys
import faiss
import numpy
rows = numpy.random.default_rng(0).standard_normal((256, 8), numpy.float32)
resources = faiss.StandardGpuResources()
resources.setTempMemory(1 << 24)
for form in ("IVF2,Flat", "IVF2,PQ4x8np"):
    index = faiss.index_factory(8, form, faiss.METRIC_INNER_PRODUCT)
    index = faiss.index_cpu_to_gpu(resources, int(sys.argv[1]), index)
    index.train(rows)
    index.add(rows)
    index.search(rows, 5)
"""


def cpu_fallback_reason(faiss: Any, kind: str, width: int, device: torch.device) -> str:
    """Return why an index type falls back to the CPU although models are on ``device``; "" if it does not."""
    if kind == "hnsw":
        return "FAISS does not support hnsw on GPUs"
    if not hasattr(faiss, "StandardGpuResources"):
        return "the installed FAISS is CPU-only (extra faiss; the extra gpu installs one for GPUs)"
    if faiss.get_num_gpus() == 0:
        return "FAISS finds no GPU"
    if kind == "pq" and not code_bytes(width):
        return f"FAISS does not support pq of width {width} on GPUs"
    return find_gpu_failure(device_index(device))


def code_bytes(width: int) -> int:
    """Return the bytes of a passage's pq code on a GPU; 0 if FAISS supports no code that is fine enough."""
    finest, coarsest = _DIMENSIONS_PER_CODE_BYTE
    fitting = [code for code in _CODE_BYTES if width % code == 0 and finest <= width // code <= coarsest]
    return max(fitting, default=0)


@cache
def find_gpu_failure(gpu: int) -> str:
    """Run a trial search on a GPU in a subprocess, once per GPU; return why it failed, "" on success.

    FAISS aborts the process if it has no kernels for the GPU ("no kernel image"), so this process must not try.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", _TRIAL, str(gpu)]
    try:
        process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TRIAL_SECONDS)
    except subprocess.TimeoutExpired:
        return f"a trial of FAISS on the GPU timed out after {_TRIAL_SECONDS} s"
    if process.returncode == 0:
        return ""
    lines = process.stderr.split("\n")
    reason = next((line.strip() for line in reversed(lines) if line.strip()), f"exit code {process.returncode}")
    return f"a trial of FAISS on the GPU failed: {reason}"


def device_index(device: torch.device) -> int:
    return torch.cuda.current_device() if str(device) == "cuda" else device.index


class GpuIndex:
    """A FAISS index on a GPU with the methods of a CPU index.

    FAISS allows one thread at a time to use an index's GPU resources. Each index has its own resources and a lock, so
    that threads can share it, and one index can be freed while another one is searched.
    """

    def __init__(self, faiss: Any, empty: Any, device: torch.device) -> None:
        """Copy an untrained index to the GPU; RuntimeError where FAISS cannot."""
        torch.cuda.empty_cache()  # returns torch's unused cached memory, so that FAISS can allocate it
        self._lock = threading.Lock()
        self._resources = faiss.StandardGpuResources()
        self._resources.setTempMemory(_TEMPORARY_BYTES)
        options = faiss.GpuClonerOptions()
        options.useFloat16 = hasattr(empty, "pq") and empty.pq.M > _FP32_CODE_BYTES
        self._index = faiss.index_cpu_to_gpu(self._resources, device_index(device), empty, options)
        self.cp = self._index.cp  # clustering parameters

    def train(self, rows: np.ndarray) -> None:
        with self._lock:
            self._index.train(rows)

    def add(self, rows: np.ndarray) -> None:
        with self._lock:
            self._index.add(rows)

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        with self._lock:
            results: tuple[np.ndarray, np.ndarray] = self._index.search(queries, k)
        return results

    @property
    def nprobe(self) -> int:
        lists: int = self._index.nprobe
        return lists

    @nprobe.setter
    def nprobe(self, lists: int) -> None:
        with self._lock:
            self._index.nprobe = lists
