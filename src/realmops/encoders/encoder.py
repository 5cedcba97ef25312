"""What a network must offer so that retriever, reader, tagger and paths can be built on it.

Shape suffixes: B sequences, T wordpieces of all sequences, D width, V vocabulary, N chosen positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from realmops.encoders.packed import Packed


class Encoder(nn.Module, ABC):
    """Packed wordpieces in, one vector for each of them out; nobody asks it for more than what stands here.

    ``positions`` is the longest sequence that it takes. ``layer_norm_eps`` is what heads behind it take over.
    """

    words: str  # what it is, for people, with its article
    segments = 2  # that it tells apart; below 2 all wordpieces are alike to it
    reentrant = True  # several threads may call it at once; and it multiplies by ``devices.product``

    def __init__(self, vocabulary: int, width: int, positions: int, dropout: float, layer_norm_eps: float) -> None:
        super().__init__()
        self.vocabulary, self.width, self.positions = vocabulary, width, positions
        self.dropout, self.layer_norm_eps = dropout, layer_norm_eps
        self.added_width = width  # of what ``forward`` adds: that of the word vectors
        self.gradient_checkpointing = False  # activations are made again on the way back, where it can do that

    @abstractmethod
    def forward(self, batch: Packed, added_TD: Tensor | None = None) -> Tensor:
        """Hidden states T x D of a batch, which is moved to its device; ``added_TD`` is added to the word vectors."""

    @property
    @abstractmethod
    def word_vectors(self) -> nn.Parameter:
        """The vector of each wordpiece, V x D for most; masked words are told by it too."""

    @property
    @abstractmethod
    def shifts(self) -> list[nn.Parameter]:
        """Biases that add the same vector to all hidden states."""

    @abstractmethod
    def masked_word_head(self) -> nn.Module:
        """A new head that makes logits N x V of hidden states N x D and ``word_vectors``."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Its shape, as JSON; ``model_type`` says which class it is."""

    @classmethod
    @abstractmethod
    def described(cls, description: Mapping[str, Any], source: str) -> Self:
        """The inverse of :meth:`describe`, without the weights; ValueError names the source."""

    @classmethod
    @abstractmethod
    def load(cls, folder: Path, dropout: float | None = None) -> tuple[Self, nn.Module, bool]:
        """One from a published folder, with its masked word head; the flag says whether the folder had one.

        Where it had none the head starts afresh. ``dropout`` takes the place of the folder's own.
        """

    def published(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """``config.json`` and weights as transformers has them; None where it has no such encoder."""
        return None

    def in_fp16(self) -> Self | None:
        """Return a copy that computes all in fp16, without gradients; None where numbers grow too large.

        On a GPU that takes less time than bf16 beside fp32, and is nearer to fp32: fp16 has three more binary digits.
        """
        return None

    def set_dropout(self, dropout: float) -> None:
        """Learn with another dropout from here on."""
        self.dropout = dropout

    def cls(self, batch: Packed) -> Tensor:
        """The hidden state of each sequence's first wordpiece, B x D."""
        hidden_TD: Tensor = self(batch)
        return hidden_TD.index_select(0, batch.first_B)

    @property
    def device(self) -> torch.device:
        return self.word_vectors.device
