"""Encoders of many families: equal to transformers on random weights, packed, learned, saved and exported."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from small_encoders import DECODERS, ENCODERS, FAMILIES, PADDED, write_encoder
from small_project import toy_values
from small_world import World
from torch import Tensor

from realmops.commands.run import check_encoders
from realmops.model.encoder_files import encoder_from_description, load_encoder
from realmops.model.packed import PackedBatch
from realmops.model.reader import Reader
from realmops.model.reader_files import load_models, save_models
from realmops.model.retriever import Embedder, Retriever

LENGTHS = (7, 1, 50, 4, 33, 6, 48, 8)  # some are so alike that a family that does not pack pads them together
EXACT = {"rtol": 0, "atol": 1e-5}
FAMILY = pytest.mark.parametrize("family", ENCODERS)
ANY = pytest.mark.parametrize("family", [*ENCODERS, *DECODERS])


def sequences(vocabulary: int, lengths: Sequence[int] = LENGTHS) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(5, vocabulary, length) for length in lengths]


def peer_of(folder: Path, family: str) -> transformers.PreTrainedModel:
    kind = transformers.AutoModel if family in DECODERS else transformers.AutoModelForMaskedLM
    return kind.from_pretrained(folder).eval()


def their_rows(model: torch.nn.Module, tokens: list[np.ndarray]) -> Tensor:
    """Hidden states or logits of the sequences, one by one, so that nothing is padded."""
    return torch.cat([model(input_ids=torch.from_numpy(one)[None])[0][0] for one in tokens])


@ANY
def test_hidden_states_and_gradients_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """To 1e-5; in one group and in several, with gradients and recomputed activations."""
    folder = write_encoder(tmp_path, family)
    encoder, head = load_encoder(folder, 0.0)
    assert encoder.packs is (family not in PADDED)
    assert (head is not None and head.is_trained) == (family not in DECODERS)
    encoder.eval()
    model = peer_of(folder, family).base_model
    tokens = sequences(encoder.vocabulary)
    many = sequences(encoder.vocabulary, [1 + n % 60 for n in range(330)])
    with torch.no_grad():
        hidden_TD = their_rows(model, tokens)
        assert hidden_TD.std() > 0.3, "the weights are so large that every term counts"
        torch.testing.assert_close(encoder(PackedBatch(tokens)), hidden_TD, **EXACT)
        assert len(PackedBatch(many).groups) > 1
        torch.testing.assert_close(encoder(PackedBatch(many)), their_rows(model, many), **EXACT)
    ours_TD = encoder(PackedBatch(tokens))
    torch.testing.assert_close(ours_TD, hidden_TD, **EXACT)
    weight_TD = torch.linspace(0.5, 1.5, hidden_TD.numel()).view_as(hidden_TD)
    (ours_TD * weight_TD).sum().backward()
    (their_rows(model, tokens) * weight_TD).sum().backward()
    ours, theirs = (dict(one.named_parameters()) for one in (encoder.model, model))
    scale = max(float(parameter.grad.abs().max()) for parameter in theirs.values() if parameter.grad is not None)
    for name, parameter in ours.items():
        gradient = theirs[name].grad
        if parameter.requires_grad and gradient is not None:
            torch.testing.assert_close(parameter.grad / scale, gradient / scale, **EXACT, msg=name)
        elif gradient is not None:
            assert float(gradient.abs().max()) < 1e-6 * scale, f"{name}: no loss sees a bias of keys"
    before = {name: parameter.grad for name, parameter in ours.items()}
    encoder.zero_grad()
    encoder.train().gradient_checkpointing = True
    (encoder(PackedBatch(tokens)) * weight_TD).sum().backward()
    assert all(parameter.grad is None or torch.equal(parameter.grad, before[name]) for name, parameter in ours.items())


@FAMILY
@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_those_of_transformers_with_the_word_vectors_and_with_another_decoder(
    family: str, tied: bool, world: World, tmp_path: Path
) -> None:
    """Also of models that were saved, here and in transformers; and where a folder's configuration says otherwise."""
    folder = write_encoder(tmp_path / "encoder", family, tie_word_embeddings=tied)
    for stated in (tied, True):
        values = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": stated}
        (folder / "config.json").write_text(json.dumps(values))
        if stated and not tied:  # such a file has one bias for two parameters
            weights = load_file(folder / "model.safetensors")
            kept = {name: tensor for name, tensor in weights.items() if not name.endswith("decoder.bias")}
            save_file(kept if family != "modernbert" else weights, folder / "model.safetensors", {"format": "pt"})
        encoder, head = load_encoder(folder, 0.0)
        assert head is not None
        assert head.is_trained
        tokens = sequences(encoder.vocabulary)
        with torch.no_grad():
            logits_TV = their_rows(peer_of(folder, family), tokens)
            ours_TV = head(encoder.eval()(PackedBatch(tokens)), encoder.word_vectors)
            torch.testing.assert_close(ours_TV, logits_TV, rtol=0, atol=1e-4)
            if not tied:  # the head's own parameters alone decide
                assert torch.equal(head(encoder(PackedBatch(tokens)), 0 * encoder.word_vectors), ours_TV)
    models = tmp_path / "models"
    tower = Embedder(encoder, 8, "cosine", segments="one")
    save_models(models, Retriever(tower, tower), Reader(encoder, head).eval(), world.text)
    assert "realmops" not in (models / "reader/config.json").read_text()
    retriever, reader = load_models(models, world.text.vocabulary_hash)
    described = encoder_from_description(encoder.describe())
    described.load_state_dict(encoder.state_dict())
    with torch.no_grad():
        assert torch.equal(retriever.eval().query(PackedBatch(tokens)), tower.eval()(PackedBatch(tokens)))
        for opened, its_head in ((reader.eval().encoder, reader.masked_words), (described.eval(), head)):
            assert opened.packs is encoder.packs
            assert torch.equal(its_head(opened(PackedBatch(tokens)), opened.word_vectors), ours_TV)
        again_TV = their_rows(peer_of(models / "reader", family), tokens)
        torch.testing.assert_close(again_TV, logits_TV, **EXACT)


