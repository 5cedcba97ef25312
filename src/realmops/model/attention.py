"""Attention of transformers' encoders over packed sequences, each of which attends to itself alone.

On a GPU in half precision flash attention takes the sequences as they are; elsewhere they are padded in groups of
similar lengths, for attention alone.

Shape suffixes: T wordpieces of all sequences, G sequences of a group, L its longest, P padded rows, D width, H heads,
E width of a head.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from realmops.model.packed import Packed, PaddedGroup

NAME = "realmops_packed"  # as transformers knows the function


@cache
def register() -> str:
    """Make :func:`packed_attention` known to transformers and return its name there."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
    return NAME


def packed_attention(
    module: nn.Module,
    query_1HTE: Tensor,
    key_1HTE: Tensor,
    value_1HTE: Tensor,
    mask: None,
    *,
    packed: Packed,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return softmax attention 1 x T x H x E, in the form of transformers' attention functions.

    Args:
        packed: the batch; rows after its last wordpiece get zeros.
        sliding_window: a wordpiece attends to those at a distance below it.
        is_causal: whether a wordpiece attends to none after it; None takes the module's own.
    """
    rows = query_1HTE.shape[2]
    scale = query_1HTE.shape[-1] ** -0.5 if scaling is None else scaling
    causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    reach = None if sliding_window is None else sliding_window - 1
    q_THE, k_THE, v_THE = (x[0].transpose(0, 1)[: packed.wordpieces] for x in (query_1HTE, key_1HTE, value_1HTE))
    if not dropout and _supports_flash(v_THE):
        y_THE = _flash(q_THE.to(v_THE.dtype), k_THE.to(v_THE.dtype), v_THE, packed, scale, reach, causal)
    else:
        y_THE = _padded(q_THE, k_THE, v_THE, packed, scale, dropout, reach, causal)
    if packed.wordpieces is not None:  # of a batch for a graph, whose sizes are not known, all rows are wordpieces
        y_THE = F.pad(y_THE, (0, 0, 0, 0, 0, rows - len(y_THE)))
    return y_THE[None], None


def _supports_flash(x: Tensor) -> bool:
    """Return whether flash attention supports this device and dtype."""
    half = x.dtype in (torch.bfloat16, torch.float16)
    return x.is_cuda and half and torch.backends.cuda.is_flash_attention_available()


def _flash(
    q_THE: Tensor, k_THE: Tensor, v_THE: Tensor, packed: Packed, scale: float, reach: int | None, causal: bool
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # takes seconds to import

    before = -1 if reach is None else reach
    window = (before, 0 if causal else before)
    k_THE, v_THE = _repeat_heads(k_THE, q_THE), _repeat_heads(v_THE, q_THE)
    y_THE: Tensor = varlen_attn(  # type: ignore[assignment]  # a tuple only where more is requested
        q_THE, k_THE, v_THE, packed.starts_B, packed.starts_B, packed.longest, packed.longest,
        scale=scale, window_size=window,
    )  # fmt: skip
    return y_THE


def _repeat_heads(x_THE: Tensor, like_THE: Tensor) -> Tensor:
    """Repeat the heads of keys or values that several heads of queries share."""
    times = like_THE.shape[1] // x_THE.shape[1]
    return x_THE if times == 1 else x_THE.repeat_interleave(times, 1)


def _padded(
    q_THE: Tensor, k_THE: Tensor, v_THE: Tensor, packed: Packed, scale: float, dropout: float, reach: int | None,
    causal: bool,
) -> Tensor:  # fmt: skip
    packed.pad()
    k_THE, v_THE = _repeat_heads(k_THE, q_THE), _repeat_heads(v_THE, q_THE)
    parts = [packed.split(_to_padded(x_THE.flatten(1), packed)) for x_THE in (q_THE, k_THE, v_THE)]
    heads = q_THE.shape[1]
    made = []
    for q_PD, k_PD, v_PD, group in zip(*parts, packed.groups, strict=True):
        shape = (group.size, group.longest, heads, -1)
        q_GHLE, k_GHLE, v_GHLE = (x_PD.view(shape).transpose(1, 2) for x_PD in (q_PD, k_PD, v_PD))
        made.append(_attend_group(q_GHLE, k_GHLE, v_GHLE, group, scale, dropout, reach, causal))
    y_PD = made[0] if len(made) == 1 else torch.cat(made)
    y_TD = y_PD if packed.in_place else y_PD.index_select(0, packed.padded_row_T)
    return y_TD.view(-1, heads, v_THE.shape[2])


def _to_padded(x_TD: Tensor, packed: Packed) -> Tensor:
    if packed.in_place:
        return x_TD
    return x_TD.new_zeros(packed.padded_rows, x_TD.shape[1]).index_copy_(0, packed.padded_row_T, x_TD)


def _attend_group(
    q_GHLE: Tensor, k_GHLE: Tensor, v_GHLE: Tensor, group: PaddedGroup, scale: float, dropout: float,
    reach: int | None, causal: bool,
) -> Tensor:  # fmt: skip
    hidden = _hidden(group, reach, causal, q_GHLE.device)
    if q_GHLE.is_cuda or not torch.is_grad_enabled():
        mask = None if hidden is None else ~hidden
        y_GHLE = F.scaled_dot_product_attention(q_GHLE, k_GHLE, v_GHLE, mask, dropout, scale=scale)
    else:  # on a CPU the fused form is faster forward alone, not with its backward pass
        scores_GHLL = (q_GHLE * scale) @ k_GHLE.transpose(-1, -2)
        if hidden is not None:  # in place: autograd then saves no copy
            scores_GHLL += scores_GHLL.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        y_GHLE = F.dropout(scores_GHLL.softmax(-1), dropout, True) @ v_GHLE
    return y_GHLE.transpose(1, 2).reshape(group.size * group.longest, -1)


def _hidden(group: PaddedGroup, reach: int | None, causal: bool, device: torch.device) -> Tensor | None:
    """Which keys are hidden from a query, G x 1 x (1 or L) x L; None for none. Padding sees all, so no row is empty."""
    padding_GL = group.is_padding_GL
    is_traced = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]  # the graph serves all lengths
    if not causal and (reach is None or (not is_traced and group.longest <= reach + 1)):
        return None if padding_GL is None else padding_GL[:, None, None, :]
    place_L = torch.arange(group.longest, device=device)
    distance_LL = place_L[:, None] - place_L
    far_LL = torch.zeros_like(distance_LL, dtype=torch.bool) if reach is None else distance_LL.abs() > reach
    if causal:
        far_LL = far_LL | (distance_LL < 0)
    if padding_GL is None:
        return far_LL[None, None]
    return ((far_LL | padding_GL[:, None, :]) & ~padding_GL[:, :, None])[:, None]
