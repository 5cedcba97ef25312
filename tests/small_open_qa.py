"""An Open-QA model over twelve passages, with three questions."""

from typing import Any

import torch
from small_world import World, section, tiny_models

from realmops.answering.openqa import OpenQa
from realmops.model.build import add_span_head
from realmops.options import Finetune
from realmops.questions.question_sets import Question
from realmops.search.embed import document_sequences, embed
from realmops.search.exact import ExactIndex

FP32 = torch.float32
BORN = Question("born", "Where was Anna Berg born?", ("Oslo",))
PORT = Question("port", "Which town is a port?", ("Bergen", "the port of Bergen"))
NEVER = Question("never", "Who is she?", ("Nobody at all",))


def options(**changes: Any) -> Finetune:
    values: dict[str, Any] = {
        "epochs": 2, "batch_size": 2, "retriever_learning_rate": 1e-2, "reader_learning_rate": 1e-2,
        "retriever_candidates": 8, "reader_candidates": 3, "query_wordpieces": 24, "reader_wordpieces": 60,
        "answer_wordpieces": 4, "checkpoint_every": 100,
    }  # fmt: skip
    return section("finetune", **{**values, **changes})


def open_qa(world: World, *, width: int = 8, **changes: Any) -> OpenQa:
    retriever, reader = tiny_models(world)
    add_span_head(reader, width, seed=0)
    with torch.no_grad():
        for parameter in reader.spans.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    sequences = document_sequences(world.snapshot, range(len(world.snapshot)))
    passages = ExactIndex(embed(retriever.document, sequences, FP32))
    return OpenQa(retriever, reader, world.snapshot, passages, options(**changes), FP32)


def cut(world: World, passage: int, first: int, last: int) -> str:
    """The text between two wordpieces, by their characters."""
    characters = world.snapshot.chars(passage)
    return world.snapshot.text(passage)[characters[first, 0] : characters[last, 1]]