@ANY
def test_in_fp16_all_is_nearly_the_same_and_nothing_stays(family: str, tmp_path: Path) -> None:
    encoder = load_encoder(write_encoder(tmp_path, family), 0.0)[0].eval()
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    half, tokens = encoder.in_fp16(), sequences(60)
    assert half is not None
    encoder.output_biases  # noqa: B018 (it tries them out)
    assert all(torch.equal(tensor, before[name]) for name, tensor in encoder.state_dict().items())
    with torch.no_grad():
        hidden_TD, half_TD = encoder(PackedBatch(tokens)), half(PackedBatch(tokens))
        assert half_TD.dtype == torch.float16
        assert float((half_TD.float() - hidden_TD).norm() / hidden_TD.norm()) < 0.01
        encoder.word_vectors.mul_(1e6)
    if family == "bert":
        assert encoder.in_fp16() is None, "such numbers are out of its range"


@pytest.mark.parametrize("family", ["bert", "modernbert", "albert", "qwen3"])
def test_shifts_are_biases_that_move_all_hidden_states(family: str, tmp_path: Path) -> None:
    changes = {"norm_bias": True} if family == "modernbert" else {}
    encoder = load_encoder(write_encoder(tmp_path, family, **changes), 0.0)[0].eval()
    shifts = encoder.output_biases
    assert len(shifts) == (family in ("bert", "modernbert")), "that of ALBERT is of all its layers"
    with torch.no_grad():
        hidden_TD = encoder(PackedBatch(sequences(60)))
        for shift in shifts:
            shift += 1
            torch.testing.assert_close(encoder(PackedBatch(sequences(60))), hidden_TD + 1, **EXACT)


@FAMILY
def test_a_head_that_is_missing_starts_near_the_word_vectors(family: str, tmp_path: Path) -> None:
    """Also where a folder has only its decoder."""
    folder = write_encoder(tmp_path, family, tie_word_embeddings=False)
    weights = load_file(folder / "model.safetensors")
    heads, counts = [], []
    encoders = rf"({load_encoder(folder)[1].model.base_model_prefix})\."
    for left in (rf"{encoders}|.*decoder\.|vocab_projector|generator_lm_head", encoders):
        kept = {name: tensor for name, tensor in weights.items() if re.match(left, name)}
        save_file(kept, folder / "model.safetensors", {"format": "pt"})
        encoder, head = load_encoder(folder, 0.0)
        assert not head.is_trained
        like_words_VD = F.pad(encoder.word_vectors, (0, encoder.width - encoder.added_width))
        heads.append(head(like_words_VD, encoder.word_vectors).detach())
        counts.append(len(kept))
    assert len(weights) > counts[0] > counts[1]
    own_V = heads[1].argmax(-1) == torch.arange(encoder.vocabulary)
    assert own_V.float().mean() > 0.8, "a word vector is likeliest its own word's"


