"""Variable-length attention for transformers' encoders: each packed sequence attends only to itself.

On a GPU in half precision, flash attention reads the packed sequences directly. Otherwise sequences of similar lengths
are padded in groups, for the attention only.

Shape suffixes: T wordpieces in the batch, G sequences in a group, L the longest sequence in it, P padded rows, D width,
H heads, E head width.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from realmops.model.packed import PackedBatch, PaddedGroup

ATTENTION_NAME = "realmops_packed"  # in the attention registry of transformers


@cache
def register_attention() -> str:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, packed_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, lambda *args, **kwargs: None)
    return ATTENTION_NAME


def packed_attention(
    module: nn.Module,
    query_1HTE: Tensor,
    key_1HTE: Tensor,
    value_1HTE: Tensor,
    mask: None,
    *,
    packed: PackedBatch,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute softmax attention per packed sequence, as an attention function of transformers.

    Keys and values may have fewer heads than queries. A wordpiece attends to others at a smaller distance than
    ``sliding_window``; if causal (by default as ``module`` is), only to earlier ones. Rows after the batch get zeros.
    """
    rows = query_1HTE.shape[2]
    scale = query_1HTE.shape[-1] ** -0.5 if scaling is None else scaling
    causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    max_distance = None if sliding_window is None else sliding_window - 1
    q_THE, k_THE, v_THE = (x[0].transpose(0, 1)[: packed.wordpieces] for x in (query_1HTE, key_1HTE, value_1HTE))
    times = q_THE.shape[1] // k_THE.shape[1]
    if times > 1:
        k_THE, v_THE = (x_THE.repeat_interleave(times, 1) for x_THE in (k_THE, v_THE))
    is_half = v_THE.is_cuda and v_THE.dtype in (torch.bfloat16, torch.float16)
    if not dropout and is_half and torch.backends.cuda.is_flash_attention_available():
        from torch.nn.attention.varlen import varlen_attn  # takes seconds to import

        left = -1 if max_distance is None else max_distance
        starts, longest, dtype = packed.starts_B, packed.longest, v_THE.dtype
        y_THE: Tensor = varlen_attn(  # type: ignore[assignment]  # a tuple only with return_aux
            q_THE.to(dtype), k_THE.to(dtype), v_THE, starts, starts, longest, longest,
            scale=scale, window_size=(left, 0 if causal else left),
        )  # fmt: skip
    else:
        y_THE = _padded(q_THE, k_THE, v_THE, packed, scale, dropout, max_distance, causal)
    if packed.wordpieces is not None:  # a traced batch has dynamic sizes, and no rows after its last wordpiece
        y_THE = F.pad(y_THE, (0, 0, 0, 0, 0, rows - len(y_THE)))
    return y_THE[None], None


def _padded(
    q_THE: Tensor, k_THE: Tensor, v_THE: Tensor, packed: PackedBatch, scale: float, dropout: float,
    max_distance: int | None, causal: bool,
) -> Tensor:  # fmt: skip
    parts = [packed.split(x_THE.flatten(1)) for x_THE in (q_THE, k_THE, v_THE)]
    heads = q_THE.shape[1]
    outputs = []
    for q_PD, k_PD, v_PD, group in zip(*parts, packed.groups, strict=True):
        shape = (group.size, group.longest, heads, -1)
        q_GHLE, k_GHLE, v_GHLE = (x_PD.view(shape).transpose(1, 2) for x_PD in (q_PD, k_PD, v_PD))
        blocked = _blocked_keys(group, max_distance, causal, q_GHLE.device)
        if q_GHLE.is_cuda or not torch.is_grad_enabled():
            mask = None if blocked is None else ~blocked
            y_GHLE = F.scaled_dot_product_attention(q_GHLE, k_GHLE, v_GHLE, mask, dropout, scale=scale)
        else:  # on a CPU the fused kernel is faster in the forward pass, but not with its backward pass
            scores_GHLL = (q_GHLE * scale) @ k_GHLE.transpose(-1, -2)
            if blocked is not None:  # in place, so that autograd saves no copy
                scores_GHLL += scores_GHLL.new_zeros(blocked.shape).masked_fill_(blocked, -torch.inf)
            y_GHLE = F.dropout(scores_GHLL.softmax(-1), dropout, True) @ v_GHLE
        outputs.append(y_GHLE.transpose(1, 2).reshape(group.size * group.longest, -1))
    return packed.join(outputs).view(-1, heads, v_THE.shape[2])


def _blocked_keys(group: PaddedGroup, max_distance: int | None, causal: bool, device: torch.device) -> Tensor | None:
    """Return the keys that a query may not attend to, G x 1 x (1 or L) x L, or None if it may attend to all.

    Padded queries attend to every key, so that no row of the softmax is empty.
    """
    padding_GL = group.is_padding_GL
    is_traced = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]  # a trace must hold for all lengths
    if not causal and (max_distance is None or (not is_traced and group.longest <= max_distance + 1)):
        return None if padding_GL is None else padding_GL[:, None, None, :]
    position_L = torch.arange(group.longest, device=device)
    distance_LL = position_L[:, None] - position_L
    blocked_LL = distance_LL < 0 if causal else torch.zeros_like(distance_LL, dtype=torch.bool)
    if max_distance is not None:
        blocked_LL = blocked_LL | (distance_LL.abs() > max_distance)
    if padding_GL is None:
        return blocked_LL[None, None]
    return ((blocked_LL | padding_GL[:, None, :]) & ~padding_GL[:, :, None])[:, None]
