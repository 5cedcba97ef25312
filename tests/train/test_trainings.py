"""Every training: its parameters have gradients above rounding, and killed and resumed it ends with the same bits.

A parameter that the loss does not depend on, as a bias under a softmax, has a gradient of rounding only. Adam divides
by its size and takes full steps, to another place on every processor.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, get_args
from unittest import mock

import numpy as np
import pytest
import torch
from small_readers import FAMILIES, write_reader
from small_world import (
    MemoryCheckpoints,
    MemoryJournal,
    OneIndex,
    World,
    index_of,
    killed_and_resumed,
    section,
    tiny_context,
    tiny_models,
)
from torch import nn
from transformers import BertConfig

from realmops.answering.extractive import ExtractiveQa
from realmops.answering.openqa import OpenQa
from realmops.answering.span_answers import SpanAnswers
from realmops.baselines import path
from realmops.baselines import t5 as closed_book
from realmops.baselines.path import PathRetriever
from realmops.baselines.t5 import ClosedBook
from realmops.model.build import add_span_head, build_encoder
from realmops.model.extractive_reader import load_extractive_reader
from realmops.model.retriever import DEFAULT_FUSION_WEIGHTS, Retriever
from realmops.options import ClosedBookOptions, RetrieverOptions
from realmops.questions.question_sets import Question
from realmops.search.bm25 import Bm25
from realmops.search.exact import PassageIndex
from realmops.train import fine_tuning, in_batch_negatives, loop, pretraining, reader_training, tagger
from realmops.train import inverse_cloze as ict
from realmops.train.conll import TaggedSentence
from realmops.train.in_batch_negatives import group_by_passage
from realmops.train.loop import TrainingContext
from realmops.train.masked_sentences import Examples
from realmops.train.optimiser import BertAdamW, Group
from realmops.train.realm import Realm
from realmops.train.tagger import Tagger, tag_names, train_tagger

# Share of the largest gradient. Sums in double precision are rounded by some 1e-16; the smallest gradient is 4e-9.
BOUND = 1e-12
pytestmark = pytest.mark.usefixtures("double")  # also where results of autocast are converted to fp32
FP32 = torch.float32  # no autocast: everything is double
LENGTHS = {"query_wordpieces": 40, "reader_wordpieces": 60}
QUESTIONS = [
    Question("born", "Where was Anna Berg born?", ("Oslo",)),
    Question("port", "Which town is a port?", ("Bergen", "the port of Bergen")),
    Question("two", "Where did the builder of The Star build?", ("ships in Bergen",)),
]
TAGGED = [
    TaggedSentence(("Anna", "Berg", "was", "born", "in", "Oslo"), ("B-PER", "I-PER", "O", "O", "O", "B-LOC")),
    TaggedSentence(("Karl", "Lund", "lived", "in", "Bergen"), ("B-PER", "I-PER", "O", "O", "B-LOC")),
]


def randomise(*modules: nn.Module) -> None:
    """Set parameters far from their start, where zeros and equal towers could hide something."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in modules:
            for part in module.double().modules():
                for name, parameter in part.named_parameters(recurse=False):
                    parameter.normal_(0.0, 0.2, generator=generator)
                    if "Norm" in type(part).__name__ and name == "weight":
                        parameter.add_(1.0)


def embeddings(world: World, retriever: Retriever) -> PassageIndex:
    return index_of(world, retriever).passages


def inverse_cloze(world: World, crops: int = 0, **model: Any) -> None:
    retriever, _ = tiny_models(world, **model)
    randomise(retriever)
    chosen = section("ict", crops=crops, batch_size=8, neighbours=2, removal=0.5)
    ict.train_retriever(tiny_context(), retriever, world.snapshot, chosen)


def masked_words(world: World, **model: Any) -> None:
    _, reader = tiny_models(world, **model)
    randomise(reader)
    chosen = section("ict", reader_batch_size=8)
    ict.train_reader(tiny_context(), reader, world.snapshot, world.spans, chosen, 60)


