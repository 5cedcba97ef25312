"""The path retriever on twelve passages: its examples and its loss by hand, and that it learns to follow a link."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_world import (
    World,
    section,
    tiny_context,
    tiny_models,
)

from realmops.baselines import path as paths
from realmops.baselines.path import PathExample, PathRetriever, train_paths
from realmops.options import Finetune
from realmops.questions.question_sets import Question
from realmops.search.bm25 import top_k

FP32 = torch.float32
# The Star names Jon Vik; that he built ships in Bergen is in his own passage.
DIRECT = Question("direct", "Where was Anna Berg born?", ("Oslo",))
TWO_STEPS = Question("two", "Where did the builder of The Star build?", ("ships in Bergen",))
NOWHERE = Question("nowhere", "Who wrote The Cold Sea?", ("Nobody",))


@pytest.fixture(autouse=True)
def few_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "STARTS", 2)
    monkeypatch.setattr(paths, "BEAM", 2)


def options(**changes: Any) -> Finetune:
    values: dict[str, Any] = {"epochs": 30, "batch_size": 2, "reader_learning_rate": 5e-3, "reader_wordpieces": 60}
    return section("finetune", **{**values, "query_wordpieces": 24, **changes})


def retriever(world: World, **changes: Any) -> PathRetriever:
    _, reader = tiny_models(world)
    return PathRetriever.start(reader.bert, world.snapshot, options(**changes), FP32, seed=0)


def test_an_example_ends_at_a_start_with_the_answer_or_continues_to_it(world: World) -> None:
    model = retriever(world)
    direct, two = model.training_example(DIRECT), model.training_example(TWO_STEPS)
    assert direct.starts == top_k(model.bm25.scores(DIRECT.question), 2).tolist()
    assert direct.is_right_start.tolist() == ["Oslo" in world.snapshot.text(p) for p in direct.starts]
    assert direct.is_right_start[direct.first]
    assert direct.is_right_next[0], "the path may end there"
    assert 8 not in two.starts
    assert two.is_right_start.tolist() == [p == two.starts[two.first] for p in two.starts]
    assert 8 in model.links.of(two.starts[two.first])
    assert not two.is_right_next[0], "the first passage has no answer"
    assert [p for p, right in zip(two.linked, two.is_right_next[1:], strict=True) if right] == [8]
    assert model.training_example(NOWHERE) is None


def test_the_loss_is_that_of_both_steps(world: World) -> None:
    model = retriever(world)
    example = model.training_example(TWO_STEPS)
    with torch.no_grad():
        read = {p: model._encode([(example.question, p)])[0] for p in (*example.starts, *example.linked)}
        begin, end, step = model.scorer.begin, model.scorer.end, model.scorer.step

        def minus_log_p(state: torch.Tensor, choices: list[torch.Tensor], right: np.ndarray) -> float:
            shares = [math.exp(float(state @ choice)) for choice in choices]
            return -math.log(sum(np.array(shares)[right]) / sum(shares))

        first = minus_log_p(begin, [read[p] for p in example.starts], example.is_right_start)
        state = step(read[example.starts[example.first]], begin)
        second = minus_log_p(state, [end, *(read[p] for p in example.linked)], example.is_right_next)
        assert float(model.loss([example])) == pytest.approx(first + second, rel=1e-4)
        other: PathExample = replace(example, linked=example.linked[:1], is_right_next=np.array([True, False]))
        both = (float(model.loss([example])) + float(model.loss([other]))) / 2
        assert float(model.loss([example, other])) == pytest.approx(both, rel=1e-4)


def test_it_learns_to_follow_a_link_to_a_passage_that_words_do_not_find(world: World) -> None:
    model = retriever(world)
    examples = [example for q in (DIRECT, TWO_STEPS) if (example := model.training_example(q))]
    train_paths(tiny_context(), model, examples, model.options)
    ranking = model.rank([DIRECT.question, TWO_STEPS.question], 12)
    assert "Oslo" in world.snapshot.text(int(ranking[0, 0]))
    assert ranking[1, 0] == 8
    words = top_k(model.bm25.scores(TWO_STEPS.question), 12).tolist()
    assert words.index(8) > 1
    assert sorted(ranking[1].tolist()) == list(range(12)), "each passage once"


def test_a_saved_retriever_ranks_the_same_and_pads(world: World, tmp_path: Path) -> None:
    model, questions = retriever(world), [DIRECT.question, TWO_STEPS.question]
    model.save(tmp_path)
    again = PathRetriever.load(tmp_path, world.snapshot, model.options, torch.device("cpu"), FP32)
    ranking = again.rank(questions, 14)
    assert ranking.tolist() == model.rank(questions, 14).tolist()
    assert ranking[0, 12:].tolist() == [-1, -1]
