"""Packed batches: sequences one after another without padding, so that linear layers compute no padding.

Only attention pads: to the longest sequence of the batch or, if that is too much padding, within groups of similar
lengths.

Shape suffixes: B sequences, T wordpieces in the batch, G sequences in a group, L the longest sequence in it,
P padded rows, D width, N rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from realmops.corpus.word_shape import SHAPE_STEP
from realmops.devices import async_to

BATCH_WORDPIECES = {"cpu": 1024, "cuda": 65_536}  # padded wordpieces per batch, by device type
_UNGROUPED_SCORES = 1 << 20  # attention scores B x L x L of a batch; above it, attention pads in groups
_GROUP_SCORES = 1 << 18  # attention scores G x L x L of a group
_ROW_MULTIPLE = 16  # least multiple of the rows of a bf16 matrix on a CPU
_MIN_LENGTH_RATIO = 0.75  # shortest to longest sequence of a group, where all layers compute padding
_LENGTH_MULTIPLE = 8  # of padded lengths


@dataclass(frozen=True)
class PaddedGroup:
    """A group of sequences that attention pads to one length: ``size`` times ``longest`` padded rows."""

    size: int
    longest: int
    lengths_G: Tensor | None  # None if all are equal

    @cached_property
    def is_padding_GL(self) -> Tensor | None:
        if self.lengths_G is None:
            return None
        return torch.arange(self.longest, device=self.lengths_G.device)[None, :] >= self.lengths_G[:, None]


class PackedBatch:
    """A batch of sequences without padding; a batch is one tensor, so that it is one copy to a GPU.

    ``padded_row_T`` is the row of each wordpiece in the padded ``groups``.
    """

    tokens_T: Tensor
    forms_T: Tensor
    segments_T: Tensor
    positions_T: Tensor
    padded_row_T: Tensor
    lengths_B: Tensor
    first_B: Tensor
    starts_B: Tensor  # int32, with the end of the last sequence; cu_seqlens of flash attention

    def __init__(self, sequences: Sequence[np.ndarray], segments: Sequence[np.ndarray] | None = None) -> None:
        self.lengths = np.array([len(s) for s in sequences], dtype=np.int64)
        assert self.lengths.min(initial=1) > 0, "a sequence is empty"
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)])
        self.longest, self.wordpieces = int(self.lengths.max()), int(self.starts[-1])
        position_T = np.arange(self.starts[-1]) - np.repeat(self.starts[:-1], self.lengths)
        token_T = np.concatenate(sequences).astype(np.int64)
        segment_T = np.zeros_like(token_T) if segments is None else np.concatenate(segments).astype(np.int64)
        first_row_B = np.empty(len(self.lengths), dtype=np.int64)
        self._group_shapes: list[tuple[int, int, bool]] = []  # size, longest, whether it has padding
        self.padded_rows = 0
        groups = _attention_groups(self.lengths)
        for rows in groups:
            lengths_G = self.lengths[rows]
            size, longest = len(rows), int(lengths_G.max())
            has_padding = bool(lengths_G.min() < longest)
            longest += -longest % _LENGTH_MULTIPLE if has_padding else 0
            first_row_B[rows] = self.padded_rows + np.arange(size) * longest
            self._group_shapes.append((size, longest, has_padding))
            self.padded_rows += size * longest
        padded_row_T = np.repeat(first_row_B, self.lengths) + position_T
        self.in_place = len(groups) == 1 and not self._group_shapes[0][2]
        per_wordpiece = [token_T & (SHAPE_STEP - 1), token_T // SHAPE_STEP, segment_T, position_T, padded_row_T]
        per_sequence = [self.lengths, self.lengths[np.concatenate(groups)], self.starts]
        self._set_views(torch.from_numpy(np.concatenate([*per_wordpiece, *per_sequence])))

    def _set_views(self, numbers: Tensor) -> None:
        sequences = len(self.lengths)
        parts = torch.split(numbers, [self.wordpieces] * 5 + [sequences] * 2 + [sequences + 1])
        self.tokens_T, self.forms_T, self.segments_T, self.positions_T, self.padded_row_T = parts[:5]
        self.lengths_B, lengths_in_groups_B, starts_B = parts[5:]
        self.first_B, self.starts_B = starts_B[:-1], starts_B.to(torch.int32)
        lengths = torch.split(lengths_in_groups_B, [size for size, _, _ in self._group_shapes])
        self.groups = [
            PaddedGroup(size, longest, lengths_G if has_padding else None)
            for lengths_G, (size, longest, has_padding) in zip(lengths, self._group_shapes, strict=True)
        ]
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self.lengths)

    def split(self, x_TD: Tensor) -> Sequence[Tensor]:
        """Pad rows T x D, and split them by group."""
        if self.in_place:
            return (x_TD,)
        x_PD = x_TD.new_zeros(self.padded_rows, x_TD.shape[1]).index_copy_(0, self.padded_row_T, x_TD)
        return torch.split(x_PD, [group.size * group.longest for group in self.groups])

    def join(self, groups: Sequence[Tensor]) -> Tensor:
        return groups[0] if self.in_place else torch.cat(groups).index_select(0, self.padded_row_T)  # type: ignore[arg-type]

    def with_single_segment(self) -> PackedBatch:
        other = copy(self)
        other._set_views(self._numbers.clone())
        other.segments_T.zero_()
        return other

    def to(self, device: torch.device) -> PackedBatch:
        if self._numbers.device != device:
            self._set_views(async_to(self._numbers, device))
        return self


class PaddedBatch(PackedBatch):
    """A padded batch B x L for tracing a model: all of its sizes are dynamic, from the tensors."""

    def __init__(self, tokens_BL: Tensor, segments_BL: Tensor, lengths_B: Tensor) -> None:
        size, longest = tokens_BL.shape
        place_BL = torch.arange(longest) + torch.zeros_like(tokens_BL)
        self.tokens_T, self.segments_T, self.positions_T = (x.flatten() for x in (tokens_BL, segments_BL, place_BL))
        self.groups = [PaddedGroup(size, longest, lengths_B)]
        self.in_place, self.longest, self._numbers = True, 0, tokens_BL
        self.wordpieces = None  # type: ignore[assignment]  # a slice up to None is the whole tensor


def _attention_groups(lengths: np.ndarray) -> list[np.ndarray]:
    """Return the sequences of each padded group: one for all, or several by length if there are many scores."""
    if len(lengths) * int(lengths.max()) ** 2 <= _UNGROUPED_SCORES:
        return [np.arange(len(lengths))]
    return [np.array(rows) for rows in _group_by_cost(lengths.tolist(), 2, _GROUP_SCORES)]


def batch_by_length(lengths: Sequence[int], device: torch.device) -> Iterator[list[int]]:
    """Yield the sequences of batches of similar lengths, shortest first, up to ``BATCH_WORDPIECES`` when padded."""
    return _group_by_cost(lengths, 1, BATCH_WORDPIECES[device.type])


def _group_by_cost(lengths: Sequence[int], power: int, limit: int) -> Iterator[list[int]]:
    """Yield groups, shortest sequences first, in which size times longest length ** ``power`` is at most ``limit``."""
    order = np.argsort(lengths, kind="stable").tolist()
    start = 0
    for end in range(1, len(order) + 1):
        if end == len(order) or (end + 1 - start) * lengths[order[end]] ** power > limit:
            yield order[start:end]
            start = end


def group_by_length(lengths: np.ndarray) -> list[list[int]]:
    """Return the indices of sequences in groups of similar lengths, longest first."""
    groups: list[list[int]] = []
    for row in np.argsort(-lengths, kind="stable").tolist():
        if not groups or lengths[row] < _MIN_LENGTH_RATIO * lengths[groups[-1][0]]:
            groups.append([])
        groups[-1].append(row)
    return groups


def pad_rows(x_N: Tensor) -> Tensor:
    """Pad with zeros under bf16 autocast on a CPU, by at most a 16th or to a multiple of 16 rows.

    oneDNN compiles and caches a product for each new number of rows: rounding up keeps these few.
    """
    if not torch.is_autocast_enabled("cpu"):
        return x_N
    step = max(_ROW_MULTIPLE, (1 << len(x_N).bit_length()) // 32)
    return F.pad(x_N, [0, 0] * (x_N.dim() - 1) + [0, -len(x_N) % step])
