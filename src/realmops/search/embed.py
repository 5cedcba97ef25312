"""Passages and queries to embeddings, for the index and for search.

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
from realmops.devices import autocast, evaluating, send, with_packed_linears
from realmops.model.packed import Packed, length_batches
from realmops.model.retriever import Embedder, Retriever, Tower
from realmops.model.sequences import SpecialTokens, join_query, join_text
from realmops.search.openvino import MANY, Graph, graph_of
from realmops.text.special import blank_before

SHARD_ROWS = 4096  # passages of a shard
_BATCHES_OF_A_THREAD = 2
_STARTING = Lock()  # while threads start: a thread that torch does not know yet takes over the number that was set last

Progress = Callable[[int], None]
"""Is told how many more units are done."""

MakeShard = Callable[[int, int, Progress], dict[str, bytes]]
"""(first, end, progress) -> the files of the shard of passages [first, end); the same bytes every time."""

Sequences = Sequence[tuple[np.ndarray, np.ndarray]]
"""Wordpieces and segments of each."""


def no_progress(done: int) -> None:
    """The progress that nobody wants to see."""


def embed(
    tower: Tower, sequences: Sequences, dtype: torch.dtype, progress: Progress = no_progress, vectors: int = 1,
    graph: Graph | None = None,
) -> Tensor:  # fmt: skip
    """Embeddings N x M E (fp32, on the CPU) of sequences, M vectors of each; by the tower, or by a graph of it.

    Equal calls give equal bytes on one machine (``packed.length_batches``).
    """
    embedding_NE, place_N = _embedded(tower, sequences, dtype, progress, vectors, graph)
    return embedding_NE.cpu()[place_N]


def embed_passages(
    tower: Tower, sequences: Sequences, dtype: torch.dtype, progress: Progress = no_progress, vectors: int = 1
) -> Tensor:
    """Return embeddings N x M E of many passages, with faster products than :func:`embed`.

    On a GPU that is fp16 in the place of bf16, unless a number becomes infinite in it.
    """
    with evaluating(tower):
        half = _in_fp16(tower) if dtype == torch.bfloat16 else None
        if half is not None:
            made_NE = embed(half, sequences, torch.float32, progress, vectors)
            if bool(made_NE.isfinite().all()):
                return made_NE
            progress = no_progress  # has been told
        return embed(with_packed_linears(tower, dtype), sequences, dtype, progress, vectors)


def _in_fp16(tower: Tower) -> Tower | None:
    """Return a copy of a tower on a GPU whose encoder computes in fp16, if it can."""
    if tower.device.type != "cuda" or not isinstance(tower, Embedder):
        return None
    encoder = tower.encoder.in_fp16()
    return None if encoder is None else tower.over(encoder)


def embed_there(tower: Tower, sequences: Sequences, dtype: torch.dtype) -> Tensor:
    """The same where the tower is, for a search there: nothing waits for a GPU."""
    embedding_NE, place_N = _embedded(tower, sequences, dtype, no_progress)
    return embedding_NE[send(tower.device, place_N)[0]]


def _embedded(
    tower: Tower, sequences: Sequences, dtype: torch.dtype, progress: Progress, vectors: int = 1,
    graph: Graph | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Embeddings in the order of their batches, and the place of each sequence's there."""
    out = torch.empty(len(sequences), vectors * tower.width, device=tower.device)
    place_N = torch.empty(len(sequences), dtype=torch.int64)
    batches = list(length_batches([len(tokens) for tokens, _ in sequences], tower.device))
    left, lock = deque(zip(batches, accumulate(map(len, batches), initial=0), strict=False)), Lock()

    def work() -> None:
        # Around all batches: weights are copied to these numbers once.
        with torch.no_grad(), autocast(tower.device, dtype):
            while True:
                try:
                    rows, first = left.popleft()
                except IndexError:
                    return
                some = [sequences[i] for i in rows]
                made = graph(some) if graph is not None else tower(Packed(*zip(*some, strict=True)), vectors)
                out[first : first + len(rows)] = made.float()
                place_N[rows] = torch.arange(first, first + len(rows))
                with lock:
                    progress(len(rows))

    with _STARTING:
        threads = torch.get_num_threads() if tower.device.type == "cpu" else 1
    with evaluating(tower):
        if threads > 1 and len(batches) >= _BATCHES_OF_A_THREAD * threads:
            _side_by_side(work, threads, left)
        else:
            work()
    return out, place_N


