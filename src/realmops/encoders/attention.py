"""Attention over packed sequences: by flash attention as they lie, elsewhere padded in groups of like lengths.

Shape suffixes: T wordpieces of all sequences, G sequences of a group, L its longest, P padded rows, D width, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from realmops.encoders.packed import Packed, PaddedGroup, pad_rows, unpad_rows


def attend(
    qkv_TD: Tensor,
    batch: Packed,
    heads: int,
    drop: float,
    window: int | None = None,
    added: Sequence[Tensor] | None = None,
) -> Tensor:
    """Softmax attention T x D of queries, keys and values T x 3 D, each sequence to itself.

    ``window`` is how far a wordpiece looks to either side. ``added`` is added to the scores of each group of the padded
    batch, and has minus infinity where padding is.
    """
    if added is None and not drop and _flash_takes(qkv_TD):
        from torch.nn.attention.varlen import varlen_attn  # takes seconds to import

        q_THD, k_THD, v_THD = qkv_TD.view(len(qkv_TD), 3, heads, -1).unbind(1)
        sides = (-1, -1) if window is None else (window, window)
        y_THD: Tensor = varlen_attn(  # type: ignore[assignment]  # one tensor, as nothing more is asked for
            q_THD, k_THD, v_THD, batch.starts_B, batch.starts_B, batch.longest, batch.longest, window_size=sides
        )
        return y_THD.flatten(1)
    batch.pad()
    qkv_PD = qkv_TD if batch.in_place else pad_rows(qkv_TD, batch.padded_row_T, batch.padded_rows)
    scores = [None] * len(batch.groups) if added is None else added
    each = zip(batch.split(qkv_PD), batch.groups, scores, strict=True)
    parts = [_attend_group(part, group, heads, drop, window, more) for part, group, more in each]
    y_PD = parts[0] if len(parts) == 1 else torch.cat(parts)
    return y_PD if batch.in_place else unpad_rows(y_PD, batch.padded_row_T)


def _flash_takes(x_TD: Tensor) -> bool:
    """Whether flash attention can be had for these numbers: on a GPU, in half precision."""
    halves = (torch.bfloat16, torch.float16)
    return x_TD.is_cuda and x_TD.dtype in halves and torch.backends.cuda.is_flash_attention_available()


def _attend_group(
    qkv_PD: Tensor, group: PaddedGroup, heads: int, drop: float, window: int | None, added: Tensor | None
) -> Tensor:
    qkv_GLD = qkv_PD.view(group.size, group.longest, 3, heads, -1)
    q_GHLD, k_GHLD, v_GHLD = qkv_GLD.permute(2, 0, 3, 1, 4).unbind(0)
    hidden = None if added is not None else _hidden(group, window, qkv_PD.device)
    if qkv_PD.is_cuda or not torch.is_grad_enabled():
        mask = added if hidden is None else ~hidden
        y_GHLD = F.scaled_dot_product_attention(q_GHLD, k_GHLD, v_GHLD, mask, drop)
    else:  # on a CPU the fused form is the faster one, but not with its way back
        scores_GHLL = (q_GHLD / math.sqrt(q_GHLD.shape[-1])) @ k_GHLD.transpose(-1, -2)
        if hidden is not None:  # adding in place costs nothing on the way back, and makes no copy
            added = scores_GHLL.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        if added is not None:
            scores_GHLL += added
        y_GHLD = F.dropout(scores_GHLL.softmax(-1), drop, True) @ v_GHLD
    return y_GHLD.transpose(1, 2).reshape(group.size * group.longest, -1)


def _hidden(group: PaddedGroup, window: int | None, device: torch.device) -> Tensor | None:
    """Which keys a query does not see, G x 1 x (1 or L) x L; padding sees all, so that nobody sees nothing."""
    padding_GL = group.is_padding_GL
    is_traced = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]  # the graph serves all lengths
    if window is None or (not is_traced and group.longest <= window + 1):
        return None if padding_GL is None else padding_GL[:, None, None, :]
    place_L = torch.arange(group.longest, device=device)
    far_LL = (place_L[:, None] - place_L).abs() > window
    if padding_GL is None:
        return far_LL[None, None]
    return ((far_LL | padding_GL[:, None, :]) & ~padding_GL[:, :, None])[:, None]