def realm(
    world: World, marginal: str = "joint", *, crop_weight: float = 0.0, hybrid: bool = False, **model: Any
) -> None:
    retriever, reader = tiny_models(world, **model)
    randomise(retriever, reader)
    changes = {"batch_size": 4, "candidates": 4, "retriever_delay": 0, "masking": "salient", "crop_weight": crop_weight}
    chosen = section("pretrain", **changes, marginal=marginal, null_document=True, reader_wordpieces=60)
    examples = Examples(world.snapshot, world.spans, chosen)
    if hybrid:
        retriever.mixture = DEFAULT_FUSION_WEIGHTS
    words = Bm25.of(world.snapshot) if hybrid else None
    joined = Realm(retriever, reader, world.snapshot, chosen, torch.float32, words)
    rest: dict[str, Any] = {"evaluate": lambda index: {}, "warn": print}
    pretraining.pretrain(tiny_context(), joined, examples, OneIndex(world), **rest)


def answers(
    world: World, *, given: bool = False, span_loss: str = "marginal", hybrid: bool = False, **model: Any
) -> None:
    retriever, reader = tiny_models(world, **model)
    add_span_head(reader, 12, seed=0)
    randomise(retriever, reader)
    changes = {"batch_size": 3, "retriever_candidates": 8, "reader_candidates": 8, "answer_wordpieces": 4}
    chosen = section("finetune", span_loss=span_loss, **changes, **LENGTHS)
    index = None if given else embeddings(world, retriever)
    ranker = (lambda question, k: np.arange(k)) if given else None
    if hybrid:
        retriever.mixture = DEFAULT_FUSION_WEIGHTS
    words = Bm25.of(world.snapshot) if hybrid else None
    asked = OpenQa(retriever, reader, world.snapshot, index, chosen, FP32, ranker, words)
    fine_tuning.finetune(tiny_context(), asked, QUESTIONS, chosen)


def by_passages(world: World, **model: Any) -> None:
    retriever, _ = tiny_models(world, **model)
    randomise(retriever)
    chosen = section("finetune", retriever_batch_size=3, **LENGTHS)
    positives = group_by_passage([[0], [3], [8]])
    arguments = retriever, world.snapshot, QUESTIONS, positives, chosen
    in_batch_negatives.train_by_passages(tiny_context(), *arguments)


def train_reader(model: SpanAnswers, share: float) -> None:
    trainer = reader_training.reader_trainer(model)
    examples = trainer.examples(QUESTIONS, 12)
    assert len(examples) == 3
    with mock.patch.object(reader_training, "NEGATIVES_FROM", share):
        trainer.train(tiny_context(), examples, model.options)


def in_windows(world: World, *, freeze_words: bool = False, share: float = 0.0, **model: Any) -> None:
    retriever, reader = tiny_models(world, **model)
    add_span_head(reader, 12, seed=0)
    randomise(retriever, reader)
    reader.bert.word_vectors.requires_grad_(not freeze_words)
    chosen = section("finetune", batch_size=3, answer_wordpieces=4, **LENGTHS)
    asked = OpenQa(retriever, reader, world.snapshot, embeddings(world, retriever), chosen, FP32)
    train_reader(asked, share)
    assert all(parameter.grad is None for parameter in retriever.parameters())


def published(world: World, *, family: str = "bert", share: float = 0.0, freeze_words: bool = False) -> None:
    retriever, _ = tiny_models(world)
    with tempfile.TemporaryDirectory() as folder:
        reader = load_extractive_reader(write_reader(Path(folder) / "reader", family))
    randomise(reader)
    reader.word_vectors.requires_grad_(not freeze_words)
    chosen = section("finetune", batch_size=3, answer_wordpieces=8, **LENGTHS)
    asked = ExtractiveQa(retriever, reader, world.snapshot, embeddings(world, retriever), chosen, FP32)
    train_reader(asked, share)


def tags(world: World) -> None:
    options = section("bert", width=16, layers=2, heads=2, positions=64)
    bert, _ = build_encoder("small", options, world.snapshot.tokenizer.get_vocab_size(), 0)
    model = Tagger(bert, tag_names(TAGGED))
    randomise(model)
    train_tagger(tiny_context(), model, TAGGED, world.snapshot.tokenizer, section("tag"), 0.3)


