"""Encoders as one table of families and properties: random weights, equal to transformers, packed or padded."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from serving import client_of
from small_encoders import DECODERS, ENCODERS, OWN, PADDED, change_weights, edit_json, write_encoder
from small_project import QUESTIONS, builder_beside, cli, stage, toy_values, write_project
from small_world import World, at_once, section
from torch import Tensor

from realmops.commands.run import check_encoders
from realmops.model.encoder_files import build_small_encoder, encoder_from_description, load_encoder
from realmops.model.packed import PackedBatch
from realmops.model.reader import Reader
from realmops.model.reader_files import load_models, save_models
from realmops.model.retriever import Embedder, Retriever, initialise_projection
from realmops.opening import open_run
from realmops.search.embed import embed, query_sequences, text_queries

LENGTHS = (7, 1, 50, 4, 33, 6, 48, 8)  # padded families pad similar ones together
EXACT = {"rtol": 0, "atol": 1e-5}
FAMILY = pytest.mark.parametrize("family", ENCODERS)
ANY = pytest.mark.parametrize("family", [*ENCODERS, *DECODERS])
WITHOUT_DROPOUT = ("modernbert", "albert", "nomic_bert")
CHAINS: dict[str, dict[str, Any]] = {  # retriever, reader and prompts of a project
    "roberta": {"prompts": {"query": "Query: ", "passage": "Passage: "}},  # a BPE of bytes: blanks are of words
    "mpnet": {"reader": {"matches": True}},
    "modernbert": {"reader": {"copies": True, "apart": True, "matches": False}},
    "qwen3": {"retriever": {"pooling": "last"}, "ict": {"reader_steps": 0}},
}


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
        if configured and not tied and family not in ("modernbert", OWN):  # such a file has one bias for two parameters
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


@pytest.mark.parametrize("family", [family for family in ENCODERS if family != OWN])
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
def test_dropout_and_added_vectors_are_those_given(family: str, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, family)
    encoder = load_encoder(folder, 0.5)[0].train()
    batch = PackedBatch(sequences(encoder.vocabulary))
    with torch.no_grad():
        assert family in DECODERS or not torch.equal(encoder(batch), encoder(batch))
        encoder.set_dropout(0.0)
        plain_TD = encoder(batch)
        added_TD = torch.zeros(len(plain_TD), encoder.added_width)
        assert torch.equal(encoder(batch, added_TD), plain_TD)
        added_TD[batch.starts[2]] = 1.0
        is_changed_T = (encoder(batch, added_TD) - plain_TD).abs().amax(-1) > 0
    is_third = np.repeat(np.arange(len(LENGTHS)), LENGTHS) == 2
    assert is_changed_T[is_third][: 2 if family == OWN else 20].all(), "all that a layer attends to"
    assert not is_changed_T[~is_third].any()
    assert family in DECODERS or load_encoder(folder)[0].dropout == (0.0 if family in WITHOUT_DROPOUT else 0.1)


@pytest.mark.parametrize("family", CHAINS)
def test_a_folder_is_trained_served_and_exported(family: str, tmp_path: Path) -> None:
    """ONNX's card computes the run's embeddings, with the blanks that a tokenizer of bytes needs."""
    folder, root = write_encoder(tmp_path / "encoder", family, max_position_embeddings=130), tmp_path / "root"
    chain = {**CHAINS[family]}
    prompts = chain.pop("prompts", {})
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    write_project(tmp_path)
    refreshes = family == "modernbert"
    pretrain = {"steps": 4 * refreshes, "refresh_every": 2, "lag": 0, "builder": "external"}
    chain["retriever"] = {"init": str(folder), **chain.get("retriever", {})}
    values = toy_values(bert={"positions": 128}, pretrain={**pretrain, "exchange": str(root / "exchange")}, **chain)
    for name in ("snapshot", "tag", "ict", "pretrain", "finetune"):
        if name == "pretrain" and refreshes:
            with builder_beside(root / "exchange", root / "data/snapshot/corpus"):
                stage(name, values, tmp_path, root)
        else:
            stage(name, values, tmp_path, root)
    with client_of(root) as client:
        reply = client.post("/v1/answer", json={"question": "Where was the poet Anna Berg born?"})
    assert (reply.status_code, len(reply.json()["passages"]) > 1) == (200, True)

    model = open_run(root).model
    indexed_PE = model.passages.vectors(slice(None)).numpy()
    assert indexed_PE.std(0).min() > 1e-4
    if family == "qwen3":
        return
    assert cli("export", tmp_path / "onnx", "--format", "onnx", "--root", root).exit_code == 0
    card, blank = (tmp_path / "onnx/README.md").read_text(), " " if prompts else ""
    assert ("The leading blank" in card) == bool(prompts)
    example: dict[str, Any] = {}
    code = re.findall(r"```python\n(.*?)```", card, re.DOTALL)[0]
    exec(code.replace("FOLDER", str(tmp_path / "onnx")), example)
    (of_query, query_limit), (of_document, limit) = re.findall(r'embed\("(\w+\.onnx)", (\d+), \[', card)
    pairs = [(blank + model.snapshot.title(i), model.snapshot.text(i)) for i in range(len(model.snapshot))]
    np.testing.assert_allclose(example["embed"](of_document, int(limit), pairs), indexed_PE, atol=1e-4)
    asked = [question for split in QUESTIONS.values() for question, _ in split]
    query_QE = embed(model.retriever.query, query_sequences(text_queries(model.snapshot, asked, 64)), torch.float32)
    asked = [blank + question for question in asked]
    np.testing.assert_allclose(example["embed"](of_query, int(query_limit), asked), query_QE, atol=1e-4)


# ---- what is reported and refused


def opened(folder: Path, stages: Sequence[str] = ("ict",), **changes: Any) -> list[str]:
    """Warnings of an encoder before the first stage."""
    return check_encoders(stages, toy_values(bert={"positions": 128}, retriever={"init": str(folder)}, **changes))


@pytest.mark.parametrize("family", ["bert", "mpnet", *DECODERS])
def test_run_opens_an_encoder_before_the_first_stage(family: str, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "encoder", family, max_position_embeddings=130)
    none, learns = (
        {"reader_steps": 0},
        ({"ict": {"reader_steps": 1}}, {"ict": {"reader_steps": 0}, "pretrain": {"steps": 1}}),
    )
    if family in DECODERS:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode": "lasttoken"}))
        for name, changes in zip(("ict", "pretrain"), learns, strict=True):
            with pytest.raises(ValueError, match=rf"a {family} is a causal model, which cannot .*; set {name}\."):
                opened(folder, ("ict", name), **changes)
        assert opened(folder, ict=none) == []
        return
    assert ["whose batches are padded" in note for note in opened(folder)] == [True] * (family in PADDED)
    prefix = load_encoder(folder)[1].model.base_model_prefix
    change_weights(folder, lambda name, x: x if name.startswith(f"{prefix}.") else None)
    for steps in (0, 1):
        notes = opened(folder, ("ict", "pretrain"), ict=none, pretrain={"steps": steps})
        assert any("has no masked word head" in note for note in notes) == bool(steps)
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="encoder"):
        opened(folder)


DAMAGED = "bert.encoder.layer.0.output.dense.weight"


def with_config(**values: Any) -> Callable[[Path], object]:
    return lambda folder: (folder / "config.json").write_text(json.dumps(values))


def with_weight(value: Tensor | None) -> Callable[[Path], object]:
    return lambda folder: change_weights(folder, lambda name, x: value if name == DAMAGED else x)


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "encoder-decoder": (with_config(model_type="t5"), r"'t5' is an encoder-decoder.*for example, .*roberta"),
    "images": (with_config(model_type="vit"), r"'vit' is no text encoder; .*ModernBERT-base"),
    "decoder": (with_config(model_type="albert", is_decoder=True), r"'albert' is configured as a decoder"),
    "custom code": (with_config(model_type="mine", auto_map={}), r"'mine' needs custom code .*never executed"),
    "unknown": (with_config(model_type="mine"), r"'mine' is unknown to the installed transformers"),
    "shape": (
        with_config(model_type="bert", hidden_size=30, num_attention_heads=4),
        r"transformers cannot open it \(ValueError: The hidden size \(30\)",
    ),
    "not finite": (with_weight(torch.full((32, 48), torch.nan)), f"parameter {DAMAGED} has a value that is not finite"),
    "missing": (with_weight(None), f"parameter {DAMAGED} is missing"),
    **{
        family: (partial(write_encoder, family=family), f"{family} is not invariant to the padding of a batch")
        for family in ("convbert", "fnet", "nystromformer", "reformer")  # the last one from 65 wordpieces on
    },
}


@pytest.mark.parametrize(("damage", "message"), REFUSED.values(), ids=REFUSED)
def test_an_unsupported_model_is_refused_with_the_reason(
    damage: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    damage(write_encoder(tmp_path, "bert"))
    with pytest.raises(ValueError, match=f"{re.escape(str(tmp_path))}.*{message}"):
        load_encoder(tmp_path)


@pytest.mark.parametrize("family", ["bert", "mpnet"])
def test_large_hidden_states_are_compared_relative_to_their_size(family: str, tmp_path: Path) -> None:
    folder, last = write_encoder(tmp_path, family), f"{family}.encoder.layer.1.output.LayerNorm.weight"
    change_weights(folder, lambda name, x: 1e5 * x if name == last else x)
    assert load_encoder(folder)[0].packs == (family == "bert")


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


# ---- threads


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


FIRST_USE = """
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from realmops.model.transformers_models import import_transformers

barrier = Barrier(8)
uses = lambda _: (barrier.wait(), import_transformers().AutoConfig.for_model("bert"))
assert len(list(ThreadPoolExecutor(8).map(uses, range(8)))) == 8
"""


def test_threads_import_transformers_at_once() -> None:
    """In a new process, as a server that opens its models in threads."""
    result = subprocess.run([sys.executable, "-c", FIRST_USE], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
