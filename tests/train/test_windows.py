"""The reader learns in windows: where they lie, what is right in them, the loss against a slow version."""

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from small_world import (
    MemoryJournal,
    World,
    build_world,
    index_of,
    killed_and_resumed,
    same_parameters,
    section,
    tiny_context,
    tiny_models,
    tiny_optimiser,
)

from realmops.answering.openqa import OpenQa
from realmops.model.build import add_span_head
from realmops.model.packed import PackedBatch
from realmops.model.retriever import FusionWeights
from realmops.model.sequences import join_reader
from realmops.options import Finetune
from realmops.questions.question_sets import Question
from realmops.train import windows as module
from realmops.train.loop import TrainingContext
from realmops.train.parallel import ProcessGroup
from realmops.train.windows import (
    HARDEST,
    NEGATIVES_FROM,
    WindowExample,
    build_window_examples,
    draw_windows,
    place_window,
    train_in_windows,
    windows_loss,
)

BORN = Question("born", "Where was Anna Berg born?", ("Oslo",))
DIED = Question("died", "When did Maria Holm die?", ("1972",))
NEVER = Question("never", "Who is she?", ("Nobody at all",))
FP32 = torch.float32


def options(**changes: Any) -> Finetune:
    lengths = {"query_wordpieces": 24, "reader_wordpieces": 60, "answer_wordpieces": 4}
    rates = {"reader_learning_rate": 3e-3, "span_learning_rate": 1e-2}
    steps = {"epochs": 2, "batch_size": 2, "checkpoint_every": 2}
    return section("finetune", **{**steps, **lengths, **rates, **changes})


def open_qa(world: World, *, dropout: float = 0.0, order: list[int] | None = None, **changes: Any) -> OpenQa:
    """With ``order`` a ranker finds these passages for every question."""
    retriever, reader = tiny_models(world, dropout=dropout)
    add_span_head(reader, 8, seed=0)
    passages, ranker = None, None
    if order is None:
        passages = index_of(world, retriever).passages
    else:
        ranker = lambda question, k: np.array([*order, *[-1] * k][:k])  # noqa: E731
    return OpenQa(retriever, reader, world.snapshot, passages, options(**changes), FP32, ranker)


def text_of(world: World, passage: int, first: int, end: int) -> str:
    return world.words(world.snapshot.body(passage)[first:end])


# ---- lessons


def test_lessons_by_hand(world: World) -> None:
    """Of 7, 4, 0, 11 and 5, in this order, 4 is the first with Oslo; without it are 7 and 11. NEVER teaches nothing."""
    model = open_qa(world, order=[7, 4, 0, 11, 5])
    told: list[int] = []
    [lesson] = build_window_examples(model, [BORN, NEVER, DIED], 5, told.append, batch_size=2)
    assert told == [2, 1]
    assert world.words(lesson.question) == "where was anna berg born [UNK]"
    assert (lesson.passage, lesson.negatives) == (4, [7, 11])
    assert [text_of(world, 4, *span) for span in lesson.gold] == ["oslo"]
    assert (lesson.relevance, lesson.negative_relevance) == (0.0, [0.0, 0.0])
    twice = Question("twice", "Who?", ("Anna Berg", "poet"))
    [lesson] = build_window_examples(model, [twice], 2)
    assert [text_of(world, 4, *span) for span in lesson.gold] == ["poet", "anna berg"]


def test_a_passage_of_which_no_span_is_right_is_no_evidence(world: World) -> None:
    """Passage 0 holds an answer of seven wordpieces, which no span of four can be; nor is it a negative."""
    long = Question("long", "What?", ("Anna Berg was born in Oslo", "1931", "Norway"))
    [lesson] = build_window_examples(open_qa(world, order=[4, 0, 7]), [long], 3)
    assert lesson.passage == 4
    assert lesson.negatives == [7]
    some = Question("some", "What?", ("Anna Berg was born in Oslo",))
    assert build_window_examples(open_qa(world, order=[0, 7]), [some], 2) == []


def test_relevance_is_the_retrievers_and_the_hardest_come_first(world: World) -> None:
    model = open_qa(world)
    [lesson] = build_window_examples(model, [DIED], 12)
    with torch.no_grad():
        relevance_BK, id_BK = model.relevance([DIED.question], 12)
    f = dict(zip(id_BK[0].tolist(), relevance_BK[0].tolist(), strict=True))
    assert lesson.passage == 6
    assert lesson.negatives == [p for p in id_BK[0].tolist() if p != 6][:HARDEST]
    assert lesson.negative_relevance == pytest.approx([f[p] for p in lesson.negatives])
    assert lesson.relevance == pytest.approx(f[6])


