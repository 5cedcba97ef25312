"""Sequences of a batch, one after another without padding, so that every linear layer sees useful wordpieces only.

Attention alone pads, to the longest sequence of the batch, and where that would be much, to the longest of each of
several groups of like lengths.

Shape suffixes: B sequences, T wordpieces of all sequences, G sequences of a group, L its longest, P padded rows,
D width, N rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from realmops.devices import moved
from realmops.text.word_shape import FORM_STEP

BATCH_WORDPIECES = {"cpu": 1024, "cuda": 65_536}
_SCORES_TOGETHER = 1 << 20  # B x L x L; a batch with more is attended to in groups of
_SCORES_OF_GROUP = 1 << 18
_ROWS = 16  # of a matrix in bf16 on a CPU: a multiple of it
_SIMILAR = 0.75  # of the longest sequence's length, where a family's layers see the padding
_LENGTHS = 8  # sequences are padded to a multiple of it


@dataclass(frozen=True)
class PaddedGroup:
    """Sequences that attention pads together: ``size`` times ``longest`` padded rows."""

    size: int
    longest: int
    is_padding_GL: Tensor | None  # None: all are of one length


class Packed:
    """A batch of sequences without padding.

    ``tokens_T``, ``forms_T``, ``segments_T`` and ``positions_T`` are int64; ``starts`` gives each sequence's first row.
    ``groups`` cover the padded rows, of which ``padded_row_T`` names each wordpiece's. All are parts of one tensor,
    which goes to a GPU by one copy.
    """

    tokens_T: Tensor
    forms_T: Tensor
    segments_T: Tensor
    positions_T: Tensor
    padded_row_T: Tensor
    lengths_B: Tensor
    first_B: Tensor
    starts_B: Tensor  # int32, the end of the last one too

    def __init__(self, sequences: Sequence[np.ndarray], segments: Sequence[np.ndarray] | None = None) -> None:
        self.lengths = np.array([len(s) for s in sequences], dtype=np.int64)
        assert self.lengths.min(initial=1) > 0, "each sequence needs a wordpiece"
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)])
        self.longest, self.wordpieces = int(self.lengths.max()), int(self.starts[-1])
        position_T = np.arange(self.starts[-1]) - np.repeat(self.starts[:-1], self.lengths)
        token_T = np.concatenate(sequences).astype(np.int64)
        segment_T = np.zeros_like(token_T) if segments is None else np.concatenate(segments).astype(np.int64)
        first_row_B = np.empty(len(self.lengths), dtype=np.int64)
        self.groups: list[PaddedGroup] = []
        self.padded_rows = 0
        together = _attended_together(self.lengths)
        for rows in together:
            lengths_G = self.lengths[rows]
            size, longest = len(rows), int(lengths_G.max())
            if lengths_G.min() < longest:
                longest += -longest % _LENGTHS
            first_row_B[rows] = self.padded_rows + np.arange(size) * longest
            padding = _is_padding(torch.from_numpy(lengths_G), longest) if lengths_G.min() < longest else None
            self.groups.append(PaddedGroup(size, longest, padding))
            self.padded_rows += size * longest
        padded_row_T = np.repeat(first_row_B, self.lengths) + position_T
        self.in_place = len(self.groups) == 1 and self.groups[0].is_padding_GL is None
        of_wordpieces = [token_T & (FORM_STEP - 1), token_T // FORM_STEP, segment_T, position_T, padded_row_T]
        of_sequences = [self.lengths, self.lengths[np.concatenate(together)], self.starts]
        self._take_apart(torch.from_numpy(np.concatenate([*of_wordpieces, *of_sequences])))

    def _take_apart(self, numbers: Tensor) -> None:
        sequences = len(self.lengths)
        parts = torch.split(numbers, [self.wordpieces] * 5 + [sequences] * 2 + [sequences + 1])
        self.tokens_T, self.forms_T, self.segments_T, self.positions_T, self.padded_row_T = parts[:5]
        self.lengths_B, self._lengths_in_groups_B, starts_B = parts[5:]
        self.first_B, self.starts_B = starts_B[:-1], starts_B.to(torch.int32)
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self.lengths)

    def split(self, x_PD: Tensor) -> Sequence[Tensor]:
        """The padded rows of each group."""
        return (x_PD,) if len(self.groups) == 1 else torch.split(x_PD, [g.size * g.longest for g in self.groups])

    def in_one_segment(self) -> Packed:
        """The same sequences, all of segment 0."""
        other = copy(self)
        other._take_apart(self._numbers.clone())
        other.segments_T.zero_()
        return other

    def to(self, device: torch.device) -> Packed:
        """Move the tensors to a device, in place; those of padding follow where something pads."""
        if self._numbers.device != device:
            self._take_apart(moved(self._numbers, device))
        return self

    def pad(self) -> None:
        """Say where the tensors are what is padding, in place."""
        if all(g.is_padding_GL is None or g.is_padding_GL.device == self._numbers.device for g in self.groups):
            return
        lengths = torch.split(self._lengths_in_groups_B, [group.size for group in self.groups])
        self.groups = [
            group if group.is_padding_GL is None else replace(group, is_padding_GL=_is_padding(mine_G, group.longest))
            for group, mine_G in zip(self.groups, lengths, strict=True)
        ]


class Padded(Packed):
    """A batch B x L of sequences that are padded already, for a graph: all of its sizes are those of the tensors."""

    def __init__(self, tokens_BL: Tensor, segments_BL: Tensor, lengths_B: Tensor) -> None:
        size, longest = tokens_BL.shape
        place_BL = torch.arange(longest) + torch.zeros_like(tokens_BL)
        self.tokens_T, self.segments_T, self.positions_T = (x.flatten() for x in (tokens_BL, segments_BL, place_BL))
        self.groups = [PaddedGroup(size, longest, place_BL >= lengths_B[:, None])]
        self.in_place, self.longest, self._numbers = True, 0, tokens_BL
        self.wordpieces = None  # type: ignore[assignment]  # a slice up to here is the whole


def _is_padding(lengths_G: Tensor, longest: int) -> Tensor:
    return torch.arange(longest, device=lengths_G.device)[None, :] >= lengths_G[:, None]


def _attended_together(lengths: np.ndarray) -> list[np.ndarray]:
    """Rows of the sequences of each group: all in one, or when their padded scores are many, by length."""
    if len(lengths) * int(lengths.max()) ** 2 <= _SCORES_TOGETHER:
        return [np.arange(len(lengths))]
    return [np.array(rows) for rows in _like_lengths(lengths.tolist(), 2, _SCORES_OF_GROUP)]


def length_batches(lengths: Sequence[int], device: torch.device) -> Iterator[list[int]]:
    """Rows of sequences in batches of like lengths: shortest first, at most ``BATCH_WORDPIECES`` when padded.

    The batches depend on lengths and device alone, so that equal calls give equal bytes on one machine.
    """
    return _like_lengths(lengths, 1, BATCH_WORDPIECES[device.type])


def _like_lengths(lengths: Sequence[int], power: int, limit: int) -> Iterator[list[int]]:
    """Rows, shortest first, in groups: their number times the longest's length ** ``power`` is at most ``limit``."""
    order = np.argsort(lengths, kind="stable").tolist()
    start = 0
    for end in range(1, len(order) + 1):
        if end == len(order) or (end + 1 - start) * lengths[order[end]] ** power > limit:
            yield order[start:end]
            start = end


def similar_lengths(lengths: np.ndarray) -> list[np.ndarray]:
    """Return the numbers of sequences in groups, longest first, whose shortest has most of the longest's length."""
    order = np.argsort(-lengths, kind="stable")
    groups: list[list[int]] = []
    for number in order.tolist():
        if not groups or lengths[number] < _SIMILAR * lengths[groups[-1][0]]:
            groups.append([])
        groups[-1].append(number)
    return [np.array(group) for group in groups]


def even_rows(x_N: Tensor) -> Tensor:
    """The same with zeros behind it, where a CPU computes in bf16: at most a 16th more, or up to 16 rows.

    oneDNN prepares a product for each number of rows that it has not seen: that takes it a millisecond, and what it
    keeps takes memory. So there are few such numbers.
    """
    if not torch.is_autocast_enabled("cpu"):
        return x_N
    step = max(_ROWS, (1 << len(x_N).bit_length()) // 32)
    return F.pad(x_N, [0, 0] * (x_N.dim() - 1) + [0, -len(x_N) % step])
