"""Embeddings by an OpenVINO graph in bf16: close to those of the tower, for every family of encoders."""

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
from small_world import World, at_once, embed_documents, tiny_models
from torch import Tensor
from transformers import AutoConfig, AutoModel

from realmops import devices, process
from realmops.devices import supports_bf16
from realmops.model import packed
from realmops.model.encoder import Encoder
from realmops.model.retriever import BagOfWords, Embedder
from realmops.search import openvino
from realmops.search.embed import Sequences, embed
from realmops.search.embeddings import embed_changed, embed_corpus
from realmops.search.openvino import OpenVinoGraph, compile_graph

WORDS, LONGEST = 60, 150  # more wordpieces than a layer of ModernBERT sees to either side
BF16, FP32 = torch.bfloat16, torch.float32
AUTO = torch.bfloat16 if supports_bf16() else FP32


KINDS = {  # entries of a family's configuration in addition to the common shape
    "bert": {},
    "roberta": {"max_position_embeddings": LONGEST + 1, "type_vocab_size": 1, "pad_token_id": 0},
    "distilbert": {"n_layers": 2, "n_heads": 4},
    "electra": {"embedding_size": 24},
    "modernbert": {"layer_types": ["full_attention", "sliding_attention"], "cls_token_id": 1, "sep_token_id": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16},
}


def encoder(kind: str, width: int = 48, inner: int = 96, **changes: Any) -> Encoder:
    """Two layers, of which ModernBERT's second has local attention."""
    torch.manual_seed(0)
    shape = {"hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": inner}
    if kind == "distilbert":
        shape = {"dim": width, "hidden_dim": inner}
    shape |= {"vocab_size": WORDS, "max_position_embeddings": LONGEST, "pad_token_id": 0, "initializer_range": 0.1}
    shape |= {**KINDS[kind], **changes}
    return Encoder(AutoModel.from_config(AutoConfig.for_model(kind, **shape)))


def tower(kind: str = "bert", **how: Any) -> Embedder:
    """A tower of width 8 in training mode."""
    return Embedder(encoder(kind), 8, "cosine", **how).train()


