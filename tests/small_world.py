"""A world of twelve documents, small enough to follow by hand, with small models."""

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from threading import Barrier
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from realmops.artifacts import atomic_folder
from realmops.config import parse_sections
from realmops.corpus.snapshot_reader import Snapshot
from realmops.corpus.snapshot_writer import write_snapshot
from realmops.corpus.spans import Spans
from realmops.corpus.word_counts import train_vocabulary
from realmops.model.build import build_models
from realmops.model.reader import Reader
from realmops.model.retriever import Retriever
from realmops.model.retriever_files import TextFormat
from realmops.model.sequences import SpecialTokens
from realmops.options import BertOptions, ReaderOptions, RetrieverOptions
from realmops.readers.sources import list_sources
from realmops.search import bm25
from realmops.search.bm25_writer import write_bm25
from realmops.search.embed import Progress, make_document_embedder, no_progress
from realmops.search.exact import exact_index
from realmops.train.index_source import Index
from realmops.train.loop import TrainingContext

# One document is one passage. Passage 3 repeats the second sentence of passage 2 between two others; passage
# 11 has one sentence only.
DOCUMENTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Anna Berg", "Anna Berg was born in Oslo. She wrote The Cold Sea in 1931.", ("Oslo", "1931")),
    ("The Cold Sea", "The Cold Sea is a novel by Anna Berg. It is set in Oslo.", ("Anna Berg", "Oslo")),
    ("Karl Lund", "Karl Lund was a painter. He lived in Bergen until 1950.", ("Karl Lund", "1950")),
    ("Bergen", "Bergen is a port. He lived in Bergen until 1950. It rains.", ("Bergen", "1950")),
    ("Oslo", "Oslo is a city in Norway. The poet Anna Berg was born there.", ("Norway", "Anna Berg")),
    ("Norway", "Norway is a country. Its capital is Oslo.", ("Norway", "Oslo")),
    ("Maria Holm", "Maria Holm sang in Bergen. She died in 1972.", ("Maria Holm", "1972")),
    ("The Red Door", "The Red Door is a play. Maria Holm sang in it.", ("Maria Holm",)),
    ("Jon Vik", "Jon Vik built ships in Bergen. He sold one to Karl Lund.", ("Bergen", "Karl Lund")),
    ("The Star", "The Star is a ship. Jon Vik built it in 1950.", ("Jon Vik", "1950")),
    ("Fjell", "Fjell is a town in Norway. Jon Vik was born there.", ("Norway", "Jon Vik")),
    ("Rain", "It rains in Bergen.", ("Bergen",)),
)
PARAMS = Path(__file__).parents[1] / "params.yaml"
PAPERS_READER = {"copies": False, "apart": False, "matches": False}


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Return the results of calls that begin together, each in a thread."""
    ready = Barrier(len(calls))

    def begin(call: Callable[[], Any]) -> Any:
        ready.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(begin, calls))


@dataclass(frozen=True)
class World:
    folder: Path
    snapshot: Snapshot
    spans: Spans

    @property
    def special(self) -> SpecialTokens:
        return SpecialTokens.of(self.snapshot.tokenizer)

    @property
    def text(self) -> TextFormat:
        return TextFormat.of(self.snapshot)

    def wordpieces(self, text: str) -> np.ndarray:
        return np.array(self.snapshot.tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def words(self, tokens: np.ndarray) -> str:
        """Return wordpieces as text, the pieces of a word joined."""
        names = [str(self.snapshot.tokenizer.id_to_token(int(t))) for t in tokens]
        return " ".join(names).replace(" ##", "")


def write_documents(path: Path, documents: tuple[tuple[str, str, tuple[str, ...]], ...] = DOCUMENTS) -> Path:
    lines = []
    for title, text, salient in documents:
        spans = [[text.index(s), text.index(s) + len(s), "NAME"] for s in salient]
        lines.append(json.dumps({"title": title, "text": text, "spans": spans}))
    path.write_text("\n".join(lines) + "\n")
    return path


def build_world(
    folder: Path, documents: tuple[tuple[str, str, tuple[str, ...]], ...] = DOCUMENTS, block_wordpieces: int = 48
) -> World:
    snapshot = build_snapshot(folder, write_documents(folder / "documents.jsonl", documents), block_wordpieces)
    write_bm25(folder / bm25.FOLDER, snapshot)
    spans = snapshot.given_spans()
    assert spans is not None
    return World(folder, snapshot, spans)


def build_snapshot(folder: Path, documents: Path, block_wordpieces: int = 48, workers: int = 1) -> Snapshot:
    """The snapshot of a file of documents, in the folder ``snapshot``."""
    corpus = list_sources(documents, "auto")
    with atomic_folder(folder / "snapshot", "snapshot") as stage:
        vocabulary = train_vocabulary(corpus, size=150, min_count=1, workers=workers)
        options: Any = {"block_wordpieces": block_wordpieces, "workers": workers}
        write_snapshot(corpus, stage, vocabulary=vocabulary, **options)
    return Snapshot.open(folder / "snapshot")


def embed_documents(
    retriever: Retriever, snapshot: Snapshot, rows: Sequence[int], dtype: torch.dtype, progress: Progress = no_progress
) -> torch.Tensor:
    """The embeddings of passages."""
    return make_document_embedder(retriever, snapshot, dtype, len(rows))(rows, progress)


def write_texts(path: Path, texts: Sequence[str]) -> Path:
    """Documents without a title, each short enough to be one passage."""
    path.write_text("".join(json.dumps({"title": "", "text": text}) + "\n" for text in texts))
    return path


def labels_of(spans: Spans, passage: int) -> list[str]:
    """The label of each span of a passage."""
    return [spans.labels[label] for label in spans.label_ids[slice(*spans.offsets[passage : passage + 2])]]


def section(name: str, **changes: Any) -> Any:
    """A section with changes of its defaults."""
    return parse_sections(("the test", {name: changes})).get(name)


def tiny_models(
    world: World,
    *,
    dropout: float = 0.0,
    seed: int = 0,
    copying: Mapping[str, bool] = MappingProxyType({}),
    share_embedders: bool = True,
    **changes: Any,
) -> tuple[Retriever, Reader]:
    """Two layers of width 16, with weights so large that documents make a difference; the reader is the paper's."""
    shape: BertOptions = section("bert", width=16, layers=2, heads=2, positions=64, dropout=dropout)
    options: RetrieverOptions = section("retriever", **{"embedding_width": 8, **changes})
    reading: ReaderOptions = section("reader", **{**PAPERS_READER, **copying})
    vocabulary = world.snapshot.tokenizer.get_vocab_size()
    retriever, reader = build_models(shape, options, reading, vocabulary, seed)
    if not share_embedders:
        retriever = Retriever(retriever.query, deepcopy(retriever.query), options.document_vectors)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in (retriever, reader):
            for parameter in module.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return retriever.train(), reader.train()