def test_lessons_do_not_depend_on_chance(world: World) -> None:
    """A resumed training finds the ones that it had: dropout does not count."""
    model = open_qa(world, dropout=0.5)
    model.retriever.train()
    lessons = [build_window_examples(model, [BORN, DIED], 12) for _ in range(2)]
    assert [one.relevance for one in lessons[0]] == [one.relevance for one in lessons[1]]


# ---- windows


def test_a_window_holds_its_span_wherever_it_lies() -> None:
    """A body of 30 with windows of 10: every place that holds the span, and no other."""
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


def test_windows_mark_the_right_spans_that_they_hold(long_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oslo stands twice, further from each other than a window: always one of them whole, each of them sometimes."""
    monkeypatch.setattr(module, "WINDOW", 20)
    model = open_qa(long_world, order=[0, 1])
    [lesson] = build_window_examples(model, [BORN], 2)
    assert len(lesson.gold) == 2
    rng, seen = np.random.default_rng(0), set()
    for _ in range(60):
        right, wrong = draw_windows(model, lesson, rng, negatives=True)
        assert (right.passage, wrong.passage) == (0, 1)
        assert right.end - right.begin == wrong.end - wrong.begin == 20
        assert 0 <= right.begin < right.end <= len(long_world.snapshot.body(0))
        assert 0 <= wrong.begin < wrong.end <= len(long_world.snapshot.body(1))
        inside = [(low, high) for low, high in right.gold if low >= 0 and high < 20]
        assert [text_of(long_world, 0, right.begin + low, right.begin + high + 1) for low, high in inside] == ["oslo"]
        assert wrong.gold == frozenset()
        seen.add(inside[0][0] + right.begin)
        assert len(draw_windows(model, lesson, rng, negatives=False)) == 1
    assert len(seen) == 2


def test_right_spans_of_a_window_by_hand() -> None:
    """Two of them; one begins before the window, one ends behind it, and one is longer than a span may be."""
    gold = frozenset({(0, 1), (2, 2), (-1, 0), (2, 3), (0, 2)})
    spans = np.array([(0, 0), (0, 1), (1, 1), (1, 2), (2, 2)])
    found = module.is_gold(spans, module.Window(0, 0, 3, 0.0, gold))
    assert found.tolist() == [False, True, False, False, True]
    assert module.is_gold(spans, module.Window(0, 0, 3, 0.0, frozenset())).tolist() == [False] * 5


def test_question_and_window_fit_the_reader(long_world: World) -> None:
    """Room for 40 with a question of 7: windows of 30; a longer question leaves room for an answer."""
    model = open_qa(long_world, order=[0, 1], reader_wordpieces=40)
    [lesson] = build_window_examples(model, [BORN], 2)
    [window] = draw_windows(model, lesson, np.random.default_rng(0), negatives=False)
    assert window.end - window.begin == 40 - 3 - len(lesson.question)
    wordy = Question("wordy", "Where " * 50, ("Oslo",))
    model = open_qa(long_world, order=[0, 1], query_wordpieces=62, reader_wordpieces=64)
    [lesson] = build_window_examples(model, [wordy], 2)
    assert len(lesson.question) == 64 - 3 - 4
    windows = draw_windows(model, lesson, np.random.default_rng(0), negatives=True)
    loss, _ = windows_loss(model, [lesson], [windows])
    assert 0 < loss.item() < math.inf


# ---- the loss


def slow_loss(world: World, model: OpenQa, lesson: WindowExample, windows: list[module.Window]) -> float:
    """-log of the share of the right spans, one window and one span at a time."""
    spans, special = model.reader.spans, world.special
    assert spans is not None
    right = total = 0.0
    for window in windows:
        body = world.snapshot.body(window.passage)[window.begin : window.end]
        joined, segments, offset = join_reader(lesson.question, body, special, model.options.reader_wordpieces)
        hidden = model.reader.bert(PackedBatch([joined], [segments]))
        for first in range(len(body)):
            for last in range(first, min(first + model.options.answer_wordpieces, len(body))):
                score = float(spans(hidden, torch.tensor([offset + first]), torch.tensor([offset + last])))
                mass = math.exp(score + model.retriever.mixture.reading * window.relevance)
                total += mass
                is_right = window.passage == lesson.passage and (
                    (window.begin + first, window.begin + last + 1) in lesson.gold
                )
                right += mass if is_right else 0.0
    return -math.log(right / total)


@pytest.mark.parametrize("negatives", [True, False])
@pytest.mark.parametrize("reading", [1.0, 0.5])
def test_the_loss_is_the_slow_ones(
    world: World, negatives: bool, reading: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of eight; two questions with different numbers of right spans."""
    monkeypatch.setattr(module, "WINDOW", 8)
    model = open_qa(world)
    model.retriever.mixture = FusionWeights(1.0, 0.0, reading)
    lessons = build_window_examples(model, [BORN, Question("who", "Who was born?", ("Anna Berg", "poet"))], 12)
    rng = np.random.default_rng(1)
    windows = [draw_windows(model, lesson, rng, negatives=negatives) for lesson in lessons]
    assert [len(read) for read in windows] == [1 + negatives] * 2
    with torch.no_grad():
        loss, later = windows_loss(model, lessons, windows)
        expected = [slow_loss(world, model, lesson, read) for lesson, read in zip(lessons, windows, strict=True)]
    assert loss.item() == pytest.approx(np.mean(expected), rel=1e-4)
    metrics = later.now()
    assert metrics["span_loss"] == loss.item()
    assert metrics["span_accuracy"] in (0.0, 0.5, 1.0)


# ---- the training


def train(
    world: World, chosen: dict[str, Any], questions: list[Question], **changes: Any
) -> tuple[OpenQa, MemoryJournal]:
    model = open_qa(world, dropout=changes.pop("dropout", 0.0), **chosen)
    context = tiny_context(**{"journal": MemoryJournal(), **changes})
    train_in_windows(context, model, build_window_examples(model, questions, 12), model.options, tiny_optimiser())
    assert isinstance(context.journal, MemoryJournal)
    return model, context.journal


FIVE = [
    BORN, DIED, Question("wrote", "Who wrote The Cold Sea?", ("Anna Berg",)),
    Question("star", "Who built The Star?", ("Jon Vik",)), Question("sang", "Who sang in Bergen?", ("Maria Holm",)),
]  # fmt: skip


def test_training_learns_and_negatives_come_late(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty epochs of three steps: from step 33 of 60 on a second window is read; the retriever stays as it is."""
    asked: list[bool] = []
    usual = module.draw_windows

    def spy(*given: Any, negatives: bool) -> Any:
        asked.append(negatives)
        return usual(*given, negatives=negatives)

    monkeypatch.setattr(module, "draw_windows", spy)
    start, _ = tiny_models(world)
    model, journal = train(world, {"epochs": 20}, FIVE)
    loss = journal.values("loss")
    assert len(loss) == 60
    assert asked == [False] * (33 // 3 * 5) + [True] * (27 // 3 * 5)
    assert NEGATIVES_FROM == 0.55
    assert np.mean(loss[-6:]) < 0.5 * np.mean(loss[:6])
    same_parameters(model.retriever, start)
    assert np.mean(journal.values("span_accuracy")[:6]) < 0.5 < np.mean(journal.values("span_accuracy")[27:33])


def test_processes_draw_the_windows_that_one_draws(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three questions over two processes: the mean of their losses is the loss of the batch."""
    found: dict[int, list[float]] = {}

    def one_step(context: TrainingContext, groups: Any, options: Any, step_loss: Any, **rest: Any) -> int:
        found.setdefault(context.processes.size, []).append(step_loss(0)[0].item())
        return 0

    monkeypatch.setattr(module, "fit", one_step)
    monkeypatch.setattr(module, "NEGATIVES_FROM", 0.0)
    for processes in (ProcessGroup(), ProcessGroup(0, 2), ProcessGroup(1, 2)):
        train(world, {"batch_size": 3}, FIVE[:3], processes=processes)
    assert sum(found[2]) / 2 == pytest.approx(found[1][0], rel=1e-5)


@pytest.mark.parametrize("kill_at", [1, 3, 5])
def test_killed_and_resumed_it_ends_with_the_same_bits(world: World, kill_at: int) -> None:
    """Six steps with dropout, a checkpoint at every second; the last ones with negatives."""
    expected, lines = train(world, {}, FIVE, dropout=0.1)
    (found, _), journal = killed_and_resumed(partial(train, world, {}, FIVE, dropout=0.1), kill_at)
    same_parameters(found.reader, expected.reader)
    assert journal.without_times() == lines.without_times()
