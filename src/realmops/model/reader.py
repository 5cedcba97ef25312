"""The knowledge-augmented encoder: p(y|z,x) for masked words and for answer spans (paper, section 3.2).

Shape suffixes: N sequences, T wordpieces of all sequences, D width, M masked wordpieces, V vocabulary,
S spans.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from realmops.bert import Bert, MaskedWordHead, Packed

SPAN_NORM_EPS = 1e-5  # of our own span heads; published ones have 1e-3


class Reader(nn.Module):
    """A BERT over join(x, z) with a masked word head; fine-tuning adds ORQA's span head."""

    def __init__(self, bert: Bert, head: MaskedWordHead) -> None:
        super().__init__()
        self.bert, self.masked_words = bert, head
        self.spans: SpanHead | None = None

    def log_token(self, batch: Packed, rows_M: Tensor, targets_M: Tensor) -> Tensor:
        """log p(y_j|z,x) of the wordpieces ``targets_M`` at the packed rows ``rows_M``, length M.

        The head is evaluated at those rows only.
        """
        logits_MV = self._logits(batch, rows_M)
        return -F.cross_entropy(logits_MV, targets_M.to(logits_MV.device), reduction="none")

    def log_words(self, batch: Packed, rows_M: Tensor) -> Tensor:
        """log p(y_j|z,x) of every wordpiece of the vocabulary at the packed rows ``rows_M``, M x V."""
        return self._logits(batch, rows_M).log_softmax(-1)

    def _logits(self, batch: Packed, rows_M: Tensor) -> Tensor:
        hidden_TD = self.bert(batch)
        hidden_MD = hidden_TD.index_select(0, rows_M.to(hidden_TD.device))
        logits_MV: Tensor = self.masked_words(hidden_MD, self.bert.word.weight)
        return logits_MV.float()


class SpanHead(nn.Module):
    """ORQA's span score: w . LayerNorm(ReLU(W_s h_start + W_e h_end)) (the paper's MLP, section 3.2).

    LayerNorm and w have no bias: it would add one number to the scores of all spans, which no softmax over spans sees.
    """

    def __init__(self, width: int, span_width: int, eps: float = SPAN_NORM_EPS) -> None:
        super().__init__()
        self.start = nn.Linear(width, span_width)
        self.end = nn.Linear(width, span_width, bias=False)
        self.norm = nn.LayerNorm(span_width, eps=eps, bias=False)
        self.score = nn.Linear(span_width, 1, bias=False)

    def forward(self, hidden_TD: Tensor, start_S: Tensor, end_S: Tensor) -> Tensor:
        """Scores of the spans from row ``start_S`` to row ``end_S`` (both inside), length S."""
        start_TD, end_TD = self.start(hidden_TD), self.end(hidden_TD)
        inner_SD = F.relu(start_TD.index_select(0, start_S) + end_TD.index_select(0, end_S))
        score_S: Tensor = self.score(self.norm(inner_SD))[:, 0]
        return score_S.float()


def enumerate_spans(first_row: int, length: int, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """First and last row of every span of 1 to ``longest`` wordpieces inside ``length`` rows, by start then end."""
    start = np.repeat(np.arange(length), longest)
    end = start + np.tile(np.arange(longest), length)
    inside = end < length
    return first_row + start[inside], first_row + end[inside]


def initialise_spans(head: SpanHead, generator: torch.Generator) -> None:
    """BERT's start values: normal weights of deviation 0.02, no bias."""
    with torch.no_grad():
        for module in head.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0.0, 0.02, generator=generator)
                if module.bias is not None:
                    module.bias.zero_()
