"""Exact maximum inner product search (paper, section 3.3), and what every index can do.

Shape suffixes: Q queries, P passages, E embedding width, K results, G groups, R passages to score again,
M vectors of a passage, X = M E, N vectors found.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from realmops.devices import multiplies_bf16, multiplies_int8
from realmops.search.mapped import release

GROUP = 256
_HELD = 1 << 21  # passages of mapped embeddings whose pages are in memory together, no less than a chunk
_LARGE = 50_000
_CHUNK = {"cpu": 1 << 14, "cuda": 1 << 18}  # passages; on a CPU their scores stay in a core's cache
_SCORES_ON_GPU = 1 << 27  # of one product; few queries have larger chunks, and send a GPU less
_GROUPS = 4  # for each result; with fewer the maxima of groups choose little


class PassageIndex(Protocol):
    """Embeddings of passages that can be searched: the seam behind which an index of another type goes."""

    @property
    def device(self) -> torch.device:
        """Where ``vectors`` gives them."""

    def __len__(self) -> int:
        """Passages."""

    def vectors(self, ids: Tensor | slice) -> Tensor:
        """The embeddings of passages, ids.shape x X, exact whatever finds the candidates; of a slice without a copy."""

    def search(self, query_QE: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Inner products, and ids of the k passages found, Q x min(k, P), best first."""


class InMemory:
    """What indexes that hold all embeddings have in common."""

    embedding_PE: Tensor

    @property
    def device(self) -> torch.device:
        return self.embedding_PE.device

    def __len__(self) -> int:
        return len(self.embedding_PE)

    def vectors(self, ids: Tensor | slice) -> Tensor:
        return self.embedding_PE[ids.to(self.device) if isinstance(ids, Tensor) else ids]


@dataclass(frozen=True)
class Exact(InMemory):
    """Every passage is compared with the query.

    The first search of more than 50,000 passages in fp32 makes a copy of them in bf16, where the processor multiplies
    that in hardware: half the memory more, and a search takes a third of the time. For a few queries it makes one in
    int8 where the index is searched ``often``: a quarter of the memory more, and one query takes a third of the time.
    """

    embedding_PE: Tensor
    often: bool = False

    def search(self, query_QE: Tensor, k: int) -> tuple[Tensor, Tensor]:
        query_QE = query_QE.to(self.embedding_PE.device)
        if query_QE.dtype == torch.float32:
            few = len(query_QE) < _FEW
            copied = (self.in_bytes if self.often else None) if few else self.halves
            if copied is not None:
                return copied.search(query_QE, min(k, len(self.embedding_PE)))
        return search(query_QE, self.embedding_PE, k)

    def of_passages(self, query_QE: Tensor, k: int, count: int) -> tuple[Tensor, Tensor] | None:
        """The same of passages that have ``count`` rows each, whose best one counts; None where that is not quicker."""
        few = self.often and len(query_QE) < _FEW and query_QE.dtype == torch.float32
        if not few or self.in_bytes is None or k > len(self.embedding_PE) // count:
            return None
        return self.in_bytes.search(query_QE, k, count)

    @cached_property
    def halves(self) -> Halves | None:
        """The copy in bf16, made when it is first asked for; None where it is of no use."""
        return Halves.of(self.embedding_PE)

    @cached_property
    def in_bytes(self) -> Bytes | None:
        """The copy in int8, likewise."""
        return Bytes.of(self.embedding_PE)


