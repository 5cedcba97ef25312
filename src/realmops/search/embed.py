"""Embed passages and queries, for the index and for search.

Shape suffixes: P passages, Q queries, E embedding width.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from threading import Event, Lock, Semaphore
from typing import Any

import numpy as np
import torch
from torch import Tensor

from realmops.corpus.snapshot_reader import Snapshot
from realmops.corpus.special_tokens import prompt_separator
from realmops.devices import autocast, eval_mode, to_device
from realmops.model.packed import PackedBatch, batch_by_length
from realmops.model.retriever import Embedder, Retriever, Tower
from realmops.model.sequences import SpecialTokens, join_text
from realmops.search.openvino import OpenVinoGraph, Sequences, compile_graph

SHARD_ROWS = 4096  # passages per shard
_MIN_BATCHES_PER_THREAD = 2
_STARTING = Lock()  # held while threads start: a new thread takes over the number of threads that was set last

Progress = Callable[[int], None]
"""Callback with the number of units done since its last call."""

MakeShard = Callable[[int, int, Progress], dict[str, bytes]]
"""(first, end, progress) -> files of the shard of passages [first, end), by name; deterministic."""


def no_progress(count: int) -> None:
    pass


def embed(
    tower: Tower, sequences: Sequences, dtype: torch.dtype, progress: Progress = no_progress, vectors: int = 1,
    graph: OpenVinoGraph | None = None,
) -> Tensor:  # fmt: skip
    """Embed sequences with a tower, or with its OpenVINO ``graph``: N x M E with M vectors each, fp32, on the CPU.

    Equal calls give equal bytes on one machine (``packed.batch_by_length``).
    """
    embedding_NE, place_N = _embed_batches(tower, sequences, dtype, progress, vectors, graph)
    return embedding_NE.cpu()[place_N]


def embed_passages(
    tower: Tower, sequences: Sequences, dtype: torch.dtype, progress: Progress = no_progress, vectors: int = 1
) -> Tensor:
    """Embed passages, N x M E; on a GPU fp16 replaces bf16 unless a result overflows."""
    with eval_mode(tower):
        half = None
        if dtype == torch.bfloat16 and tower.device.type == "cuda" and isinstance(tower, Embedder):
            half = tower.encoder.in_fp16()
        if isinstance(tower, Embedder) and half is not None:
            embedding_NE = embed(tower.with_encoder(half), sequences, torch.float32, progress, vectors)
            if bool(embedding_NE.isfinite().all()):
                return embedding_NE
            progress = no_progress  # already reported
        return embed(tower, sequences, dtype, progress, vectors)


def embed_on_device(tower: Tower, sequences: Sequences, dtype: torch.dtype) -> Tensor:
    """Embed sequences and leave the result on the tower's device, without synchronising with a GPU."""
    embedding_NE, place_N = _embed_batches(tower, sequences, dtype, no_progress)
    return embedding_NE[to_device(tower.device, place_N)[0]]


