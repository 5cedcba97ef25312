"""Sharded work over all passages, shared with index builders: tagging and embedding."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from realmops.corpus.phrases import Entity
from realmops.corpus.snapshot_reader import Snapshot
from realmops.devices import device_and_dtype
from realmops.model.retriever import Retriever
from realmops.model.retriever_files import TextFormat, retriever_files
from realmops.options import RunOptions
from realmops.process import configure_malloc
from realmops.refresh.shards import ShardSettings, Work, compute_in_shards
from realmops.search.embeddings import join_shards, make_shard_embedder
from realmops.stages import Job
from realmops.train.tagger import Tagger, make_span_finder, read_spans, tagger_files

EMBEDDING, TAGGING = "embedding", "tagging"
WORKS: Mapping[str, Work] = {EMBEDDING: make_shard_embedder, TAGGING: make_span_finder}


def tag_in_shards(job: Job, tagger: Tagger | None, snapshot: Snapshot) -> Iterator[list[Entity]]:
    """Yield the entities of each passage in order."""
    model = tagger_files(tagger)
    for files in _run_shards(job, TAGGING, snapshot, tagger, model, f"tags of {snapshot.folder.name}"):
        yield from read_spans(files)


def embed_in_shards(job: Job, retriever: Retriever, snapshot: Snapshot) -> Tensor:
    """Return the embeddings of all passages, P x E."""
    configure_malloc()  # already set if a training ran before
    files = retriever_files(retriever, TextFormat.of(snapshot))
    parts = _run_shards(job, EMBEDDING, snapshot, retriever, files, "embeddings")
    return join_shards(parts, len(snapshot), retriever.width)


def _run_shards(
    job: Job, name: str, snapshot: Snapshot, model: nn.Module | None, files: Mapping[str, bytes], label: str
) -> Iterator[dict[str, bytes]]:
    run = job.section(RunOptions)
    place = ShardSettings(
        job.work / "shards", job.offer, *device_and_dtype(run, model), torch.get_num_threads(), job.report.log
    )
    return compute_in_shards(place, name, WORKS[name], snapshot, files, job.report.progress(label, len(snapshot)))
