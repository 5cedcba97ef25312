"""What several stages do the same way."""

from __future__ import annotations

import ctypes
import json
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from realmops import artifacts
from realmops.bert import resolve_device, resolve_precision
from realmops.config import Run
from realmops.corpus.answers import MATCH_SECONDS, expression
from realmops.corpus.questions import Question
from realmops.corpus.snapshot import Snapshot
from realmops.corpus.spans import Spans
from realmops.evaluate.report import read_journal, series_of
from realmops.index.approximate import QUERIES, Approximate, Recipe, passage_index
from realmops.index.embed import document_sequences, embed, query_sequences, text_queries
from realmops.index.mips import Exact, PassageIndex
from realmops.model.retriever import Retriever, Tower
from realmops.stages import Job
from realmops.train.loop import Context
from realmops.train.parallel import team

T = TypeVar("T")
INDEX = "index.safetensors"
RECIPE = "index.json"
_KIND = "checkpoint"
_KEPT = 2
_ROWS = 1 << 16
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)


@dataclass(frozen=True)
class FolderCheckpoints:
    """The newest two states of a training loop that works alone, each a folder with digests."""

    folder: Path

    def restore(self) -> dict[str, bytes] | None:
        """The newest state whose digests are right; a damaged one is stepped over."""
        for path in sorted(self.folder.glob("step-*"), reverse=True):
            try:
                names = artifacts.read_manifest(path, _KIND)["files"]
            except ValueError:
                continue
            return {name: (path / name).read_bytes() for name in names}
        return None

    def save(self, step: int, files: Mapping[str, bytes]) -> None:
        """Commit a state; older ones than the last two go."""
        with artifacts.atomic_folder(self.folder / f"step-{step:08d}") as stage:
            for name, content in files.items():
                (stage / name).write_bytes(content)
            artifacts.write_manifest(stage, _KIND, step=step)
        for old in sorted(self.folder.glob("step-*"))[:-_KEPT]:
            shutil.rmtree(old)


def keep_freed_memory() -> None:
    """Let glibc keep what a step frees for the next: fresh pages for every tensor cost more than its use."""
    with suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, 32 << 20)  # larger tensors go back at once, or memory would grow without end
        libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def prepare(run: Run) -> tuple[torch.device, torch.dtype]:
    """Set threads and give the device and the precision of a stage."""
    keep_freed_memory()
    torch.set_num_threads(run.threads)
    device = resolve_device(run.device)
    return device, resolve_precision(run.precision, device)


def context(job: Job, stream: str, steps: int, label: str, **journal: Any) -> Context:
    """The surroundings of one training loop, with checkpoints in the stage's work folder and a progress bar."""
    run: Run = job.sections["run"]
    device, dtype = prepare(run)
    checkpoints = FolderCheckpoints(job.work / stream)
    return Context(
        stream,
        run.seed,
        device,
        dtype,
        checkpoints,
        job.journal,
        job.report.progress(label, steps),
        team=team(),
        **journal,
    )


def open_snapshot(job: Job, name: str = "corpus") -> Snapshot:
    """The snapshot of the corpus or of the warm-up text."""
    return Snapshot.open(job.inputs["snapshot"] / name, verify=False)  # the stage's manifest was checked whole


def open_spans(job: Job, snapshot: Snapshot, name: str = "corpus") -> Spans:
    """The salient spans of a snapshot."""
    spans = Spans.open(job.inputs["tag"] / name, verify=False, corpus_hash=snapshot.corpus_hash)
    if spans.vocabulary_hash != snapshot.vocabulary_hash:
        raise ValueError(
            f"{spans.folder}: made with the vocabulary {spans.vocabulary_hash[:12]}, the snapshot has "
            f"{snapshot.vocabulary_hash[:12]}; run the tag stage again"
        )
    return spans


def embed_corpus(
    retriever: Retriever, snapshot: Snapshot, dtype: torch.dtype, progress: Callable[[int], None] | None = None
) -> Tensor:
    """Embeddings P x E of all passages."""
    nothing = torch.empty(0, retriever.document.width)
    return embed_changed(retriever, snapshot, dtype, np.full(len(snapshot), -1), nothing, progress)


def embed_changed(
    retriever: Retriever,
    snapshot: Snapshot,
    dtype: torch.dtype,
    row_P: np.ndarray,
    earlier: Tensor,
    progress: Callable[[int], None] | None = None,
) -> Tensor:
    """Embeddings P x E of all passages, where ``row_P`` >= 0 taken from that row of an earlier index of this model.

    The wordpieces of some new passages at a time are in memory.
    """
    new, old = np.flatnonzero(row_P < 0), np.flatnonzero(row_P >= 0)
    embedding_PE = torch.empty(len(snapshot), earlier.shape[1])
    embedding_PE[old] = earlier[row_P[old]]
    for first in range(0, len(new), _ROWS):
        rows = new[first : first + _ROWS].tolist()
        embedding_PE[rows] = embed(retriever.document, document_sequences(snapshot, rows), dtype, progress)
    return embedding_PE


