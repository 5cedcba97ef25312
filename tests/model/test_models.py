"""Retriever and reader: their heads by hand, embedding in batches, and the files they are handed on in."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_world import World, section, tiny_models
from torch import Tensor, nn

from realmops.model.build import add_span_head, build_models
from realmops.model.encoder import Encoder
from realmops.model.encoder_files import build_small_encoder, load_encoder, save_encoder
from realmops.model.masked_word_head import MaskedWordHead
from realmops.model.packed import BATCH_WORDPIECES, PackedBatch
from realmops.model.reader import SpanHead
from realmops.model.reader_files import load_models, model_files, save_models
from realmops.model.retriever import Embedder
from realmops.search.embed import document_sequences, embed, query_sequences

FP32 = torch.float32


def batch(world: World) -> PackedBatch:
    sequences = document_sequences(world.snapshot, range(5))
    return PackedBatch([tokens for tokens, _ in sequences], [segments for _, segments in sequences])


def write_small(folder: Path) -> tuple[Encoder, MaskedWordHead]:
    """A published BERT of 150 wordpieces."""
    options = section("bert", width=16, layers=1, heads=2, positions=64, dropout=0.0)
    encoder, head = build_small_encoder(options, 150, torch.Generator().manual_seed(0))
    save_encoder(folder, encoder, head)
    (folder / "vocab.txt").write_text("")
    return encoder, head


# ---- heads


def test_the_papers_head_is_w_times_cls(world: World) -> None:
    retriever, _ = tiny_models(world, head="paper")
    tower = retriever.query
    assert [name for name, _ in tower.named_parameters() if not name.startswith("bert.")] == ["projection.weight"]
    cls_BD = tower.pool(batch(world))
    torch.testing.assert_close(tower(batch(world)), cls_BD @ tower.projection.weight.T)
    assert retriever.scale == 1.0


def test_the_normalised_head_has_layer_norm_and_a_scale(world: World) -> None:
    """Each embedding has mean 0 and variance 1 before gain and bias; relevance is divided by sqrt(8)."""
    retriever, _ = tiny_models(world, head="normalised")
    tower = retriever.query
    nn.init.ones_(tower.norm.weight)
    nn.init.zeros_(tower.norm.bias)
    embedding_BE = tower(batch(world)).detach()
    torch.testing.assert_close(embedding_BE.mean(-1), torch.zeros(5), rtol=0, atol=1e-6)
    torch.testing.assert_close(embedding_BE.var(-1, correction=0), torch.ones(5))
    relevance_BK = retriever.relevance(embedding_BE[:1], embedding_BE[None, :3])
    expected = [float(embedding_BE[0] @ embedding_BE[k]) / math.sqrt(8) for k in range(3)]
    assert relevance_BK[0].tolist() == pytest.approx(expected, rel=1e-5)


def test_both_towers_are_one_and_the_reader_has_its_own(world: World) -> None:
    shape = section("bert", width=16, layers=1, heads=2, positions=64)
    towers = section("retriever", embedding_width=8)
    retriever, reader = build_models(shape, towers, section("reader"), world.snapshot.tokenizer.get_vocab_size(), 0)
    assert retriever.shared
    assert torch.equal(retriever.query.bert.word_vectors, reader.bert.word_vectors)
    with torch.no_grad():
        retriever.query.bert.word_vectors.add_(1.0)
    assert not torch.equal(retriever.query.bert.word_vectors, reader.bert.word_vectors)


def test_a_small_encoder_predicts_by_its_word_vectors_from_the_start(tmp_path: Path) -> None:
    """Its value and output matrices are half an identity, and it comes back from its folder as it was."""
    encoder, head = write_small(tmp_path)
    assert head.tied
    layer = encoder.model.encoder.layer[0].attention
    product_DD = layer.output.dense.weight @ layer.self.value.weight
    torch.testing.assert_close(product_DD, 0.5 * torch.eye(16), rtol=0, atol=1e-5)
    logits_VV = head(encoder.word_vectors, encoder.word_vectors)
    assert (logits_VV.argmax(-1) == torch.arange(150)).float().mean() > 0.8
    again, its_head = load_encoder(tmp_path)
    assert its_head.is_trained
    same_state(again, encoder)
    same_state(its_head, head)


def test_models_depend_on_the_seed_alone() -> None:
    def weights(seed: int) -> Tensor:
        bert, options = section("bert", width=16, layers=1, heads=2), section("retriever", embedding_width=8)
        return build_models(bert, options, section("reader"), 150, seed)[0].query.projection.weight

    torch.manual_seed(7)
    first = weights(0)
    assert torch.equal(first, weights(0))
    assert not torch.equal(first, weights(1))


def test_an_encoder_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    """And one with the snapshot's is loaded, with its head or with a near identity in its place."""
    bert, head = write_small(tmp_path)
    with pytest.raises(ValueError, match=r"has 64 positions, bert\.positions is 512; set bert\.positions=64"):
        build_models(section("bert"), section("retriever", init=str(tmp_path)), section("reader"), 150, 0)
    shape, options = section("bert", positions=64), section("retriever", init=str(tmp_path))
    with pytest.raises(ValueError, match="the encoder has 150 wordpieces, the snapshot 151; build the snapshot"):
        build_models(shape, options, section("reader"), 151, 0)
    _, reader = build_models(shape, options, section("reader"), 150, 0)
    assert torch.equal(reader.bert.word_vectors, bert.word_vectors)
    same_state(reader.masked_words, head)
    save_encoder(tmp_path, bert)
    _, reader = build_models(shape, options, section("reader"), 150, 0)
    assert not reader.masked_words.is_trained
    assert torch.equal(reader.masked_words.model.cls.predictions.transform.dense.weight, torch.eye(16))


