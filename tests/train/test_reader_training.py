"""Training of readers on windows of passages: examples, windows, both losses against slow versions, resuming."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_open_qa
import torch
from small_open_qa import FP32, ranker, span_scores
from small_readers import build_model, write_reader
from small_world import World, build_world, section, tiny_context, tiny_models

from realmops.answering.extractive import ExtractiveQa
from realmops.answering.openqa import OpenQa
from realmops.model.extractive_reader import ExtractiveReader, load_extractive_reader
from realmops.model.retriever import FusionWeights
from realmops.questions.question_sets import Question
from realmops.train import reader_training as module
from realmops.train.reader_training import (
    HARDEST,
    ExtractiveTrainer,
    ReaderExample,
    ReaderTrainer,
    SpanHeadTrainer,
    Window,
    passages_loss,
    place_window,
    reader_trainer,
)

BORN = Question("born", "Where was Anna Berg born?", ("Oslo",))
DIED = Question("died", "When did Maria Holm die?", ("1972",))
NEVER = Question("never", "Who is she?", ("Nobody at all",))
QUESTIONS = [
    BORN, DIED, Question("wrote", "Who wrote The Cold Sea?", ("Anna Berg",)),
    Question("star", "Who built The Star?", ("Jon Vik",)), Question("sang", "Who sang in Bergen?", ("Maria Holm",)),
]  # fmt: skip
RULE = "token_boundary"
Pairs = Sequence[tuple[str, str, Sequence[str]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reader(tmp_path_factory.mktemp("readers") / "bert", "bert")


def options(**changes: Any) -> dict[str, Any]:
    steps = {"epochs": 2, "batch_size": 2, "reader_learning_rate": 3e-3}
    return {**steps, "query_wordpieces": 24, **changes}


def open_qa(world: World, **changes: Any) -> OpenQa:
    return small_open_qa.open_qa(world, **options(**changes))


def extractive(world: World, folder: Path, order: Sequence[int], dropout: float = 0.0, **changes: Any) -> ExtractiveQa:
    reader = load_extractive_reader(folder)
    reader.set_dropout(dropout)
    chosen = section("finetune", **options(reader_wordpieces=120, answer_wordpieces=8, **changes))
    return ExtractiveQa(tiny_models(world)[0], reader, world.snapshot, None, chosen, FP32, ranker(order))


def trainer_of(kind: str, world: World, folder: Path, order: Sequence[int], **changes: Any) -> ReaderTrainer:
    made = open_qa(world, order=order, **changes) if kind == "spans" else extractive(world, folder, order, **changes)
    return reader_trainer(made)


def text_of(world: World, passage: int, first: int, end: int) -> str:
    return world.words(world.snapshot.body(passage)[first:end])


both_kinds = pytest.mark.parametrize("kind", ["spans", "extractive"])


@both_kinds
def test_examples_by_hand(world: World, folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 7, 4, 0, 11 and 5, in this order, 4 is the first with Oslo; 7 and 11 lack it. NEVER has no answer."""
    monkeypatch.setattr(module, "QUESTIONS_AT_ONCE", 2)
    trainer, counted = trainer_of(kind, world, folder, [7, 4, 0, 11, 5]), list[int]()
    [example] = trainer.examples([BORN, NEVER, DIED], 5, counted.append)
    assert counted == [2, 1]
    assert (example.question, example.passage, example.relevance) == (BORN, 4, 0.0)
    assert example.negatives == [(7, 0.0), (11, 0.0)]
    [(first, end)] = example.spans
    window = Window(4, first, end, 0.0, ())
    if isinstance(trainer, ExtractiveTrainer):
        assert trainer.text(window) == "Oslo"
    else:
        assert text_of(world, 4, first, end) == "oslo"
        twice = Question("twice", "Who?", ("Anna Berg", "poet"))
        [example] = trainer.examples([twice], 2)
        assert [text_of(world, 4, *span) for span in example.spans] == ["poet", "anna berg"]


def test_a_passage_without_a_span_of_the_answer_is_no_evidence(world: World) -> None:
    """Passage 0 has an answer of seven wordpieces, longer than a span of four; it is no negative either."""
    long = Question("long", "What?", ("Anna Berg was born in Oslo", "1931", "Norway"))
    [example] = SpanHeadTrainer(open_qa(world, order=[4, 0, 7])).examples([long], 3)
    assert (example.passage, [passage for passage, _ in example.negatives]) == (4, [7])