def _side_by_side(work: Callable[[], None], threads: int, left: deque[Any]) -> None:
    """Take from what is ``left`` in so many threads at once, in which torch computes on one each.

    Batches are small: sharing each among threads leaves a third of two cores unused, and changes last digits.
    """

    started, may_work = Semaphore(0), Event()

    def alone() -> None:
        torch.get_num_threads()  # makes itself known; else the number that was set last replaces this one later
        torch.set_num_threads(1)
        started.release()
        may_work.wait()  # until a new thread gets the number of threads of all again
        work()

    try:
        with ThreadPoolExecutor(threads) as pool:
            try:
                with _STARTING:
                    running = [pool.submit(alone) for _ in range(threads)]
                    for _ in running:
                        started.acquire()
                    torch.set_num_threads(threads)
                may_work.set()
                for done in running:
                    done.result()
            finally:
                left.clear()  # what ends one of them, or this one, ends all
                may_work.set()
    finally:
        torch.set_num_threads(threads)


def document_sequences(snapshot: Snapshot, rows: Sequence[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    """``join_document`` of passages, of at most the snapshot's block length; made together, so that no GPU waits."""
    if not len(rows):
        return []
    special, row_N = SpecialTokens.of(snapshot.tokenizer), np.asarray(rows, dtype=np.int64)
    told = [*special.begin, *special.document]
    room = max(0, snapshot.block_wordpieces - len(told) - 2)
    title_N = np.minimum(snapshot.title_offsets[row_N + 1] - snapshot.title_offsets[row_N], room)
    body_N = np.minimum(snapshot.token_offsets[row_N + 1] - snapshot.token_offsets[row_N], room - title_N)
    end_N = np.cumsum(len(told) + title_N + body_N + 2)
    body_at_N = end_N - 1 - body_N
    title_at_N = body_at_N - 1 - title_N
    token_T = np.full(end_N[-1], special.sep, dtype=np.int64)
    for place, token in enumerate(told, start=-len(told)):
        token_T[title_at_N + place] = token
    for flat, from_N, at_N, count_N in (
        (snapshot.title_flat, snapshot.title_offsets[row_N], title_at_N, title_N),
        (snapshot.tokens, snapshot.token_offsets[row_N], body_at_N, body_N),
    ):
        step_T = np.arange(count_N.sum()) - np.repeat(np.cumsum(count_N) - count_N, count_N)
        token_T[np.repeat(at_N, count_N) + step_T] = flat[np.repeat(from_N, count_N) + step_T]
    segment_T = np.repeat(np.tile([0, 1], len(row_N)), np.stack([len(told) + title_N + 1, body_N + 1], 1).ravel())
    return list(zip(*(np.split(flat, end_N[:-1]) for flat in (token_T, segment_T)), strict=True))


def text_queries(snapshot: Snapshot, texts: Sequence[str], limit: int, *, documents: bool = False) -> list[np.ndarray]:
    """[CLS] text [SEP] of each text, of at most ``limit`` wordpieces; they are queries, or ``documents``."""
    special = SpecialTokens.of(snapshot.tokenizer)
    blank = blank_before(snapshot.tokenizer, special.document if documents else special.query)
    encoded = snapshot.tokenizer.encode_batch([blank + text for text in texts], add_special_tokens=False)
    join = join_text if documents else join_query
    return [join(np.array(e.ids, dtype=np.int64), special, limit) for e in encoded]


def document_embedding(
    retriever: Retriever, snapshot: Snapshot, dtype: torch.dtype, *, many: bool
) -> Callable[[Sequence[int], Progress], Tensor]:
    """What makes embeddings N x X of passages by their rows; with int8 for ``dtype`` in it where they are ``many``."""
    tower, vectors = retriever.document, retriever.vectors
    graph = graph_of(tower, vectors) if many and dtype == torch.int8 else None

    def make(rows: Sequence[int], progress: Progress) -> Tensor:
        sequences = document_sequences(snapshot, rows)
        if graph is None:
            return embed_passages(tower, sequences, dtype, progress, vectors)
        return embed(tower, sequences, dtype, progress, vectors, graph)

    return make


def embed_documents(
    retriever: Retriever, snapshot: Snapshot, rows: Sequence[int], dtype: torch.dtype, progress: Progress = no_progress
) -> Tensor:
    """Embeddings N x X of all passages that are wanted."""
    return document_embedding(retriever, snapshot, dtype, many=len(rows) >= MANY)(rows, progress)


def query_sequences(queries: Sequence[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Joined queries with their segments, which are all 0."""
    return [(tokens, np.zeros(len(tokens), dtype=np.int64)) for tokens in queries]
