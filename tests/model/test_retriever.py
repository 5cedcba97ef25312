"""The towers: pooling, projection, head and segments of an encoder, and the bag of word vectors; all by hand."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from small_world import World, section, tiny_models
from test_retriever_files import FORMS
from torch import Tensor, nn

from realmops import devices
from realmops.devices import autocast
from realmops.model.build import TEMPERATURE, build_models
from realmops.model.encoder import Encoder
from realmops.model.encoder_files import build_small_encoder
from realmops.model.packed import PackedBatch
from realmops.model.retriever import BagOfWords, Embedder, Retriever, initialise_projection, mean_pool
from realmops.model.sequences import join_document
from realmops.search.embed import document_sequences, embed, embed_documents

FP32 = torch.float32
SHAPE = {"layers": 2, "heads": 2, "positions": 64, "dropout": 0.0}


def batch(world: World, rows: Sequence[int] = range(5)) -> PackedBatch:
    sequences = document_sequences(world.snapshot, rows)
    return PackedBatch([tokens for tokens, _ in sequences], [segments for _, segments in sequences])


def encoder(width: int = 16) -> Encoder:
    """Weights so large that sequences differ."""
    generator = torch.Generator().manual_seed(0)
    made, _ = build_small_encoder(section("bert", width=width, **SHAPE), 150, generator)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return made.eval()


def embedder(width: int = 16, head: str = "cosine", **form: Any) -> Embedder:
    tower = Embedder(encoder(), width, head, **{"projection": "identity", **form}).eval()
    initialise_projection(tower, torch.Generator().manual_seed(0))
    return tower


# ---- pooling


def test_the_mean_is_over_all_wordpieces_with_cls_and_sep(world: World) -> None:
    tower = embedder(head="paper", pooling="mean")
    pooled_BD = tower(batch(world))
    for row, (tokens, segments) in enumerate(document_sequences(world.snapshot, range(5))):
        hidden_TD = tower.bert(PackedBatch([tokens], [segments]))
        assert len(hidden_TD) == len(tokens)
        torch.testing.assert_close(pooled_BD[row], hidden_TD.mean(0), rtol=0, atol=1e-5)


def test_cls_is_the_first_wordpiece(world: World) -> None:
    tower = embedder(head="paper", pooling="cls")
    documents = batch(world)
    torch.testing.assert_close(tower(documents), tower.bert(documents)[documents.first_B])


# ---- several vectors of a passage


def slowly(hidden_TD: Tensor, vectors: int) -> Tensor:
    """Half the mean of all wordpieces and half that of the part, which has them from T k / M to T (k + 1) / M."""
    length, found = len(hidden_TD), []
    for part in range(vectors):
        own = [hidden_TD[t] for t in range(length) if length * part // vectors <= t < length * (part + 1) // vectors]
        mean_D = sum(hidden_TD) / length
        found.append((mean_D + sum(own) / len(own)) / 2 if own else mean_D)
    return torch.stack(found)


@pytest.mark.parametrize("vectors", [2, 3, 7])
def test_each_vector_is_half_the_passage_and_half_a_part_of_it(vectors: int) -> None:
    tower, rng = embedder(pooling="mean"), np.random.default_rng(0)
    sequences = [rng.integers(5, 150, length) for length in (30, 4, 7, 1, 2)]
    together = tower(PackedBatch(sequences), vectors)
    for sequence, embedding_X in zip(sequences, together, strict=True):
        hidden_TD = tower.bert(PackedBatch([sequence]))
        expected_MD = slowly(hidden_TD, vectors)
        expected_MD = expected_MD / expected_MD.norm(dim=-1, keepdim=True)
        torch.testing.assert_close(embedding_X.view(vectors, -1), expected_MD, rtol=0, atol=1e-5)


@pytest.mark.parametrize("vectors", [1, 2, 7])
def test_a_gpu_makes_the_means_of_all_sequences_together(vectors: int) -> None:
    """The same numbers and gradients by other sums; computed here on a CPU."""
    lengths = np.array([30, 4, 7, 1, 2])
    hidden_TD = torch.randn(int(lengths.sum()), 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    expected = torch.cat([slowly(rows_TD, vectors) for rows_TD in torch.split(hidden_TD, lengths.tolist())])
    found = mean_pool(hidden_TD, lengths, vectors)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    weight = torch.linspace(0.5, 1.5, found.numel()).view_as(found)
    gradients = [torch.autograd.grad((each * weight).sum(), hidden_TD)[0] for each in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-6)


def test_a_mean_is_in_full_precision_whatever_the_stages() -> None:
    tower, tokens = embedder(head="paper", pooling="mean"), np.arange(5, 35)
    with autocast(torch.device("cpu"), torch.bfloat16):
        hidden_TD = tower.bert(PackedBatch([tokens])).float()
        [embedding_X] = tower(PackedBatch([tokens]), 2)
    torch.testing.assert_close(embedding_X.view(2, -1), slowly(hidden_TD, 2), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_vector_that_is_nearest_to_the_query_counts(world: World) -> None:
    retriever, _ = tiny_models(world, head="cosine", pooling="mean", document_vectors=3)
    query_QE, document_NX = retriever.query(batch(world, range(4))), retriever.documents(batch(world))
    score_QN = retriever.scores(query_QE, document_NX)
    width = query_QE.shape[1]
    for q, query_E in enumerate(query_QE):
        for n, document_X in enumerate(document_NX):
            best = max(float(query_E @ document_X[m * width : (m + 1) * width]) for m in range(3))
            assert float(score_QN[q, n]) == pytest.approx(best / TEMPERATURE, abs=1e-5)
    torch.testing.assert_close(retriever.relevance(query_QE, document_NX.expand(4, -1, -1)), score_QN)


def test_the_vector_of_cls_is_one_alone() -> None:
    shape = section("bert", width=16, layers=1, heads=2, positions=64)
    with pytest.raises(ValueError, match=r"document_vectors is 2, and retriever.pooling=auto gives one .*pooling=mean"):
        build_models(shape, section("retriever", document_vectors=2), section("reader"), 150, 0)


# ---- projection


def test_the_identity_has_no_projection() -> None:
    tower = embedder(head="paper", pooling="mean")
    assert tower.projection is None
    assert tower.width == 16
    assert [name for name, _ in tower.named_parameters() if not name.startswith("bert.")] == []


def test_no_layer_norm_comes_between_the_identity_and_the_cosine(world: World) -> None:
    tower = embedder()
    assert tower.norm is None
    pooled_BD = tower.pool(batch(world))
    torch.testing.assert_close(tower(batch(world)), pooled_BD / pooled_BD.norm(dim=-1, keepdim=True))
    assert embedder(head="normalised").norm is not None


def test_an_orthogonal_square_changes_no_cosine(world: World) -> None:
    plain, turned = embedder(), embedder(projection="orthogonal")
    one, other = plain(batch(world)), turned(batch(world))
    assert not torch.allclose(one, other, atol=0.1)
    torch.testing.assert_close(one @ one.T, other @ other.T, rtol=0, atol=1e-5)


def test_a_random_projection_has_variance_one_over_its_width() -> None:
    tower = Embedder(encoder(400), 100, "paper", projection="random")
    initialise_projection(tower, torch.Generator().manual_seed(0))
    weight_ED = tower.projection.weight.detach()
    assert float(weight_ED.mean()) == pytest.approx(0.0, abs=0.005)
    assert float(weight_ED.var()) == pytest.approx(1 / 100, rel=0.05)
    length_D = weight_ED.norm(dim=0)
    assert float(length_D.mean()) == pytest.approx(1.0, abs=0.02), "lengths are kept in the mean"


# ---- head


@pytest.mark.parametrize("temperature", [0.05, 2.0])
def test_the_cosine_is_divided_by_the_temperature(world: World, temperature: float) -> None:
    tower = embedder(temperature=temperature, pooling="mean")
    retriever = Retriever(tower, tower)
    embedding_BE = tower(batch(world)).detach()
    torch.testing.assert_close(embedding_BE.norm(dim=-1), torch.ones(5))
    assert retriever.scale == pytest.approx(1 / temperature)
    pooled_BD = tower.pool(batch(world)).detach()
    relevance_BK = retriever.relevance(embedding_BE[:1], embedding_BE[None, :3])
    expected = [float(torch.cosine_similarity(pooled_BD[0], pooled_BD[k], dim=0)) / temperature for k in range(3)]
    assert relevance_BK[0].tolist() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("head", "scale"), [("paper", 1.0), ("release", 1.0), ("normalised", 1 / math.sqrt(8))])
def test_the_temperature_is_the_cosines_alone(head: str, scale: float) -> None:
    tower = Embedder(encoder(), 8, head, temperature=0.05)
    assert Retriever(tower, tower).scale == pytest.approx(scale)


# ---- segments


def test_with_one_segment_title_and_body_are_the_same(world: World) -> None:
    """What is asked of the encoder changes, the batch does not."""
    one, two = embedder(segments="one"), embedder(segments="two")
    documents = batch(world)
    before = documents.segments_T.clone()
    as_zeros = PackedBatch([t for t, _ in document_sequences(world.snapshot, range(5))])
    assert int(before.sum()) > 0
    torch.testing.assert_close(one(documents), two(as_zeros))
    assert not torch.allclose(one(documents), two(documents), atol=1e-3)
    assert torch.equal(documents.segments_T, before)


# ---- the bag


def bag_of(vectors: Sequence[Sequence[float]], special: Sequence[int] = ()) -> BagOfWords:
    bag = BagOfWords(len(vectors), len(vectors[0]), 0.05)
    with torch.no_grad():
        bag.word.weight.copy_(torch.tensor(vectors))
        bag.counts_V[list(special)] = 0.0
    return bag


def test_a_bag_by_hand() -> None:
    """Wordpieces 2 and 3 twice: (3, 0) + 2 (0, 2) = (3, 4), of length 5."""
    bag = bag_of([[9.0, 9.0], [7.0, -7.0], [3.0, 0.0], [0.0, 2.0]], special=[0, 1])
    embedding_BE = bag(PackedBatch([np.array([0, 3, 2, 1, 3, 1]), np.array([0, 3, 1]), np.array([0, 1])]))
    torch.testing.assert_close(embedding_BE, torch.tensor([[0.6, 0.8], [0.0, 1.0], [0.0, 0.0]]))
    assert (bag.width, bag.head, Retriever(bag, bag).scale) == (2, "cosine", pytest.approx(20.0))


def test_special_wordpieces_count_nothing_and_learn_nothing() -> None:
    bag = bag_of(torch.randn(6, 3, generator=torch.Generator().manual_seed(0)).tolist(), special=[0, 1])
    tokens = [np.array([0, 2, 1, 3, 1]), np.array([0, 4, 4, 1])]
    bag(PackedBatch(tokens)).sum().backward()
    gradient_VE = bag.word.weight.grad
    assert not gradient_VE[[0, 1, 5]].any()
    assert gradient_VE[[2, 3]].abs().sum(-1).min() > 0
    with_more = [np.concatenate([t, [0, 1, 1]]) for t in tokens]
    assert torch.equal(bag(PackedBatch(with_more)), bag(PackedBatch(tokens)))


def test_an_empty_document_has_relevance_0_and_a_finite_gradient() -> None:
    bag = bag_of(torch.randn(6, 3, generator=torch.Generator().manual_seed(0)).tolist(), special=[0, 1])
    embedding_BE = bag(PackedBatch([np.array([0, 1, 1]), np.array([0, 2, 3, 1])]))
    assert embedding_BE[0].tolist() == [0.0, 0.0, 0.0]
    relevance = Retriever(bag, bag).relevance(embedding_BE[1:], embedding_BE[None, :])
    assert float(relevance[0, 0].detach()) == 0.0
    relevance.sum().backward()
    assert bag.word.weight.grad.isfinite().all()


def test_a_bag_knows_no_order_and_no_segments(world: World) -> None:
    bag = bag_of(torch.randn(150, 8).tolist())
    [(tokens, segments)] = document_sequences(world.snapshot, [3])
    forwards = bag(PackedBatch([tokens], [segments]))
    torch.testing.assert_close(bag(PackedBatch([tokens[::-1].copy()])), forwards)


def test_a_bag_is_in_full_precision_whatever_the_stages() -> None:
    bag, packed = bag_of(torch.randn(20, 8).tolist()), PackedBatch([np.arange(20), np.arange(3)])
    with autocast(torch.device("cpu"), torch.bfloat16):
        low = bag(packed)
    assert low.dtype == FP32
    assert torch.equal(low, bag(packed))


# ---- all forms

ALL_FORMS: list[dict[str, Any]] = [
    *FORMS.values(),
    *({"head": head, "pooling": "mean", "document_vectors": 3} for head in ("cosine", "normalised", "paper")),
    {"head": "cosine", "pooling": "mean", "document_vectors": 2, "share_embedders": False},
    {"head": "release", "projection": "random", "share_embedders": False},
]


def named(form: dict[str, Any]) -> str:
    return "-".join(str(value) for value in form.values())


@pytest.mark.parametrize("form", ALL_FORMS, ids=named)
def test_every_parameter_of_every_form_gets_a_gradient(world: World, form: dict[str, Any]) -> None:
    retriever, _ = tiny_models(world, **form)
    query_BE, document_BE = retriever.query(batch(world, range(6))), retriever.documents(batch(world, range(6, 12)))
    retriever.relevance(query_BE, document_BE[None].expand(6, -1, -1)).softmax(-1)[:, 0].sum().backward()
    for name, parameter in retriever.named_parameters():
        if not parameter.requires_grad:  # a shift of all passages, which no loss can see
            continue
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


def test_a_null_document_has_an_embedding_in_every_form(world: World) -> None:
    nothing = np.zeros(0, dtype=np.int64)
    tokens, segments = join_document(nothing, nothing, world.special, 48)
    for form in ALL_FORMS:
        retriever, _ = tiny_models(world, **form)
        assert retriever.documents(PackedBatch([tokens], [segments])).isfinite().all(), form


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"projection": "identity", "embedding_width": 8}, r"keeps the encoder's width of 16, and .*_width is 8; set"),
        ({"projection": "pca", "embedding_width": 17}, r"have no more than 16 components; set .*embedding_width=16 or"),
        ({"tower": "bag", "head": "cosine", "embedding_width": 151}, r"one dimension per wordpiece .150"),
    ],
)
def test_a_width_that_a_tower_cannot_have_is_refused(form: dict[str, Any], message: str) -> None:
    shape = section("bert", width=16, layers=1, heads=2, positions=64)
    with pytest.raises(ValueError, match=message):
        build_models(shape, section("retriever", **form), section("reader"), 150, 0)


def test_width_0_is_the_encoders_own() -> None:
    shape = section("bert", width=16, layers=1, heads=2, positions=64)
    retriever, _ = build_models(shape, section("retriever", embedding_width=0), section("reader"), 150, 0)
    assert retriever.query.width == 16
    assert isinstance(retriever.query, Embedder)
    assert isinstance(retriever.query.projection, nn.Linear)


def test_passages_are_embedded_without_quick_products_too(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch has no such product."""
    tower, sequences = embedder(), document_sequences(world.snapshot, range(5))
    plain_PE = embed(tower, sequences, torch.bfloat16)

    def failing(*_: Any) -> Tensor:
        raise RuntimeError("not on this processor")

    monkeypatch.setattr(devices, "supports_bf16", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", failing)
    found_PE = embed_documents(Retriever(tower, tower), world.snapshot, range(5), torch.bfloat16)
    assert torch.equal(found_PE, plain_PE)
