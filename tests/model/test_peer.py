"""The losses equal those of transformers' REALM (4.35.2) on the same random weights.

benchmarks/peer_fixture.py made the fixture. test_peer_published.py compares embeddings, f(x, z) and span scores.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from realmops.model import likelihood
from realmops.model.encoder import Encoder
from realmops.model.masked_word_head import MaskedWordHead
from realmops.model.packed import PackedBatch
from realmops.model.reader import DocumentRows, Reader
from realmops.model.transformers_models import MASKED_WORDS, load_transformers_model

FIXTURE = Path(__file__).parents[1] / "fixtures" / "peer_realm.safetensors"
EXACT = {"rtol": 0.0, "atol": 1e-5}
PADDING = 0


@pytest.fixture(scope="module")
def peer() -> dict[str, Tensor]:
    with safe_open(FIXTURE, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)


def reader(peer: dict[str, Tensor]) -> Reader:
    """The peer's knowledge-augmented encoder."""
    with safe_open(FIXTURE, "pt") as file:
        config = json.loads(file.metadata()["config"]) | {"model_type": "realm"}
    state = {name.removeprefix("encoder/"): x for name, x in peer.items() if name.startswith("encoder/")}
    model, _ = load_transformers_model(state, config, "encoder", MASKED_WORDS)
    return Reader(Encoder(model.base_model), MaskedWordHead(model)).eval()


def packed(token_NL: Tensor, segment_NL: Tensor) -> PackedBatch:
    """Padded rows without their padding."""
    lengths = token_NL.ne(PADDING).sum(1).tolist()
    rows = list(zip(token_NL.numpy(), segment_NL.numpy(), lengths, strict=True))
    return PackedBatch([t[:n] for t, _, n in rows], [s[:n] for _, s, n in rows])


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours.double(), theirs.double(), **EXACT)


def test_the_loss_of_masked_words_equals_the_peers(peer: dict[str, Tensor]) -> None:
    """It is the mean of the per_token marginal over masked words; the retriever's gradients are equal too."""
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
    log_token_N = reader(peer).log_token(
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


def test_both_losses_of_fine_tuning_equal_the_peers(peer: dict[str, Tensor]) -> None:
    """Over the peer's span scores: the marginal of gold spans, and ORQA's early loss over passages."""
    relevance_P, score_RS = peer["reader.relevance_P"].float(), peer["reader.span_score_RS"].float()
    spans = torch.stack([peer["reader.span_start_S"], peer["reader.span_end_S"]], dim=-1).tolist()
    gold_RA2 = torch.stack([peer["reader.gold_start_RA"], peer["reader.gold_end_RA"]], dim=-1).tolist()
    is_gold_RS = torch.tensor([[span in gold for span in spans] for gold in gold_RA2])
    assert is_gold_RS.sum() == 3
    logit_RS = score_RS + relevance_P[: len(score_RS), None]
    logit_RS = logit_RS.masked_fill(score_RS < -1e30, -torch.inf)  # spans that leave the passage
    close(likelihood.marginal_span_loss(logit_RS.view(1, -1), is_gold_RS.view(1, -1))[0], peer["reader.reader_loss"])
    early = likelihood.marginal_span_loss(relevance_P[None], peer["reader.has_answer_P"][None])[0]
    close(early, peer["reader.retriever_loss"])
