"""Query encoders and readers of a run as saved OpenVINO graphs, for commands that answer one question.

To import transformers and build its modules takes longer than all else that such a command does. The first command
saves each module as a graph in fp32; later ones open it in a third of a second, without transformers. A module that
OpenVINO does not support is opened as usual.

Shape suffixes: B sequences, L wordpieces of the longest, N windows, D width, E embedding width.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from realmops import artifacts
from realmops.devices import disable_autocast
from realmops.hub import TOKENIZER
from realmops.model.checkpoint_files import READER_FOLDER, identifying_files, load_retriever, open_description
from realmops.model.encoder import is_near
from realmops.model.extractive_reader import ExtractiveReader, load_extractive_reader
from realmops.model.packed import PackedBatch
from realmops.model.retriever import Embedder, FusionWeights, Retriever, Tower
from realmops.search.openvino import import_openvino

FOLDER = "graphs"  # below the work folder of a run
KIND = "graphs"
Loaded = TypeVar("Loaded")
_READER = "reader"
_SHAPES = ((2, 9), (1, 4), (3, 40))  # sequences and wordpieces: one to trace a module, all to compare its graph


@dataclass(frozen=True)
class SavedGraphs:
    """Graphs of a run, saved when they are first needed.

    Args:
        folder: folder of the graphs, which is created.
    """

    folder: Path

    def retriever(self, folder: Path, vocabulary_hash: str) -> Retriever:
        """Open the retriever of a fine-tuned model to embed queries; raise ValueError as ``load_retriever`` does."""
        with open_description(folder, vocabulary_hash) as description:
            if description["tower"] != "bert":
                return load_retriever(folder, vocabulary_hash)
            shared, shape = description["share_embedders"], (description["head"], description["temperature"])
            width, vectors, mixture = (description[name] for name in ("embedding_width", "document_vectors", "mixture"))

        def save(graphs: Path, loaded: Retriever) -> bool:
            towers = {"query": loaded.query} | ({} if shared else {"document": loaded.document})
            return all(_save_tower(graphs / f"{name}.xml", tower) for name, tower in towers.items())

        opened = self._open("retriever", folder, lambda: load_retriever(folder, vocabulary_hash), save)
        if not isinstance(opened, Path):
            return opened
        query = GraphTower(opened / "query.xml", *shape, width)
        document = query if shared else GraphTower(opened / "document.xml", *shape, width)
        retriever = Retriever(query, document, vectors)
        retriever.mixture = FusionWeights(**mixture)
        return retriever

    def reader(self, folder: Path) -> ExtractiveReader:
        """Open the published reader of a fine-tuned model; raise ValueError as ``load_extractive_reader`` does."""
        opened = self._open(_READER, folder, lambda: load_extractive_reader(folder / READER_FOLDER), _save_reader)
        return GraphReader(opened) if isinstance(opened, Path) else opened

    def _open(
        self, part: str, folder: Path, load: Callable[[], Loaded], save: Callable[[Path, Loaded], bool]
    ) -> Path | Loaded:
        """Return the folder of a part's graphs, which are saved if they are missing, or the part if it has none."""
        files = [artifacts.sha256_file(path) for path in identifying_files(folder, part)]
        key = artifacts.digest_of([files, version("openvino"), version("transformers"), version("torch")])
        graphs = self.folder / f"{part}-{key[:16]}"
        try:
            is_supported = artifacts.read_manifest(graphs, KIND)["supported"]
        except ValueError:  # missing or damaged
            is_supported = None
        if is_supported is not None:
            return graphs if is_supported else load()
        try:
            with artifacts.atomic_folder(graphs) as draft:
                is_supported = save(draft, load())
                artifacts.write_manifest(draft, KIND, supported=is_supported)
        except OSError:  # a read-only or full disk
            return load()
        for other in self.folder.glob(f"{part}-*"):  # of another model
            if other != graphs:
                shutil.rmtree(other, ignore_errors=True)
        return graphs if is_supported else load()  # again: saving changes the attention of what it is given