def index_header(passages: int, width: int) -> bytes:
    """What comes before embeddings P x E (fp32) in a safetensors file."""
    entry = {"dtype": "F32", "shape": [passages, width], "data_offsets": [0, passages * width * 4]}
    header = json.dumps({"embeddings": entry}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def save_index(path: Path, embedding_PE: Tensor) -> None:
    """Write embeddings P x E (fp32) as safetensors, some rows at a time: 13 million need no memory of their own."""
    with open(path, "xb") as file:
        file.write(index_header(*embedding_PE.shape))
        for rows_RE in torch.split(embedding_PE, _ROWS):
            file.write(rows_RE.detach().float().cpu().contiguous().numpy().data)


def embeddings_in(content: bytes) -> Tensor:
    """The embeddings P x E (fp32) in the bytes of such a file, whose memory they share: only to be read.

    An index of the exchange is taken so and not memory-mapped: what its digest was compared with is what is used, and
    where a mapped file stays when it is deleted on a local disk, on NFS it is gone, and the process with it (SIGBUS).
    """
    start = 8 + int.from_bytes(content[:8], "little")
    shape = json.loads(content[8:start])["embeddings"]["shape"]
    with warnings.catch_warnings(action="ignore"):  # that the bytes cannot be written
        return torch.frombuffer(content, dtype=torch.float32, offset=start).view(shape)


def load_index(folder: Path, snapshot: Snapshot) -> Tensor:
    """The embeddings P x E of a folder, memory-mapped; ValueError when they are of other passages."""
    with safe_open(folder / INDEX, "pt") as file:
        embedding_PE: Tensor = file.get_tensor("embeddings")
    if len(embedding_PE) != len(snapshot):
        raise ValueError(
            f"{folder / INDEX} has {len(embedding_PE)} embeddings, {snapshot.folder} {len(snapshot)} passages; an "
            "imported index wants the passages that it was made from, in their order: run the stage snapshot on them "
            "with snapshot.whole_documents=true"
        )
    return embedding_PE


def passage_embeddings(folder: Path, retriever: Retriever, snapshot: Snapshot, dtype: torch.dtype) -> Tensor:
    """Embeddings P x E of all passages: those imported with the model in ``folder``, else made now."""
    if (folder / INDEX).is_file():
        return load_index(folder, snapshot)
    return embed_corpus(retriever, snapshot, dtype)


def searchable(job: Job, embedding_PE: Tensor, tower: Tower, queries: Sequence[np.ndarray], k: int) -> PassageIndex:
    """An index over embeddings as the section ``index`` wants it, its recall of the top k measured with the queries."""
    run: Run = job.sections["run"]
    device, dtype = prepare(run)

    def embedded() -> Tensor:
        return embed(tower, query_sequences(queries), dtype)

    seed = artifacts.seed_for(run.seed, "index")
    return passage_index(embedding_PE, job.sections["index"], device, seed, embedded, k)


def save_passages(folder: Path, passages: PassageIndex) -> None:
    """Write the embeddings and, where the search is approximate, how it was built and what recall it has."""
    save_index(folder / INDEX, passages.embedding_PE)
    if isinstance(passages, Approximate):
        artifacts.write_json(folder / RECIPE, asdict(passages.recipe))


def load_passages(folder: Path, snapshot: Snapshot, device: torch.device) -> PassageIndex:
    """What :func:`save_passages` wrote; an approximate index is built again from the embeddings."""
    embedding_PE = load_index(folder, snapshot)
    if (folder / RECIPE).is_file():
        return Approximate(embedding_PE, Recipe(**artifacts.read_json(folder / RECIPE)), device)
    return Exact(embedding_PE.to(device))


def sampled(items: Sequence[T], seed: int) -> list[T]:
    """Those that the recall of an index is measured with."""
    rng = np.random.default_rng(artifacts.seed_for(seed, "index", "queries"))
    return [items[row] for row in rng.permutation(len(items))[:QUERIES]]


def question_queries(snapshot: Snapshot, questions: Sequence[Question], limit: int) -> list[np.ndarray]:
    """[CLS] question [SEP] of each question, tokenised here and once."""
    return text_queries(snapshot, [q.question for q in questions], limit)


def rank(
    retriever: Retriever, passages: PassageIndex, queries: Sequence[np.ndarray], k: int, dtype: torch.dtype
) -> np.ndarray:
    """Ids of the top k passages of each query, Q x k."""
    query = embed(retriever.query, query_sequences(queries), dtype)
    ids: np.ndarray = passages.search(query, k)[1].cpu().numpy()
    return ids


def warn_of_timeouts(job: Job, questions: Sequence[Question]) -> dict[str, int]:
    """Name the questions whose regular expressions took too long; their number as a metric, if there are any."""
    expressions = [question for question in questions if question.is_regex]
    slow = [q.id for q in expressions if any(expression(answer).timed_out for answer in q.answers)]
    if slow:
        job.report.warn(
            f"the regular expressions of {len(slow)} questions took longer than {MATCH_SECONDS:g} s for one text and "
            f"were given up, which counts as no match: {', '.join(slow)}; simplify them"
        )
    return {"regex_timeouts": len(slow)} if expressions else {}


class JournalValues:
    """What the stage logged, read once: a metric's values in the order of the steps."""

    def __init__(self, job: Job) -> None:
        self.stage, self.records = job.journal.stage, read_journal(job.journal.path)

    def of(self, metric: str) -> Sequence[float]:
        """All values of one metric."""
        return series_of(self.records, self.stage, metric).values

    def mean(self, metric: str, last: int | None = None) -> float:
        """Their mean, or that of the last ones; NaN where there is none."""
        values = self.of(metric)[-last if last else None :]
        return sum(values) / len(values) if values else float("nan")
