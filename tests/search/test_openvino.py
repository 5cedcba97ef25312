"""Passages by a graph that OpenVINO runs in bf16: near what the tower makes of them, for every encoder."""

import gc
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import Forked
from small_world import World, at_once, tiny_models
from torch import Tensor
from transformers import AutoConfig, AutoModel

from realmops import devices
from realmops.devices import supports_bf16
from realmops.model import packed
from realmops.model.encoder import Encoder
from realmops.model.retriever import BagOfWords, Embedder
from realmops.search import openvino
from realmops.search.embed import Sequences, embed, embed_documents
from realmops.search.embeddings import embed_changed, embed_corpus
from realmops.search.openvino import OpenVinoGraph, compile_graph

WORDS, LONGEST = 60, 150  # more wordpieces than a layer of ModernBERT sees to either side
BF16, FP32 = torch.bfloat16, torch.float32
AUTO = torch.bfloat16 if supports_bf16() else FP32


KINDS = {  # what a family's configuration has beside the common shape
    "bert": {},
    "roberta": {"max_position_embeddings": LONGEST + 1, "type_vocab_size": 1, "pad_token_id": 0},
    "distilbert": {"n_layers": 2, "n_heads": 4},
    "electra": {"embedding_size": 24},
    "modernbert": {"layer_types": ["full_attention", "sliding_attention"], "cls_token_id": 1, "sep_token_id": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16},
}


def encoder(kind: str, width: int = 48, inner: int = 96, **changes: Any) -> Encoder:
    """Two layers, of which ModernBERT's second sees what is near alone."""
    torch.manual_seed(0)
    shape = {"hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": inner}
    if kind == "distilbert":
        shape = {"dim": width, "hidden_dim": inner}
    shape |= {"vocab_size": WORDS, "max_position_embeddings": LONGEST, "pad_token_id": 0, "initializer_range": 0.1}
    shape |= {**KINDS[kind], **changes}
    return Encoder(AutoModel.from_config(AutoConfig.for_model(kind, **shape)))


def tower(kind: str = "bert", **how: Any) -> Embedder:
    """One of 8 numbers, as it is while it learns."""
    return Embedder(encoder(kind), 8, "cosine", **how).train()


