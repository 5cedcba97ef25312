"""``realmops export``: retriever, embeddings and rankings in formats of other programs, or the reader.

Shape suffixes: R passages of a row group, M vectors of a passage, E embedding width.
"""

import json
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from realmops import __version__, artifacts
from realmops.answering.confidence import FILE as CONFIDENCE
from realmops.answering.extractive import ExtractiveQa
from realmops.answering.opened_model import OpenedModel
from realmops.answering.openqa import OpenQa
from realmops.commands.card import CARD, Publication, card, limitations, measured_metrics, reader_card
from realmops.commands.hub_upload import HubRepository
from realmops.corpus.snapshot_reader import ROWS_PER_BATCH, TEXT_COLUMNS
from realmops.evaluate.search_run import export_trec
from realmops.hub import TOKENIZER
from realmops.memory_map import release_pages
from realmops.model.reader_files import READER_FOLDER
from realmops.model.retriever import Embedder, Retriever
from realmops.model.retriever_files import (
    RETRIEVER_FOLDER,
    ROUTES,
    joining_tokenizer,
    load_retriever,
    model_input_names,
    passage_tower_digest,
    similarity,
)
from realmops.search.embeddings import indexed_tower
from realmops.search.exact import PassageIndex

KIND = "export"
PASSAGES = "passages.parquet"
INPUTS = ("input_ids", "attention_mask", "token_type_ids")  # of an ONNX file; the last if the encoder has segments
OUTPUT = "sentence_embedding"
_ONNX_PACKAGES = ("sentence_transformers", "onnxscript")


def export(
    folder: Path, format: str, open_model: Callable[[], OpenedModel], root: Path | None, push: str | None = None
) -> Iterator[str]:
    """Write a model's retriever, embeddings or reader with a model card; yield a description and notes.

    ``root`` is None for a model from the registry; ``push`` is OWNER/NAME of a model repository on the hub.
    """
    artifacts.check_replaceable(folder, KIND)
    if push and format in ("parquet", "trec"):
        raise ValueError(
            f"--push uploads models, and --format {format} has texts of your own; see 'hf upload' for a private dataset"
        )
    repository = HubRepository(push, KIND) if push else None
    if format == "onnx" and not all(map(find_spec, _ONNX_PACKAGES)):
        raise ValueError(
            "--format onnx: sentence-transformers or onnxscript is not installed; pip install 'realmops[export]'"
        )
    if format == "trec":
        if root is None:
            raise ValueError("--format trec: a registered model has no results; name its run with --root")
        yield export_trec(folder, root, KIND)
        return
    opened = open_model()
    metrics = {} if root is None else measured_metrics(root)
    publication = Publication(root, metrics, push, repository.inspect() if repository else None)
    yield from _write(folder, format, opened, publication)
    if root is not None and not publication.evaluated:
        yield (
            "The card has no figures of 'evaluate': it has not run, or model, corpus or question files have changed or "
            "moved since"
        )
    if repository:
        yield f"{repository.upload(folder)}: uploaded to {push}, which is private if it is new"


def _write(folder: Path, format: str, opened: OpenedModel, publication: Publication) -> Iterator[str]:
    if format == "reader":
        yield _export_reader(folder, opened, publication)
        return
    model = opened.model
    if model.passages is None:
        raise ValueError(
            f"no embeddings to export: finetune.retriever is {model.options.retriever}; fine-tune with pretrain or ict"
        )
    # Loaded from disk: the weights of the opened model may be rounded to bf16.
    retriever = load_retriever(opened.folder, model.snapshot.vocabulary_hash)
    source = opened.folder / RETRIEVER_FOLDER
    is_indexed = format == "parquet" or indexed_tower(opened.folder) == passage_tower_digest(source)
    notes = limitations(format, opened, is_indexed=is_indexed, has_reader=isinstance(model, OpenQa))
    # Several vectors are approximated by one, and another tower has another recall.
    measured = None if retriever.vectors > 1 or not is_indexed else "dense_" if model.hybrid else ""
    text = card(format, opened, retriever, notes, publication, measured)
    with artifacts.atomic_folder(folder, KIND) as out:
        if format == "parquet":
            _write_passages(out / PASSAGES, opened, model.passages)
        elif format == "onnx":
            _write_onnx(out, source, retriever, model.snapshot.tokenizer)
        else:
            shutil.copytree(source, out, dirs_exist_ok=True)
        (out / CARD).write_text(text, encoding="utf-8")
        artifacts.write_manifest(out, KIND, format=format, realmops=__version__, **opened.about)
    count = f" of {len(model.snapshot)} passages" if format == "parquet" else ""
    yield f"{folder}: {format}{count}, {retriever.query.description}"
    yield from notes


