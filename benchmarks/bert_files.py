"""Our encoder as a folder that Hugging Face's BERT can load, for what is compared with it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from realmops.encoders.bert import HEAD_NAMES, Bert, MaskedWordHead, their_names


def export_state(bert: Bert, head: MaskedWordHead | None = None) -> dict[str, Tensor]:
    """The parameters under Hugging Face's names (``bert.`` in front, ``cls.predictions.`` for the head).

    Hugging Face's keys have a bias, which changes nothing: it is written as zeros.
    """
    out = {}
    for ours, tensor in bert.state_dict().items():
        theirs = their_names(ours)
        out |= {f"bert.{name}": part for name, part in zip(theirs, tensor.chunk(len(theirs)), strict=True)}
    for name in [name for name in out if name.endswith("query.bias")]:
        out[name.replace("query", "key")] = torch.zeros_like(out[name])
    if head is not None:
        out |= {theirs: head.state_dict()[ours] for ours, theirs in HEAD_NAMES.items()}
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in out.items()}


def save_bert(folder: Path, bert: Bert, head: MaskedWordHead | None = None) -> None:
    """Write ``config.json`` and ``model.safetensors``."""
    (folder / "config.json").write_text(json.dumps(bert.config.to_json(), indent=1) + "\n")
    save_file(export_state(bert, head), folder / "model.safetensors")