def test_relevance_is_without_dropout_and_negatives_are_the_hardest(world: World) -> None:
    model = open_qa(world, dropout=0.5)
    model.retriever.train()
    [example], [again] = (SpanHeadTrainer(model).examples([DIED], 12) for _ in range(2))
    assert example == again, "a resumed training has the same examples"
    with torch.no_grad():
        relevance_BK, id_BK = model.relevance([DIED.question], 12)
    f = dict(zip(id_BK[0].tolist(), relevance_BK[0].tolist(), strict=True))
    assert example.passage == 6
    assert [passage for passage, _ in example.negatives] == [p for p in id_BK[0].tolist() if p != 6][:HARDEST]
    assert [relevance for _, relevance in example.negatives] == pytest.approx([f[p] for p, _ in example.negatives])
    assert example.relevance == pytest.approx(f[6])


def test_a_window_contains_its_span_at_a_uniform_place() -> None:
    """A body of 30 with windows of 10."""
    for span, expected in (((0, 1), {0}), ((12, 15), set(range(5, 13))), ((29, 30), {20}), ((9, 10), set(range(10)))):
        rng = np.random.default_rng(0)
        begins = [place_window(30, span, 10, rng) for _ in range(600)]
        assert set(begins) == expected
        assert all(begin <= span[0] and span[1] <= begin + 10 for begin in begins)
        counts = np.bincount(begins)[min(expected) :]
        assert counts.tolist() == pytest.approx([600 / len(expected)] * len(expected), abs=50)
    rng = np.random.default_rng(0)
    assert {place_window(8, (3, 5), 10, rng) for _ in range(20)} == {0}, "all of a short passage"
    assert {place_window(12, None, 10, rng) for _ in range(60)} == {0, 1, 2}, "without a span anywhere"
    assert place_window(8, None, 10, rng) == 0


LONG = "Rain fell and it fell again and again. " * 6
TEXTS = (
    ("Long", f"{LONG}Anna was in Oslo then. {LONG}Then she left Oslo. {LONG}", ("Anna", "Oslo")),
    ("None", f"{LONG}Jon sat there. {LONG}", ("Jon",)),
)


@pytest.fixture(scope="module")
def long_world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return build_world(tmp_path_factory.mktemp("long"), TEXTS, block_wordpieces=500)


