"""Encoders of every family: equal to transformers on random weights, packed or padded, trained, saved and reloaded."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from small_encoders import DECODERS, ENCODERS, FAMILIES, PADDED, change_weights, edit_json, write_encoder
from small_project import toy_values
from small_world import World, at_once, section
from torch import Tensor

from realmops.commands.run import check_encoders
from realmops.model.encoder_files import build_small_encoder, encoder_from_description, load_encoder
from realmops.model.packed import PackedBatch
from realmops.model.reader import Reader
from realmops.model.reader_files import load_models, save_models
from realmops.model.retriever import Embedder, Retriever, initialise_projection

LENGTHS = (7, 1, 50, 4, 33, 6, 48, 8)  # padded families pad similar ones together
EXACT = {"rtol": 0, "atol": 1e-5}
FAMILY = pytest.mark.parametrize("family", ENCODERS)
ANY = pytest.mark.parametrize("family", [*ENCODERS, *DECODERS])


def sequences(vocabulary: int = 60, lengths: Sequence[int] = LENGTHS) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(5, vocabulary, length) for length in lengths]


def peer_of(folder: Path, family: str) -> transformers.PreTrainedModel:
    kind = transformers.AutoModel if family in DECODERS else transformers.AutoModelForMaskedLM
    return kind.from_pretrained(folder).eval()


def peer_rows(model: torch.nn.Module, tokens: list[np.ndarray]) -> Tensor:
    """Hidden states or logits of the sequences, one by one, so that nothing is padded."""
    return torch.cat([model(input_ids=torch.from_numpy(each)[None])[0][0] for each in tokens])


@ANY
def test_hidden_states_and_gradients_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    """In one padded group and in several, with and without gradients and recomputed activations."""
    folder = write_encoder(tmp_path, family)
    encoder, head = load_encoder(folder, 0.0)
    assert encoder.packs is (family not in PADDED)
    assert (head is not None and head.is_trained) == (family not in DECODERS)
    encoder.eval()
    model = peer_of(folder, family).base_model
    tokens = sequences(encoder.vocabulary)
    many = sequences(encoder.vocabulary, [1 + n % 60 for n in range(330)])
    with torch.no_grad():
        hidden_TD = peer_rows(model, tokens)
        assert hidden_TD.std() > 0.3, "the weights are so large that every term counts"
        torch.testing.assert_close(encoder(PackedBatch(tokens)), hidden_TD, **EXACT)
        assert len(PackedBatch(many).groups) > 1
        torch.testing.assert_close(encoder(PackedBatch(many)), peer_rows(model, many), **EXACT)
    ours_TD = encoder(PackedBatch(tokens))
    torch.testing.assert_close(ours_TD, hidden_TD, **EXACT)
    weight_TD = torch.linspace(0.5, 1.5, hidden_TD.numel()).view_as(hidden_TD)
    (ours_TD * weight_TD).sum().backward()
    (peer_rows(model, tokens) * weight_TD).sum().backward()
    ours, peers = (dict(each.named_parameters()) for each in (encoder.model, model))
    scale = max(float(parameter.grad.abs().max()) for parameter in peers.values() if parameter.grad is not None)
    for name, parameter in ours.items():
        gradient = peers[name].grad
        if parameter.requires_grad and gradient is not None:
            torch.testing.assert_close(parameter.grad / scale, gradient / scale, **EXACT, msg=name)
        elif gradient is not None:
            assert float(gradient.abs().max()) < 1e-6 * scale, f"{name}: a bias of keys cancels"
    before = {name: parameter.grad for name, parameter in ours.items()}
    encoder.zero_grad()
    encoder.train().set_gradient_checkpointing(True)
    (encoder(PackedBatch(tokens)) * weight_TD).sum().backward()
    assert all(parameter.grad is None or torch.equal(parameter.grad, before[name]) for name, parameter in ours.items())


@FAMILY
@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_those_of_transformers_and_survive_saving(
    family: str, tied: bool, world: World, tmp_path: Path
) -> None:
    """With tied and untied decoders, also where config.json contradicts the weights."""
    folder = write_encoder(tmp_path / "encoder", family, tie_word_embeddings=tied)
    for configured in (tied, True):
        edit_json(folder / "config.json", tie_word_embeddings=configured)
        if configured and not tied and family != "modernbert":  # such a file has one bias for two parameters
            change_weights(folder, lambda name, x: None if name.endswith("decoder.bias") else x)
        encoder, head = load_encoder(folder, 0.0)
        assert head.is_trained
        tokens = sequences(encoder.vocabulary)
        with torch.no_grad():
            logits_TV = peer_rows(peer_of(folder, family), tokens)
            ours_TV = head(encoder.eval()(PackedBatch(tokens)), encoder.word_vectors)
            torch.testing.assert_close(ours_TV, logits_TV, rtol=0, atol=1e-4)
            if not tied:
                assert torch.equal(head(encoder(PackedBatch(tokens)), 0 * encoder.word_vectors), ours_TV)
    models = tmp_path / "models"
    tower = Embedder(encoder, 8, "cosine", segments="one")
    save_models(models, Retriever(tower, tower), Reader(encoder, head).eval(), world.text)
    retriever, reader = load_models(models, world.text.vocabulary_hash)
    described = encoder_from_description(json.loads(json.dumps(encoder.describe())))
    described.load_state_dict(encoder.state_dict())
    with torch.no_grad():
        assert torch.equal(retriever.eval().query(PackedBatch(tokens)), tower.eval()(PackedBatch(tokens)))
        for reloaded, its_head in ((reader.eval().encoder, reader.masked_words), (described.eval(), head)):
            assert reloaded.packs is encoder.packs
            assert torch.equal(its_head(reloaded(PackedBatch(tokens)), reloaded.word_vectors), ours_TV)
        torch.testing.assert_close(peer_rows(peer_of(models / "reader", family), tokens), logits_TV, **EXACT)


@ANY
def test_fp16_is_near_fp32_and_probes_leave_the_parameters_unchanged(family: str, tmp_path: Path) -> None:
    encoder = load_encoder(write_encoder(tmp_path, family), 0.0)[0].eval()
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    half, tokens, biases = encoder.in_fp16(), sequences(), encoder.output_biases
    assert all(torch.equal(tensor, before[name]) for name, tensor in encoder.state_dict().items())
    with torch.no_grad():
        hidden_TD, half_TD = encoder(PackedBatch(tokens)), half(PackedBatch(tokens))
        assert float((half_TD.float() - hidden_TD).norm() / hidden_TD.norm()) < 0.01
        for bias in biases:
            bias += 1
            torch.testing.assert_close(encoder(PackedBatch(tokens)), hidden_TD + 1, **EXACT)
        encoder.word_vectors.mul_(1e6)
    if family in ("bert", "albert"):
        assert len(biases) == (family == "bert"), "ALBERT's bias is in all its layers"
    if family == "bert":
        assert encoder.in_fp16() is None, "such numbers exceed its range"


@FAMILY
def test_a_missing_head_starts_near_the_word_vectors(family: str, tmp_path: Path) -> None:
    """Also in a folder that has only the decoder of the head."""
    folder = write_encoder(tmp_path, family, tie_word_embeddings=False)
    prefix = rf"({load_encoder(folder)[1].model.base_model_prefix})\."
    for kept in (rf"{prefix}|.*decoder\.|vocab_projector|generator_lm_head", prefix):
        change_weights(folder, lambda name, x, kept=kept: x if re.match(kept, name) else None)
        encoder, head = load_encoder(folder, 0.0)
        assert not head.is_trained
    like_words_VD = F.pad(encoder.word_vectors, (0, encoder.width - encoder.added_width))
    is_own_V = head(like_words_VD, encoder.word_vectors).argmax(-1) == torch.arange(encoder.vocabulary)
    assert is_own_V.float().mean() > 0.8


@ANY
def test_added_vectors_count_as_part_of_the_word_vectors(family: str, tmp_path: Path) -> None:
    encoder = load_encoder(write_encoder(tmp_path, family), 0.0)[0].eval()
    batch = PackedBatch(sequences(encoder.vocabulary))
    with torch.no_grad():
        plain_TD = encoder(batch)
        added_TD = torch.zeros(len(plain_TD), encoder.added_width)
        assert torch.equal(encoder(batch, added_TD), plain_TD)
        added_TD[batch.starts[2]] = 1.0
        is_changed_T = (encoder(batch, added_TD) - plain_TD).abs().amax(-1) > 0
    is_third = np.repeat(np.arange(len(LENGTHS)), LENGTHS) == 2
    assert is_changed_T[is_third][:20].all(), "all that a layer attends to"
    assert not is_changed_T[~is_third].any()


@FAMILY
def test_dropout_is_that_of_the_folder_or_another(family: str, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, family)
    encoder = load_encoder(folder, 0.5)[0].train()
    batch = PackedBatch(sequences(encoder.vocabulary))
    with torch.no_grad():
        assert not torch.equal(encoder(batch), encoder(batch))
        encoder.set_dropout(0.0)
        assert torch.equal(encoder(batch), encoder(batch))
    assert load_encoder(folder)[0].dropout == (0.0 if family in ("modernbert", "albert", "nomic_bert") else 0.1)


@pytest.mark.parametrize("family", [*FAMILIES, "albert"])
def test_run_opens_an_encoder_before_the_first_stage(family: str, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "encoder", family, max_position_embeddings=130)
    values = toy_values(bert={"positions": 128}, retriever={"init": str(folder)})
    notes = check_encoders(["ict"], values)
    assert ["whose batches are padded" in note for note in notes] == [True] * (family in PADDED)
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="encoder"):
        check_encoders(["ict"], values)


def test_an_untrained_head_is_reported_where_masked_words_are_learned(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "encoder", "bert", max_position_embeddings=130)
    change_weights(folder, lambda name, x: x if name.startswith("bert.") else None)
    values = toy_values(bert={"positions": 128}, retriever={"init": str(folder)}, ict={"reader_steps": 0})
    for steps, warnings in ((0, []), (1, [True])):
        notes = check_encoders(["ict", "pretrain"], values.replace({"pretrain.steps": steps}))
        assert ["has no masked word head" in note for note in notes] == warnings


@pytest.mark.parametrize("family", DECODERS)
def test_a_decoder_embeds_and_predicts_no_masked_words(family: str, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "encoder", family, max_position_embeddings=130)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode": "lasttoken"}))
    changes = {"bert": {"positions": 128}, "retriever": {"init": str(folder), "embedding_width": 8}}
    for steps, stage in (({"ict": {"reader_steps": 1}}, "ict"), ({"pretrain": {"steps": 1}}, "pretrain")):
        message = rf"a {family} is a causal model, which cannot predict masked words .*; set {stage}\."
        with pytest.raises(ValueError, match=message):
            check_encoders(["ict", stage], toy_values(**changes, **{"ict": {"reader_steps": 0}, **steps}))
    assert check_encoders(["ict"], toy_values(**changes, ict={"reader_steps": 0})) == []


REFUSED = {
    "encoder-decoder": ({"model_type": "t5"}, r"'t5' is an encoder-decoder.*for example, .*roberta"),
    "images": ({"model_type": "vit"}, r"'vit' is no text encoder; .*ModernBERT-base"),
    "BERT as decoder": ({"model_type": "albert", "is_decoder": True}, r"'albert' is configured as a decoder"),
    "custom code": ({"model_type": "mine", "auto_map": {}}, r"'mine' needs custom code .*never executed"),
    "unknown": ({"model_type": "mine"}, r"'mine' is unknown to the installed transformers"),
    "impossible shape": (
        {"model_type": "bert", "hidden_size": 30, "num_attention_heads": 4},
        r"transformers cannot open it \(ValueError: The hidden size \(30\)",
    ),
}


@pytest.mark.parametrize(("config", "message"), REFUSED.values(), ids=REFUSED)
def test_an_unsupported_model_is_refused_with_the_reason(
    config: dict[str, object], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_encoder(tmp_path)


@pytest.mark.parametrize("family", ["convbert", "fnet"])
def test_an_encoder_that_reads_padding_is_refused(family: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{family} is not invariant to the padding of a batch"):
        load_encoder(write_encoder(tmp_path, family))


@pytest.mark.parametrize("family", ["bert", "mpnet"])
def test_large_hidden_states_are_compared_relative_to_their_size(family: str, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, family)
    last = f"{family}.encoder.layer.1.output.LayerNorm.weight"
    change_weights(folder, lambda name, x: 1e5 * x if name == last else x)
    encoder, _ = load_encoder(folder)
    assert float(encoder.eval()(PackedBatch(sequences(encoder.vocabulary))).detach().abs().max()) > 1e4
    assert encoder.packs == (family == "bert")


def test_weights_that_are_missing_or_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    folder, damaged = write_encoder(tmp_path, "bert"), "bert.encoder.layer.0.output.dense.weight"
    for value, message in ((torch.full((32, 48), torch.nan), "has a value that is not finite"), (None, "is missing")):
        change_weights(folder, lambda name, x, value=value: value if name == damaged else x)
        with pytest.raises(ValueError, match=f"{re.escape(str(folder))}: the parameter {damaged} {message}"):
            load_encoder(folder)


def test_an_encoder_with_the_names_of_realm_is_a_bert(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, "bert")
    encoder, _ = load_encoder(folder, 0.0)
    weights = {name.replace("bert.", "realm.", 1): x for name, x in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    edit_json(folder / "config.json", model_type="realm")
    reloaded, head = load_encoder(folder, 0.0)
    assert head.is_trained
    batch = PackedBatch(sequences())
    with torch.no_grad():
        assert torch.equal(reloaded.eval()(batch), encoder.eval()(batch))


def test_loading_runs_no_code_and_touches_neither_gpus_nor_random_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, target = write_encoder(tmp_path / "encoder", "bert", head=False), tmp_path / "proof"
    (folder / "mine.py").write_text(f"import pathlib\npathlib.Path({str(target)!r}).write_text('it ran')\n")
    edit_json(folder / "config.json", auto_map={"AutoConfig": "mine.Config", "AutoModel": "mine.Model"})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *args: pytest.fail("a GPU was used"))
    before = torch.random.get_rng_state()
    encoder, _ = load_encoder(folder)
    encoder_from_description(encoder.describe())
    assert torch.equal(torch.random.get_rng_state(), before)
    assert "auto_map" not in encoder.describe()["config"]
    assert not target.exists()


def test_concurrent_builds_initialise_and_leave_torch_unchanged(tmp_path: Path) -> None:
    """transformers replaces torch's functions while it builds a model."""
    folder, functions = write_encoder(tmp_path / "encoder", "bert"), dict(vars(torch.nn.init))

    def build_projection() -> Tensor:
        options = section("bert", width=8, layers=1, heads=2, positions=64, dropout=0.0)
        encoder = build_small_encoder(options, 40, torch.Generator().manual_seed(0))[0]
        tower = Embedder(encoder, 8, "paper", projection="orthogonal")
        initialise_projection(tower, torch.Generator().manual_seed(0))
        return tower.projection.weight

    alone, description = build_projection(), load_encoder(folder)[0].describe()
    for _ in range(4):
        calls = [partial(load_encoder, folder), build_projection, partial(encoder_from_description, description)]
        built = at_once(*calls * 2)
        assert torch.equal(built[1], alone)
        assert torch.equal(built[4], alone)
        assert dict(vars(torch.nn.init)) == functions


@pytest.mark.parametrize("family", ["bert", "mpnet"])
def test_concurrent_encoding_equals_encoding_alone(family: str, tmp_path: Path) -> None:
    encoder, rng = load_encoder(write_encoder(tmp_path, family), 0.0)[0].eval(), np.random.default_rng(1)
    texts = [[rng.integers(5, 60, length) for length in rng.integers(1, 60, 9)] for _ in range(8)]

    def hidden(tokens: list[np.ndarray]) -> Tensor:
        with torch.no_grad():
            return torch.cat([encoder(PackedBatch(tokens)) for _ in range(5)])

    expected = [hidden(tokens) for tokens in texts]
    assert all(map(torch.equal, at_once(*(partial(hidden, tokens) for tokens in texts)), expected))


FIRST_USE = """
import threading
from realmops.model.transformers_models import import_transformers

barrier, opened = threading.Barrier(8), []

def use() -> None:
    barrier.wait()
    opened.append(import_transformers().AutoConfig.for_model("bert"))

threads = [threading.Thread(target=use) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(opened) == 8
"""


def test_threads_import_transformers_at_once() -> None:
    """In a new process, as a server that opens its models in threads."""
    result = subprocess.run([sys.executable, "-c", FIRST_USE], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
