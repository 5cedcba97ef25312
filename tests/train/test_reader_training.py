"""Training of a published reader: parts of passages, targets, the loss in fp64, resume to the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_open_qa import FP32
from small_readers import build_model, write_reader
from small_world import (
    MemoryJournal,
    World,
    build_world,
    killed_and_resumed,
    same_parameters,
    section,
    tiny_context,
    tiny_models,
    tiny_optimiser,
)

from realmops.answering.extractive import ExtractiveQa
from realmops.model.extractive_reader import ExtractiveReader, load_extractive_reader
from realmops.questions.answer_matching import matched_spans
from realmops.questions.question_sets import Question
from realmops.train import reader_training as module
from realmops.train.reader_training import (
    build_passage_examples,
    draw_pairs,
    draw_part,
    passages_loss,
    target_positions,
    train_reader,
)

BORN = Question("born", "Where was Anna Berg born?", ("Oslo",))
QUESTIONS = [
    BORN, Question("died", "When did Maria Holm die?", ("1972",)), Question("who", "Who wrote it?", ("Anna Berg",)),
    Question("star", "Who built The Star?", ("Jon Vik",)), Question("sang", "Who sang in Bergen?", ("Maria Holm",)),
]  # fmt: skip
RULE = "token_boundary"
Pairs = Sequence[tuple[str, str, Sequence[str]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reader(tmp_path_factory.mktemp("readers") / "bert", "bert")


def extractive(world: World, folder: Path, order: Sequence[int], **changes: Any) -> ExtractiveQa:
    """A model for which a ranker finds these passages for every question."""
    retriever, _ = tiny_models(world)
    values = {
        "epochs": 2, "batch_size": 2, "query_wordpieces": 24, "reader_wordpieces": 120, "answer_wordpieces": 8,
        "reader_learning_rate": 3e-3, "span_learning_rate": 3e-3, "checkpoint_every": 2,
    }  # fmt: skip
    reader = load_extractive_reader(folder)
    reader.set_dropout(0.1)
    ranker = lambda question, k: np.array([*order, *[-1] * k][:k])  # noqa: E731
    given = section("finetune", **{**values, **changes})
    return ExtractiveQa(retriever, reader, world.snapshot, None, given, FP32, ranker)


def test_examples_by_hand(world: World, folder: Path) -> None:
    """Of 7, 4, 0, 11 and 5, in this order, 4 is the first with Oslo; without it are 7 and 11."""
    model = extractive(world, folder, [7, 4, 0, 11, 5])
    never = Question("never", "Who is she?", ("Nobody at all",))
    counted: list[int] = []
    [example] = build_passage_examples(model, [never, BORN], 5, counted.append)
    assert counted == [2]
    assert (example.question, example.passage, example.negatives) == (BORN, 4, [7, 11])
    text = world.snapshot.text(4)
    assert [text[start:end] for start, end in example.spans] == ["Oslo"]


def test_a_part_contains_a_span_wherever_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two distant answers is in some parts; without answers parts begin anywhere; a short passage is whole."""
    monkeypatch.setattr(module, "PART", 20)
    reader = load_extractive_reader(folder)
    filler = "norway in it is a port. " * 8
    text = f"{filler}Anna was in Oslo then. {filler}Then she left Oslo. {filler}"
    spans = matched_spans(text, ["Oslo"], RULE)
    rng, begins = np.random.default_rng(0), set[int]()
    for _ in range(80):
        part = draw_part(reader, text, spans, rng)
        assert part in text
        assert "Oslo" in part
        assert len(reader.tokenize(part).ids) <= 21
        begins.add(text.index(part) > len(filler) + 30)
    assert begins == {False, True}
    assert len({draw_part(reader, text, (), rng) for _ in range(20)}) > 10
    assert draw_part(reader, "Oslo is a port.", [(0, 4)], rng) == "Oslo is a port."


def test_targets_by_hand(folder: Path) -> None:
    """Wordpieces of both answers, none for a longer answer than allowed, the null answer for a passage without one."""
    reader = load_extractive_reader(folder)
    text = "oslo in norway is oslo"
    [window] = reader.windows([("where", text)], 120)
    targets = target_positions(window, text, ("Oslo",), RULE, 8)
    assert len(targets) == 2
    for start, end in targets:
        assert text[window.encoding.offsets[start][0] : window.encoding.offsets[end][1]] == "oslo"
    assert target_positions(window, text, ("oslo in norway is oslo",), RULE, 2) == []
    assert target_positions(window, text, ("bergen",), RULE, 8) == []
    assert target_positions(window, text, (), RULE, 8) == [(0, 0)]


