"""Words beside embeddings: f(x, z) = a scale q . d + b BM25(x, z) / max over z of BM25(x, z).

Not in the paper, whose f is the inner product alone. BM25 is divided by that of the query's best passage, so that long
and short queries count alike; on real questions the sum is better than either part by far, without any training.
The weights a and b are fitted by the likelihood of the right passages, so that softmax of f is a p(z|x) as it stands.

Shape suffixes: Q queries, E embedding width, K results, C candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from realmops.devices import bring, send
from realmops.model.likelihood import log_sum_correct
from realmops.model.retriever import Mixture
from realmops.search.bm25 import Bm25
from realmops.search.exact import PassageIndex

LEAST = 1e-4  # of a fitted weight: with 0 words would no longer be looked for, and never fitted again


@dataclass(frozen=True)
class Hits:
    """The passages found for each query, best first by f; id -1 where there are fewer."""

    id_QK: Tensor
    dense_QK: Tensor  # scale q . d
    words_QK: Tensor  # BM25 over that of the best passage; 0 without words

    def relevance(self, mixture: Mixture) -> Tensor:
        """f(x, z), -inf for what is not there."""
        return mixture.of(self.dense_QK, self.words_QK).masked_fill(self.id_QK < 0, -torch.inf)


@dataclass(frozen=True)
class Hybrid:
    """Searches embeddings and, where the mixture wants it, words: the best of both by f."""

    passages: PassageIndex
    words: Bm25 | None
    mixture: Mixture
    scale: float

    @torch.no_grad()
    def search(self, query_QE: Tensor, queries: Sequence[str], k: int, depth: int | None = None) -> Hits:
        """The best k passages of each query among the ``depth`` (k) best of either kind; all tensors on the CPU."""
        depth = max(k, depth or k)
        score_QK, id_QK = bring(*self.passages.search(query_QE, depth))
        if self.words is None or not self.mixture.lexical:
            id_QK = id_QK[:, :k]
            return Hits(id_QK, self.scale * score_QK[:, :k].float(), torch.zeros(id_QK.shape))
        word_QK, word_id_QK = self.words.search(queries, depth)
        best_Q = word_QK[:, 0].clip(min=0.0)
        both = zip(id_QK.numpy(), word_id_QK, strict=True)
        ids_of = [np.unique(np.concatenate([ids, word_ids[word_ids >= 0]])) for ids, word_ids in both]
        dense = _dense(self.passages, query_QE, ids_of)
        rows = []
        for q, (query, ids) in enumerate(zip(queries, ids_of, strict=True)):
            places = torch.from_numpy(ids)
            dense_C = self.scale * dense[q]
            words_C = torch.zeros(len(ids))
            if best_Q[q] > 0:
                words_C = torch.from_numpy(self.words.score_of(query, ids) / best_Q[q])
            order = torch.argsort(self.mixture.of(dense_C, words_C), descending=True, stable=True)[:k]
            rows.append((places[order], dense_C[order], words_C[order]))
        columns = zip(zip(*rows, strict=True), (-1, 0.0, 0.0), strict=True)
        return Hits(*(pad_sequence(list(column), batch_first=True, padding_value=fill) for column, fill in columns))


def _dense(passages: PassageIndex, query_QE: Tensor, ids_of: Sequence[NDArray[np.int64]]) -> list[Tensor]:
    """q . d of each query with the best vector of passages of its own, on the CPU; from a GPU by one copy each way."""
    device = passages.device
    if device.type == "cpu":
        found = []
        for ids, query_E in zip(ids_of, *bring(query_QE.float()), strict=True):
            vector_NE = passages.vectors(torch.from_numpy(ids)).float().view(-1, len(query_E))
            found.append((vector_NE @ query_E).view(len(ids), -1).amax(-1))
        return found
    (id_QC,) = send(device, pad_sequence([torch.from_numpy(ids) for ids in ids_of], batch_first=True))
    vectors_QCME = passages.vectors(id_QC).float().view(*id_QC.shape, -1, query_QE.shape[1])
    dense_QC = torch.einsum("qcme,qe->qcm", vectors_QCME, query_QE.float().to(device)).amax(-1)
    return [dense_C[: len(ids)] for dense_C, ids in zip(*bring(dense_QC), ids_of, strict=True)]


def words_share(
    words: Bm25 | None, mixture: Mixture, queries: Sequence[str], id_QK: Tensor, device: torch.device
) -> Tensor:
    """BM25 of chosen passages over that of each query's best one, Q x K; 0 where the mixture wants no words."""
    if words is None or not mixture.lexical:
        return torch.zeros(id_QK.shape, device=device)
    best_Q1, _ = words.search(queries, 1)
    scores = [words.score_of(query, ids) for query, ids in zip(queries, id_QK.cpu().numpy(), strict=True)]
    return torch.from_numpy(np.stack(scores) / np.maximum(best_Q1, 1e-6)).clamp(0.0, 1.0).to(device)


def fit_mixture(dense_QK: Tensor, words_QK: Tensor, there_QK: Tensor, correct_QK: Tensor) -> Mixture | None:
    """The weights under which the right passages have the largest likelihood, the mean over queries.

    Queries without a right passage among the K do not count; None where no query counts.
    """
    from scipy.optimize import minimize

    counts_Q = (correct_QK & there_QK).any(-1) & ~(correct_QK | ~there_QK).all(-1)
    if not counts_Q.any():
        return None
    dense_QK, words_QK = dense_QK[counts_Q].double(), words_QK[counts_Q].double()
    there_QK, correct_QK = there_QK[counts_Q], (correct_QK & there_QK)[counts_Q]

    def loss(logarithms: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        weights = torch.from_numpy(logarithms).requires_grad_()  # both weights are above 0
        dense, lexical = weights.exp()
        f_QK = (dense * dense_QK + lexical * words_QK).masked_fill(~there_QK, -torch.inf)
        # a weak pull to 1 (that of one query) keeps weights finite where everything is right
        value = -log_sum_correct(f_QK, correct_QK).mean() + 0.5 * (weights**2).sum() / len(f_QK)
        return value.item(), torch.autograd.grad(value, weights)[0].numpy()

    fitted = minimize(loss, np.zeros(2), jac=True, options={"gtol": 1e-9})
    return Mixture(*(max(LEAST, round(weight, 4)) for weight in np.exp(fitted.x).tolist()))
