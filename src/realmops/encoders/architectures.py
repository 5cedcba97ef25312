"""The encoders that there are, by the ``model_type`` of their descriptions and of published folders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from realmops.encoders.bert import Bert
from realmops.encoders.encoder import Encoder
from realmops.encoders.families import FAMILIES
from realmops.encoders.folders import read_config
from realmops.encoders.foreign import MODEL_TYPE as FOREIGN
from realmops.encoders.foreign import Foreign
from realmops.encoders.modernbert import ModernBert

ARCHITECTURES: dict[str, type[Encoder]] = {
    **dict.fromkeys(FAMILIES, Bert),
    "realm": Bert,
    "modernbert": ModernBert,
    FOREIGN: Foreign,
}


def described_encoder(description: Mapping[str, Any], source: str) -> Encoder:
    """The encoder that :meth:`Encoder.describe` wrote, without its weights; ValueError names the source."""
    return _class_of(description).described(description, source)


def load_encoder(folder: Path, dropout: float | None = None) -> tuple[Encoder, nn.Module, bool]:
    """The encoder of a published folder, as :meth:`Encoder.load` gives it."""
    return _class_of(read_config(folder), Foreign).load(folder, dropout)


def _class_of(description: Mapping[str, Any], other: type[Encoder] = Bert) -> type[Encoder]:
    """BERT, which says what is missing, where nothing is named, and ``other`` where the name is not known."""
    return ARCHITECTURES.get(str(description["model_type"]), other) if "model_type" in description else Bert