def slow_loss(reader: ExtractiveReader, pairs: Pairs) -> list[float]:
    """-log p(y|x, z) in fp64 by transformers' own model, one passage and one span at a time."""
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


@torch.no_grad()
def test_the_loss_is_the_slow_one(world: World, folder: Path) -> None:
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
    expected = slow_loss(model.reader, pairs)
    assert len(expected) == 3
    assert loss.item() == pytest.approx(np.mean(expected), rel=1e-4)
    metrics = deferred.now()
    assert metrics == {"span_loss": pytest.approx(loss.item()), "no_correct_span": 0.25}
    nothing, _ = passages_loss(model, pairs[3:], [RULE])
    assert nothing.item() == 0.0


def test_a_batch_without_a_target_has_gradients_of_zero(world: World, folder: Path) -> None:
    model = extractive(world, folder, [0])
    loss, _ = passages_loss(model, [("who", "anna berg", ("Maria Holm",))], [RULE])
    loss.backward()
    gradients = [p.grad for p in model.reader.parameters() if p.grad is not None]
    assert gradients
    assert all(not gradient.any() for gradient in gradients)


def test_a_long_question_is_cut_in_training(world: World, folder: Path) -> None:
    model = extractive(world, folder, [0])
    loss, _ = passages_loss(model, [("in " * 500, "norway in oslo. " * 60, ("Oslo",))], [RULE])
    assert 0 < loss.item() < np.inf


def train(world: World, folder: Path, *, epochs: int = 2, **changes: Any) -> tuple[ExtractiveQa, MemoryJournal]:
    model = extractive(world, folder, range(12), epochs=epochs)
    context = tiny_context(**{"journal": MemoryJournal(), **changes})
    train_reader(context, model, build_passage_examples(model, QUESTIONS, 12), model.options, tiny_optimiser())
    assert isinstance(context.journal, MemoryJournal)
    return model, context.journal


def test_training_lowers_the_loss_and_negatives_come_late(
    world: World, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten epochs of three steps; from 55 % of the steps on a passage without the answer is read too."""
    drawn: list[bool] = []

    def spy(*given: Any, negatives: bool) -> Any:
        drawn.append(negatives)
        return draw_pairs(*given, negatives=negatives)

    monkeypatch.setattr(module, "draw_pairs", spy)
    start, _ = tiny_models(world)
    model, journal = train(world, folder, epochs=10)
    loss = journal.values("loss")
    assert len(loss) == 30
    assert drawn == sorted(drawn)
    assert drawn.count(False) == 29, "of 17 steps, every third with one question"
    assert np.mean(loss[-6:]) < 0.7 * np.mean(loss[:6])
    same_parameters(model.retriever, start)


@pytest.mark.parametrize("kill_at", [1, 3, 5])
def test_killed_and_resumed_it_ends_with_the_same_bits(world: World, folder: Path, kill_at: int) -> None:
    """Six steps with dropout, a checkpoint at every second; the last ones with negatives."""
    expected, lines = train(world, folder)
    (found, _), journal = killed_and_resumed(partial(train, world, folder), kill_at)
    same_parameters(found.reader, expected.reader)
    assert journal.without_times() == lines.without_times()


def test_long_passages_are_read_in_parts(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Question, part and answers of the passage with the answer, then of one without it."""
    monkeypatch.setattr(module, "PART", 20)
    filler = "Rain fell and it fell again and again. " * 6
    texts = (("Long", f"{filler}Anna was in Oslo then. {filler}", ("Anna", "Oslo")), ("None", filler, ("Rain",)))
    world = build_world(tmp_path, texts, block_wordpieces=500)
    model = extractive(world, folder, [0, 1])
    [example] = build_passage_examples(model, [BORN], 2)
    right, wrong = draw_pairs(model, example, np.random.default_rng(0), negatives=True)
    assert (right[0], right[2], wrong[0], wrong[2]) == (BORN.question, ("Oslo",), BORN.question, ())
    assert "Oslo" in right[1]
    assert wrong[1] in world.snapshot.text(1)
    assert len(draw_pairs(model, example, np.random.default_rng(0), negatives=False)) == 1
