"""FAISS on a GPU: whether its code runs on the card, what it supports there, and an index that threads may share.

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

MOST_SELECTED = 2048  # results of a query, and lists that it looks at: FAISS's limit on a GPU
_TEMPORARY_BYTES = 512 << 20  # of the card, for each index; FAISS takes 1.5 GiB by default
_CODE_BYTES = (1, 2, 3, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 96)  # of pq, one for each part of a vector
_FP32_CODE_BYTES = 48  # from more on, a block's shared memory (48 KiB) holds the tables of distances in fp16 alone
_DIMENSIONS_PER_CODE_BYTE = (2, 8)  # of pq: half a byte per dimension, as on a CPU, where such a code exists
_TRIAL_SECONDS = 300  # a card newer than FAISS compiles its kernels first
_TRIAL = """
import sys
import faiss
import numpy
rows = numpy.random.default_rng(0).standard_normal((256, 8), numpy.float32)
found = []
for form in ("IVF2,Flat", "IVF2,PQ4x8np"):
    cpu = faiss.index_factory(8, form, faiss.METRIC_INNER_PRODUCT)
    cpu.train(rows)
    resources = faiss.StandardGpuResources()
    resources.setTempMemory(1 << 24)
    gpu = faiss.index_cpu_to_gpu(resources, int(sys.argv[1]), cpu)
    for index in (cpu, gpu):
        index.add(rows)
        index.nprobe = 2
    scores = [index.search(rows, 5)[0] for index in (cpu, gpu)]
    if not numpy.allclose(*scores, rtol=1e-3, atol=1e-3):
        sys.exit(f"its scores of {form} differ from those of the CPU")
"""


def why_cpu(faiss: Any, kind: str, width: int, device: torch.device) -> str:
    """Return why an index of a type must be searched on the CPU although models are on ``device``; "" for a GPU."""
    if kind == "hnsw":
        return "FAISS has no hnsw for GPUs"
    if not hasattr(faiss, "StandardGpuResources"):
        return "the installed FAISS is for CPUs (the extra faiss; the extra gpu brings one for GPUs)"
    if faiss.get_num_gpus() == 0:
        return "FAISS finds no GPU"
    if kind == "pq" and not code_bytes(width):
        return f"FAISS has no pq for GPUs with vectors of {width} numbers"
    return why_not_on_card(number(device))


def code_bytes(width: int) -> int:
    """Return the bytes of a passage's code of pq on a GPU; 0 where FAISS supports none that is fine enough."""
    finest, coarsest = _DIMENSIONS_PER_CODE_BYTE
    fitting = [code for code in _CODE_BYTES if width % code == 0 and finest <= width // code <= coarsest]
    return max(fitting, default=0)


@cache
def why_not_on_card(card: int) -> str:
    """Search on a card in a process of its own, once; return what fails there, "" for nothing.

    FAISS ends the process where it has no code for the card ("no kernel image"), so this process must not try.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", _TRIAL, str(card)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TRIAL_SECONDS)
    except subprocess.TimeoutExpired:
        return f"a trial of FAISS on the card took longer than {_TRIAL_SECONDS} s"
    if done.returncode == 0:
        return ""
    said = done.stderr.split("\n")
    reason = next((line.strip() for line in reversed(said) if line.strip()), f"exit code {done.returncode}")
    return f"a trial of FAISS on the card failed: {reason}"


def number(device: torch.device) -> int:
    """Return the number of the card that ``device`` means in this process."""
    return torch.cuda.current_device() if str(device) == "cuda" else device.index


class GpuIndex:
    """A FAISS index on a card, with the calls of one on the CPU.

    Each has resources of its own, which FAISS lets one thread use at a time; so threads take turns here, and an index
    can go while another one is searched.
    """

    def __init__(self, faiss: Any, empty: Any, device: torch.device) -> None:
        """Copy an index to the card before it is trained; RuntimeError where FAISS cannot."""
        torch.cuda.empty_cache()  # what torch holds and does not use, FAISS cannot take
        self._lock = threading.Lock()
        self._resources = faiss.StandardGpuResources()
        self._resources.setTempMemory(_TEMPORARY_BYTES)
        options = faiss.GpuClonerOptions()
        options.useFloat16 = hasattr(empty, "pq") and empty.pq.M > _FP32_CODE_BYTES
        self._index = faiss.index_cpu_to_gpu(self._resources, number(device), empty, options)
        self.cp = self._index.cp  # how its lists are trained

    def train(self, rows: np.ndarray) -> None:
        with self._lock:
            self._index.train(rows)

    def add(self, rows: np.ndarray) -> None:
        with self._lock:
            self._index.add(rows)

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        with self._lock:
            found: tuple[np.ndarray, np.ndarray] = self._index.search(queries, k)
        return found

    @property
    def nprobe(self) -> int:
        """Lists that a query looks at."""
        lists: int = self._index.nprobe
        return lists

    @nprobe.setter
    def nprobe(self, lists: int) -> None:
        with self._lock:
            self._index.nprobe = lists