def sequences(count: int = 9) -> Sequences:
    """Sequences of many lengths, with both segments."""
    rng = np.random.default_rng(0)
    lengths = np.linspace(2, LONGEST, count).astype(int)
    return [(rng.integers(0, WORDS, n), (np.arange(n) > n // 2).astype(np.int64)) for n in lengths]


def min_cosine(found_NX: Tensor, true_NX: Tensor, width: int = 8) -> float:
    """Return the smallest cosine of corresponding vectors."""
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
def test_embeddings_of_a_graph_are_those_of_the_tower(kind: str, how: dict[str, str], vectors: int) -> None:
    one, texts = tower(kind, **how), sequences()
    before = dict(one.named_modules())
    graph = OpenVinoGraph(one, vectors)
    assert one.training
    assert before == dict(one.named_modules()), "the tower keeps its modules"
    graph_NX = embed(one, texts, AUTO, vectors=vectors, graph=graph)
    tower_NX = embed(one, texts, FP32, vectors=vectors)
    assert graph_NX.shape == tower_NX.shape == (9, 8 * vectors)
    assert min_cosine(graph_NX, tower_NX) > 0.999
    assert min_cosine(graph_NX, tower_NX.roll(1, 0)) < min_cosine(graph_NX, tower_NX)
    torch.testing.assert_close(graph_NX.view(-1, 8).norm(dim=1), torch.ones(9 * vectors))


def for_long_texts(kind: str, local: int = 128) -> Embedder:
    """A tower whose attention is so sharp that its first vector depends on the window of attention."""
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
def test_a_graph_keeps_attention_windows_of_any_width(local: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 the graph equals the tower for any length."""
    one, texts = for_long_texts("modernbert", local), long_texts()
    true_NE = embed(one, texts, FP32)
    monkeypatch.setattr(openvino, "supports_bf16", lambda: False)
    with torch.autocast("cpu", torch.bfloat16):  # which the caller may compute in
        in_fp32 = OpenVinoGraph(one, 1)
    torch.testing.assert_close(embed(one, texts, FP32, graph=in_fp32), true_NE, rtol=0, atol=1e-5)
    assert min_cosine(embed(for_long_texts("modernbert", 2048), texts, FP32), true_NE) < 0.998, "the window counts"


@pytest.mark.parametrize("kind", ["bert", "roberta", "qwen3", "modernbert"])
def test_a_graph_is_as_close_for_long_texts(kind: str) -> None:
    """bf16 cannot represent positions above 256, nor the angles of rotary ones."""
    one, texts = for_long_texts(kind, 320), long_texts()
    assert min_cosine(embed(one, texts, AUTO, graph=OpenVinoGraph(one, 1)), embed(one, texts, FP32)) > 0.999


@pytest.mark.parametrize("head", ["paper", "release", "normalised"])
def test_a_graph_ends_in_the_head_of_the_tower(head: str) -> None:
    one = Embedder(encoder("bert", width=160), 8, head).eval()
    graph_NE, true_NE = embed(one, sequences(), AUTO, graph=OpenVinoGraph(one, 1)), embed(one, sequences(), FP32)
    torch.testing.assert_close(graph_NE, true_NE, rtol=0, atol=0.05 * float(true_NE.abs().max()))


@pytest.mark.parametrize("embedding", [48, 24])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_graph_is_compiled_of_narrow_word_vectors_and_of_frozen_weights(embedding: int, frozen: bool) -> None:
    """Small ELECTRAs widen their word vectors by a product; a frozen model has its weights in bf16."""
    one = Embedder(encoder("electra", embedding_size=embedding), 8, "cosine").eval()
    true_NE = embed(one, sequences(), FP32)
    if frozen:
        devices.freeze_linear_weights(one, torch.bfloat16)
    assert min_cosine(embed(one, sequences(), AUTO, graph=OpenVinoGraph(one, 1)), true_NE) > 0.99


def test_a_graph_gives_the_same_bytes_for_any_number_of_threads_and_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(packed.BATCH_WORDPIECES, "cpu", LONGEST)
    one, texts, before = tower(), sequences(30), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 3, 3):
            torch.set_num_threads(threads)
            results.append(embed(one, texts, AUTO, graph=OpenVinoGraph(one, 1)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[1], results[2])
    alone_NE = embed(one, texts[8:9], AUTO, graph=OpenVinoGraph(one, 1))
    assert min_cosine(alone_NE, results[0][8:9]) > 0.9999


def in_bf16(monkeypatch: pytest.MonkeyPatch, least: float = 0.0) -> list[OpenVinoGraph]:
    """Compile graphs from ``least`` work on, on any processor, and return them as they are compiled."""
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
    assert torch.equal(few_PE, embed_documents(retriever, world.snapshot, rows[1:], BF16)), "the tower is unchanged"
    row_P = np.array([*rows[1:], -1])
    changed_PE = embed_changed(retriever, world.snapshot, BF16, row_P, many_PE)
    assert torch.equal(changed_PE[:-1], many_PE[1:])
    assert torch.equal(changed_PE[-1:], embed_documents(retriever, world.snapshot, rows[-1:], BF16))
    assert len(made) == 2, "not for an update of few passages"
    assert min_cosine(many_PE, embed_documents(retriever, world.snapshot, rows, FP32)) > 0.98
    assert len(made) == 2, "torch computes fp32"
    monkeypatch.setattr(openvino, "find_spec", lambda name: None)
    assert min_cosine(embed_documents(retriever, world.snapshot, rows, BF16), many_PE) > 0.98
    assert len(made) == 2


def test_no_graph_is_compiled_of_infinite_parameters_and_of_encoders_that_pad(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_memory_of_a_graph_is_freed() -> None:
    """An index builder compiles one for each generation of weights."""
    one = Embedder(encoder("bert", 512, 4096), 8, "cosine")  # weights of 40 MiB
    left = []
    for _ in range(5):
        graph = OpenVinoGraph(one, 1)
        graph([(np.arange(9), np.zeros(9, np.int64))])
        del graph
        gc.collect()
        process.configure_malloc()
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


def test_graphs_are_compiled_and_used_in_several_threads(tmp_path: Path) -> None:
    """In another process: traces share a registry, and a race crashes the process."""
    assert Forked(use_threads, log=tmp_path / "log.txt").wait() == 0, (tmp_path / "log.txt").read_text()


def make_at(home: Path) -> None:
    os.environ["HOME"] = str(home)
    assert "openvino" not in sys.modules
    OpenVinoGraph(tower(), 1)
    assert "openvino" in sys.modules
    assert sys.modules["openvino_telemetry"] is None  # type: ignore[comparison-overlap]


def test_no_graph_is_reported_by_telemetry(tmp_path: Path) -> None:
    """OpenVINO's telemetry keeps its number of this machine in the home folder."""
    (home := tmp_path / "home").mkdir()
    assert Forked(partial(make_at, home), log=tmp_path / "log.txt").wait() == 0, (tmp_path / "log.txt").read_text()
    assert not list(home.iterdir())