def paths(world: World) -> None:
    _, reader = tiny_models(world)
    chosen = section("finetune", batch_size=3, **LENGTHS)
    model = PathRetriever.start(reader.bert, world.snapshot, chosen, FP32, seed=0)
    randomise(model.scorer)
    lessons = [lesson for question in QUESTIONS if (lesson := model.training_example(question))]
    assert any(lesson.linked for lesson in lessons)
    path.train_paths(tiny_context(), model, lessons, chosen)


def t5(world: World, train: Callable[..., int]) -> None:
    chosen = ClosedBookOptions(init="small", steps=1, epochs=1)
    shape = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    model = ClosedBook.build(chosen, world.snapshot, shape, 0)
    randomise(model.net)
    text = world.snapshot if train is closed_book.pretrain else QUESTIONS
    train(tiny_context(), model, text, chosen)


COPIES, APART = {"copies": True, "apart": False}, {"copies": True, "apart": True}
BAG = {"tower": "bag", "head": "cosine"}
VECTORS = {"head": "cosine", "pooling": "mean", "document_vectors": 2}
TOWERS = {
    f"{head}, {'one tower' if share else 'two towers'}": {"head": head, "share_embedders": share}
    for head in get_args(RetrieverOptions.model_fields["head"].annotation)
    for share in (True, False)
}
TRAININGS: dict[str, tuple[ModuleType, Callable[..., None], dict[str, Any]]] = {
    **{f"ict: {name}": (ict, inverse_cloze, towers) for name, towers in TOWERS.items()},
    "ict: crops": (ict, inverse_cloze, {"crops": 3, "head": "cosine"}),
    "ict: bag": (ict, inverse_cloze, {"crops": 3, **BAG}),
    "ict: bags": (ict, inverse_cloze, {"crops": 3, **BAG, "share_embedders": False}),
    "ict: vectors": (ict, inverse_cloze, {"crops": 3, **VECTORS}),
    "ict: reader": (ict, masked_words, {}),
    "ict: reader that copies": (ict, masked_words, {"copying": COPIES}),
    "ict: reader apart": (ict, masked_words, {"copying": APART}),
    **{
        f"pretrain: {marginal}, {name}": (pretraining, realm, {"marginal": marginal, **towers})
        for marginal in ("joint", "per_token")
        for name, towers in TOWERS.items()
    },
    **{
        f"pretrain: {name}": (pretraining, realm, options)
        for name, options in {
            "copies": {"copying": COPIES}, "copies, per_token": {"copying": COPIES, "marginal": "per_token"},
            "apart": {"copying": APART}, "apart, per_token": {"copying": APART, "marginal": "per_token"},
            "crops": {"crop_weight": 0.5, "head": "cosine"},
            "crops, two towers": {"crop_weight": 0.5, "share_embedders": False},
            "apart, bag, crops": {"copying": APART, "crop_weight": 0.5, **BAG},
            "apart, vectors, crops": {"copying": APART, "crop_weight": 0.5, **VECTORS}, "hybrid": {"hybrid": True},
        }.items()
    },
    **{f"finetune: {name}": (fine_tuning, answers, towers) for name, towers in TOWERS.items()},
    "finetune: a reader that copies": (fine_tuning, answers, {"copying": COPIES}),
    "finetune: bag, hybrid": (fine_tuning, answers, {"hybrid": True, **BAG}),
    "finetune: vectors, hybrid": (fine_tuning, answers, {"hybrid": True, **VECTORS}),
    **{f"passages: {name}": (in_batch_negatives, by_passages, towers) for name, towers in TOWERS.items()},
    "passages: bag": (in_batch_negatives, by_passages, BAG),
    "passages: vectors": (in_batch_negatives, by_passages, VECTORS),
    "windows": (reader_training, in_windows, {}),
    "windows: no negatives": (reader_training, in_windows, {"share": 2.0}),
    "windows: a reader apart": (reader_training, in_windows, {"copying": APART}),
    "windows: frozen words": (reader_training, in_windows, {"freeze_words": True}),
    **{f"finetune: {name}": (fine_tuning, answers, {"span_loss": name}) for name in ("hard_em", "per_passage")},
    "finetune: passages given": (fine_tuning, answers, {"given": True}),
    **{f"reader: {family}": (reader_training, published, {"family": family}) for family in FAMILIES},
    "reader: no negatives": (reader_training, published, {"share": 2.0}),
    "reader: frozen words": (reader_training, published, {"freeze_words": True}),
    "tagger": (tagger, tags, {}),
    "path": (path, paths, {}),
    "closed_book: pretrain": (closed_book, t5, {"train": closed_book.pretrain}),
    "closed_book: finetune": (closed_book, t5, {"train": closed_book.finetune}),
}  # fmt: skip