@dataclass(frozen=True)
class BestVector(InMemory):
    """Passages of M vectors each, in an index over all vectors; a passage's best one counts (``model.retriever``)."""

    each: PassageIndex  # its passages are vectors
    count: int  # of vectors, M

    @property
    def embedding_PE(self) -> Tensor:  # type: ignore[override]
        """All vectors of a passage one after another, P x M E."""
        rows = self.each.vectors(slice(None))
        return rows.view(-1, self.count * rows.shape[1])

    def search(self, query_QE: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k passages with the best vectors: the k M best vectors are of k passages at least."""
        if isinstance(self.each, Exact) and (found := self.each.of_passages(query_QE, k, self.count)) is not None:
            return found
        score_QN, row_QN = self.each.search(query_QE, k * self.count)
        passage_QN, order_QN = (row_QN // self.count).sort(dim=1, stable=True)
        again_QN = F.pad(passage_QN[:, 1:] == passage_QN[:, :-1], (1, 0))
        again_QN = torch.empty_like(again_QN).scatter(1, order_QN, again_QN)  # in the order of scores
        place_QK = torch.argsort(again_QN.byte(), dim=1, stable=True)[:, : min(k, len(self.embedding_PE))]
        return score_QN.gather(1, place_QK), (row_QN // self.count).gather(1, place_QK)


def searched_often(passages: PassageIndex) -> PassageIndex:
    """The same index for a server: worth a copy also where a search has a few queries."""
    if isinstance(passages, BestVector):
        return replace(passages, each=searched_often(passages.each))
    return replace(passages, often=True) if isinstance(passages, Exact) else passages


def exact(embedding_PX: Tensor, vectors: int) -> PassageIndex:
    """An exact index of passages with so many vectors each."""
    return over_vectors(embedding_PX, vectors, Exact)


def over_vectors(embedding_PX: Tensor, vectors: int, make: Callable[[Tensor], PassageIndex]) -> PassageIndex:
    """An index of passages with so many vectors each, from what makes an index over single vectors."""
    if vectors == 1:
        return make(embedding_PX)
    return BestVector(make(embedding_PX.view(-1, embedding_PX.shape[1] // vectors)), vectors)


def search(query_QE: Tensor, embedding_PE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k passages with the largest inner product: scores and ids, Q x K, best first.

    ``k`` is cut to the number of passages.  Above 50,000 passages a maximum over groups of 256 selects
    the k groups that can hold the answer, so that the costly sort sees those only; the result is the same.
    """
    k = min(k, embedding_PE.shape[0])
    if embedding_PE.shape[0] <= _LARGE:
        return (query_QE @ embedding_PE.T).topk(k, dim=1)
    chunk = max(_CHUNK[embedding_PE.device.type], _GROUPS * k * GROUP)
    if embedding_PE.is_cuda:
        chunk = max(chunk, _SCORES_ON_GPU // max(1, len(query_QE)))
    parts = torch.split(embedding_PE, chunk)
    # made at once: many small results kept between large ones that go would break the memory up into pieces
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
        if (number + 1) * chunk % _HELD == 0:
            release(embedding_PE)
    top_QK, place_QK = score.topk(k, dim=1)
    return top_QK, ids.gather(1, place_QK)


def _search_groups(query_QE: Tensor, embedding_PE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    score_QP = query_QE @ embedding_PE.T
    whole = score_QP.shape[1] // GROUP * GROUP
    groups = whole // GROUP
    if groups <= k:
        return score_QP.topk(k, dim=1)
    best_QG = score_QP[:, :whole].view(-1, groups, GROUP).amax(-1)
    group_QK = best_QG.topk(k, dim=1).indices.sort(dim=1).values  # the k best lie in the k groups with the best maxima
    ids = (group_QK[:, :, None] * GROUP + torch.arange(GROUP, device=score_QP.device)).flatten(1)
    rest = torch.arange(whole, score_QP.shape[1], device=score_QP.device).expand(len(score_QP), -1)
    ids = torch.cat([ids, rest], dim=1)
    top_QK, place_QK = score_QP.gather(1, ids).topk(k, dim=1)
    return top_QK, ids.gather(1, place_QK)


# ---- candidates by a product in bf16 --------------------------------------------------------------

SMALL_GROUP = 16
_SCORES = 1 << 20  # of one product; in bf16 they stay in a core's cache
_PART = 1 << 18  # passages whose maxima are kept at a time
_COPIED = 1 << 10  # passages that are copied to bf16 at a time, and measured in fp64
_AGAIN = 1 << 13  # passages that are scored again at a time, of some queries
_SHARE = 24  # to score more than one passage in so many again costs more than the whole product in fp32
_FEW = 16  # queries; with fewer a search takes as long as it takes to read the passages, and
_READ = 1 << 14  # passages of a product of a few queries
_SHARE_OF_FEW = 8  # one passage in so many can be scored again
_ROUNDING = 2.0**-8  # of bf16, relative
_SUM = 2.0**-23  # what a sum in fp32 can lose at each step, relative, and as much again
_ROUNDINGS = 16  # at most, of numbers that are compared
_LEAST = 2.0**-126  # what becomes smaller may count as 0, in fp32 and in bf16
_MOST = 2.0**120  # for |q| |z|, so that no sum overflows


@dataclass(frozen=True)
class Halves:
    """Passages with a copy in bf16, whose products tell which passages have to be scored in fp32.

    What is found is what fp32 finds: scores are fp32's sums of products, and no passage that is left out could have a
    score as large as the last one found, in whatever order fp32 adds up. The copy is of the differences from the mean
    m, which are smaller, and change no order. For the copies q' and z' in bf16

        q z - q m - q' z' = q (z - m - z') + (q - q') z', which is at most |q| |z - m - z'| + |q - q'| |z'|.

    The lengths of these differences are measured, not estimated. To that comes what the product q' z' loses itself:
    each of its E sums is rounded in fp32, and the last one to bf16.
    """

    embedding_PE: Tensor
    mean_E: Tensor
    half_PE: Tensor
    length: float  # of the longest z'
    lost: float  # the largest |z - m - z'|

    @staticmethod
    def of(embedding_PE: Tensor) -> Halves | None:
        """The copy; None where it is of no use or a number is not finite."""
        if not _is_large(embedding_PE) or not multiplies_bf16():
            return None
        mean_E = embedding_PE.mean(dim=0)
        half_PE = torch.empty_like(embedding_PE, dtype=torch.bfloat16)
        lengths, losses = [], []
        for half, part in zip(torch.split(half_PE, _COPIED), torch.split(embedding_PE, _COPIED), strict=True):
            half.copy_(_half(part - mean_E))
            lengths.append(float(_lengths(half).max()))
            losses.append(float(_lengths(part.double() - mean_E - half).max()))
        if not math.isfinite(sum(lengths) + sum(losses)):
            return None
        return Halves(embedding_PE, mean_E, half_PE, max(lengths), max(losses))

    def search(self, query_QE: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """As the function of that name; the best groups of 16 passages are scored in fp32, or all where they must."""
        groups = k + k // 2 + 8
        if groups * SMALL_GROUP * _SHARE > len(self.half_PE):
            return search(query_QE, self.embedding_PE, k)
        most_QG, group_QG = self._best_groups(query_QE, groups + 1)
        score_QK, id_QK = self._score(query_QE, group_QG[:, :-1], k)
        again_Q = ~(self.bound(query_QE, most_QG[:, -1]) < score_QK[:, -1])  # what is not a number is not sure either
        if again_Q.any():
            score_QK[again_Q], id_QK[again_Q] = search(query_QE[again_Q], self.embedding_PE, k)
        return score_QK, id_QK

    def bound(self, query_QE: Tensor, score_Q: Tensor) -> Tensor:
        """What fp32 can make of a passage at most whose product in bf16 is this, or less where it is 0; in fp64.

        Infinite where a sum could overflow.
        """
        half_QE, mean_E = _half(query_QE), self.mean_E.double()
        query_Q, half_Q, lost_Q = _lengths(query_QE), _lengths(half_QE), _lengths(query_QE.double() - half_QE)
        longest = float(mean_E.norm()) + self.length + self.lost
        products_Q = half_Q * self.length + query_Q * longest
        sums_Q = (query_QE.shape[1] + 1) * (_SUM * products_Q + 4 * _LEAST)
        copies_Q = query_Q * self.lost + lost_Q * self.length
        bound_Q = query_QE.double() @ mean_E + score_Q.double() * (1 + _ROUNDING) + copies_Q + sums_Q
        return bound_Q.masked_fill(~(products_Q < _MOST), math.inf)

    def _best_groups(self, query_QE: Tensor, groups: int) -> tuple[Tensor, Tensor]:
        """The largest maxima of groups in bf16, or 0 where one is negative, and the groups; Q x G, best first."""
        queries = len(query_QE)
        half_EQ = _half(query_QE).T
        chunk = SMALL_GROUP * max(1, _SCORES // (SMALL_GROUP * queries))
        best = []
        for start in range(0, self._whole, _PART):
            part_PE = self.half_PE[start : min(start + _PART, self._whole)]
            found = [
                # bits of numbers from 0 on have their order, and those of a negative one are a negative integer
                (some_PE @ half_EQ).view(torch.int16).view(-1, SMALL_GROUP, queries).amax(1)
                for some_PE in torch.split(part_PE, chunk)
            ]
            most_QG = torch.cat(found).T.clamp(min=0).contiguous().view(torch.bfloat16)
            most_QG, group_QG = most_QG.topk(min(groups, most_QG.shape[1]), dim=1)
            best.append((most_QG, group_QG + start // SMALL_GROUP))
        most_QG, group_QG = (torch.cat(some, dim=1) for some in zip(*best, strict=True))
        most_QG, place_QG = most_QG.topk(groups, dim=1)
        return most_QG, group_QG.gather(1, place_QG)

    def _score(self, query_QE: Tensor, group_QG: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The best k passages of the groups, and of those behind the last whole group, by their scores in fp32."""
        queries, width = query_QE.shape
        group_QG = group_QG.sort(dim=1).values
        ids = (group_QG[:, :, None] * SMALL_GROUP + torch.arange(SMALL_GROUP)).flatten(1)
        of_group_GE = self.embedding_PE[: self._whole].view(-1, SMALL_GROUP * width)
        score = torch.empty(ids.shape)
        together = max(1, _AGAIN // ids.shape[1])
        for some in range(0, queries, together):
            part = slice(some, some + together)
            again_QRE = of_group_GE[group_QG[part].flatten()].view(-1, ids.shape[1], width)
            score[part] = torch.bmm(again_QRE, query_QE[part, :, None])[:, :, 0]
        rest = torch.arange(self._whole, len(self.embedding_PE))
        score = torch.cat([score, query_QE @ self.embedding_PE[self._whole :].T], dim=1)
        score_QK, place_QK = score.topk(k, dim=1)
        return score_QK, torch.cat([ids, rest.expand(queries, -1)], dim=1).gather(1, place_QK)

    @property
    def _whole(self) -> int:
        """Passages that are in a group."""
        return len(self.half_PE) // SMALL_GROUP * SMALL_GROUP


# ---- candidates of a few queries by a product in int8 ---------------------------------------------


@dataclass(frozen=True)
class Bytes:
    """Passages with a copy in int8, whose products tell which passages have to be scored in fp32.

    For a few queries a search takes as long as it takes to read the passages, and these have a quarter of the bytes.
    As with :class:`Halves`, what is found is what fp32 finds, and the copy is of the differences from the mean m. Each
    row of it is whole numbers z' times a factor s of the row. With a query rounded to r q' likewise

        q z - q m - r s q' z' = q (z - m - s z') + (q - r q') s z', at most |q| |z - m - s z'| + |q - r q'| |s z'|.

    The product q' z' is exact. A passage whose product is less than the k-th best by more than twice this bound is none
    of the best; all others are scored in fp32.
    """

    embedding_PE: Tensor
    byte_PE: Tensor
    factor_P: Tensor
    length: float  # of the longest s z'
    lost: float  # the largest |z - m - s z'|
    longest: float  # no |z| + |m| is larger

    @staticmethod
    def of(embedding_PE: Tensor) -> Bytes | None:
        """The copy; None where it is of no use or a number is not finite."""
        if not _is_large(embedding_PE) or not multiplies_int8():
            return None
        mean_E = embedding_PE.mean(dim=0)
        byte_PE, factor_P = torch.empty_like(embedding_PE, dtype=torch.int8), torch.empty(len(embedding_PE))
        lengths, losses = [], []
        for first in range(0, len(embedding_PE), _COPIED):
            some = slice(first, first + _COPIED)
            byte_PE[some], factor_P[some] = _byte(embedding_PE[some] - mean_E)
            copy_PE = byte_PE[some].double() * factor_P[some, None]
            lengths.append(float(_lengths(copy_PE).max()))
            losses.append(float(_lengths(embedding_PE[some].double() - mean_E - copy_PE).max()))
        if not math.isfinite(sum(lengths) + sum(losses)):
            return None
        length, lost = max(lengths), max(losses)
        return Bytes(embedding_PE, byte_PE, factor_P, length, lost, 2 * float(mean_E.norm()) + length + lost)

    def search(self, query_QE: Tensor, k: int, count: int = 1) -> tuple[Tensor, Tensor]:
        """As the function of that name; of passages with ``count`` rows each the best row counts."""
        byte_QE, factor_Q = _byte(query_QE)
        product_QP = torch.cat([torch._int_mm(byte_QE, some_PE.T) for some_PE in torch.split(self.byte_PE, _READ)], 1)
        bounds = (self.bound(query_QE) / factor_Q).tolist()
        columns = zip(torch.split(query_QE, 1), product_QP, bounds, strict=True)
        found = [
            self._best(query_1E, product_P * self.factor_P, bound, k, count) for query_1E, product_P, bound in columns
        ]
        score_QK, id_QK = (torch.cat(some) for some in zip(*found, strict=True))
        return score_QK, id_QK

    def bound(self, query_QE: Tensor) -> Tensor:
        """How far r s q' z' and fp32's q z - q m can be apart, in fp64; infinite where a sum could overflow."""
        byte_QE, factor_Q = _byte(query_QE)
        query_Q = _lengths(query_QE)
        lost_Q = _lengths(query_QE.double() - byte_QE.double() * factor_Q[:, None])
        products_Q = (query_Q + lost_Q) * self.longest
        sums_Q = (query_QE.shape[1] + _ROUNDINGS) * (_SUM * products_Q + 4 * _LEAST)
        return (query_Q * self.lost + lost_Q * self.length + sums_Q).masked_fill(~(products_Q < _MOST), math.inf)

    def _best(self, query_1E: Tensor, score_P: Tensor, bound: float, k: int, count: int) -> tuple[Tensor, Tensor]:
        size = SMALL_GROUP if count == 1 else count
        groups = len(score_P) // size
        if groups >= k:
            most_G = score_P[: groups * size].view(groups, size).amax(1)
            least = float(most_G.topk(k).values[-1])  # k passages are as good as this one
            possible_R = (score_P >= least - 2 * bound).nonzero()[:, 0]
            if k <= len(possible_R) <= len(score_P) // _SHARE_OF_FEW:  # none where the bound is no number
                score_R = (query_1E @ self.embedding_PE[possible_R].T)[0]
                if count > 1:
                    passage_R = possible_R // count
                    possible_R, place_R = torch.unique_consecutive(passage_R, return_inverse=True)
                    score_R = torch.full(possible_R.shape, -math.inf).scatter_reduce(0, place_R, score_R, "amax")
                score_K, place_K = score_R.topk(k)
                return score_K[None], possible_R[place_K][None]
        if count == 1:
            return search(query_1E, self.embedding_PE, k)
        return BestVector(Exact(self.embedding_PE), count).search(query_1E, k)


def _byte(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as whole numbers up to 127, and the factor of each."""
    factor_N = (rows.abs().amax(1) / 127).clamp(min=_LEAST)
    return (rows / factor_N[:, None]).round().to(torch.int8), factor_N


def _is_large(embedding_PE: Tensor) -> bool:
    """Whether a copy in fewer bits can be of use."""
    on_cpu = embedding_PE.device.type == "cpu" and embedding_PE.dtype == torch.float32
    return on_cpu and len(embedding_PE) > _LARGE and embedding_PE.is_contiguous()


def _half(number: Tensor) -> Tensor:
    """In bf16; numbers that a product may take for 0 are 0."""
    half = number.bfloat16()
    return half.masked_fill(half.abs() < _LEAST, 0)


def _lengths(rows: Tensor) -> Tensor:
    """Of each row, in fp64: squares of tiny numbers would be 0."""
    length: Tensor = torch.linalg.vector_norm(rows.double(), dim=1)
    return length
