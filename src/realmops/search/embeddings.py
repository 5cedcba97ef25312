"""Compute, write and read the embeddings of a corpus, one safetensors file."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as save_tensors
from torch import Tensor

from realmops import artifacts
from realmops.corpus.snapshot_reader import Snapshot
from realmops.memory_map import Content, allocate_matrix, map_file, release_pages, view_fp32
from realmops.model.retriever import Retriever
from realmops.model.retriever_files import retriever_from_files
from realmops.search.approximate import TYPES, Recipe, unwrap_approximate
from realmops.search.embed import SHARD_ROWS, MakeShard, Progress, make_document_embedder, no_progress
from realmops.search.exact import PassageIndex, exact_index, multi_vector_index

INDEX = "index.safetensors"
RECIPE = "index.json"
CORPUS_HASH, TOWER = "corpus_hash", "passage_tower"  # keys in the metadata of ``INDEX``
EMBEDDINGS = "embeddings.safetensors"  # of one shard, or of the whole corpus
_ROWS = 1 << 16  # copied or written at a time


def embed_corpus(
    retriever: Retriever, snapshot: Snapshot, dtype: torch.dtype, progress: Progress = no_progress
) -> Tensor:
    """Embed all passages, P x E; the same bytes as the shards have."""
    empty = torch.empty(0, retriever.width)
    return embed_changed(retriever, snapshot, dtype, np.full(len(snapshot), -1), empty, progress)


def embed_changed(
    retriever: Retriever, snapshot: Snapshot, dtype: torch.dtype, row_P: np.ndarray, earlier: Tensor,
    progress: Progress = no_progress,
) -> Tensor:  # fmt: skip
    """Embed the passages with ``row_P`` < 0; copy the others from those rows of an earlier index of the same model.

    Returns embeddings P x E. Wordpieces are built for one shard of new passages at a time.
    """
    new, old = np.flatnonzero(row_P < 0), np.flatnonzero(row_P >= 0)
    embedding_PE = allocate_matrix(len(snapshot), earlier.shape[1])
    for first in range(0, len(old), _ROWS):
        rows = old[first : first + _ROWS]
        embedding_PE[rows] = earlier[row_P[rows]]
        release_pages(earlier)
        release_pages(embedding_PE)
    make = make_document_embedder(retriever, snapshot, dtype, len(new))
    for first in range(0, len(new), SHARD_ROWS):
        rows = new[first : first + SHARD_ROWS].tolist()
        embedding_PE[rows] = make(rows, progress)
    return embedding_PE


def make_shard_embedder(
    snapshot: Snapshot, model: Mapping[str, bytes], device: torch.device, dtype: torch.dtype
) -> MakeShard:
    """Return a function that embeds a shard; ``model`` has the files of ``retriever_files.retriever_files``."""
    retriever = retriever_from_files(model).to(device)
    embedded = make_document_embedder(retriever, snapshot, dtype, len(snapshot))

    def make(first: int, end: int, progress: Progress) -> dict[str, bytes]:
        return {EMBEDDINGS: save_tensors({"embeddings": embedded(range(first, end), progress)})}

    return make


def join_shards(parts: Iterable[dict[str, bytes]], passages: int, width: int) -> Tensor:
    """Concatenate the embeddings of all shards in order, P x E; each shard is freed once it is copied."""
    embedding_PE, first = allocate_matrix(passages, width), 0
    for part in parts:
        rows_RE = view_embeddings(part.pop(EMBEDDINGS))
        embedding_PE[first : first + len(rows_RE)] = rows_RE
        first += len(rows_RE)
        release_pages(embedding_PE)
    assert first == passages
    return embedding_PE


def index_header(passages: int, width: int, **names: str) -> bytes:
    """Return the header of a safetensors file of embeddings P x E (fp32).

    ``names`` are what the embeddings belong to, by ``CORPUS_HASH`` and ``TOWER``, where they are known.
    """
    entry = {"dtype": "F32", "shape": [passages, width], "data_offsets": [0, passages * width * 4]}
    metadata = {"__metadata__": known} if (known := {name: value for name, value in names.items() if value}) else {}
    header = json.dumps({**metadata, "embeddings": entry}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def save_index(path: Path, embedding_PE: Tensor, corpus_hash: str, tower: str = "") -> None:
    """Write embeddings P x E as fp32 safetensors, in parts, so that 13 million rows need no extra memory.

    ``corpus_hash`` is that of the snapshot, ``tower`` the ``passage_tower_digest`` of the retriever; both are empty for
    a published index of unknown passages.
    """
    with open(path, "xb") as file:
        file.write(index_header(len(embedding_PE), embedding_PE.shape[1], **{CORPUS_HASH: corpus_hash, TOWER: tower}))
        for rows_RE in torch.split(embedding_PE, _ROWS):
            file.write(rows_RE.detach().float().cpu().contiguous().numpy().data)
            release_pages(embedding_PE)


def view_embeddings(content: Content) -> Tensor:
    """Return a read-only view of the embeddings P x E (fp32) in the content of a safetensors file.

    A file on the exchange must be copied, into memory or to a local disk, before its digest is compared and it is
    mapped: only then is the compared content the content in use. A map of a deleted file stays valid on a local disk;
    on NFS an access kills the process (SIGBUS).
    """
    header, start = _header(content)
    return view_fp32(content, start).view(header["embeddings"]["shape"])


def _header(content: Content) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, and the offset of its data."""
    start = 8 + int.from_bytes(content[:8], "little")
    header: dict[str, Any] = json.loads(content[8:start])
    return header, start