@pytest.mark.parametrize("training", TRAININGS)
def test_every_trained_parameter_has_a_gradient_above_rounding(
    world: World, training: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or of 0, as the rows of an embedding that no text uses."""
    module, train, options = TRAININGS[training]
    trained: list[BertAdamW] = []

    def one_step(context: TrainingContext, groups: list[Group], step_loss: Any, **rest: Any) -> int:
        if "at_step" in rest:
            rest["at_step"](0)
        loss, _ = step_loss(0)
        assert loss.dtype == torch.float64
        loss.backward()
        trained.append(BertAdamW(groups))
        return 0

    for place in (loop, *([module] if hasattr(module, "fit") else [])):
        monkeypatch.setattr(place, "fit", one_step)
    train(world, **options)
    [optimiser] = trained
    gradients = dict(zip(optimiser.names, (parameter.grad for parameter in optimiser.parameters), strict=True))
    untouched = [name for name, gradient in gradients.items() if gradient is None]
    masked_words = ("reader.masked_words.", "reader.copy.")  # not used for answers
    is_of_masked_words = training.startswith(("finetune", "windows"))
    assert all(is_of_masked_words and name.startswith(masked_words) for name in untouched), untouched
    assert is_of_masked_words == bool(untouched)
    sizes = {name: gradient.abs() for name, gradient in gradients.items() if gradient is not None}
    assert len(sizes) > 10 or options.get("tower") == "bag"
    largest = max(float(size.max()) for size in sizes.values())
    unseen = [
        f"{name}: {int(rounding.sum())} of {size.numel()}, at most {float((size * rounding).max()):.0e}"
        for name, size in sizes.items()
        if (rounding := (size > 0) & (size < BOUND * largest)).any() or not size.any()
    ]
    assert not unseen, "\n".join([f"the largest gradient is {largest:.0e}", *unseen])


RESUMED = (
    "ict: crops",
    "ict: reader",
    "finetune: vectors, hybrid",
    "passages: bag",
    "windows",
    "reader: bert",
    "tagger",
)


@pytest.mark.parametrize("training", [*RESUMED, "path", "closed_book: pretrain", "closed_book: finetune"])
def test_a_killed_training_resumes_to_the_same_bits(
    world: World, training: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five steps with a checkpoint at every second, killed after the third."""
    module, train, options = TRAININGS[training]
    usual_fit, usual_context = loop.fit, tiny_context

    def process(journal: MemoryJournal, checkpoints: MemoryCheckpoints, **surroundings: Any) -> bytes:
        context = usual_context(journal=journal, checkpoints=checkpoints, checkpoint_every=2, **surroundings)
        with monkeypatch.context() as patched:
            patched.setattr(sys.modules[__name__], "tiny_context", lambda: context)
            for place in (loop, *([module] if hasattr(module, "fit") else [])):
                patched.setattr(place, "fit", lambda *given, **changes: usual_fit(*given, **{**changes, "steps": 5}))
            train(world, **options)
        return checkpoints.saved[5][loop.TENSORS]

    journal = MemoryJournal()
    expected = process(journal, MemoryCheckpoints())
    tensors, resumed = killed_and_resumed(process, 3)
    assert tensors == expected
    assert resumed.without_times() == journal.without_times()