def _export_reader(folder: Path, opened: OpenedModel, publication: Publication) -> str:
    model = opened.model
    if not isinstance(model, ExtractiveQa):
        raise ValueError(
            f"no reader to export: {opened.folder} has none in transformers' format; make one by 'realmops reader'"
        )
    write_reader(folder, opened, reader_card(opened, publication))
    return f"{folder}: the reader of {opened.version}; use it in another run with reader.init"


def write_reader(folder: Path, opened: OpenedModel, text: str, kind: str = KIND) -> None:
    with artifacts.atomic_folder(folder, kind) as out:
        shutil.copytree(opened.folder / READER_FOLDER, out, dirs_exist_ok=True)
        if (opened.folder / CONFIDENCE).is_file():
            shutil.copyfile(opened.folder / CONFIDENCE, out / CONFIDENCE)
        (out / CARD).write_text(text, encoding="utf-8")
        artifacts.write_manifest(out, kind, format="reader", realmops=__version__, **opened.about)


def _write_passages(path: Path, opened: OpenedModel, passages: PassageIndex) -> None:
    """Write every passage with its embedding, with one row group in memory at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    snapshot, retriever = opened.model.snapshot, opened.model.retriever
    vectors, width = retriever.vectors, retriever.document.width
    types = dict.fromkeys(TEXT_COLUMNS, pa.string()) | {"start": pa.int64(), "end": pa.int64(), "uri": pa.string()}
    types |= {"page": pa.int32(), "vector": pa.int32(), "embedding": pa.list_(pa.float32(), width)}
    about = opened.about | {"scale": retriever.scale, "similarity": similarity(retriever), "realmops": __version__}
    schema = pa.schema(types, {"realmops": json.dumps(about, sort_keys=True)})
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for first in range(0, len(snapshot), ROWS_PER_BATCH):
            rows = np.arange(first, min(first + ROWS_PER_BATCH, len(snapshot)))
            columns = [np.array(column, object) for column in zip(*snapshot.rows(rows, *TEXT_COLUMNS), strict=True)]
            start = snapshot.places[rows, 1]
            columns += [start, start + [len(text) for text in columns[3]]]
            columns += [np.array([snapshot.uri(row) for row in rows.tolist()], object)]
            columns += [np.array([snapshot.page(row, 0) for row in rows.tolist()], object)]
            repeated = [pa.array(np.repeat(c, vectors), kind) for c, kind in zip(columns, types.values(), strict=False)]
            part_RX = passages.vectors(slice(first, first + len(rows)))
            flat = pa.array(part_RX.float().cpu().numpy().reshape(-1))
            number = pa.array(np.tile(np.arange(vectors, dtype=np.int32), len(rows)))
            embedding = pa.FixedSizeListArray.from_arrays(flat, width)
            writer.write_table(pa.Table.from_arrays([*repeated, number, embedding], schema=schema))
            release_pages(part_RX)


def _write_onnx(out: Path, source: Path, retriever: Retriever, tokenizer: Tokenizer) -> None:
    from sentence_transformers import SentenceTransformer

    if not isinstance(retriever.query, Embedder):
        raise ValueError(
            "--format onnx: retriever.tower is bag, a table of word vectors; use --format sentence-transformers"
        )
    library = SentenceTransformer(str(source), device="cpu", local_files_only=True).eval()
    routes = {"encoder": list(library)} if retriever.shared else {r: list(library[0].sub_modules[r]) for r in ROUTES}
    example, mask = torch.tensor([[2, 1, 3, 1, 3], [2, 1, 3, 0, 0]]), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("wordpieces")}
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns about optional packages
    inputs = [name for name in INPUTS if name in model_input_names(retriever.query.encoder)]
    examples = (example, mask, 0 * mask)[: len(inputs)]
    for route, modules in routes.items():
        with warnings.catch_warnings(action="ignore"):  # deprecations inside torch
            torch.onnx.export(
                _Route(*modules).eval(), examples, str(out / f"{route}.onnx"), input_names=inputs,
                output_names=[OUTPUT], dynamic_shapes=((sizes,) * len(inputs),), external_data=False, verbose=False,
            )  # fmt: skip
    joining_tokenizer(tokenizer, retriever.query.segments).save(str(out / TOKENIZER))


class _Route(nn.Sequential):
    """A sequence of sentence-transformers modules that takes tensors instead of a dictionary."""

    def forward(self, *inputs: Tensor) -> Tensor:
        features = dict(zip(INPUTS, inputs, strict=False))
        for module in self:
            features = module(features)
        return features[OUTPUT]
