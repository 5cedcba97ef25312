"""Towers by hand: pooling, projection, head and segments of an encoder, and the bag of words; how models are built."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_world import World, same_parameters, section, tiny_models
from test_retriever_files import FORMS
from torch import Tensor, nn

from realmops.devices import autocast
from realmops.model.build import build_models
from realmops.model.encoder import Encoder
from realmops.model.encoder_files import build_small_encoder, load_encoder, save_encoder
from realmops.model.masked_word_head import MaskedWordHead
from realmops.model.packed import BATCH_WORDPIECES, PackedBatch
from realmops.model.reader import Reader
from realmops.model.retriever import TEMPERATURE, BagOfWords, Embedder, Retriever, initialise_projection, mean_pool
from realmops.model.sequences import join_document
from realmops.search.embed import document_sequences, embed, query_sequences

FP32 = torch.float32
SHAPE = {"width": 16, "layers": 1, "heads": 2, "positions": 64, "dropout": 0.0}


def batch(world: World, rows: Sequence[int] = range(5)) -> PackedBatch:
    sequences = document_sequences(world.snapshot, rows)
    return PackedBatch([tokens for tokens, _ in sequences], [segments for _, segments in sequences])


def encoder(width: int = 16) -> Encoder:
    """Weights so large that sequences differ."""
    generator = torch.Generator().manual_seed(0)
    built, _ = build_small_encoder(section("bert", **SHAPE | {"width": width, "layers": 2}), 150, generator)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return built.eval()


def embedder(width: int = 16, head: str = "cosine", **form: Any) -> Embedder:
    tower = Embedder(encoder(), width, head, **{"projection": "identity", **form}).eval()
    initialise_projection(tower, torch.Generator().manual_seed(0))
    return tower


def build(vocabulary: int = 150, seed: int = 0, positions: int = 64, **options: Any) -> tuple[Retriever, Reader]:
    bert, retriever = section("bert", **SHAPE | {"positions": positions}), section("retriever", **options)
    return build_models(bert, retriever, section("reader"), vocabulary, seed)


# ---- pooling


@pytest.mark.parametrize("pooling", ["cls", "last"])
def test_cls_and_last_pool_one_wordpiece(world: World, pooling: str) -> None:
    tower, documents = embedder(head="paper", pooling=pooling), batch(world)
    rows = documents.starts[:-1] if pooling == "cls" else documents.starts[1:] - 1
    torch.testing.assert_close(tower(documents), tower.bert(documents)[rows])


def slow_means(hidden_TD: Tensor, vectors: int) -> Tensor:
    """Half the mean of all wordpieces, half that of part k, which are those from T k / M to T (k + 1) / M."""
    length, means = len(hidden_TD), []
    for part in range(vectors):
        own = [hidden_TD[t] for t in range(length) if length * part // vectors <= t < length * (part + 1) // vectors]
        mean_D = sum(hidden_TD) / length
        means.append((mean_D + sum(own) / len(own)) / 2 if own else mean_D)
    return torch.stack(means)


@pytest.mark.parametrize("vectors", [1, 2, 3, 7])
def test_each_vector_is_half_the_mean_of_all_and_half_that_of_a_part(vectors: int) -> None:
    tower, rng = embedder(head="paper", pooling="mean"), np.random.default_rng(0)
    sequences = [rng.integers(5, 150, length) for length in (30, 4, 7, 1, 2)]
    together = tower(PackedBatch(sequences), vectors)
    for sequence, embedding_X in zip(sequences, together, strict=True):
        expected_MD = slow_means(tower.bert(PackedBatch([sequence])), vectors)
        torch.testing.assert_close(embedding_X.view(vectors, -1), expected_MD, rtol=0, atol=1e-5)
    with autocast(torch.device("cpu"), torch.bfloat16):
        hidden_TD = tower.bert(PackedBatch(sequences[:1])).float()
        low_X = tower(PackedBatch(sequences[:1]), vectors)
    torch.testing.assert_close(low_X.view(vectors, -1), slow_means(hidden_TD, vectors), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("vectors", [1, 2, 7])
def test_means_on_a_gpu_have_the_same_values_and_gradients(vectors: int) -> None:
    lengths = np.array([30, 4, 7, 1, 2])
    hidden_TD = torch.randn(int(lengths.sum()), 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    expected = torch.cat([slow_means(rows_TD, vectors) for rows_TD in torch.split(hidden_TD, lengths.tolist())])
    means = mean_pool(hidden_TD, lengths, vectors)
    torch.testing.assert_close(means, expected, rtol=0, atol=1e-6)
    weight = torch.linspace(0.5, 1.5, means.numel()).view_as(means)
    gradients = [torch.autograd.grad((each * weight).sum(), hidden_TD)[0] for each in (means, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-6)


@torch.no_grad()
def test_a_passage_is_scored_by_its_nearest_vector(world: World) -> None:
    retriever, _ = tiny_models(world, head="cosine", pooling="mean", document_vectors=3)
    query_QE, document_NX = retriever.query(batch(world, range(4))), retriever.documents(batch(world))
    score_QN = retriever.scores(query_QE, document_NX)
    width = query_QE.shape[1]
    for q, query_E in enumerate(query_QE):
        for n, document_X in enumerate(document_NX):
            best = max(float(query_E @ document_X[m * width : (m + 1) * width]) for m in range(3))
            assert float(score_QN[q, n]) == pytest.approx(best / TEMPERATURE, abs=1e-5)
    torch.testing.assert_close(retriever.relevance(query_QE, document_NX.expand(4, -1, -1)), score_QN)


# ---- projection and head


def test_the_papers_head_is_w_times_cls(world: World) -> None:
    retriever, _ = tiny_models(world, head="paper")
    tower = retriever.query
    assert [name for name, _ in tower.named_parameters() if not name.startswith("bert.")] == ["projection.weight"]
    torch.testing.assert_close(tower(batch(world)), tower.pool(batch(world)) @ tower.projection.weight.T)
    assert retriever.scale == 1.0


def test_the_normalised_head_has_layer_norm_and_a_scale(world: World) -> None:
    """Each embedding has mean 0 and variance 1 before gain and bias; relevance is divided by sqrt(8)."""
    retriever, _ = tiny_models(world, head="normalised")
    nn.init.ones_(retriever.query.norm.weight)
    nn.init.zeros_(retriever.query.norm.bias)
    embedding_BE = retriever.query(batch(world)).detach()
    torch.testing.assert_close(embedding_BE.mean(-1), torch.zeros(5), rtol=0, atol=1e-6)
    torch.testing.assert_close(embedding_BE.var(-1, correction=0), torch.ones(5))
    relevance_BK = retriever.relevance(embedding_BE[:1], embedding_BE[None, :3])
    expected = [float(embedding_BE[0] @ embedding_BE[k]) / math.sqrt(8) for k in range(3)]
    assert relevance_BK[0].tolist() == pytest.approx(expected, rel=1e-5)


def test_the_cosine_is_divided_by_the_temperature(world: World) -> None:
    tower = embedder(pooling="mean")
    assert (tower.norm, tower.projection) == (None, None)
    embedding_BE, pooled_BD = tower(batch(world)).detach(), tower.pool(batch(world)).detach()
    torch.testing.assert_close(embedding_BE.norm(dim=-1), torch.ones(5))
    relevance_BK = Retriever(tower, tower).relevance(embedding_BE[:1], embedding_BE[None, :3])
    expected = [float(torch.cosine_similarity(pooled_BD[0], pooled_BD[k], dim=0)) / TEMPERATURE for k in range(3)]
    assert relevance_BK[0].tolist() == pytest.approx(expected, rel=1e-4)


def test_an_orthogonal_square_changes_no_cosine(world: World) -> None:
    plain_BE, turned_BE = embedder()(batch(world)), embedder(projection="orthogonal")(batch(world))
    assert not torch.allclose(plain_BE, turned_BE, atol=0.1)
    torch.testing.assert_close(plain_BE @ plain_BE.T, turned_BE @ turned_BE.T, rtol=0, atol=1e-5)


def test_one_segment_makes_title_and_body_equal(world: World) -> None:
    one, two, documents = embedder(segments="one"), embedder(segments="two"), batch(world)
    before = documents.segments_T.clone()
    zeros = PackedBatch([tokens for tokens, _ in document_sequences(world.snapshot, range(5))])
    torch.testing.assert_close(one(documents), two(zeros))
    assert not torch.allclose(one(documents), two(documents), atol=1e-3)
    assert torch.equal(documents.segments_T, before), "the batch is unchanged"


# ---- the bag


def bag_of(vectors: Sequence[Sequence[float]], special: Sequence[int] = ()) -> BagOfWords:
    bag = BagOfWords(len(vectors), len(vectors[0]))
    with torch.no_grad():
        bag.word.weight.copy_(torch.tensor(vectors))
        bag.counts_V[list(special)] = 0.0
    return bag


def test_a_bag_by_hand() -> None:
    """Wordpieces 2 and 3 twice: (3, 0) + 2 (0, 2) = (3, 4), of length 5; special ones count nothing."""
    bag = bag_of([[9.0, 9.0], [7.0, -7.0], [3.0, 0.0], [0.0, 2.0]], special=[0, 1])
    packed = PackedBatch([np.array([0, 3, 2, 1, 3, 1]), np.array([0, 3, 1]), np.array([0, 1])])
    expected = torch.tensor([[0.6, 0.8], [0.0, 1.0], [0.0, 0.0]])
    torch.testing.assert_close(bag(packed), expected)
    with autocast(torch.device("cpu"), torch.bfloat16):
        assert torch.equal(bag(packed), bag(packed).float())
        torch.testing.assert_close(bag(packed), expected)
    assert (bag.width, bag.head, Retriever(bag, bag).scale) == (2, "cosine", pytest.approx(20.0))


def test_special_wordpieces_and_empty_documents_have_finite_or_no_gradients() -> None:
    bag = bag_of(torch.randn(6, 3, generator=torch.Generator().manual_seed(0)).tolist(), special=[0, 1])
    embedding_BE = bag(PackedBatch([np.array([0, 1, 1]), np.array([0, 2, 3, 1])]))
    assert embedding_BE[0].tolist() == [0.0, 0.0, 0.0]
    relevance = Retriever(bag, bag).relevance(embedding_BE[1:], embedding_BE[None, :])
    assert float(relevance[0, 0].detach()) == 0.0
    relevance.sum().backward()
    gradient_VE = bag.word.weight.grad
    assert gradient_VE.isfinite().all()
    assert not gradient_VE[[0, 1, 4, 5]].any()


# ---- building

ALL_FORMS: list[dict[str, Any]] = [
    *FORMS.values(),
    *({"head": head, "pooling": "mean", "document_vectors": 3} for head in ("cosine", "normalised", "paper")),
    {"head": "cosine", "pooling": "mean", "document_vectors": 2, "share_embedders": False},
    {"head": "release", "share_embedders": False},
]


@pytest.mark.parametrize("form", ALL_FORMS, ids=lambda form: "-".join(str(value) for value in form.values()))
def test_every_form_has_gradients_and_embeds_the_null_document(world: World, form: dict[str, Any]) -> None:
    retriever, _ = tiny_models(world, **form)
    query_BE, document_BE = retriever.query(batch(world, range(6))), retriever.documents(batch(world, range(6, 12)))
    retriever.relevance(query_BE, document_BE[None].expand(6, -1, -1)).softmax(-1)[:, 0].sum().backward()
    for name, parameter in retriever.named_parameters():
        if parameter.requires_grad:  # frozen ones shift all passages equally
            assert parameter.grad.isfinite().all(), name
            assert parameter.grad.any(), name
    nothing = np.zeros(0, dtype=np.int64)
    tokens, segments = join_document(nothing, nothing, world.special, 48)
    assert retriever.documents(PackedBatch([tokens], [segments])).isfinite().all()


def test_both_towers_are_one_and_depend_on_the_seed_alone() -> None:
    retriever, reader = build(embedding_width=8)
    assert retriever.shared
    weight = retriever.query.projection.weight
    assert [torch.equal(weight, build(seed=n, embedding_width=8)[0].query.projection.weight) for n in (0, 1)] == [
        True,
        False,
    ]
    assert torch.equal(retriever.query.bert.word_vectors, reader.bert.word_vectors)
    with torch.no_grad():
        retriever.query.bert.word_vectors.add_(1.0)
    assert not torch.equal(retriever.query.bert.word_vectors, reader.bert.word_vectors), "the reader has a copy"


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"projection": "identity", "embedding_width": 8}, r"keeps the encoder's width of 16, and .*_width is 8; set"),
        ({"projection": "first", "embedding_width": 17}, r"have 16 numbers; set .*embedding_width=16 or"),
        ({"tower": "bag", "head": "cosine", "embedding_width": 151}, r"one dimension per wordpiece .150"),
        ({"document_vectors": 2}, r"document_vectors is 2, and retriever.pooling=auto gives one .*pooling=mean"),
    ],
)
def test_an_impossible_width_is_refused(form: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**form)
    assert build(embedding_width=0)[0].query.width == 16, "0 is the encoder's width"


def write_small(folder: Path) -> tuple[Encoder, MaskedWordHead]:
    """A published BERT of 150 wordpieces."""
    encoder, head = build_small_encoder(section("bert", **SHAPE), 150, torch.Generator().manual_seed(0))
    save_encoder(folder, encoder, head)
    (folder / "vocab.txt").write_text("")
    return encoder, head


def test_a_small_encoder_predicts_by_its_word_vectors_from_the_start(tmp_path: Path) -> None:
    """Its value and output matrices are half an identity; it is unchanged after loading."""
    encoder, head = write_small(tmp_path)
    layer = encoder.model.encoder.layer[0].attention
    product_DD = layer.output.dense.weight @ layer.self.value.weight
    torch.testing.assert_close(product_DD, 0.5 * torch.eye(16), rtol=0, atol=1e-5)
    logits_VV = head(encoder.word_vectors, encoder.word_vectors)
    assert (logits_VV.argmax(-1) == torch.arange(150)).float().mean() > 0.8
    loaded, its_head = load_encoder(tmp_path)
    same_parameters(loaded, encoder)
    same_parameters(its_head, head)


def test_a_published_encoder_is_built_if_vocabulary_and_positions_match(tmp_path: Path) -> None:
    bert, head = write_small(tmp_path)
    with pytest.raises(ValueError, match=r"has 64 positions, bert\.positions is 512; set bert\.positions=64"):
        build(positions=512, init=str(tmp_path))
    with pytest.raises(ValueError, match="the encoder has 150 wordpieces, the snapshot 151; build the snapshot"):
        build(vocabulary=151, init=str(tmp_path))
    _, reader = build(init=str(tmp_path))
    assert torch.equal(reader.bert.word_vectors, bert.word_vectors)
    same_parameters(reader.masked_words, head)


def test_the_releases_head_starts_from_the_encoders_pooler(tmp_path: Path) -> None:
    write_small(tmp_path)
    pooler = {"bert.pooler.dense.weight": torch.full((16, 16), 0.5), "bert.pooler.dense.bias": torch.full((16,), 0.25)}
    save_file(load_file(tmp_path / "model.safetensors") | pooler, tmp_path / "model.safetensors")
    retriever, _ = build(init=str(tmp_path), head="release")
    for tower in (retriever.query, retriever.document):
        assert torch.equal(tower.pooler.weight, pooler["bert.pooler.dense.weight"])
        assert torch.equal(tower.pooler.bias, pooler["bert.pooler.dense.bias"])


# ---- embedding in batches


def test_embeddings_equal_those_of_single_sequences_in_order(world: World) -> None:
    retriever, _ = tiny_models(world, dropout=0.5)
    sequences, counts = document_sequences(world.snapshot, [5, 0, 11, 3]), list[int]()
    embedding_NE = embed(retriever.document, sequences, FP32, counts.append)
    assert sum(counts) == 4
    assert retriever.document.training, "dropout is off during embedding, and on again afterwards"
    retriever.eval()
    with torch.no_grad():
        singles = [retriever.document(PackedBatch([tokens], [segments]))[0] for tokens, segments in sequences]
    torch.testing.assert_close(embedding_NE, torch.stack(singles), rtol=0, atol=1e-5)
    assert not embedding_NE.requires_grad


def test_batches_have_a_limit_of_wordpieces(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    retriever, _ = tiny_models(world)
    sizes, forward = list[int](), Embedder.forward

    def spy(self: Embedder, packed: PackedBatch, vectors: int) -> Tensor:
        sizes.append(len(packed) * packed.longest)
        return forward(self, packed, vectors)

    monkeypatch.setattr(Embedder, "forward", spy)
    rng = np.random.default_rng(0)
    queries = [rng.integers(5, 100, rng.integers(1, 64)) for _ in range(300)]
    assert embed(retriever.query, query_sequences(queries), FP32).shape == (300, 8)
    assert max(sizes) <= BATCH_WORDPIECES["cpu"]
    assert len(sizes) < 16
