"""The same numbers as another REALM: transformers 4.35.2, from equal random weights.

benchmarks/peer_fixture.py made the fixture. Embeddings and f(x, z) are held against the peer's in
test_peer_published.py. Names of the other side are mapped here, nowhere else.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from realmops.model import likelihood
from realmops.model.encoder import Encoder
from realmops.model.masked_word_head import MaskedWordHead
from realmops.model.packed import PackedBatch
from realmops.model.reader import DocumentRows, Reader, SpanHead, enumerate_spans
from realmops.model.transformers_models import MASKED_WORDS, load_transformers_model

FIXTURE = Path(__file__).parents[1] / "fixtures" / "peer_realm.safetensors"
EXACT = {"rtol": 0.0, "atol": 1e-5}
PADDING = 0


@pytest.fixture(scope="module")
def peer() -> dict[str, Tensor]:
    with safe_open(FIXTURE, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    with safe_open(FIXTURE, "pt") as file:
        return json.loads(file.metadata()["config"]) | {"model_type": "bert"}


def state_of(peer: dict[str, Tensor], module: str) -> dict[str, Tensor]:
    """The weights of one of the peer's modules, its encoder renamed to BERT's prefix."""
    prefix = f"{module}/"
    names = {name: name.removeprefix(prefix) for name in peer if name.startswith(prefix)}
    return {ours.replace("realm.", "bert.", 1): peer[name] for name, ours in names.items()}


def reader(peer: dict[str, Tensor], module: str, config: dict[str, Any]) -> Reader:
    model, _ = load_transformers_model(state_of(peer, module), config, module, MASKED_WORDS)
    return Reader(Encoder(model.base_model), MaskedWordHead(model)).eval()


def span_head(state: dict[str, Tensor]) -> SpanHead:
    """The peer keeps start and end in one layer, with a bias for each; only their sum counts.

    Its biases behind that are :func:`beside_spans`.
    """
    weight, bias = state["qa_outputs.dense_intermediate.weight"], state["qa_outputs.dense_intermediate.bias"]
    ours = SpanHead(weight.shape[1], weight.shape[0] // 2)
    ours.load_state_dict(
        {
            "start.weight": weight.chunk(2)[0],
            "end.weight": weight.chunk(2)[1],
            "start.bias": sum(bias.chunk(2)),
            "norm.weight": state["qa_outputs.layer_normalization.weight"],
            "score.weight": state["qa_outputs.dense_output.weight"],
        }
    )
    return ours


def beside_spans(state: dict[str, Tensor]) -> Tensor:
    """What the peer adds to the scores of all spans."""
    score_1H, norm_H = state["qa_outputs.dense_output.weight"], state["qa_outputs.layer_normalization.bias"]
    return score_1H @ norm_H + state["qa_outputs.dense_output.bias"]


def packed(token_NL: Tensor, segment_NL: Tensor) -> PackedBatch:
    """Padded rows without their padding."""
    lengths = token_NL.ne(PADDING).sum(1).tolist()
    rows = list(zip(token_NL.numpy(), segment_NL.numpy(), lengths, strict=True))
    return PackedBatch([t[:n] for t, _, n in rows], [s[:n] for _, s, n in rows])


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours.double(), theirs.double(), **EXACT)


def test_marginal_masked_word_loss(peer: dict[str, Tensor], config: dict[str, Any]) -> None:
    """The peer's loss is the mean of the per_token marginal over masked words; gradients are equal too."""
    relevance_BK = peer["scorer.relevance_BK"].float().requires_grad_()
    label_BL = peer["encoder.label_BL"]
    size, count = relevance_BK.shape
    batch = packed(peer["encoder.token_NL"], peer["encoder.segment_NL"])
    masks = [np.flatnonzero(row) for row in label_BL.numpy()]
    longest = max(map(len, masks))
    is_mask_BM = torch.tensor([[j < len(at) for j in range(longest)] for at in masks])
    assert is_mask_BM.sum(1).tolist() == [2, 1, 3]
    rows, targets, places = [], [], []
    for n, start in enumerate(batch.starts[:-1]):
        at = masks[n // count]
        rows.append(start + at)
        targets.append(label_BL[n // count].numpy()[at])
        places.append(n * longest + np.arange(len(at)))
    sequence_N = torch.arange(len(batch)).repeat_interleave(torch.tensor([len(at) for at in rows]))
    log_token_N = reader(peer, "encoder", config).log_token(
        batch,
        torch.from_numpy(np.concatenate(rows)),
        torch.from_numpy(np.concatenate(targets)),
        DocumentRows.of(batch.starts[:-1], batch.starts[1:]),
        sequence_N,
    )
    flat = torch.zeros(size * count * longest).index_copy(0, torch.from_numpy(np.concatenate(places)), log_token_N)
    per_token_B = likelihood.log_marginal_per_token(
        likelihood.log_prior(relevance_BK), flat.view(size, count, longest), is_mask_BM
    )
    loss = -per_token_B.sum() / is_mask_BM.sum()
    close(loss, peer["encoder.loss"])
    (gradient_BK,) = torch.autograd.grad(loss, relevance_BK)
    assert peer["encoder.relevance_gradient_BK"].abs().max() > 1e-3
    close(gradient_BK, peer["encoder.relevance_gradient_BK"])


def test_span_scores_and_both_losses(peer: dict[str, Tensor], config: dict[str, Any]) -> None:
    ours = reader(peer, "reader", config)
    head = span_head(state_of(peer, "reader"))
    batch = packed(peer["reader.token_RL"], peer["reader.segment_RL"])
    theirs = {
        (rank, start, end): score
        for rank, row in enumerate(peer["reader.span_score_RS"].tolist())
        for start, end, score in zip(
            peer["reader.span_start_S"].tolist(), peer["reader.span_end_S"].tolist(), row, strict=True
        )
        if score > -1e30  # the peer's mark for spans that leave the passage
    }
    first_of_body = int(peer["reader.segment_RL"][0].argmax())
    longest = int((peer["reader.span_end_S"] - peer["reader.span_start_S"]).max()) + 1
    spans = []
    for rank, length in enumerate(batch.lengths.tolist()):
        start, end = enumerate_spans(first_of_body, length - 1 - first_of_body, longest)
        spans += [(rank, s, e) for s, e in zip(start.tolist(), end.tolist(), strict=True)]
    assert sorted(spans) == sorted(theirs)
    offset = [int(batch.starts[rank]) for rank, _, _ in spans]
    with torch.no_grad():
        score_S = head(
            ours.bert(batch),
            torch.tensor([o + s for o, (_, s, _) in zip(offset, spans, strict=True)]),
            torch.tensor([o + e for o, (_, _, e) in zip(offset, spans, strict=True)]),
        )
    beside_1 = beside_spans(state_of(peer, "reader"))
    assert beside_1.abs() > 1e-2
    close(score_S + beside_1, torch.tensor([theirs[span] for span in spans]))

    gold_RA2 = torch.stack([peer["reader.gold_start_RA"], peer["reader.gold_end_RA"]], dim=-1).tolist()
    gold = {(rank, *pair) for rank, pairs in enumerate(gold_RA2) for pair in pairs if pair[0] >= 0}
    assert len(gold) == 3
    assert gold <= set(spans)
    relevance_P = peer["reader.relevance_P"].float()
    logit_S = score_S + relevance_P[[rank for rank, _, _ in spans]]
    is_gold_S = torch.tensor([span in gold for span in spans])
    close(likelihood.marginal_span_loss(logit_S[None], is_gold_S[None])[0], peer["reader.reader_loss"])
    early = likelihood.marginal_span_loss(relevance_P[None], peer["reader.has_answer_P"][None])[0]
    close(early, peer["reader.retriever_loss"])