def sequences(count: int = 9) -> Sequences:
    """Of many lengths, with both segments."""
    rng = np.random.default_rng(0)
    lengths = np.linspace(2, LONGEST, count).astype(int)
    return [(rng.integers(0, WORDS, n), (np.arange(n) > n // 2).astype(np.int64)) for n in lengths]


def near(found_NX: Tensor, true_NX: Tensor, width: int = 8) -> float:
    """The least cosine of both, vector by vector."""
    return float(torch.cosine_similarity(found_NX.view(-1, width), true_NX.view(-1, width)).min())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("how", "vectors"),
    [
        ({"pooling": "mean"}, 6),
        ({"pooling": "mean", "segments": "one"}, 1),
        ({"pooling": "cls"}, 1),
        ({"pooling": "last"}, 1),
    ],
)
def test_a_graph_finds_what_the_tower_finds(kind: str, how: dict[str, str], vectors: int) -> None:
    one, texts = tower(kind, **how), sequences()
    before = dict(one.named_modules())
    graph = OpenVinoGraph(one, vectors)
    assert one.training
    assert before == dict(one.named_modules()), "the tower keeps its own parts"
    found_NX, true_NX = (
        embed(one, texts, dtype, vectors=vectors, graph=g) for dtype, g in ((AUTO, graph), (FP32, None))
    )
    assert found_NX.shape == true_NX.shape == (9, 8 * vectors)
    assert near(found_NX, true_NX) > 0.999
    shuffled_NX = true_NX.roll(1, 0)
    assert near(found_NX, shuffled_NX) < near(found_NX, true_NX)
    torch.testing.assert_close(found_NX.view(-1, 8).norm(dim=1), torch.ones(9 * vectors))


def for_long_texts(kind: str, local: int = 128) -> Embedder:
    """One whose attention is so sharp that its first vector depends on what is seen, and from how far."""
    changes = {"local_attention": local} if kind == "modernbert" else {}
    one = Embedder(encoder(kind, max_position_embeddings=1024, **changes), 8, "cosine").eval()
    with torch.no_grad():
        for name, parameter in one.named_parameters():
            parameter.mul_(3.0 if any(part in name for part in ("Wqkv", "query", "key", "value", "_proj")) else 1.0)
    return one


def long_texts() -> Sequences:
    rng = np.random.default_rng(0)
    return [(rng.integers(0, WORDS, n), np.zeros(n, np.int64)) for n in (3, 159, 162, 170, 300, 451, 600, 900)]


@pytest.mark.parametrize("local", [2, 128, 320, 900])
def test_a_graph_keeps_windows_of_any_width(local: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 the graph gives what the tower gives, whatever the length."""
    one, texts = for_long_texts("modernbert", local), long_texts()
    true_NE = embed(one, texts, FP32)
    monkeypatch.setattr(openvino, "supports_bf16", lambda: False)
    with torch.autocast("cpu", torch.bfloat16):  # which the caller may compute in
        in_fp32 = OpenVinoGraph(one, 1)
    torch.testing.assert_close(embed(one, texts, FP32, graph=in_fp32), true_NE, rtol=0, atol=1e-5)
    assert near(embed(for_long_texts("modernbert", 2048), texts, FP32), true_NE) < 0.998, "the window counts"


@pytest.mark.parametrize("kind", ["bert", "roberta", "qwen3", "modernbert"])
def test_a_graph_is_as_near_for_long_texts_as_for_short_ones(kind: str) -> None:
    """Positions above 256, and the angles of rotary ones, are no numbers of bf16."""
    one, texts = for_long_texts(kind, 320), long_texts()
    assert near(embed(one, texts, AUTO, graph=OpenVinoGraph(one, 1)), embed(one, texts, FP32)) > 0.999


@pytest.mark.parametrize("head", ["paper", "release", "normalised"])
def test_a_graph_ends_in_the_towers_own_head(head: str) -> None:
    one = Embedder(encoder("bert", width=160), 8, head).eval()
    found_NE, true_NE = (embed(one, sequences(), d, graph=g) for d, g in ((AUTO, OpenVinoGraph(one, 1)), (FP32, None)))
    torch.testing.assert_close(found_NE, true_NE, rtol=0, atol=0.05 * float(true_NE.abs().max()))


@pytest.mark.parametrize("embedding", [48, 24])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_graph_is_made_of_narrow_word_vectors_and_of_frozen_weights_too(embedding: int, frozen: bool) -> None:
    """Small ELECTRAs widen their word vectors by a product; a model that learns no more has its weights in bf16."""
    one = Embedder(encoder("electra", embedding_size=embedding), 8, "cosine").eval()
    true_NE = embed(one, sequences(), FP32)
    if frozen:
        devices.freeze_linear_weights(one, torch.bfloat16)
    assert near(embed(one, sequences(), AUTO, graph=OpenVinoGraph(one, 1)), true_NE) > 0.99


def test_no_passage_depends_on_those_beside_it() -> None:
    one, texts = tower(), sequences()
    graph = OpenVinoGraph(one, 1)
    together_NE = embed(one, texts, AUTO, graph=graph)
    for row in (0, 5, 8):
        assert near(embed(one, [texts[row]], AUTO, graph=graph), together_NE[row]) > 0.9999


def test_a_graph_gives_equal_bytes_for_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(packed.BATCH_WORDPIECES, "cpu", LONGEST)
    one, texts, before = tower(), sequences(30), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 3, 3):
            torch.set_num_threads(threads)
            found.append(embed(one, texts, AUTO, graph=OpenVinoGraph(one, 1)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[1], found[2])


def in_bf16(monkeypatch: pytest.MonkeyPatch, least: float = 0.0) -> list[OpenVinoGraph]:
    """Make graphs from ``least`` work on, on any processor, and return those that are made."""
    made: list[OpenVinoGraph] = []
    monkeypatch.setattr(openvino, "MIN_WORK", least)
    monkeypatch.setattr(openvino, "supports_bf16", lambda: True)
    monkeypatch.setattr(openvino, "OpenVinoGraph", lambda *given: made.append(OpenVinoGraph(*given)) or made[-1])
    return made


def test_many_passages_are_embedded_by_a_graph_and_few_by_the_tower(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    retriever, rows = tiny_models(world)[0], range(len(world.snapshot))
    layers = [part for part in retriever.document.modules() if isinstance(part, torch.nn.Linear)]
    outputs = sum(layer.out_features for layer in layers if layer is not retriever.document.projection)
    made = in_bf16(monkeypatch, (openvino.OF_ANY_WIDTH + outputs) * len(rows))
    few_PE = embed_documents(retriever, world.snapshot, rows[1:], BF16)
    assert not made
    many_PE = embed_documents(retriever, world.snapshot, rows, BF16)
    assert len(made) == 1
    assert torch.equal(many_PE, embed_corpus(retriever, world.snapshot, BF16))
    assert len(made) == 2
    assert torch.equal(few_PE, embed_documents(retriever, world.snapshot, rows[1:], BF16)), "the tower is as it was"
    row_P = np.array([*rows[1:], -1])
    changed_PE = embed_changed(retriever, world.snapshot, BF16, row_P, many_PE)
    assert torch.equal(changed_PE[:-1], many_PE[1:])
    assert torch.equal(changed_PE[-1:], embed_documents(retriever, world.snapshot, rows[-1:], BF16))
    assert len(made) == 2, "an update of few passages waits for no graph"
    assert near(many_PE, embed_documents(retriever, world.snapshot, rows, FP32)) > 0.98
    assert len(made) == 2, "torch computes fp32"
    monkeypatch.setattr(openvino, "find_spec", lambda name: None)
    assert near(embed_documents(retriever, world.snapshot, rows, BF16), many_PE) > 0.98
    assert len(made) == 2


def test_parameters_that_are_not_finite_and_encoders_that_pad_have_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openvino, "supports_bf16", lambda: True)
    make = partial(compile_graph, vectors=1, passages=10**12)
    assert make(BagOfWords(WORDS, 8), dtype=BF16) is None
    one = tower()
    with monkeypatch.context() as context:
        context.setattr(one.encoder, "packs", False)
        assert make(one, dtype=BF16) is None
    assert make(one, dtype=BF16) is not None
    with torch.no_grad():
        one.bert.word_vectors[5] = torch.nan
    assert make(one, dtype=BF16) is None


def test_a_graph_that_goes_leaves_nothing_behind() -> None:
    """An index builder makes one for each generation of weights."""
    one = Embedder(encoder("bert", 512, 4096), 8, "cosine")  # weights of 40 MiB
    left = []
    for _ in range(5):
        graph = OpenVinoGraph(one, 1)
        graph([(np.arange(9), np.zeros(9, np.int64))])
        del graph
        gc.collect()
        devices.configure_malloc()
        status = Path("/proc/self/status").read_text()
        left.append(int(status.partition("RssAnon:")[2].split()[0]) >> 10)
    assert left[-1] - left[1] < 60, left


def use_threads() -> None:
    towers, texts = [tower("modernbert"), tower("bert")], sequences()

    def make(one: Embedder) -> Tensor:
        return embed(one, texts, AUTO, graph=OpenVinoGraph(one, 1))

    calls = [partial(make, one) for one in towers * 4]
    alone = [make(one) for one in towers] * 4
    for _ in range(2):
        assert all(map(torch.equal, at_once(*calls), alone))
    graph = OpenVinoGraph(towers[0], 1)
    calls = [partial(embed, towers[0], texts[n:], AUTO, graph=graph) for n in range(8)]
    alone = [call() for call in calls]
    for _ in range(5):
        assert all(map(torch.equal, at_once(*calls), alone))
    assert all(one.training for one in towers)
    os._exit(0)


def test_graphs_are_made_and_used_in_several_threads(tmp_path: Path) -> None:
    """In a process of its own: what is traced is known to all of a process, which may crash."""
    assert Forked(use_threads, log=tmp_path / "log.txt").wait() == 0, (tmp_path / "log.txt").read_text()


def make_at(home: Path) -> None:
    os.environ["HOME"] = str(home)
    assert "openvino" not in sys.modules
    OpenVinoGraph(tower(), 1)
    assert "openvino" in sys.modules
    assert sys.modules["openvino_telemetry"] is None  # type: ignore[comparison-overlap]


def test_no_graph_is_told_to_anybody(tmp_path: Path) -> None:
    """OpenVINO's telemetry keeps its number of this machine in the home folder."""
    (home := tmp_path / "home").mkdir()
    assert Forked(partial(make_at, home), log=tmp_path / "log.txt").wait() == 0, (tmp_path / "log.txt").read_text()
    assert not list(home.iterdir())
