"""An Open-QA model over twelve passages, with three questions."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from small_world import World, index_of, section, tiny_models

from realmops.answering.openqa import OpenQa
from realmops.model.build import add_span_head
from realmops.model.packed import PackedBatch
from realmops.model.sequences import SpecialTokens, join_reader
from realmops.options import Finetune
from realmops.questions.question_sets import Question

FP32 = torch.float32
BORN = Question("born", "Where was Anna Berg born?", ("Oslo",))
PORT = Question("port", "Which town is a port?", ("Bergen", "the port of Bergen"))
NEVER = Question("never", "Who is she?", ("Nobody at all",))


def options(**changes: Any) -> Finetune:
    values: dict[str, Any] = {
        "epochs": 2, "batch_size": 2, "retriever_learning_rate": 1e-2, "reader_learning_rate": 1e-2,
        "retriever_candidates": 8, "reader_candidates": 3, "query_wordpieces": 24, "reader_wordpieces": 60,
        "answer_wordpieces": 4,
    }  # fmt: skip
    return section("finetune", **{**values, **changes})


def open_qa(
    world: World, *, width: int = 8, dropout: float = 0.0, order: Sequence[int] | None = None, **changes: Any
) -> OpenQa:
    """Return a model that retrieves passages in this order for every question, by embeddings without it."""
    retriever, reader = tiny_models(world, dropout=dropout)
    add_span_head(reader, width, seed=0)
    with torch.no_grad():
        for parameter in reader.spans.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    if order is None:
        return OpenQa(retriever, reader, world.snapshot, index_of(world, retriever).passages, options(**changes), FP32)
    return OpenQa(retriever, reader, world.snapshot, None, options(**changes), FP32, ranker(order))


def ranker(order: Sequence[int]) -> Callable[[str, int], np.ndarray]:
    """Return a ranker that finds these passages for every question."""
    return lambda question, k: np.array([*order, *[-1] * k][:k])


def cut(world: World | OpenQa, passage: int, first: int, last: int) -> str:
    """Return the text from the first to the last wordpiece."""
    characters = world.snapshot.chars(passage)
    return world.snapshot.text(passage)[characters[first, 0] : characters[last, 1]]


@torch.no_grad()
def span_scores(model: OpenQa, x: np.ndarray, body: np.ndarray) -> dict[tuple[int, int], float]:
    """Score each span (first, last) of a passage's wordpieces, one at a time."""
    special, longest = SpecialTokens.of(model.snapshot.tokenizer), model.options.answer_wordpieces
    joined, segments, offset = join_reader(x, body, special, model.options.reader_wordpieces)
    hidden = model.reader.bert(PackedBatch([joined], [segments]))
    spans = [(first, last) for first in range(len(body)) for last in range(first, min(first + longest, len(body)))]
    return {
        (first, last): float(model.reader.spans(hidden, torch.tensor([offset + first]), torch.tensor([offset + last])))
        for first, last in spans
    }
