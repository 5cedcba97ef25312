"""The transfers to a GPU and the synchronisations of a training step, counted without a GPU (tests/elsewhere.py)."""

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from elsewhere import ELSEWHERE, Counts, recorded
from small_world import World, embed_documents, section, tiny_context, tiny_models

from realmops.answering.openqa import OpenQa
from realmops.model.build import add_span_head
from realmops.model.retriever import DEFAULT_FUSION_WEIGHTS, Retriever
from realmops.questions.question_sets import Question
from realmops.search.bm25 import Bm25
from realmops.search.exact import PassageIndex, exact_index
from realmops.train.fine_tuning import finetune
from realmops.train.index_source import Index
from realmops.train.masked_sentences import Examples
from realmops.train.pretraining import pretrain
from realmops.train.realm import Realm

STEPS = 3
FP32 = torch.float32
CPU = torch.device("cpu")
ASKED = (("Where was Anna Berg born?", "Oslo"), ("Which town is a port?", "Bergen"), ("Who built The Star?", "Jon Vik"))


class Steps:
    """The counts of each step, as a progress callback."""

    def __init__(self, counts: Counts) -> None:
        self.counts, self.before, self.steps = counts, replace(counts), list[Counts]()

    def __call__(self, done: int) -> None:
        self.steps.append(self.counts - self.before)
        self.before = replace(self.counts)


def passages_of(world: World, retriever: Retriever) -> PassageIndex:
    embedding_PX = embed_documents(retriever, world.snapshot, range(len(world.snapshot)), FP32)
    return exact_index(embedding_PX.to(ELSEWHERE), retriever.vectors)


@dataclass
class Once:
    """One index, adopted at the first step."""

    world: World

    def at_step(self, step: int, retriever: Retriever) -> list[Index]:
        searcher = copy.deepcopy(retriever).eval()
        return [] if step else [Index(0, passages_of(self.world, searcher), searcher, 0.0, True)]


@dataclass(frozen=True)
class Kind:
    """A kind of step: its options, and the number of copies to the GPU and back that it may have."""

    copies: int
    options: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    hybrid: bool = False
    not_in: tuple[int, ...] = ()  # passages
    means: bool = False  # the mean of each sequence is an operation


VECTORS = {"head": "cosine", "pooling": "mean", "document_vectors": 3}


PRETRAIN = {
    "as usual": Kind(10), "per token": Kind(10, {"marginal": "per_token"}),
    "without null": Kind(10, {"null_document": False}), "fresh": Kind(10, {"query_encoder": "fresh"}),
    "crops": Kind(12, {"crop_weight": 0.5}), "copies": Kind(10, model={"copying": {"copies": True}}),
    "matches": Kind(10, model={"copying": {"matches": True}}),
    "apart": Kind(11, model={"copying": {"copies": True, "apart": True}}),
    "crops, vectors": Kind(13, {"crop_weight": 0.5}, VECTORS, means=True),
}  # fmt: skip
FINETUNE = {
    "as usual": Kind(8), "all passages": Kind(8, {"retriever_candidates": 50}),
    "hard EM": Kind(8, {"span_loss": "hard_em"}), "per passage": Kind(9, {"span_loss": "per_passage"}),
    "sources left out": Kind(9, not_in=(0,)), "matches": Kind(8, model={"copying": {"matches": True}}),
    "hybrid": Kind(11, hybrid=True), "hybrid, vectors": Kind(11, model=VECTORS, hybrid=True, means=True),
}  # fmt: skip


def pretraining(world: World, kind: Kind, batch: int) -> list[Counts]:
    values = {"steps": STEPS, "batch_size": batch, "candidates": 8, "refresh_every": 100}
    lengths = {"reader_wordpieces": 60, "retriever_delay": 0}
    chosen = section("pretrain", **{**values, **lengths, **kind.options})
    with recorded() as counts:
        retriever, reader = tiny_models(world, dropout=0.1, **kind.model)
        realm = Realm(retriever.to(ELSEWHERE), reader.to(ELSEWHERE), world.snapshot, chosen, FP32)
        context = tiny_context(device=ELSEWHERE, progress=Steps(counts))
        examples = Examples(world.snapshot, world.spans, chosen)
        pretrain(context, realm, examples, Once(world), evaluate=lambda index: {}, warn=print)
    return context.progress.steps[2:]  # type: ignore[attr-defined]


def finetuning(world: World, kind: Kind, batch: int) -> list[Counts]:
    values = {"epochs": 1, "batch_size": batch, "retriever_candidates": 8, "reader_candidates": 3}
    lengths = {"query_wordpieces": 24, "reader_wordpieces": 60, "answer_wordpieces": 4}
    chosen = section("finetune", **{**values, **lengths, **kind.options})
    not_in = tuple(map(world.snapshot.passage_id, kind.not_in))
    asked = [(str(i), *ASKED[i % len(ASKED)]) for i in range(STEPS * batch)]
    questions = [Question(name, text, (answer,), not_in=not_in) for name, text, answer in asked]
    with recorded() as counts:
        retriever, reader = tiny_models(world, **kind.model)
        add_span_head(reader, 8, seed=0)
        retriever.to(ELSEWHERE)
        passages = passages_of(world, retriever)
        words = Bm25.of(world.snapshot) if kind.hybrid else None
        retriever.mixture = DEFAULT_FUSION_WEIGHTS if kind.hybrid else retriever.mixture
        model = OpenQa(retriever, reader.to(ELSEWHERE), world.snapshot, passages, chosen, FP32, bm25=words)
        context = tiny_context(device=ELSEWHERE, progress=Steps(counts))
        finetune(context, model, questions, chosen)
    return context.progress.steps[2:]  # type: ignore[attr-defined]


def check(few: list[Counts], many: list[Counts], kind: Kind) -> None:
    for counts in (*few, *many):
        assert counts.waits == counts.brought == 2, "once for the results of the search, once for the metrics"
        assert counts.sent + counts.brought <= kind.copies
    assert kind.means or max(c.operations for c in many) <= max(c.operations for c in few)


@pytest.mark.parametrize("name", PRETRAIN)
def test_a_pretraining_step_synchronises_twice_for_any_batch(world: World, name: str) -> None:
    kind = PRETRAIN[name]
    check(pretraining(world, kind, 4), pretraining(world, kind, 16), kind)


@pytest.mark.parametrize("name", FINETUNE)
def test_a_fine_tuning_step_synchronises_twice_for_any_batch(world: World, name: str) -> None:
    kind = FINETUNE[name]
    few, many = finetuning(world, kind, 4), finetuning(world, kind, 16)
    if kind.hybrid:  # the best by BM25 and by embeddings are scored once more, on the device of the embeddings
        few, many = ([replace(c, waits=c.waits - 1, brought=c.brought - 1) for c in steps] for steps in (few, many))
    check(few, many, kind)
