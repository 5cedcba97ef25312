"""Our encoder against transformers' BERT on random weights, and its files and error messages."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from bert_files import save_bert
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from realmops.devices import (
    autocast,
    freeze_products,
    multiplies_bf16,
    pack_products,
    resolve_device,
    resolve_precision,
)
from realmops.hub import read_weights
from realmops.model.encoder import (
    Bert,
    BertConfig,
    MaskedWordHead,
    export_state,
    import_pooler,
    import_state,
    initialise_small,
)
from realmops.model.packed import Packed, even_rows
from realmops.model.reader import SpanHead

SHAPE = {
    "vocab_size": 60, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 40,
    "max_position_embeddings": 16, "type_vocab_size": 2, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "hidden_act": "gelu",
}  # fmt: skip
LENGTHS = (7, 1, 16, 4)


@pytest.fixture(params=["gelu", "gelu_new"])
def theirs(request: pytest.FixtureRequest) -> transformers.BertForMaskedLM:
    """Weights so large that every term counts."""
    config = transformers.BertConfig(**{**SHAPE, "hidden_act": request.param}, attn_implementation="eager")
    model = transformers.BertForMaskedLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
            if name.endswith("LayerNorm.weight"):
                parameter.add_(1.0)
    return model


def sequences() -> tuple[list[np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng(0)
    tokens = [rng.integers(1, SHAPE["vocab_size"], length) for length in LENGTHS]  # 0 is their padding
    return tokens, [np.sort(rng.integers(0, 2, length)) for length in LENGTHS]


def their_hidden(model: transformers.BertForMaskedLM) -> Tensor:
    """Hidden states of the sequences, one by one, so that nothing is padded."""
    rows = []
    for tokens, segments in zip(*sequences(), strict=True):
        inputs = {"input_ids": torch.from_numpy(tokens)[None], "token_type_ids": torch.from_numpy(segments)[None]}
        rows.append(model.bert(**inputs).last_hidden_state[0])
    return torch.cat(rows)


def loaded(model: transformers.BertForMaskedLM, folder: Path) -> tuple[Bert, MaskedWordHead]:
    model.save_pretrained(folder)
    bert, head, found = Bert.load(folder)
    assert found
    return bert.eval(), head


def test_hidden_states_logits_and_gradients_are_transformers(
    theirs: transformers.BertForMaskedLM, tmp_path: Path
) -> None:
    """A packed batch of four lengths against one sequence at a time on the other side."""
    bert, head = loaded(theirs, tmp_path)
    hidden_TD, their_TD = bert(Packed(*sequences())), their_hidden(theirs)
    torch.testing.assert_close(hidden_TD, their_TD, rtol=0, atol=2e-5)
    logits_TV, their_TV = head(hidden_TD, bert.word.weight), theirs.cls(their_TD)
    torch.testing.assert_close(logits_TV, their_TV, rtol=0, atol=1e-4)
    assert their_TV.abs().max() > 3

    weight_TV = torch.randn(their_TV.shape, generator=torch.Generator().manual_seed(1)) / 100
    (logits_TV.softmax(-1) * weight_TV).sum().backward()
    (their_TV.softmax(-1) * weight_TV).sum().backward()
    ours, other = Bert(bert.config), MaskedWordHead(bert.config)
    gradients = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    assert import_state(ours, gradients, "gradients", other), "renames and joins them as it does parameters"
    largest = 0.0
    for found, expected in ((bert, ours), (head, other)):
        for name, parameter in found.named_parameters():
            gradient = expected.get_parameter(name)
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, gradient.detach(), rtol=1e-3, atol=2e-6, msg=name)
            largest = max(largest, gradient.abs().max().item())
    assert largest > 1e-3


def test_a_packed_batch_is_its_sequences_one_by_one(
    theirs: transformers.BertForMaskedLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forwards and backwards, with padding in attention, without, and in groups of like lengths."""
    bert, _ = loaded(theirs, tmp_path)
    tokens, segments = sequences()

    def gradients(batches: list[Packed]) -> tuple[Tensor, list[Tensor]]:
        bert.zero_grad()
        hidden_TD = torch.cat([bert(batch) for batch in batches])
        hidden_TD.pow(3).sum().backward()
        return hidden_TD.detach(), [p.grad.clone() for p in bert.parameters() if p.grad is not None]

    whole_TD, whole = gradients([Packed(tokens, segments)])
    singles = [Packed([t], [s]) for t, s in zip(tokens, segments, strict=True)]
    assert all(batch.in_place for batch in singles)
    apart_TD, apart = gradients(singles)
    torch.testing.assert_close(whole_TD, apart_TD, rtol=0, atol=1e-5)
    monkeypatch.setattr("realmops.model.packed._SCORES_TOGETHER", 60)
    monkeypatch.setattr("realmops.model.packed._SCORES_OF_GROUP", 150)
    groups = Packed(tokens, segments)
    assert 1 < len(groups.groups) < len(tokens)
    grouped_TD, grouped = gradients([groups])
    torch.testing.assert_close(grouped_TD, apart_TD, rtol=0, atol=1e-5)
    with torch.no_grad():
        for batch in (Packed(tokens, segments), groups, singles[0]):
            torch.testing.assert_close(bert(batch), apart_TD[: len(batch.tokens_T)], rtol=0, atol=1e-5)
    for found in (whole, grouped):
        for one, other in zip(found, apart, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    cls_BD = bert.cls(Packed(tokens, segments))
    torch.testing.assert_close(cls_BD, apart_TD[np.cumsum([0, *LENGTHS[:-1]])], rtol=0, atol=1e-5)


def test_groups_are_of_like_lengths_and_cover_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realmops.model.packed._SCORES_TOGETHER", 1)
    monkeypatch.setattr("realmops.model.packed._SCORES_OF_GROUP", 8)  # two of 2 x 2; a longer one stays alone
    batch = Packed([np.arange(length) for length in (5, 2, 1, 2)])
    found = [(g.first, g.size, g.longest, g.is_padding_GL is not None) for g in batch.groups]
    assert found == [(0, 2, 8, True), (16, 1, 2, False), (18, 1, 5, False)]
    assert batch.padded_row_T.tolist() == [18, 19, 20, 21, 22, 8, 9, 0, 16, 17]
    assert batch.padded_rows == 23


def test_few_numbers_of_rows_in_bf16() -> None:
    """A 16th more, or up to 16 rows, is enough for 16 numbers of rows from each power of two to the next."""
    assert len(even_rows(torch.ones(17, 2))) == 17
    with autocast(torch.device("cpu"), torch.bfloat16):
        found = {rows: len(even_rows(torch.ones(rows, 2))) for rows in range(4097)}
        ids = even_rows(torch.arange(1, 18))
    assert ids.tolist() == [*range(1, 18), *[0] * 15]
    assert all(rows <= even <= rows + max(15, rows // 16) for rows, even in found.items())
    assert len({even for rows, even in found.items() if rows > 2048}) == 16
    assert len(set(found.values())) < 100


def test_rows_that_are_added_in_bf16_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    bert, spans = Bert(BertConfig(60, 24, 2, 4, 40, 16, dropout=0.0)), SpanHead(24, 8)
    parameters = [*bert.parameters(), *spans.parameters()]
    batch = Packed([np.arange(length) for length in (5, 2, 9, 3)])
    start_S, end_S = torch.tensor([0, 7, 18]), torch.tensor([1, 9, 18])

    def values() -> list[Tensor]:
        bert.zero_grad()
        spans.zero_grad()
        with autocast(torch.device("cpu"), torch.bfloat16):
            hidden_TD = bert(batch)
            score_S = spans(hidden_TD, start_S, end_S)
        assert len(hidden_TD) == 19
        assert len(score_S) == 3
        (hidden_TD.float().pow(3).sum() + 10 * score_S.sum()).backward()
        return [hidden_TD.detach().float(), score_S.detach(), *(p.grad for p in parameters)]

    even = values()
    monkeypatch.setattr("realmops.model.encoder.even_rows", lambda x: x)
    monkeypatch.setattr("realmops.model.reader.even_rows", lambda x: x)
    for one, other in zip(even, values(), strict=True):
        # bf16 keeps eight bits, and the order of a sum may differ with the number of rows
        torch.testing.assert_close(one, other, rtol=0, atol=0.02 * float(other.abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_frozen_products_give_the_same_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config = BertConfig(60, 24, 2, 4, 40, 16, 0.0)
    bert, spans = Bert(config).eval(), SpanHead(24, 32)
    sequences = [np.arange(1, 1 + length) for length in LENGTHS]
    first, last = torch.tensor([0, 8, 9]), torch.tensor([2, 8, 20])

    def scores() -> Tensor:
        with torch.no_grad(), autocast(torch.device("cpu"), dtype):
            found: Tensor = spans(bert(Packed(sequences)), first, last)
        return found

    before = scores()
    for module in (bert, spans):
        freeze_products(module, dtype)
    assert torch.equal(scores(), before)
    assert bert.layers[0].output.weight.dtype == dtype
    assert bert.word.weight.dtype == bert.layers[0].output_norm.weight.dtype == torch.float32  # no products of theirs


def test_packed_products_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the processor multiplies bf16; and none is packed whose trial fails, or ends otherwise."""
    torch.manual_seed(0)
    bert = Bert(BertConfig(60, 64, 2, 4, 40, 128, 0.0)).eval()
    freeze_products(bert, torch.bfloat16)

    def hidden() -> Tensor:
        with torch.no_grad(), autocast(torch.device("cpu"), torch.bfloat16):
            return bert(Packed([np.arange(1, 12)]))

    def packed() -> int:
        return sum("packed" in part.__dict__ for part in bert.modules())

    before = hidden()
    product = torch.ops.mkldnn._linear_pointwise

    def failing(*_: Any) -> Tensor:
        raise RuntimeError("not on this processor")

    for other in (failing, lambda *given: product(*given) + 1):
        monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", other)
        pack_products(bert)
        assert packed() == 0
        assert torch.equal(hidden(), before)
    monkeypatch.undo()
    pack_products(bert)
    if multiplies_bf16():
        assert packed() == 8
    assert torch.equal(hidden(), before)
    assert not [name for name in bert.state_dict() if "packed" in name]
    pack_products(Bert(BertConfig(60, 64, 1, 4, 40, 128, 0.0)))  # not frozen: nothing is packed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradient_checkpointing_keeps_little_and_gives_the_same_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    bert = Bert(BertConfig(60, 24, 3, 4, 40, 16, dropout=0.2)).train()

    def kept_and_gradients() -> tuple[int, list[Tensor]]:
        bert.zero_grad()
        torch.manual_seed(1)
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            if tensor.is_floating_point() and not isinstance(tensor, nn.Parameter):
                kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            with autocast(torch.device("cpu"), dtype):
                hidden_TD = bert(Packed([np.arange(16) for _ in range(20)]))
            held = sum(kept.values())
        (hidden_TD.float().pow(3).sum() + torch.rand(()) * hidden_TD.sum()).backward()
        gradients = [parameter.grad for parameter in bert.parameters()]
        assert all(gradient is not None for gradient in gradients)
        return held, [hidden_TD.detach(), *gradients]  # type: ignore[list-item]

    held, expected = kept_and_gradients()
    bert.gradient_checkpointing = True
    held_again, found = kept_and_gradients()
    assert held_again < held / 4
    assert all(map(torch.equal, found, expected)), "dropout is drawn again as it was, and no random number more"


def test_dropout_only_while_training() -> None:
    bert = Bert(BertConfig(60, 24, 2, 4, 40, 16, dropout=0.5))
    batch = Packed(*sequences())
    with torch.no_grad():
        bert.eval()
        assert torch.equal(bert(batch), bert(batch))
        bert.train()
        assert not torch.equal(bert(batch), bert(batch))


def test_our_folder_loads_into_transformers_and_back(tmp_path: Path) -> None:
    config = BertConfig(60, 24, 3, 4, 40, 16, dropout=0.25)
    bert, head = Bert(config).eval(), MaskedWordHead(config)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for parameter in (*bert.parameters(), *head.parameters()):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    save_bert(tmp_path, bert, head)
    theirs, info = transformers.BertForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert not any(layer.attention.self.key.bias.any() for layer in theirs.bert.encoder.layer), "they are not seen"
    assert (theirs.config.hidden_dropout_prob, theirs.config.attention_probs_dropout_prob) == (0.25, 0.25)
    with torch.no_grad():
        their_TD = their_hidden(theirs.eval())
        torch.testing.assert_close(bert(Packed(*sequences())), their_TD, rtol=0, atol=1e-5)
        torch.testing.assert_close(head(their_TD, bert.word.weight), theirs.cls(their_TD), rtol=0, atol=1e-5)
    theirs.save_pretrained(tmp_path / "theirs")
    again, again_head, found = Bert.load(tmp_path / "theirs")
    assert found
    assert again.config == config
    for name, tensor in {**bert.state_dict(), **head.state_dict()}.items():
        assert torch.equal(tensor, {**again.state_dict(), **again_head.state_dict()}[name]), name


@pytest.mark.parametrize("pooled", [True, False])
def test_an_encoder_without_a_head_is_found_out(tmp_path: Path, pooled: bool) -> None:
    """Names without the prefix "bert." and without a masked word head, as BertModel writes them."""
    model = transformers.BertModel(transformers.BertConfig(**SHAPE), add_pooling_layer=pooled)
    model.save_pretrained(tmp_path)
    bert, _, found = Bert.load(tmp_path)
    assert found is False
    assert torch.equal(bert.word.weight, model.embeddings.word_embeddings.weight)
    pooler = nn.Linear(24, 24)
    before = pooler.weight.clone()
    assert import_pooler(pooler, read_weights(tmp_path), "x") is pooled
    assert torch.equal(pooler.weight, model.pooler.dense.weight if pooled else before)


def test_names_of_old_tensorflow_checkpoints_are_known() -> None:
    """LayerNorm.gamma and .beta, as the first converted checkpoints had."""
    bert = Bert(BertConfig(60, 24, 1, 4, 40, 16, 0.0))
    state = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t + 1
        for name, t in export_state(bert).items()
    }
    assert "bert.embeddings.LayerNorm.gamma" in state
    other = Bert(bert.config)
    import_state(other, state, "old")
    assert torch.equal(other.norm.weight, bert.norm.weight + 1)


def test_a_bias_that_is_stored_with_the_output_matrix_is_found() -> None:
    """cls.predictions.decoder.bias is the same parameter; a file may hold either name."""
    config = BertConfig(60, 24, 1, 4, 40, 16, 0.0)
    bert, head = Bert(config), MaskedWordHead(config)
    state = export_state(bert, head)
    state["cls.predictions.decoder.bias"] = state.pop("cls.predictions.bias") + 7
    assert import_state(bert, state, "x", head)
    assert torch.equal(head.bias, torch.full((60,), 7.0))


def test_exported_state_is_a_copy() -> None:
    bert = Bert(BertConfig(60, 24, 1, 4, 40, 16, 0.0))
    state = export_state(bert)
    before = state["bert.encoder.layer.0.attention.self.query.weight"].clone()
    with torch.no_grad():
        bert.layers[0].qkv.weight.add_(1.0)
    assert torch.equal(state["bert.encoder.layer.0.attention.self.query.weight"], before)


def test_a_missing_parameter_is_named() -> None:
    bert = Bert(BertConfig(60, 24, 2, 4, 40, 16, 0.0))
    state = export_state(bert)
    del state["bert.encoder.layer.1.attention.self.query.bias"]
    message = r"my\.safetensors: the parameter bert\.encoder\.layer\.1\.attention\.self\.query\.bias is missing"
    with pytest.raises(ValueError, match=message):
        import_state(bert, state, "my.safetensors")


def test_another_shape_is_named() -> None:
    bert, other = Bert(BertConfig(60, 24, 2, 4, 40, 16, 0.0)), Bert(BertConfig(61, 24, 2, 4, 40, 16, 0.0))
    message = r"my: word\.weight has shape \[61, 24\], the configuration says \[60, 24\]"
    with pytest.raises(ValueError, match=message):
        import_state(bert, export_state(other), "my")


def test_configurations_survive_json() -> None:
    config = BertConfig(60, 24, 3, 4, 40, 16, dropout=0.1, segments=3, layer_norm_eps=1e-5, activation="gelu_new")
    assert BertConfig.from_json(json.loads(json.dumps(config.to_json())), "x") == config
    fewer = {k: v for k, v in config.to_json().items() if k not in ("type_vocab_size", "layer_norm_eps", "hidden_act")}
    assert BertConfig.from_json(fewer, "x") == BertConfig(60, 24, 3, 4, 40, 16, 0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "deberta"}, r"config\.json: model_type is 'deberta'; only BERT encoders can be used"),
        ({"hidden_act": "relu"}, r"hidden_act is 'relu'; only .* \(hidden_act gelu, gelu_new, gelu_pytorch_tanh\)"),
        ({"position_embedding_type": "relative_key"}, r"position_embedding_type is 'relative_key'; only BERT"),
        ({"hidden_size": None, "vocab_size": None}, r"the keys vocab_size, hidden_size are missing; it is no"),
    ],
)
def test_other_configurations_are_refused(changes: dict[str, Any], message: str) -> None:
    values = {**BertConfig(60, 24, 3, 4, 40, 16, 0.1).to_json(), **changes}
    with pytest.raises(ValueError, match=message):
        BertConfig.from_json({k: v for k, v in values.items() if v is not None}, "a/config.json")


@pytest.mark.parametrize("content", ["{", "[1]", "7"])
def test_a_config_file_that_is_no_object_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=f"{tmp_path}/config.json"):
        Bert.load(tmp_path)


def test_a_half_written_safetensors_file_is_named(tmp_path: Path) -> None:
    bert = Bert(BertConfig(60, 24, 1, 4, 40, 16, 0.0))
    save_bert(tmp_path, bert)
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        Bert.load(tmp_path)


def test_half_precision_files_become_fp32(tmp_path: Path) -> None:
    bert = Bert(BertConfig(60, 24, 1, 4, 40, 16, 0.0))
    save_bert(tmp_path, bert)
    path = tmp_path / "model.safetensors"
    save_file({name: tensor.half() for name, tensor in load_file(path).items()}, path)
    again, _, _ = Bert.load(tmp_path)
    assert {p.dtype for p in again.parameters()} == {torch.float32}


def test_small_start_values_depend_on_the_seed_alone() -> None:
    config = BertConfig(60, 24, 2, 4, 40, 16, 0.0)

    def start(seed: int) -> dict[str, Tensor]:
        bert, head = Bert(config), MaskedWordHead(config)
        initialise_small(bert, head, torch.Generator().manual_seed(seed))
        return {**bert.state_dict(), **{f"head.{name}": t for name, t in head.state_dict().items()}}

    first, again, other = start(0), start(0), start(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["word.weight"], other["word.weight"])
    # attention starts as half an identity: the output matrix times the value matrix is 0.5 I
    value_DD = first["layers.0.qkv.weight"][48:]
    product_DD = first["layers.0.attention_output.weight"] @ value_DD
    torch.testing.assert_close(product_DD, 0.5 * torch.eye(24), rtol=0, atol=1e-5)
    assert torch.equal(first["head.transform.weight"], 1.5 * torch.eye(24))


def test_devices_and_precisions_by_name() -> None:
    cpu = torch.device("cpu")
    assert resolve_device("cpu") == cpu
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert resolve_precision("fp32", cpu) == torch.float32
    assert resolve_precision("bf16", cpu) == torch.bfloat16
    assert resolve_precision("auto", cpu) in (torch.float32, torch.bfloat16)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"run\.device is 'cuda', but torch finds no GPU here"):
            resolve_device("cuda")