class Graph:
    """A saved graph, compiled at its first call."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def _compiled(self) -> Any:
        settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
        return import_openvino().Core().compile_model(self.path, "CPU", settings)

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """Return the outputs of one batch."""
        outputs = self._compiled([tensor.numpy() for tensor in inputs])
        return [torch.from_numpy(np.array(outputs[n])) for n in range(len(outputs))]


class GraphTower(Tower):
    """Tower of a saved graph, which embeds one query at a time."""

    def __init__(self, path: Path, head: str, temperature: float, width: int) -> None:
        super().__init__(head, temperature, width)
        self.graph = Graph(path)

    @property
    def description(self) -> str:
        """Short description for logs and reports."""
        return f"graph {self.graph.path.name}"

    @property
    def device(self) -> torch.device:
        """Device of the embeddings."""
        return torch.device("cpu")

    def forward(self, batch: PackedBatch, vectors: int = 1) -> Tensor:
        """Compute embeddings B x E of sequences without a second segment."""
        assert vectors == 1, vectors
        return torch.cat(
            [self.graph(tokens_L[None])[0] for tokens_L in torch.split(batch.tokens_T, batch.lengths.tolist())]
        )


class GraphReader(ExtractiveReader):
    """Reader of spans by a saved graph, with the tokenizer of the reader that it was saved from."""

    def __init__(self, folder: Path) -> None:
        nn.Module.__init__(self)
        about = artifacts.read_json(folder / f"{_READER}.json")
        self.longest, self._input_names = about["longest"], {*about["inputs"]}
        self.tokenizer = SimpleNamespace(
            **about["tokenizer"],
            backend_tokenizer=Tokenizer.from_file(str(folder / TOKENIZER)),
            num_special_tokens_to_add=lambda pair: about["special_tokens"],
        )
        graph = Graph(folder / f"{_READER}.xml")

        def model(**inputs: Tensor) -> SimpleNamespace:
            start_NL, end_NL = graph(*(inputs[name] for name in about["inputs"]))
            return SimpleNamespace(start_logits=start_NL, end_logits=end_NL)

        self.model = model
        self._truncating = {}

    @property
    def device(self) -> torch.device:
        """Device of the graph."""
        return torch.device("cpu")


class _QueryEncoder(nn.Module):
    """The tower of an encoder, over one sequence."""

    def __init__(self, tower: Embedder) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, tokens_1L: Tensor) -> Tensor:
        """Return the embedding, 1 x E."""
        model = self.tower.encoder.model
        hidden_LD = model(input_ids=tokens_1L, attention_mask=torch.ones_like(tokens_1L)).last_hidden_state[0]
        rows = {"cls": slice(1), "mean": slice(None), "last": slice(-1, None)}[self.tower.pooling]
        return self.tower.project(hidden_LD[rows].mean(0, keepdim=True))


class _SpanScores(nn.Module):
    """The model of a reader, over padded windows."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of starts and ends, N x L each."""
        out = self.model(**dict(zip(self.names, inputs, strict=True)))
        return out.start_logits, out.end_logits


def _save_tower(path: Path, tower: Tower) -> bool:
    assert isinstance(tower, Embedder)
    examples: list[tuple[Tensor, ...]] = [(_random_tokens(1, n, tower.encoder.vocabulary),) for _, n in _SHAPES]
    with torch.no_grad(), disable_autocast(tower.device):
        expected = [[tower.eval()(PackedBatch([tokens_1L[0].numpy()]))] for [tokens_1L] in examples]
        model = tower.encoder.model
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
        return _save_graph(path, _QueryEncoder(tower), examples, expected)


def _save_reader(folder: Path, reader: ExtractiveReader) -> bool:
    tokenizer, names = reader.tokenizer, sorted(reader._input_names)
    attributes = ("padding_side", "cls_token_id", "pad_token_id")
    about = {
        "longest": reader.longest,
        "inputs": names,
        "special_tokens": tokenizer.num_special_tokens_to_add(pair=True),
        "tokenizer": {name: getattr(tokenizer, name) for name in attributes},
    }
    artifacts.write_json(folder / f"{_READER}.json", about)
    tokenizer.backend_tokenizer.save(str(folder / TOKENIZER))
    examples = []
    for shape in _SHAPES:
        inputs = {name: torch.zeros(shape, dtype=torch.int64) for name in names}
        inputs["input_ids"] = _random_tokens(*shape, len(reader.word_vectors))
        inputs["attention_mask"] = torch.ones(shape, dtype=torch.int64)
        examples.append(tuple(inputs[name] for name in names))
    module = _SpanScores(reader.eval().model, names)
    with torch.no_grad(), disable_autocast(reader.device):
        return _save_graph(folder / f"{_READER}.xml", module, examples, [[*module(*inputs)] for inputs in examples])


def _random_tokens(rows: int, length: int, vocabulary: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(length).integers(0, vocabulary, (rows, length)))


def _save_graph(
    path: Path, module: nn.Module, examples: list[tuple[Tensor, ...]], expected: list[list[Tensor]]
) -> bool:
    """Trace a module with the first example and save its graph; return whether it computes what is expected."""
    openvino = import_openvino()
    try:
        with warnings.catch_warnings(action="ignore"):  # the tracer warns of constant sizes; the comparison finds them
            openvino.save_model(openvino.convert_model(module, example_input=examples[0]), path, compress_to_fp16=False)
        outputs = [Graph(path)(*inputs) for inputs in examples]
    except Exception:  # OpenVINO raises many types for encoders with their own attention
        return False
    finally:
        torch._C._jit_clear_class_registry()  # otherwise each trace leaks a copy of all weights
    pairs = zip(outputs, expected, strict=True)
    return all(is_near(ours, theirs) for output, tensors in pairs for ours, theirs in zip(output, tensors, strict=True))
