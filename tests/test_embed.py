"""Batches side by side give the bytes of one thread, and end together."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from small_world import World, tiny_models

from realmops.encoders import packed
from realmops.encoders.bert import Bert
from realmops.encoders.devices import multiplies_bf16
from realmops.encoders.foreign import Foreign
from realmops.index.embed import embed, embed_documents

PRECISIONS = [torch.float32, *([torch.bfloat16] if multiplies_bf16() else [])]


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three of them, for batches of 40 wordpieces."""
    before = torch.get_num_threads()
    monkeypatch.setitem(packed.BATCH_WORDPIECES, "cpu", 40)
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_embeddings_are_those_of_one_thread(world: World, dtype: torch.dtype) -> None:
    retriever = tiny_models(world)[0]
    rows, seen = list(range(len(world.snapshot))) * 3, list[int]()
    several = embed_documents(retriever, world.snapshot, rows, dtype, seen.append)
    assert sum(seen) == len(rows)
    assert len(seen) >= 6, "as many batches as are shared among three threads"
    assert (torch.get_num_threads(), retriever.training) == (3, True)
    torch.set_num_threads(1)
    assert torch.equal(several, embed_documents(retriever, world.snapshot, rows, dtype))


@pytest.mark.usefixtures("threads")
def test_an_error_in_one_thread_ends_all(world: World) -> None:
    tower, done = tiny_models(world)[0].document, list[int]()

    def refuse(rows: int) -> None:
        done.append(rows)
        raise ValueError("no more")

    tokens = np.array([world.special.cls, *range(10, 30), world.special.sep])
    with pytest.raises(ValueError, match="no more"):
        embed(tower, [(tokens, np.zeros_like(tokens))] * 400, torch.float32, refuse)
    assert len(done) <= 3
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("threads")
def test_an_encoder_that_does_not_promise_it_is_called_by_one_thread(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not Foreign.reentrant
    monkeypatch.setattr(Bert, "reentrant", False)
    monkeypatch.setattr("realmops.index.embed._side_by_side", None)
    rows = list(range(len(world.snapshot))) * 3
    assert len(embed_documents(tiny_models(world)[0], world.snapshot, rows, torch.float32)) == len(rows)
