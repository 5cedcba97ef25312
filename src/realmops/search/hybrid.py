"""Hybrid search: f(x, z) = a scale q . d + b BM25(x, z) / max over z of BM25(x, z).

Not in the paper, whose f is the inner product alone. BM25 is divided by that of the query's best passage, so that long
and short queries have the same scale; on real questions the sum is far better than either part, without training. The
weights a and b maximise the likelihood of the correct passages, so that softmax(f) is p(z|x) without another scale.

Shape suffixes: Q queries, E embedding width, K results, C candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from realmops.devices import to_device, to_host
from realmops.model.likelihood import log_sum_correct
from realmops.model.retriever import FusionWeights
from realmops.search.bm25 import Bm25
from realmops.search.exact import PassageIndex

MIN_WEIGHT = 1e-4  # of a fitted weight: with 0, BM25 would be skipped and its weight never fitted again


@dataclass(frozen=True)
class Hits:
    """Retrieved passages of each query, best first by f; missing ones have id -1."""

    id_QK: Tensor
    dense_QK: Tensor  # scale q . d
    words_QK: Tensor  # BM25 / max BM25 of the query; 0 without BM25

    def relevance(self, mixture: FusionWeights) -> Tensor:
        """Return f(x, z), Q x K; -inf for missing passages."""
        return mixture.combine(self.dense_QK, self.words_QK).masked_fill(self.id_QK < 0, -torch.inf)


@dataclass(frozen=True)
class HybridSearch:
    """Search by embeddings and, where the fusion weights include BM25, by words; results are the best of both by f."""

    passages: PassageIndex
    bm25: Bm25 | None
    mixture: FusionWeights
    scale: float

    @torch.no_grad()
    def search(self, query_QE: Tensor, queries: Sequence[str], k: int, depth: int | None = None) -> Hits:
        """Return the best k passages of each query, on the CPU.

        Candidates are the best ``depth`` by embeddings and the best ``depth`` by BM25 (at least, and by default, k).
        """
        depth = max(k, depth or k)
        score_QK, id_QK = to_host(*self.passages.search(query_QE, depth))
        if self.bm25 is None or not self.mixture.lexical:
            id_QK = id_QK[:, :k]
            return Hits(id_QK, self.scale * score_QK[:, :k].float(), torch.zeros(id_QK.shape))
        word_QK, word_id_QK = self.bm25.search(queries, depth)
        best_Q = word_QK[:, 0].clip(min=0.0)
        pairs = zip(id_QK.numpy(), word_id_QK, strict=True)
        candidate_ids = [np.unique(np.concatenate([ids, word_ids[word_ids >= 0]])) for ids, word_ids in pairs]
        dense = _dense(self.passages, query_QE, candidate_ids)
        rows = []
        for q, (query, ids) in enumerate(zip(queries, candidate_ids, strict=True)):
            id_C = torch.from_numpy(ids)
            dense_C = self.scale * dense[q]
            words_C = torch.zeros(len(ids))
            if best_Q[q] > 0:
                words_C = torch.from_numpy(self.bm25.score_passages(query, ids) / best_Q[q])
            order = torch.argsort(self.mixture.combine(dense_C, words_C), descending=True, stable=True)[:k]
            rows.append((id_C[order], dense_C[order], words_C[order]))
        columns = zip(zip(*rows, strict=True), (-1, 0.0, 0.0), strict=True)
        return Hits(*(pad_sequence(list(column), batch_first=True, padding_value=fill) for column, fill in columns))


def _dense(passages: PassageIndex, query_QE: Tensor, candidate_ids: Sequence[NDArray[np.int64]]) -> list[Tensor]:
    """Return q . d of each query with the best vector of each candidate, on the CPU (one transfer each way)."""
    device = passages.device
    if device.type == "cpu":
        scores = []
        for ids, query_E in zip(candidate_ids, *to_host(query_QE.float()), strict=True):
            vector_NE = passages.vectors(torch.from_numpy(ids)).float().view(-1, len(query_E))
            scores.append((vector_NE @ query_E).view(len(ids), -1).amax(-1))
        return scores
    (id_QC,) = to_device(device, pad_sequence([torch.from_numpy(ids) for ids in candidate_ids], batch_first=True))
    vectors_QCME = passages.vectors(id_QC).float().view(*id_QC.shape, -1, query_QE.shape[1])
    dense_QC = torch.einsum("qcme,qe->qcm", vectors_QCME, query_QE.float().to(device)).amax(-1)
    return [dense_C[: len(ids)] for dense_C, ids in zip(*to_host(dense_QC), candidate_ids, strict=True)]


def normalised_bm25(
    bm25: Bm25 | None, mixture: FusionWeights, queries: Sequence[str], id_QK: Tensor, device: torch.device
) -> Tensor:
    """Return BM25 over that of the query's best passage, Q x K; 0 where the fusion weights exclude BM25."""
    if bm25 is None or not mixture.lexical:
        return torch.zeros(id_QK.shape, device=device)
    best_Q1, _ = bm25.search(queries, 1)
    scores = [bm25.score_passages(query, ids) for query, ids in zip(queries, id_QK.cpu().numpy(), strict=True)]
    return torch.from_numpy(np.stack(scores) / np.maximum(best_Q1, 1e-6)).clamp(0.0, 1.0).to(device)


def fit_fusion_weights(
    dense_QK: Tensor, words_QK: Tensor, is_present_QK: Tensor, correct_QK: Tensor
) -> FusionWeights | None:
    """Fit the fusion weights that maximise the mean likelihood of the correct passages over queries.

    Queries with no correct passage among the K, or with correct ones only, do not count; None if no query counts.
    """
    from scipy.optimize import minimize

    is_used_Q = (correct_QK & is_present_QK).any(-1) & ~(correct_QK | ~is_present_QK).all(-1)
    if not is_used_Q.any():
        return None
    dense_QK, words_QK = dense_QK[is_used_Q].double(), words_QK[is_used_Q].double()
    is_present_QK, correct_QK = is_present_QK[is_used_Q], (correct_QK & is_present_QK)[is_used_Q]

    def loss(log_weights: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        weights = torch.from_numpy(log_weights).requires_grad_()  # keeps both weights positive
        dense, lexical = weights.exp()
        f_QK = (dense * dense_QK + lexical * words_QK).masked_fill(~is_present_QK, -torch.inf)
        # Regularisation towards 1, with the weight of one query, keeps weights finite where every ranking is perfect.
        value = -log_sum_correct(f_QK, correct_QK).mean() + 0.5 * (weights**2).sum() / len(f_QK)
        return value.item(), torch.autograd.grad(value, weights)[0].numpy()

    fitted = minimize(loss, np.zeros(2), jac=True, options={"gtol": 1e-9})
    return FusionWeights(*(max(MIN_WEIGHT, round(weight, 4)) for weight in np.exp(fitted.x).tolist()))