@both_kinds
def test_windows_contain_an_answer_with_its_spans(
    long_world: World, folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two answers that are further apart than a window; a window of a negative has none."""
    trainer = trainer_of(kind, long_world, folder, [0, 1])
    monkeypatch.setattr(type(trainer), "longest_window", 20)
    [example] = trainer.examples([BORN], 2)
    assert len(example.spans) == 2
    rng, seen = np.random.default_rng(0), set[int]()
    for _ in range(60):
        right, wrong = trainer.draw(example, rng, negatives=True)
        assert (right.passage, wrong.passage) == (0, 1)
        assert right.end - right.begin == wrong.end - wrong.begin == 20
        assert 0 <= right.begin < right.end <= trainer.length(0)
        assert 0 <= wrong.begin < wrong.end <= trainer.length(1)
        [(first, end)] = [(first, end) for first, end in right.spans if first >= 0 and end <= 20]
        if isinstance(trainer, ExtractiveTrainer):
            assert trainer.text(right).count("Oslo") == 1
            assert trainer.text(wrong) in long_world.snapshot.text(1)
        else:
            assert text_of(long_world, 0, right.begin + first, right.begin + end) == "oslo"
        assert not wrong.spans
        seen.add(first + right.begin)
        assert len(trainer.draw(example, rng, negatives=False)) == 1
    assert len(seen) == 2


def test_question_and_window_fit_the_reader(long_world: World, folder: Path) -> None:
    """A long question leaves room for an answer."""
    for words, query, limit in (("Where was Anna Berg born?", 24, 40), ("Where " * 50, 62, 64)):
        question = Question("q", words, ("Oslo",))
        trainer = SpanHeadTrainer(open_qa(long_world, order=[0, 1], query_wordpieces=query, reader_wordpieces=limit))
        [example] = trainer.examples([question], 2)
        windows = trainer.draw(example, np.random.default_rng(0), negatives=True)
        length = len(trainer.wordpieces(question))
        assert windows[0].end - windows[0].begin == limit - 3 - length >= 4
        assert 0 < trainer.loss([(example, windows)])[0].item() < math.inf
    model = extractive(long_world, folder, [0])
    loss, _ = passages_loss(model, [("in " * 500, "norway in oslo. " * 60, ("Oslo",))], [RULE])
    assert 0 < loss.item() < math.inf


def slow_span_head_loss(trainer: SpanHeadTrainer, example: ReaderExample, windows: list[Window]) -> float:
    """Return -log of the probability of gold spans, one window and one span at a time."""
    model, right, total = trainer.model, 0.0, 0.0
    for window in windows:
        body = model.snapshot.body(window.passage)[window.begin : window.end]
        for (first, last), score in span_scores(model, trainer.wordpieces(example.question), body).items():
            mass = math.exp(score + model.retriever.mixture.reading * window.relevance)
            total += mass
            span = (window.begin + first, window.begin + last + 1)
            right += mass * (window.passage == example.passage and span in example.spans)
    return -math.log(right / total)


@pytest.mark.parametrize("negatives", [True, False])
@pytest.mark.parametrize("reading", [1.0, 0.5])
def test_the_loss_of_the_span_head_equals_the_slow_one(
    world: World, negatives: bool, reading: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of eight; two questions with different numbers of right spans."""
    monkeypatch.setattr(SpanHeadTrainer, "longest_window", 8)
    trainer = SpanHeadTrainer(open_qa(world))
    trainer.model.retriever.mixture = FusionWeights(1.0, 0.0, reading)
    who = Question("who", "Who was born?", ("Anna Berg", "poet"))
    rng = np.random.default_rng(1)
    drawn = [(one, trainer.draw(one, rng, negatives=negatives)) for one in trainer.examples([BORN, who], 12)]
    assert [len(windows) for _, windows in drawn] == [1 + negatives] * 2
    with torch.no_grad():
        loss, later = trainer.loss(drawn)
        expected = [slow_span_head_loss(trainer, *pair) for pair in drawn]
    assert loss.item() == pytest.approx(np.mean(expected), rel=1e-4)
    metrics = later.now()
    assert metrics["span_loss"] == loss.item()
    assert metrics["span_accuracy"] in (0.0, 0.5, 1.0)


def slow_extractive_loss(reader: ExtractiveReader, pairs: Pairs) -> list[float]:
    """Return -log p(y|x, z) in fp64 by transformers' own model, one passage and one span at a time."""
    model = build_model("bert").double()
    losses = []
    for question, text, answers in pairs:
        encoding = reader.tokenizer(question, text, return_offsets_mapping=True, return_token_type_ids=True)
        inputs = {name: torch.tensor([encoding[name]]) for name in ("input_ids", "token_type_ids")}
        out = model(**inputs)
        rows = [n for n, sequence in enumerate(encoding.sequence_ids()) if sequence == 1]
        p_start, p_end = (logits[0, [0, *rows]].softmax(-1).tolist() for logits in (out.start_logits, out.end_logits))
        p = 0.0 if answers else p_start[0] * p_end[0]
        for answer in answers:
            for first in range(len(rows)):
                for last in range(first, min(first + 8, len(rows))):
                    start, end = encoding.offset_mapping[rows[first]][0], encoding.offset_mapping[rows[last]][1]
                    p += (text[start:end].lower() == answer.lower()) * p_start[first + 1] * p_end[last + 1]
        losses += [-float(np.log(p))] if p else []
    return losses


def test_the_loss_of_a_published_reader_equals_the_slow_one(world: World, folder: Path) -> None:
    """Passages with one, two and no answers, and one whose answer has no span, which does not count."""
    model = extractive(world, folder, [0])
    model.reader.eval()
    pairs: Pairs = [
        ("where was it", "anna was in oslo.", ("Oslo",)),
        ("where was it", "oslo is in norway, and oslo is a port in it.", ("Oslo", "Norway")),
        ("who was it", "it is a ship.", ()),
        ("who was it", "anna berg", ("Maria Holm",)),
    ]
    loss, deferred = passages_loss(model, pairs, [RULE] * 4)
    with torch.no_grad():
        expected = slow_extractive_loss(model.reader, pairs)
    assert len(expected) == 3
    assert loss.item() == pytest.approx(np.mean(expected), rel=1e-4)
    assert deferred.now() == {"span_loss": pytest.approx(loss.item()), "no_correct_span": 0.25}
    nothing, _ = passages_loss(model, pairs[3:], [RULE])
    assert nothing.item() == 0.0
    nothing.backward()
    gradients = [p.grad for p in model.reader.parameters() if p.grad is not None]
    assert gradients
    assert not any(gradient.any() for gradient in gradients)


def test_negatives_are_read_in_the_last_part_of_a_training(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten epochs of three steps: from step 17 of 30 on, 55 %, a second window is read."""
    drawn: list[bool] = []
    usual = ReaderTrainer.draw

    def spy(*given: Any, negatives: bool) -> Any:
        drawn.append(negatives)
        return usual(*given, negatives=negatives)

    monkeypatch.setattr(ReaderTrainer, "draw", spy)
    trainer = SpanHeadTrainer(open_qa(world, epochs=10))
    trainer.train(tiny_context(), trainer.examples(QUESTIONS, 12), trainer.model.options)
    assert drawn == [False] * 29 + [True] * 21, "every third step has one question"