def _embed_batches(
    tower: Tower, sequences: Sequences, dtype: torch.dtype, progress: Progress, vectors: int = 1,
    graph: OpenVinoGraph | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return embeddings in batch order, and each sequence's row among them."""
    out = torch.empty(len(sequences), vectors * tower.width, device=tower.device)
    row_N = torch.empty(len(sequences), dtype=torch.int64)
    batches = list(batch_by_length([len(tokens) for tokens, _ in sequences], tower.device))
    pending, lock = deque(zip(batches, accumulate(map(len, batches), initial=0), strict=False)), Lock()

    def work() -> None:
        # One context for all batches: autocast then converts the weights once.
        with torch.no_grad(), autocast(tower.device, dtype):
            while True:
                try:
                    rows, first = pending.popleft()
                except IndexError:
                    return
                batch = [sequences[i] for i in rows]
                embedding_BE = (
                    graph(batch) if graph is not None else tower(PackedBatch(*zip(*batch, strict=True)), vectors)
                )
                out[first : first + len(rows)] = embedding_BE.float()
                row_N[rows] = torch.arange(first, first + len(rows))
                with lock:
                    progress(len(rows))

    with _STARTING:
        threads = torch.get_num_threads() if tower.device.type == "cpu" else 1
    with eval_mode(tower):
        if threads > 1 and len(batches) >= _MIN_BATCHES_PER_THREAD * threads:
            _run_in_threads(work, threads, pending)
        else:
            work()
    return out, row_N


def _run_in_threads(work: Callable[[], None], threads: int, pending: deque[Any]) -> None:
    """Process the pending batches in ``threads`` threads, each of which computes on one core.

    Batches are small: intra-op parallelism leaves a third of two cores idle and changes last digits.
    """
    started, may_work = Semaphore(0), Event()

    def run() -> None:
        torch.get_num_threads()  # torch initialises a thread lazily, and would then overwrite the next line
        torch.set_num_threads(1)
        started.release()
        may_work.wait()  # until new threads get the process's number of threads again
        work()

    try:
        with ThreadPoolExecutor(threads) as pool:
            try:
                with _STARTING:
                    futures = [pool.submit(run) for _ in range(threads)]
                    for _ in futures:
                        started.acquire()
                    torch.set_num_threads(threads)
                may_work.set()
                for future in futures:
                    future.result()
            finally:
                pending.clear()  # an error in any thread stops all
                may_work.set()
    finally:
        torch.set_num_threads(threads)


def document_sequences(snapshot: Snapshot, rows: Sequence[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Build ``join_document`` sequences of passages, truncated to the block length, vectorised so that no GPU waits."""
    if not len(rows):
        return []
    special, row_N = SpecialTokens.of(snapshot.tokenizer), np.asarray(rows, dtype=np.int64)
    prefix = [*special.begin, *special.document]
    capacity = max(0, snapshot.block_wordpieces - len(prefix) - 2)
    title_N = np.minimum(snapshot.title_offsets[row_N + 1] - snapshot.title_offsets[row_N], capacity)
    body_N = np.minimum(snapshot.token_offsets[row_N + 1] - snapshot.token_offsets[row_N], capacity - title_N)
    end_N = np.cumsum(len(prefix) + title_N + body_N + 2)
    body_at_N = end_N - 1 - body_N
    title_at_N = body_at_N - 1 - title_N
    token_T = np.full(end_N[-1], special.sep, dtype=np.int64)
    for offset, token in enumerate(prefix, start=-len(prefix)):
        token_T[title_at_N + offset] = token
    for flat, source_N, target_N, count_N in (
        (snapshot.title_flat, snapshot.title_offsets[row_N], title_at_N, title_N),
        (snapshot.tokens, snapshot.token_offsets[row_N], body_at_N, body_N),
    ):
        step_T = np.arange(count_N.sum()) - np.repeat(np.cumsum(count_N) - count_N, count_N)
        token_T[np.repeat(target_N, count_N) + step_T] = flat[np.repeat(source_N, count_N) + step_T]
    segment_T = np.repeat(np.tile([0, 1], len(row_N)), np.stack([len(prefix) + title_N + 1, body_N + 1], 1).ravel())
    return list(zip(*(np.split(flat, end_N[:-1]) for flat in (token_T, segment_T)), strict=True))


def text_queries(snapshot: Snapshot, texts: Sequence[str], limit: int, *, documents: bool = False) -> list[np.ndarray]:
    """Tokenize queries or ``documents`` as [CLS] text [SEP] of at most ``limit`` wordpieces."""
    special = SpecialTokens.of(snapshot.tokenizer)
    prompt = special.document if documents else special.query
    blank = prompt_separator(snapshot.tokenizer, prompt)
    encoded = snapshot.tokenizer.encode_batch([blank + text for text in texts], add_special_tokens=False)
    return [join_text(np.array(e.ids, dtype=np.int64), special, limit, prompt) for e in encoded]


def make_document_embedder(
    retriever: Retriever, snapshot: Snapshot, dtype: torch.dtype, passages: int
) -> Callable[[Sequence[int], Progress], Tensor]:
    """Return a function that embeds passages by their rows, N x X; many ``passages`` are embedded by a graph."""
    tower, vectors = retriever.document, retriever.vectors
    graph = compile_graph(tower, vectors, dtype, passages)

    def make(rows: Sequence[int], progress: Progress) -> Tensor:
        sequences = document_sequences(snapshot, rows)
        if graph is None:
            return embed_passages(tower, sequences, dtype, progress, vectors)
        return embed(tower, sequences, dtype, progress, vectors, graph)

    return make


def query_sequences(queries: Sequence[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Pair joined queries with their segments, all 0."""
    return [(tokens, np.zeros(len(tokens), dtype=np.int64)) for tokens in queries]
