"""Counts what a GPU would be sent and waited for, without one: tensors that say to be elsewhere, in this memory.

Within ``recorded()`` tensors and modules go to the device ``ELSEWHERE`` as they would go to a GPU. Operations on them
are done by the CPU. What mixes devices is an error, as it would be there. Counted are

- operations there; views, which cost a GPU nothing, among them
- copies there and back
- waits: each copy back, and whatever else needs a number of a tensor that is there, as ``item``, ``tolist``,
  ``nonzero`` and an index of truth values do

It says nothing about time. Kernels that GPUs alone have, half precision and several streams are not there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from realmops.model import packed

aten = torch.ops.aten
ELSEWHERE = torch.device("meta")  # the one that torch knows everywhere and that needs no kernels
_ASK = {  # a single number, and results whose size depends on values
    aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.unique_consecutive,
    aten.bincount,
}  # fmt: skip
_INDICES = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)


@dataclass
class Counts:
    """Since the recording began."""

    operations: int = 0
    sent: int = 0
    brought: int = 0
    waits: int = 0

    def __sub__(self, earlier: Counts) -> Counts:
        return Counts(*(getattr(self, name) - getattr(earlier, name) for name in self.__dataclass_fields__))


class Away(Tensor):
    """A tensor that says to be elsewhere; its data are those of ``here``."""

    here: Tensor

    @staticmethod
    def __new__(cls, here: Tensor) -> Away:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, here.size(), strides=here.stride(), storage_offset=here.storage_offset(), dtype=here.dtype,
            device=ELSEWHERE,
        )  # fmt: skip

    def __init__(self, here: Tensor) -> None:
        self.here = here

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Away({self.here})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside of the recording")

    __torch_function__ = torch._C._disabled_torch_function_impl


def _here(value: Any) -> Any:
    return value.here if isinstance(value, Away) else value


class _Operations(TorchDispatchMode):
    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, counts = kwargs or {}, self.counts
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        away = [tensor for tensor in tensors if isinstance(tensor, Away)]
        wanted = kwargs.get("device")
        is_there = bool(away) if wanted is None else torch.device(wanted) == ELSEWHERE
        if func is aten._to_copy.default and is_there != bool(away):
            self._copied(is_there)
        elif func is aten.copy_.default and isinstance(args[0], Away) != isinstance(args[1], Away):
            self._copied(isinstance(args[0], Away))
        elif away:
            self._check(func, args, tensors)
        packet = func.overloadpacket
        truths = packet in _INDICES and any(
            isinstance(index, Away) and index.dtype in (torch.bool, torch.uint8) for index in tree_leaves(args[1])
        )
        sized = packet is aten.repeat_interleave and kwargs.get("output_size") is not None
        asks = packet in _ASK or truths or (packet is aten.repeat_interleave and not sized)
        counts.waits += bool(away) and asks
        counts.operations += bool(away) or is_there
        left = {name: torch.device("cpu") if name == "device" else value for name, value in kwargs.items()}
        result = func(*tree_map(_here, args), **tree_map(_here, left))
        known = {id(tensor.here): tensor for tensor in away}

        def out(value: Any) -> Any:
            if not isinstance(value, Tensor) or not (is_there or id(value) in known):
                return value
            return known[id(value)] if id(value) in known else Away(value)

        return tree_map(out, result)

    def _copied(self, is_there: bool) -> None:
        self.counts.sent += is_there
        self.counts.brought += not is_there
        self.counts.waits += not is_there

    def _check(self, func: Any, args: Any, tensors: list[Tensor]) -> None:
        """Two devices do not mix, but for single numbers and for indices of what is there."""
        indices = func.overloadpacket in _INDICES
        if indices and not isinstance(args[0], Away):
            raise RuntimeError(f"{func}: indices are elsewhere, and what they index is on the CPU")
        for tensor in tensors:
            if tensor.dim() and not isinstance(tensor, Away):
                if indices:
                    self._copied(True)
                    continue
                raise RuntimeError(f"{func}: tensors of two devices, one on the CPU of shape {tuple(tensor.shape)}")


class _Methods(TorchFunctionMode):
    """Calls without an operation: a tensor made from numbers, and its memory read."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") == ELSEWHERE:
            return func(*args, **{**kwargs, "device": "cpu"}).to(ELSEWHERE)
        if args and isinstance(args[0], Away):
            if func is Tensor.tolist:
                self.counts.waits += 1
                return args[0].here.tolist()
            if func is Tensor.numpy:
                raise TypeError("a tensor that is elsewhere has no numpy array: bring it first")
            if func is Tensor.__deepcopy__:
                copy = Away(args[0].here.clone())
                return torch.nn.Parameter(copy) if isinstance(args[0], torch.nn.Parameter) else copy
        return func(*args, **kwargs)


@contextmanager
def recorded() -> Iterator[Counts]:
    """The counts, which go on while the block does."""
    counts = Counts()
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    limits = {**packed.BATCH_WORDPIECES, ELSEWHERE.type: packed.BATCH_WORDPIECES["cuda"]}
    try:
        with mock.patch.object(packed, "BATCH_WORDPIECES", limits), _Operations(counts), _Methods(counts):
            yield counts
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)
