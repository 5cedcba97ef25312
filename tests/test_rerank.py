"""Given texts ranked by the reader: against spans that are scored one text at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_world import World
from test_finetune import open_qa

from realmops.answering import openqa
from realmops.answering.retrieval import RetrieveAndRead

QUESTION = "Who wrote The Cold Sea?"


def test_a_text_has_the_part_of_its_spans(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    model = open_qa(world)
    texts = [world.snapshot.text(n) for n in range(5)] + ["", " ", "Anna Berg wrote it. " * 40]
    sums = []
    for text in texts:
        body = np.array(world.snapshot.tokenizer.encode(text, add_special_tokens=False).ids, np.int64)
        with torch.no_grad():
            score_S, _ = model.score_spans([model.wordpieces(QUESTION)], [body])
        sums.append(float(score_S.double().exp().sum()))
    wanted = [one / sum(sums) for one in sums]
    assert wanted[5:7] == [0, 0]
    for together in (16, 3, 1):
        monkeypatch.setattr(openqa, "_TEXTS", together)
        assert model.rerank(QUESTION, texts) == pytest.approx(wanted, rel=1e-4)
    assert model.rerank(QUESTION, ["", ""]) == [0, 0]


def test_passages_as_texts_are_read_as_passages(world: World) -> None:
    snapshot = world.snapshot
    for n in range(len(snapshot)):
        assert np.array_equal(snapshot.encoded(snapshot.text(n), with_forms=False), snapshot.body(n))
        assert np.array_equal(snapshot.encoded(snapshot.text(n), with_forms=True), snapshot.written(n))
    assert len(snapshot.encoded("", with_forms=True)) == 0


def test_a_reader_of_another_kind_says_that_it_cannot(world: World) -> None:
    with pytest.raises(ValueError, match="'spans' cannot score given texts"):
        RetrieveAndRead.rerank(open_qa(world), QUESTION, ["a"])