def test_the_releases_head_starts_from_the_encoders_pooler(tmp_path: Path) -> None:
    write_small(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["bert.pooler.dense.weight"] = torch.full((16, 16), 0.5)
    state["bert.pooler.dense.bias"] = torch.full((16,), 0.25)
    save_file(state, tmp_path / "model.safetensors")
    bert, options = section("bert", positions=64), section("retriever", init=str(tmp_path), head="release")
    retriever, _ = build_models(bert, options, section("reader"), 150, 0)
    for tower in (retriever.query, retriever.document):
        assert torch.equal(tower.pooler.weight, torch.full((16, 16), 0.5))
        assert torch.equal(tower.pooler.bias, torch.full((16,), 0.25))


def test_the_span_head_by_hand() -> None:
    """w . LayerNorm(ReLU(W_s h_start + W_e h_end)), width 2: ReLU gives (3, 1), LayerNorm (1, -1), w gives 5 - 7."""
    head = SpanHead(2, 2)
    with torch.no_grad():
        head.start.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        head.start.bias.copy_(torch.tensor([1.0, 0.0]))
        head.end.weight.copy_(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
        head.score.weight.copy_(torch.tensor([[5.0, 7.0]]))
    hidden_TD = torch.tensor([[2.0, 4.0], [-3.0, 0.0], [9.0, 9.0]])
    # start row 0: (2 + 1, 4); end row 1: (0, -3); together (3, 1)
    score_S = head(hidden_TD, torch.tensor([0]), torch.tensor([1]))
    assert score_S.tolist() == pytest.approx([5.0 - 7.0], abs=1e-4)


# ---- embedding in batches


def test_embeddings_are_those_of_single_sequences_in_order(world: World) -> None:
    retriever, _ = tiny_models(world, dropout=0.5)
    sequences = document_sequences(world.snapshot, [5, 0, 11, 3])
    told: list[int] = []
    embedding_NE = embed(retriever.document, sequences, FP32, told.append)
    assert sum(told) == 4
    assert retriever.document.training, "dropout is off while it embeds, and on again afterwards"
    retriever.eval()
    with torch.no_grad():
        singles = [retriever.document(PackedBatch([tokens], [segments]))[0] for tokens, segments in sequences]
    torch.testing.assert_close(embedding_NE, torch.stack(singles), rtol=0, atol=1e-5)
    assert torch.equal(embed(retriever.document, sequences, FP32), embedding_NE)
    assert not embedding_NE.requires_grad


def test_batches_have_at_most_so_many_wordpieces(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    retriever, _ = tiny_models(world)
    sizes: list[int] = []
    real = Embedder.forward

    def spy(self: Embedder, packed: PackedBatch, vectors: int) -> Tensor:
        sizes.append(len(packed) * packed.longest)
        return real(self, packed, vectors)

    monkeypatch.setattr(Embedder, "forward", spy)
    rng = np.random.default_rng(0)
    queries = [rng.integers(5, 100, rng.integers(1, 64)) for _ in range(300)]
    assert embed(retriever.query, query_sequences(queries), FP32).shape == (300, 8)
    assert max(sizes) <= BATCH_WORDPIECES["cpu"]
    assert len(sizes) < 16


# ---- files


def same_state(one: nn.Module, other: nn.Module) -> None:
    assert one.state_dict().keys() == other.state_dict().keys()
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("spans", [True, False])
def test_readers_are_read_back_as_written(world: World, tmp_path: Path, spans: bool, apart: bool) -> None:
    retriever, reader = tiny_models(world, copying={"copies": apart, "apart": apart, "matches": not apart})
    if spans:
        add_span_head(reader, 12, seed=0)
        reader.spans.norm.eps = 1e-3  # as in published readers
    save_models(tmp_path / "one", retriever, reader, world.text)
    _, again = load_models(tmp_path / "one", world.text.vocabulary_hash)
    same_state(again, reader)
    assert again.apart is apart
    if reader.spans is not None:
        assert again.spans.norm.eps == 1e-3
    save_models(tmp_path / "two", retriever, again, world.text)
    one, two = ([path.read_bytes() for path in model_files(tmp_path / name)] for name in ("one", "two"))
    assert one == two


def test_models_of_another_vocabulary_or_version_are_refused(world: World, tmp_path: Path) -> None:
    save_models(tmp_path, *tiny_models(world), world.text)
    with pytest.raises(ValueError, match=r"trained with the vocabulary \w{12}, the snapshot has beef; run the stages"):
        load_models(tmp_path, "beef")
    for name in ("reader", "retriever"):
        path = tmp_path / name / "realmops.json"
        path.write_text("{}")
        with pytest.raises(ValueError, match=rf"{path} is missing .* another version of realmops made it; run 'realm"):
            load_models(tmp_path, world.text.vocabulary_hash)
        path.unlink()