def load_index(folder: Path, snapshot: Snapshot) -> Tensor:
    """Map the embeddings P x E of a folder; ValueError if they belong to other passages or another order.

    The index of a published checkpoint imported without its passages names no corpus: only their number is compared.
    """
    with open(folder / INDEX, "rb") as file:
        content = map_file(file)
    embedding_PE, corpus_hash = view_embeddings(content), _header(content)[0].get("__metadata__", {}).get(CORPUS_HASH)
    if corpus_hash is not None and corpus_hash != snapshot.corpus_hash:
        raise ValueError(
            f"{folder / INDEX} has the embeddings of corpus {corpus_hash[:12]}, {snapshot.folder} is corpus "
            f"{snapshot.corpus_hash[:12]}; run 'realmops run finetune' again, or for an imported index 'realmops run "
            "snapshot' on the passages imported with it, with snapshot.whole_documents=true"
        )
    if len(embedding_PE) != len(snapshot):
        raise ValueError(
            f"{folder / INDEX} has {len(embedding_PE)} embeddings, {snapshot.folder} has {len(snapshot)} passages; an "
            "imported index needs its original passages in their order: run 'realmops run snapshot' on them with "
            "snapshot.whole_documents=true"
        )
    return embedding_PE


def indexed_tower(folder: Path) -> str:
    """Return the ``passage_tower_digest`` that the index of a folder names; "" if there is none or it names none."""
    if not (folder / INDEX).is_file():
        return ""
    with open(folder / INDEX, "rb") as file:
        return str(_header(map_file(file))[0].get("__metadata__", {}).get(TOWER, ""))


def save_passages(folder: Path, passages: PassageIndex, corpus_hash: str, tower: str) -> None:
    """Write the embeddings of an index as :func:`save_index`, and the recipe if it is approximate."""
    save_index(folder / INDEX, passages.vectors(slice(None)), corpus_hash, tower)
    if (index := unwrap_approximate(passages)) is not None:
        artifacts.write_json(folder / RECIPE, asdict(index.recipe))


def load_passages(folder: Path, snapshot: Snapshot, device: torch.device, vectors: int) -> PassageIndex:
    """Load the index of :func:`save_passages` with ``vectors`` vectors per passage; an approximate one is rebuilt."""
    embedding_PE = load_index(folder, snapshot)
    if (folder / RECIPE).is_file():
        recipe = Recipe(**artifacts.read_json(folder / RECIPE))
        if recipe.type not in TYPES:
            raise ValueError(f"{folder / RECIPE}: unknown type {recipe.type!r}; this version has {', '.join(TYPES)}")
        return multi_vector_index(embedding_PE, vectors, lambda rows: TYPES[recipe.type](rows, recipe, device))
    return exact_index(embedding_PE.to(device), vectors)