@ANY
def test_what_is_added_counts_as_part_of_the_word_vectors(family: str, tmp_path: Path) -> None:
    encoder = load_encoder(write_encoder(tmp_path, family), 0.0)[0].eval()
    batch = PackedBatch(sequences(encoder.vocabulary))
    with torch.no_grad():
        plain_TD = encoder(batch)
        added_TD = torch.zeros(len(plain_TD), encoder.added_width)
        assert torch.equal(encoder(batch, added_TD), plain_TD)
        added_TD[batch.starts[2]] = 1.0
        changed_T = (encoder(batch, added_TD) - plain_TD).abs().amax(-1) > 0
    of_third = np.repeat(np.arange(len(LENGTHS)), LENGTHS) == 2
    assert changed_T[of_third][:20].all(), "all that a layer sees"
    assert not changed_T[~of_third].any()


@FAMILY
def test_dropout_is_the_folders_own_or_another(family: str, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, family)
    encoder = load_encoder(folder, 0.5)[0].train()
    batch = PackedBatch(sequences(encoder.vocabulary))
    with torch.no_grad():
        assert not torch.equal(encoder(batch), encoder(batch))
        encoder.set_dropout(0.0)
        assert torch.equal(encoder(batch), encoder(batch))
    assert load_encoder(folder)[0].dropout == (0.0 if family in ("modernbert", "albert", "nomic_bert") else 0.1)


REFUSED = {
    "two halves": ({"model_type": "t5"}, r"'t5' is an encoder-decoder.*for example, .*roberta"),
    "no texts": ({"model_type": "vit"}, r"'vit' is no text encoder; .*ModernBERT-base"),
    "a BERT as decoder": ({"model_type": "albert", "is_decoder": True}, r"'albert' is configured as a decoder"),
    "own code": ({"model_type": "mine", "auto_map": {}}, r"'mine' needs custom code .*never executed"),
    "not known": ({"model_type": "mine"}, r"'mine' is unknown to the installed transformers"),
    "an impossible shape": (
        {"model_type": "bert", "hidden_size": 30, "num_attention_heads": 4},
        r"transformers cannot open it \(ValueError: The hidden size \(30\)",
    ),
}


@pytest.mark.parametrize(("config", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_work_is_refused_with_the_reason(config: dict[str, object], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_encoder(tmp_path)


def test_an_encoder_that_reads_padding_is_refused(tmp_path: Path) -> None:
    for family, message in {"convbert": "is not invariant to the padding", "fnet": "takes no attention_mask"}.items():
        folder = write_encoder(tmp_path / family, family)
        with pytest.raises(ValueError, match=message):
            load_encoder(folder)


@pytest.mark.parametrize("family", ["bert", "mpnet"])
def test_hidden_states_of_any_size_are_compared_by_their_size(family: str, tmp_path: Path) -> None:
    """Their rounding grows with them: such an encoder packs as another does, or is padded, and has its last bias."""
    folder = write_encoder(tmp_path, family)
    weights = load_file(folder / "model.safetensors")
    last = f"{family}.encoder.layer.1.output.LayerNorm.weight"
    save_file({**weights, last: 1e5 * weights[last]}, folder / "model.safetensors", {"format": "pt"})
    encoder, _ = load_encoder(folder)
    assert float(encoder.eval()(PackedBatch(sequences(encoder.vocabulary))).detach().abs().max()) > 1e4
    assert encoder.packs == (family == "bert")


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    folder, name = write_encoder(tmp_path, "bert"), "bert.encoder.layer.0.output.dense.weight"
    weights = load_file(folder / "model.safetensors")
    weights[name][3, 4] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ValueError, match=f"{re.escape(str(folder))}: the parameter {name} has a value that is not finite"
    ):
        load_encoder(folder)


def test_an_encoder_under_the_names_of_realm_is_a_bert(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, "bert")
    encoder, _ = load_encoder(folder, 0.0)
    weights = {name.replace("bert.", "realm.", 1): one for name, one in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"model_type": "realm"}))
    again, head = load_encoder(folder, 0.0)
    assert head is not None
    assert head.is_trained
    batch = PackedBatch(sequences(encoder.vocabulary))
    with torch.no_grad():
        assert torch.equal(again.eval()(batch), encoder.eval()(batch))


