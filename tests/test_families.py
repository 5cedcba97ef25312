"""Encoders of other families: equal to transformers on random weights, packed, learned, saved and exported."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from small_encoders import FAMILIES, write_encoder
from small_project import toy_values
from torch import Tensor

from realmops.commands.run import encoder_notes, look_at_encoders
from realmops.model.checkpoint_files import load_reader, save_models
from realmops.model.encoder import Bert, described_encoder, load_encoder
from realmops.model.packed import Packed
from realmops.model.reader import Reader
from realmops.model.retriever import Embedder, Retriever

LENGTHS = (7, 1, 50, 4, 33)
EXACT = {"rtol": 0, "atol": 1e-5}


def sequences(vocabulary: int, lengths: Sequence[int] = LENGTHS) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(5, vocabulary, length) for length in lengths]


def their_rows(model: torch.nn.Module, tokens: list[np.ndarray]) -> Tensor:
    """Hidden states or logits of the sequences, one by one, so that nothing is padded."""
    with torch.no_grad():
        return torch.cat([model(input_ids=torch.from_numpy(one)[None])[0][0] for one in tokens])


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_and_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """To 1e-5; in one group, in several, with gradients on the way back, and again from what was described."""
    folder = write_encoder(tmp_path, family)
    encoder, head, found = load_encoder(folder, 0.0)
    assert found
    encoder.eval()
    peer = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    assert type(peer).__name__.lower().startswith(family.replace("-", ""))
    tokens = sequences(encoder.vocabulary)
    logits_TV = their_rows(peer, tokens)
    assert logits_TV.std() > 0.3, "the weights are so large that every term counts"
    hidden_TD = their_rows(peer.base_model, tokens)
    with torch.no_grad():
        torch.testing.assert_close(encoder(Packed(tokens)), hidden_TD, **EXACT)
        torch.testing.assert_close(head(hidden_TD, encoder.word_vectors), logits_TV, **EXACT)
        many = sequences(encoder.vocabulary, [1 + n % 60 for n in range(330)])
        assert len(Packed(many).groups) > 1
        torch.testing.assert_close(encoder(Packed(many)), their_rows(peer.base_model, many), **EXACT)
    ours_TD = encoder(Packed(tokens))
    torch.testing.assert_close(ours_TD, hidden_TD, **EXACT)
    weight_TD = torch.linspace(0.5, 1.5, hidden_TD.numel()).view_as(hidden_TD)
    (ours_TD * weight_TD).sum().backward()
    model = peer.base_model
    out = [model(input_ids=torch.from_numpy(one)[None])[0][0] for one in tokens]
    (torch.cat(out) * weight_TD).sum().backward()
    theirs = model.get_input_embeddings().weight.grad
    assert encoder.word_vectors.grad is not None
    scale = float(theirs.abs().max())
    torch.testing.assert_close(encoder.word_vectors.grad / scale, theirs / scale, rtol=0, atol=1e-5)
    encoder.gradient_checkpointing, before = True, encoder.word_vectors.grad.clone()
    encoder.word_vectors.grad = None
    (encoder(Packed(tokens)) * weight_TD).sum().backward()
    assert torch.equal(encoder.word_vectors.grad, before)
    again = described_encoder(json.loads(json.dumps(encoder.describe())), "here")
    again.load_state_dict(encoder.state_dict())
    with torch.no_grad():
        assert torch.equal(again.eval()(Packed(tokens)), encoder(Packed(tokens)))


@pytest.mark.parametrize("family", [*FAMILIES, "albert", "deberta-v2"])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_those_of_transformers_with_the_word_vectors_and_with_another_decoder(
    family: str, tied: bool, tmp_path: Path
) -> None:
    """Also of a reader that was saved and opened again, and where a folder's configuration does not tell."""
    folder = write_encoder(tmp_path / "encoder", family, tie_word_embeddings=tied)
    for said in (tied, True):
        values = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": said}
        (folder / "config.json").write_text(json.dumps(values))
        peer = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
        encoder, head, found = load_encoder(folder, 0.0)
        assert found
        tokens = sequences(encoder.vocabulary)
        logits_TV = their_rows(peer, tokens)
        with torch.no_grad():
            ours_TV = head(encoder.eval()(Packed(tokens)), encoder.word_vectors)
            torch.testing.assert_close(ours_TV, logits_TV, rtol=0, atol=1e-4)
            if not tied:  # the head's own parameters alone decide
                assert torch.equal(head(encoder(Packed(tokens)), 0 * encoder.word_vectors), ours_TV)
    tower = Embedder(encoder, 8, "cosine", segments="one")
    (tmp_path / "models").mkdir()
    save_models(tmp_path / "models", Retriever(tower, tower), Reader(encoder, head), "vocabulary")
    again = load_reader(tmp_path / "models", "vocabulary").eval()
    with torch.no_grad():
        torch.testing.assert_close(
            again.masked_words(again.encode(Packed(tokens)), again.encoder.word_vectors), logits_TV, rtol=0, atol=1e-4
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_in_fp16_all_is_nearly_the_same_and_nothing_stays(family: str, tmp_path: Path) -> None:
    """Moving biases changes nothing but roundings; ModernBERT and what transformers computes stay as they are."""
    encoder, tokens = load_encoder(write_encoder(tmp_path, family), 0.0)[0].eval(), sequences(60)
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    half = encoder.in_fp16()
    if half is None:
        assert not isinstance(encoder, Bert)
        return
    assert isinstance(encoder, Bert)
    assert all(torch.equal(tensor, before[name]) for name, tensor in encoder.state_dict().items())
    with torch.no_grad():
        hidden_TD, half_TD = encoder(Packed(tokens)), half(Packed(tokens))
        assert half_TD.dtype == torch.float16
        assert float((half_TD.float() - hidden_TD).norm() / hidden_TD.norm()) < 0.01
        last = encoder.norm.bias if encoder.project is None else encoder.project.bias
        for layer in encoder.layers:
            layer.fold(last)
            last = layer.output_norm.bias
        torch.testing.assert_close(encoder(Packed(tokens)), hidden_TD, rtol=0, atol=1e-4)
    changed = [name for name, tensor in encoder.state_dict().items() if not torch.equal(tensor, before[name])]
    assert len(changed) == 1 + 4 * len(encoder.layers) + (len(encoder.layers) - 1), (
        "each bias that takes another's part"
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_what_is_published_again(family: str, tmp_path: Path) -> None:
    encoder = load_encoder(write_encoder(tmp_path, family, head=False), 0.25)[0].eval()
    published = encoder.published()
    assert published is not None
    config, state = published
    (tmp_path / "again").mkdir()
    (tmp_path / "again/config.json").write_text(json.dumps({"pad_token_id": 0} | config))
    model = transformers.AutoModel.from_config(transformers.AutoConfig.from_pretrained(tmp_path / "again"))
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert [name for name in missing if "pooler" not in name and "position_ids" not in name] == []
    tokens = sequences(encoder.vocabulary)
    with torch.no_grad():
        torch.testing.assert_close(encoder(Packed(tokens)), their_rows(model.eval(), tokens), **EXACT)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_that_is_missing_starts_near_the_word_vectors(family: str, tmp_path: Path) -> None:
    encoder, head, found = load_encoder(write_encoder(tmp_path, family, head=False), 0.0)
    assert not found
    logits_NV = head(torch.randn(3, encoder.width), encoder.word_vectors)
    assert logits_NV.shape == (3, encoder.vocabulary)
    assert logits_NV.isfinite().all()


@pytest.mark.parametrize("family", [*FAMILIES, "albert"])
def test_a_decoder_without_the_rest_of_its_head_is_left_out(family: str, tmp_path: Path) -> None:
    """The head then starts over the word vectors, as where a folder has none at all."""
    folder = write_encoder(tmp_path, family, tie_word_embeddings=False)
    weights = load_file(folder / "model.safetensors")
    heads, counts = [], []
    encoders = r"(bert|roberta|mpnet|distilbert|electra|model|albert)\."
    for left in (rf"{encoders}|.*decoder\.|vocab_projector|generator_lm_head", encoders):
        kept = {name: tensor for name, tensor in weights.items() if re.match(left, name)}
        save_file(kept, folder / "model.safetensors", {"format": "pt"})
        encoder, head, found = load_encoder(folder, 0.0)
        assert not found
        heads.append(head(torch.eye(encoder.width), encoder.word_vectors))
        counts.append(len(kept))
    assert len(weights) > counts[0] > counts[1]
    assert torch.equal(*heads)
    assert heads[0].std() > 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_added_counts_as_part_of_the_word_vectors(family: str, tmp_path: Path) -> None:
    encoder = load_encoder(write_encoder(tmp_path, family), 0.0)[0].eval()
    batch = Packed(sequences(encoder.vocabulary))
    with torch.no_grad():
        plain_TD = encoder(batch)
        added_TD = torch.zeros(len(plain_TD), encoder.added_width)
        assert torch.equal(encoder(batch, added_TD), plain_TD)
        added_TD[batch.starts[2]] = 1.0
        changed_T = (encoder(batch, added_TD) - plain_TD).abs().amax(-1) > 0
    of_third = np.repeat(np.arange(len(LENGTHS)), LENGTHS) == 2
    assert changed_T[of_third].all()
    assert not changed_T[~of_third].any()


@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_is_the_folders_own_or_another(family: str, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, family)
    encoder = load_encoder(folder, 0.5)[0].train()
    batch = Packed(sequences(encoder.vocabulary))
    with torch.no_grad():
        assert not torch.equal(encoder(batch), encoder(batch))
        encoder.set_dropout(0.0)
        assert torch.equal(encoder(batch), encoder(batch))
    assert load_encoder(folder)[0].dropout == (0.0 if family == "modernbert" else 0.1)


@pytest.mark.parametrize("family", ["albert", "deberta-v2"])
def test_other_encoders_are_computed_by_transformers(family: str, tmp_path: Path) -> None:
    """With their masked word head, where it has a usual form."""
    folder = write_encoder(tmp_path, family)
    encoder, head, found = load_encoder(folder, 0.0)
    assert found
    assert encoder.words == f"{family} by transformers"
    assert encoder.positions == 64
    peer = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    tokens = sequences(encoder.vocabulary)
    hidden_TD = their_rows(peer.base_model, tokens)
    again = described_encoder(json.loads(json.dumps(encoder.describe())), "here").eval()
    again.load_state_dict(encoder.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(encoder.eval()(Packed(tokens)), hidden_TD, **EXACT)
        torch.testing.assert_close(again(Packed(tokens)), hidden_TD, **EXACT)
        torch.testing.assert_close(head(hidden_TD, encoder.word_vectors), their_rows(peer, tokens), **EXACT)
        added_TD = torch.zeros(len(hidden_TD), encoder.added_width)
        torch.testing.assert_close(encoder(Packed(tokens), added_TD), hidden_TD, **EXACT)
    encoder.gradient_checkpointing = True
    encoder.train()(Packed(tokens)).square().sum().backward()
    assert encoder.word_vectors.grad is not None


REFUSED = {
    "a decoder": ({"model_type": "gpt2"}, r"'gpt2' is no encoder that tells masked words.*nearest.*ModernBERT-base"),
    "two halves": (
        {"model_type": "t5"},
        r"'t5' is an encoder with a decoder.*the nearest .* is .*roberta",
    ),
    "a BERT as decoder": ({"model_type": "albert", "is_decoder": True}, r"'albert' is set up as a decoder"),
    "own code": ({"model_type": "mine", "auto_map": {}}, r"'mine' comes with code of its own, which is never run"),
    "not known": ({"model_type": "mine"}, r"'mine' is not among those of the installed transformers"),
}


@pytest.mark.parametrize(("config", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_work_is_refused_with_the_reason(config: dict[str, object], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        load_encoder(tmp_path)
    with pytest.raises(ValueError, match=message):
        list(encoder_notes(tmp_path))


def test_an_encoder_that_reads_padding_is_refused(tmp_path: Path) -> None:
    for family, message in {"convbert": "reads the padding of a batch", "fnet": "takes no attention_mask"}.items():
        folder = write_encoder(tmp_path / family, family)
        with pytest.raises(ValueError, match=message):
            load_encoder(folder)


def test_only_safetensors_are_read_of_other_encoders(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, "albert")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"albert is read from model.safetensors alone"):
        load_encoder(folder)


@pytest.mark.parametrize("family", [*FAMILIES, "albert"])
def test_run_opens_an_encoder_before_the_first_stage(family: str, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "encoder", family, max_position_embeddings=130)
    look_at_encoders(["ict"], toy_values(bert={"init": str(folder), "positions": 128}))
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="encoder"):
        look_at_encoders(["ict"], toy_values(bert={"init": str(folder), "positions": 128}))
