"""Exact maximum inner product search over a matrix of embeddings (paper, section 3.3).

Copies in bf16 and int8 select the passages whose fp32 scores are computed; the result is the same.

Shape suffixes: Q queries, P passages, E embedding width, K results, G groups, R passages to rescore.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from realmops.devices import supports_bf16, supports_int8
from realmops.memory_map import release_pages

GROUP = 256
_RESIDENT = 1 << 21  # passages of memory-mapped embeddings between two releases of their pages; at least one chunk
_LARGE = 50_000
_CHUNK = {"cpu": 1 << 14, "cuda": 1 << 18}  # passages; on a CPU their scores fit a core's cache
_SCORES_ON_GPU = 1 << 27  # scores per matrix product; with few queries chunks grow, for fewer kernel launches
_GROUPS = 4  # per result, at least; with fewer, group maxima exclude little


def search(query_QE: Tensor, embedding_PE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return scores and ids of the k passages with the largest inner products, Q x K, best first.

    ``k`` is capped at the number of passages. Above 50,000 passages, maxima over groups of 256 select the k groups that
    can contain the result, so that the expensive sort sees only those; the result is the same.
    """
    k = min(k, embedding_PE.shape[0])
    if embedding_PE.shape[0] <= _LARGE:
        return (query_QE @ embedding_PE.T).topk(k, dim=1)
    chunk = max(_CHUNK[embedding_PE.device.type], _GROUPS * k * GROUP)
    if embedding_PE.is_cuda:
        chunk = max(chunk, _SCORES_ON_GPU // max(1, len(query_QE)))
    parts = torch.split(embedding_PE, chunk)
    # Allocated once: many small results that outlive large temporaries would fragment the memory.
    columns = sum(min(k, len(part_PE)) for part_PE in parts)
    score = torch.empty(len(query_QE), columns, dtype=query_QE.dtype, device=query_QE.device)
    ids = torch.empty(len(query_QE), columns, dtype=torch.int64, device=query_QE.device)
    at = 0
    for number, part_PE in enumerate(parts):
        best_QK, id_QK = _search_groups(query_QE, part_PE, min(k, len(part_PE)))
        end = at + best_QK.shape[1]
        score[:, at:end] = best_QK
        ids[:, at:end] = id_QK + number * chunk
        at = end
        if (number + 1) * chunk % _RESIDENT == 0:
            release_pages(embedding_PE)
    top_QK, place_QK = score.topk(k, dim=1)
    return top_QK, ids.gather(1, place_QK)


def _search_groups(query_QE: Tensor, embedding_PE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    score_QP = query_QE @ embedding_PE.T
    whole = score_QP.shape[1] // GROUP * GROUP
    groups = whole // GROUP
    if groups <= k:
        return score_QP.topk(k, dim=1)
    best_QG = score_QP[:, :whole].view(-1, groups, GROUP).amax(-1)
    group_QK = best_QG.topk(k, dim=1).indices.sort(dim=1).values  # these groups contain the k best
    ids = (group_QK[:, :, None] * GROUP + torch.arange(GROUP, device=score_QP.device)).flatten(1)
    remainder = torch.arange(whole, score_QP.shape[1], device=score_QP.device).expand(len(score_QP), -1)
    ids = torch.cat([ids, remainder], dim=1)
    top_QK, place_QK = score_QP.gather(1, ids).topk(k, dim=1)
    return top_QK, ids.gather(1, place_QK)


# ---- prefilter in bf16 ----------------------------------------------------------------------------

SMALL_GROUP = 16
_SCORES = 1 << 20  # scores per matrix product; in bf16 they fit a core's cache
_PART = 1 << 18  # passages whose group maxima are held at a time
_COPY_ROWS = 1 << 10  # passages copied, and measured in fp64, at a time
_RESCORED_ROWS = 1 << 13  # passages rescored at a time, over several queries
_RESCORE_DIVISOR = 24  # rescoring more than P / 24 passages costs more than the whole product in fp32
FEW = 16  # queries; a search with fewer is bound by memory bandwidth
_INT8_ROWS = 1 << 14  # passages per matrix product in int8
_FEW_RESCORE_DIVISOR = 8  # with few queries, up to P / 8 passages are rescored
_ROUNDING = 2.0**-8  # relative rounding error of bf16
_SUM_ERROR = 2.0**-23  # twice the relative rounding error of one fp32 addition
_ROUNDINGS = 16  # upper bound on the roundings of compared numbers
_MIN_NORMAL = 2.0**-126  # smaller numbers may be flushed to 0, in fp32 and in bf16
_MAX_PRODUCT = 2.0**120  # limit of |q| |z|, so that no sum overflows


@dataclass(frozen=True)
class Bf16Prefilter:
    """Passages with a bf16 copy, whose scores select the passages to rescore in fp32.

    The result equals that of an fp32 search: scores are fp32 inner products, and no excluded passage can score as high
    as the last result, whatever the order of fp32 summation. The copy holds differences from the mean m: they are
    smaller, and centring does not change the ranking. For the bf16 copies q' and z'

        q z - q m - q' z' = q (z - m - z') + (q - q') z', which is at most |q| |z - m - z'| + |q - q'| |z'|.

    The norms of these differences are measured, not estimated. The error of the product q' z' itself is added: each of
    its E sums is rounded in fp32, and the last one to bf16.
    """

    embedding_PE: Tensor
    mean_E: Tensor
    bf16_PE: Tensor
    max_norm: float  # max |z'|
    max_error: float  # max |z - m - z'|

    @staticmethod
    def build(embedding_PE: Tensor) -> Bf16Prefilter | None:
        """Build the copy; None where it does not apply or a number is not finite."""
        if not _is_large(embedding_PE) or not supports_bf16():
            return None
        mean_E = embedding_PE.mean(dim=0)
        bf16_PE = torch.empty_like(embedding_PE, dtype=torch.bfloat16)
        norms, errors = [], []
        for bf16, part in zip(torch.split(bf16_PE, _COPY_ROWS), torch.split(embedding_PE, _COPY_ROWS), strict=True):
            bf16.copy_(_to_bf16(part - mean_E))
            norms.append(float(_norms(bf16).max()))
            errors.append(float(_norms(part.double() - mean_E - bf16).max()))
        if not math.isfinite(sum(norms) + sum(errors)):
            return None
        return Bf16Prefilter(embedding_PE, mean_E, bf16_PE, max(norms), max(errors))

    def search(self, query_QE: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return what :func:`search` returns.

        The best groups of 16 passages are rescored in fp32. Queries that the bound leaves undecided are searched in
        fp32.
        """
        groups = k + k // 2 + 8
        if groups * SMALL_GROUP * _RESCORE_DIVISOR > len(self.bf16_PE):
            return search(query_QE, self.embedding_PE, k)
        max_QG, group_QG = self._best_groups(query_QE, groups + 1)
        score_QK, id_QK = self._score(query_QE, group_QG[:, :-1], k)
        undecided_Q = ~(self.bound(query_QE, max_QG[:, -1]) < score_QK[:, -1])  # NaN is undecided too
        if undecided_Q.any():
            score_QK[undecided_Q], id_QK[undecided_Q] = search(query_QE[undecided_Q], self.embedding_PE, k)
        return score_QK, id_QK

    def bound(self, query_QE: Tensor, score_Q: Tensor) -> Tensor:
        """Return the upper bound, in fp64, of fp32 scores of passages whose bf16 score is at most max(score, 0).

        Infinite where a sum could overflow.
        """
        bf16_QE, mean_E = _to_bf16(query_QE), self.mean_E.double()
        norm_Q, bf16_norm_Q, error_Q = _norms(query_QE), _norms(bf16_QE), _norms(query_QE.double() - bf16_QE)
        max_original_norm = float(mean_E.norm()) + self.max_norm + self.max_error
        products_Q = bf16_norm_Q * self.max_norm + norm_Q * max_original_norm
        sums_Q = (query_QE.shape[1] + 1) * (_SUM_ERROR * products_Q + 4 * _MIN_NORMAL)
        copies_Q = norm_Q * self.max_error + error_Q * self.max_norm
        bound_Q = query_QE.double() @ mean_E + score_Q.double() * (1 + _ROUNDING) + copies_Q + sums_Q
        return bound_Q.masked_fill(~(products_Q < _MAX_PRODUCT), math.inf)

    def _best_groups(self, query_QE: Tensor, groups: int) -> tuple[Tensor, Tensor]:
        """Return the largest group maxima in bf16 (negative ones as 0) and their groups, Q x G, best first."""
        queries = len(query_QE)
        bf16_EQ = _to_bf16(query_QE).T
        chunk = SMALL_GROUP * max(1, _SCORES // (SMALL_GROUP * queries))
        best = []
        for start in range(0, self._whole, _PART):
            part_PE = self.bf16_PE[start : min(start + _PART, self._whole)]
            maxima = [
                # Bits of non-negative numbers sort as integers like the numbers; those of negative ones are negative.
                (chunk_PE @ bf16_EQ).view(torch.int16).view(-1, SMALL_GROUP, queries).amax(1)
                for chunk_PE in torch.split(part_PE, chunk)
            ]
            max_QG = torch.cat(maxima).T.clamp(min=0).contiguous().view(torch.bfloat16)
            max_QG, group_QG = max_QG.topk(min(groups, max_QG.shape[1]), dim=1)
            best.append((max_QG, group_QG + start // SMALL_GROUP))
        max_QG, group_QG = (torch.cat(column, dim=1) for column in zip(*best, strict=True))
        max_QG, place_QG = max_QG.topk(groups, dim=1)
        return max_QG, group_QG.gather(1, place_QG)

    def _score(self, query_QE: Tensor, group_QG: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k best passages of the groups and of the incomplete last group, scored in fp32."""
        queries, width = query_QE.shape
        group_QG = group_QG.sort(dim=1).values
        ids = (group_QG[:, :, None] * SMALL_GROUP + torch.arange(SMALL_GROUP)).flatten(1)
        embedding_GE = self.embedding_PE[: self._whole].view(-1, SMALL_GROUP * width)
        score = torch.empty(ids.shape)
        queries_per_batch = max(1, _RESCORED_ROWS // ids.shape[1])
        for start in range(0, queries, queries_per_batch):
            part = slice(start, start + queries_per_batch)
            group_QRE = embedding_GE[group_QG[part].flatten()].view(-1, ids.shape[1], width)
            score[part] = torch.bmm(group_QRE, query_QE[part, :, None])[:, :, 0]
        remainder = torch.arange(self._whole, len(self.embedding_PE))
        score = torch.cat([score, query_QE @ self.embedding_PE[self._whole :].T], dim=1)
        score_QK, place_QK = score.topk(k, dim=1)
        return score_QK, torch.cat([ids, remainder.expand(queries, -1)], dim=1).gather(1, place_QK)

    @property
    def _whole(self) -> int:
        """Number of passages in complete groups."""
        return len(self.bf16_PE) // SMALL_GROUP * SMALL_GROUP


# ---- prefilter in int8, for few queries -----------------------------------------------------------


@dataclass(frozen=True)
class Int8Prefilter:
    """Passages with an int8 copy, whose scores select the passages to rescore in fp32.

    With few queries a search is bound by memory bandwidth, and the copy has a quarter of the bytes. As with
    :class:`Bf16Prefilter`, the result equals that of an fp32 search, and the copy holds differences from the mean m.
    Each row is integers z' times the scale s of the row. With a query quantised to r q' in the same way

        q z - q m - r s q' z' = q (z - m - s z') + (q - r q') s z', at most |q| |z - m - s z'| + |q - r q'| |s z'|.

    The product q' z' is exact. A passage whose product is below the k-th best by more than twice this bound cannot be
    among the k best; all others are rescored in fp32.
    """

    embedding_PE: Tensor
    int8_PE: Tensor
    scale_P: Tensor
    max_norm: float  # max |s z'|
    max_error: float  # max |z - m - s z'|
    max_original_norm: float  # upper bound of |z| + |m|

    @staticmethod
    def build(embedding_PE: Tensor) -> Int8Prefilter | None:
        """Build the copy; None where it does not apply or a number is not finite."""
        if not _is_large(embedding_PE) or not supports_int8():
            return None
        mean_E = embedding_PE.mean(dim=0)
        int8_PE, scale_P = torch.empty_like(embedding_PE, dtype=torch.int8), torch.empty(len(embedding_PE))
        norms, errors = [], []
        for first in range(0, len(embedding_PE), _COPY_ROWS):
            part = slice(first, first + _COPY_ROWS)
            int8_PE[part], scale_P[part] = _to_int8(embedding_PE[part] - mean_E)
            copy_PE = int8_PE[part].double() * scale_P[part, None]
            norms.append(float(_norms(copy_PE).max()))
            errors.append(float(_norms(embedding_PE[part].double() - mean_E - copy_PE).max()))
        if not math.isfinite(sum(norms) + sum(errors)):
            return None
        max_norm, max_error = max(norms), max(errors)
        return Int8Prefilter(
            embedding_PE, int8_PE, scale_P, max_norm, max_error, 2 * float(mean_E.norm()) + max_norm + max_error
        )

    def search(self, query_QE: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return what :func:`search` returns; queries that the bound leaves undecided are searched in fp32."""
        best = [
            found or search(query_1E, self.embedding_PE, k)
            for query_1E, found in zip(torch.split(query_QE, 1), self._best(query_QE, k, 1), strict=True)
        ]
        score_QK, id_QK = (torch.cat(column) for column in zip(*best, strict=True))
        return score_QK, id_QK

    def search_passages(self, query_QE: Tensor, k: int, count: int) -> tuple[Tensor, Tensor] | None:
        """Return the k best passages of ``count`` rows each by their best row; None if a query is undecided."""
        best = [found for found in self._best(query_QE, k, count) if found is not None]
        if len(best) < len(query_QE):
            return None
        score_QK, id_QK = (torch.cat(column) for column in zip(*best, strict=True))
        return score_QK, id_QK

    def bound(self, query_QE: Tensor) -> Tensor:
        """Return the maximum difference of r s q' z' and fp32's q z - q m, in fp64; infinite where sums overflow."""
        int8_QE, scale_Q = _to_int8(query_QE)
        norm_Q = _norms(query_QE)
        error_Q = _norms(query_QE.double() - int8_QE.double() * scale_Q[:, None])
        products_Q = (norm_Q + error_Q) * self.max_original_norm
        sums_Q = (query_QE.shape[1] + _ROUNDINGS) * (_SUM_ERROR * products_Q + 4 * _MIN_NORMAL)
        return (norm_Q * self.max_error + error_Q * self.max_norm + sums_Q).masked_fill(
            ~(products_Q < _MAX_PRODUCT), math.inf
        )

    def _best(self, query_QE: Tensor, k: int, count: int) -> Iterator[tuple[Tensor, Tensor] | None]:
        """Yield the result of each query, 1 x K; None where the bound leaves too many passages."""
        int8_QE, scale_Q = _to_int8(query_QE)
        product_QP = torch.cat(
            [torch._int_mm(int8_QE, chunk_PE.T) for chunk_PE in torch.split(self.int8_PE, _INT8_ROWS)], 1
        )
        bounds = (self.bound(query_QE) / scale_Q).tolist()
        size = SMALL_GROUP if count == 1 else count
        groups = len(self.scale_P) // size
        for query_1E, product_P, bound in zip(torch.split(query_QE, 1), product_QP, bounds, strict=True):
            score_P = product_P * self.scale_P
            max_G = score_P[: groups * size].view(groups, size).amax(1)
            threshold = float(max_G.topk(k).values[-1]) if groups >= k else -math.inf  # k passages score this or more
            possible_R = (score_P >= threshold - 2 * bound).nonzero()[:, 0]
            if not k <= len(possible_R) <= len(score_P) // _FEW_RESCORE_DIVISOR:  # no passage where the bound is NaN
                yield None
                continue
            score_R = (query_1E @ self.embedding_PE[possible_R].T)[0]
            if count > 1:
                possible_R, place_R = torch.unique_consecutive(possible_R // count, return_inverse=True)
                score_R = torch.full(possible_R.shape, -math.inf).scatter_reduce(0, place_R, score_R, "amax")
            score_K, place_K = score_R.topk(k)
            yield score_K[None], possible_R[place_K][None]


def _to_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows to integers up to 127, with a scale for each row."""
    scale_N = (rows.abs().amax(1) / 127).clamp(min=_MIN_NORMAL)
    return (rows / scale_N[:, None]).round().to(torch.int8), scale_N


def _is_large(embedding_PE: Tensor) -> bool:
    """Check whether a copy of lower precision pays off."""
    on_cpu = embedding_PE.device.type == "cpu" and embedding_PE.dtype == torch.float32
    return on_cpu and len(embedding_PE) > _LARGE and embedding_PE.is_contiguous()


def _to_bf16(x: Tensor) -> Tensor:
    """Convert to bf16; numbers that a product may flush to 0 become 0."""
    converted = x.bfloat16()
    return converted.masked_fill(converted.abs() < _MIN_NORMAL, 0)


def _norms(rows: Tensor) -> Tensor:
    """Return the norm of each row, in fp64: in fp32 the squares of tiny numbers would underflow."""
    norm: Tensor = torch.linalg.vector_norm(rows.double(), dim=1)
    return norm