def test_an_encoder_is_opened_without_taking_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training on a CPU, or on one GPU of several, leaves the others alone."""
    folder = write_encoder(tmp_path, "bert")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *args: pytest.fail("a GPU was taken"))
    encoder_from_description(load_encoder(folder)[0].describe())


def test_code_in_a_folder_is_not_run(tmp_path: Path) -> None:
    """Neither now nor by whoever opens what is saved: it is not named there."""
    folder, target = write_encoder(tmp_path / "encoder", "bert"), tmp_path / "proof"
    code = f"import pathlib\npathlib.Path({str(target)!r}).write_text('it ran')\n"
    (folder / "mine.py").write_text(code)
    values = json.loads((folder / "config.json").read_text())
    classes = {"AutoConfig": "mine.Config", "AutoModel": "mine.Model", "AutoModelForMaskedLM": "mine.Model"}
    (folder / "config.json").write_text(json.dumps(values | {"auto_map": classes}))
    encoder, head = load_encoder(folder)
    assert head is not None
    assert head.is_trained
    assert "auto_map" not in encoder.describe()["config"]
    assert not target.exists()
    exec(code, {})
    assert target.read_text() == "it ran", "the code is live"


def test_random_numbers_are_not_drawn(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, "bert", head=False)
    before = torch.random.get_rng_state()
    encoder, _ = load_encoder(folder)
    encoder_from_description(encoder.describe())
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("family", [*FAMILIES, "albert"])
def test_run_opens_an_encoder_before_the_first_stage(family: str, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "encoder", family, max_position_embeddings=130)
    values = toy_values(bert={"positions": 128}, retriever={"init": str(folder)})
    notes = check_encoders(["ict"], values)
    assert ["whose batches are padded" in note for note in notes] == [True] * (family in PADDED)
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="encoder"):
        check_encoders(["ict"], values)


def test_an_untrained_head_is_warned_of_where_masked_words_are_learned(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "encoder", "bert", max_position_embeddings=130)
    encoder_alone = {k: v for k, v in load_file(folder / "model.safetensors").items() if k.startswith("bert.")}
    save_file(encoder_alone, folder / "model.safetensors", {"format": "pt"})
    values = toy_values(bert={"positions": 128}, retriever={"init": str(folder)}, ict={"reader_steps": 0})
    for steps, warnings in ((0, []), (1, [True])):
        values["pretrain"]["steps"] = steps
        found = check_encoders(["ict", "pretrain"], values)
        assert ["has no masked word head" in warning for warning in found] == warnings


@pytest.mark.parametrize("family", DECODERS)
def test_a_decoder_retrieves_and_predicts_no_masked_words(family: str, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "encoder", family, max_position_embeddings=130)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode": "lasttoken"}))
    changes = {"bert": {"positions": 128}, "retriever": {"init": str(folder), "embedding_width": 8}}
    for steps, stage in (({"ict": {"reader_steps": 1}}, "ict"), ({"pretrain": {"steps": 1}}, "pretrain")):
        message = rf"a {family} is a causal model, which cannot predict masked words .*; set {stage}\."
        with pytest.raises(ValueError, match=message):
            check_encoders(["ict", stage], toy_values(**changes, **{"ict": {"reader_steps": 0}, **steps}))
    assert check_encoders(["ict"], toy_values(**changes, ict={"reader_steps": 0})) == []
    reader = Reader(*load_encoder(folder))
    with pytest.raises(ValueError, match=rf"the reader has a {family}, which predicts no masked words; set ict\."):
        reader._log_vocabulary(torch.zeros(1, reader.encoder.width), None)