@dataclass
class MemoryJournal:
    """A stage's metrics file, in memory."""

    content: bytes = b""
    finished: int = 0

    def log(self, step: int, **metrics: float) -> None:
        self.content += json.dumps({"step": step, **metrics}).encode() + b"\n"

    def position(self) -> int:
        return len(self.content)

    def truncate(self, position: int) -> None:
        assert position <= len(self.content)
        self.content = self.content[:position]

    def lines(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in self.content.splitlines()]

    def values(self, name: str) -> list[float]:
        return [line[name] for line in self.lines() if name in line]

    def without_times(self) -> list[dict[str, float]]:
        """The lines without what a clock measured."""
        return [{k: v for k, v in line.items() if not k.endswith("seconds")} for line in self.lines()]


@dataclass
class MemoryCheckpoints:
    """Checkpoints that a kill does not touch; all are kept, the newest comes back."""

    saved: dict[int, dict[str, bytes]] = field(default_factory=dict)

    def restore(self) -> dict[str, bytes] | None:
        return dict(self.saved[max(self.saved)]) if self.saved else None

    def save(self, step: int, files: Mapping[str, bytes]) -> None:
        self.saved[step] = dict(files)


def index_of(world: World, retriever: Retriever, step: int = 0) -> Index:
    """All passages as the retriever embeds them now."""
    embedding_PX = embed_documents(retriever, world.snapshot, range(len(world.snapshot)), torch.float32)
    return Index(step, exact_index(embedding_PX, retriever.vectors), retriever, 0.0, True)


@dataclass
class OneIndex:
    """A source of one index, which is that of the retriever before the first step."""

    world: World

    def at_step(self, step: int, retriever: Retriever) -> list[Index]:
        return [index_of(self.world, retriever)] if step == 0 else []


class Killed(BaseException):
    """The process ends here."""


def killed_and_resumed(train: Callable[..., Any], kill_at: int) -> tuple[Any, MemoryJournal]:
    """Kill a training after that many lines of its journal and resume it; return its result and its journal."""
    checkpoints, journal = MemoryCheckpoints(), MemoryJournal()

    def progress(count: int) -> None:
        if len(journal.lines()) == kill_at:
            raise Killed

    try:
        train(checkpoints=checkpoints, journal=journal, progress=progress)
    except Killed:
        return train(checkpoints=checkpoints, journal=journal), journal
    raise AssertionError("it was not killed")


def same_parameters(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, theirs.get_parameter(name)), name


def tiny_context(**changes: Any) -> TrainingContext:
    values: dict[str, Any] = {
        "stream": "test", "seed": 0, "device": torch.device("cpu"), "dtype": torch.float32,
        "checkpoints": MemoryCheckpoints(), "journal": MemoryJournal(), "progress": lambda count: None,
    }  # fmt: skip
    return TrainingContext(**{**values, **changes})
