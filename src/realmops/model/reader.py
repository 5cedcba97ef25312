"""The knowledge-augmented encoder: p(y|z,x) for masked words and for answer spans (paper, section 3.2).

Shape suffixes: N sequences, T wordpieces in the batch, D width, M masked wordpieces, V vocabulary, L longest body,
X most masked wordpieces in a sequence, U passages, S spans, B sentences, K candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from realmops.corpus.snapshot_reader import Snapshot
from realmops.devices import to_device
from realmops.model.encoder import Encoder
from realmops.model.lexical_features import LexicalFeatures
from realmops.model.masked_word_head import MaskedWordHead
from realmops.model.packed import PackedBatch, pad_rows
from realmops.model.sequences import SpecialTokens, join_reader, join_text

SPAN_WIDTH = 256  # of the span representations, as in the paper
SPAN_NORM_EPS = 1e-5  # published REALM checkpoints have 1e-3
_EMPTY = np.zeros(0, dtype=np.int64)
_MIN_PROBABILITY = 1e-20  # lower bound of a copy probability, so that its logarithm is finite


@dataclass(frozen=True)
class DocumentRows:
    """Packed rows of each sequence's document; a sequence may have no document."""

    rows_NL: Tensor  # packed rows; 0 where ``is_valid_NL`` is False
    is_valid_NL: Tensor

    @staticmethod
    def of(first: Sequence[int], end: Sequence[int]) -> DocumentRows:
        """Build from each body's first packed row and its end (exclusive), on the CPU."""
        first_N, end_N = np.asarray(first, np.int64), np.asarray(end, np.int64)
        rows_NL = first_N[:, None] + np.arange(max(1, int((end_N - first_N).max(initial=0))))
        is_valid_NL = rows_NL < end_N[:, None]
        return DocumentRows(torch.from_numpy(np.where(is_valid_NL, rows_NL, 0)), torch.from_numpy(is_valid_NL))


@dataclass(frozen=True)
class MaskedSentences:
    """Masked sentences x as wordpieces; input sequences are truncated to ``limit`` wordpieces."""

    sentences: Sequence[np.ndarray]
    positions: Sequence[np.ndarray]  # of the masks in each sentence
    targets: Sequence[np.ndarray]  # the masked wordpieces
    special: SpecialTokens
    limit: int

    @property
    def is_mask_BM(self) -> Tensor:
        """Whether each sentence has a mask of this number."""
        counts_B = torch.tensor([len(masks) for masks in self.positions])
        return torch.arange(int(counts_B.max()))[None, :] < counts_B[:, None]

    @property
    def targets_M(self) -> Tensor:
        return torch.from_numpy(np.concatenate(self.targets))

    @property
    def sequence_M(self) -> Tensor:
        return torch.from_numpy(np.repeat(np.arange(len(self.positions)), [len(masks) for masks in self.positions]))

    @property
    def queries(self) -> PackedBatch:
        """[CLS] x [SEP] of each sentence."""
        return PackedBatch([join_text(x, self.special, self.limit) for x in self.sentences])

    def rows_M(self, batch: PackedBatch) -> Tensor:
        """Return the packed rows of the masks in a batch whose sequences begin with [CLS] x."""
        rows = [start + 1 + masks for start, masks in zip(batch.starts[:-1], self.positions, strict=True)]
        return torch.from_numpy(np.concatenate(rows))

    def select(self, rows: Sequence[int]) -> MaskedSentences:
        parts = (self.sentences, self.positions, self.targets)
        sentences, positions, targets = ([part[b] for b in rows] for part in parts)
        return MaskedSentences(sentences, positions, targets, self.special, self.limit)

    def join_documents(self, documents: Sequence[np.ndarray]) -> tuple[PackedBatch, DocumentRows]:
        joined = [join_reader(x, z, self.special, self.limit) for x, z in zip(self.sentences, documents, strict=True)]
        batch = PackedBatch([tokens for tokens, _, _ in joined], [segments for _, segments, _ in joined])
        first = [start + offset for start, (*_, offset) in zip(batch.starts[:-1], joined, strict=True)]
        return batch, DocumentRows.of(first, (batch.starts[1:] - 1).tolist())

    def pack_documents(self, documents: Sequence[np.ndarray]) -> tuple[PackedBatch, DocumentRows]:
        """Pack [CLS] [SEP] body [SEP] of each document: the join with an empty sentence."""
        empty = [_EMPTY] * len(documents)
        return MaskedSentences(empty, empty, empty, self.special, self.limit).join_documents(documents)


class CopyHead(nn.Module):
    """Copy mechanism of a pointer-generator network (See et al. 2017), from a masked wordpiece to the document.

    p(y|z,x) = (1 - g) p_vocabulary(y) + g * (attention on the wordpieces in z that equal y), with a gate g. Not in the
    paper: without it, a short pre-training gives the retriever no signal. It starts so that it copies at once.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, 1)
        with torch.no_grad():
            for layer in (self.query, self.key):
                layer.weight.copy_(torch.eye(width))
            self.gate.weight.zero_()
            self.gate.bias.zero_()

    def attention(
        self,
        hidden_MD: Tensor,
        hidden_TD: Tensor,
        bodies: DocumentRows,
        sequence_M: Tensor,
        number_M: Tensor,  # in the sequence, from 0
        most: int,  # masks of a sequence
    ) -> Tensor:
        """Compute the attention weights of each mask over the body in its sequence, M x L; 0 on padding."""
        query_MD, key_TD = self.query(hidden_MD), self.key(hidden_TD)
        shape = (len(bodies.rows_NL), most, query_MD.shape[1])
        query_NXD = query_MD.new_zeros(shape).index_put((sequence_M, number_M), query_MD)
        score_NXL = query_NXD @ key_TD[bodies.rows_NL].transpose(1, 2)
        return _masked_softmax(score_NXL[sequence_M, number_M], bodies.is_valid_NL[sequence_M], key_TD.shape[1])

    def cross_attention(self, hidden_MD: Tensor, z_TD: Tensor, bodies: DocumentRows) -> Tensor:
        """Compute the attention weights of each mask over the body of every document, M x U x L."""
        score_MT = self.query(hidden_MD) @ self.key(z_TD).T
        return _masked_softmax(score_MT[:, bodies.rows_NL], bodies.is_valid_NL[None], z_TD.shape[1])

    def mix(self, hidden_MD: Tensor, log_vocabulary_MU: Tensor, p_copy_MU: Tensor) -> Tensor:
        """Compute log p(y|z,x), M x U, from log p_vocabulary(y) and the probability of copying y from z."""
        gate_M1 = self.gate(hidden_MD).float()
        log_copy_MU = p_copy_MU.clamp(min=_MIN_PROBABILITY).log()
        return torch.logaddexp(F.logsigmoid(-gate_M1) + log_vocabulary_MU, F.logsigmoid(gate_M1) + log_copy_MU)

    def mix_all(self, hidden_MD: Tensor, log_vocabulary_MV: Tensor, attention_ML: Tensor, token_ML: Tensor) -> Tensor:
        """Compute log p(y|z,x) of the whole vocabulary, M x V."""
        p_copy_MV = torch.zeros_like(log_vocabulary_MV).scatter_add(1, token_ML, attention_ML)
        return self.mix(hidden_MD, log_vocabulary_MV, p_copy_MV)


class Reader(nn.Module):
    """An encoder over join(x, z) with a masked word head; fine-tuning adds ORQA's span head.

    Another reader of masked words overrides the three methods ``log_masked...`` and has an entry in ``READERS``. With
    ``copies`` a :class:`CopyHead` copies masked words from z, with ``matches`` lexical features are added to the words.
    """

    apart = False  # whether every passage can be scored for every sentence

    def __init__(
        self, encoder: Encoder, head: MaskedWordHead | None, *, copies: bool = False, matches: bool = False
    ) -> None:
        super().__init__()
        self.bert, self.masked_words = encoder, head
        self.copy = CopyHead(encoder.width) if copies else None
        self.matches = LexicalFeatures(encoder.vocabulary, encoder.added_width) if matches else None
        self.spans: SpanHead | None = None

    @property
    def encoder(self) -> Encoder:
        return self.bert

    @property
    def word_vectors(self) -> Tensor:
        return self.bert.word_vectors

    @property
    def device(self) -> torch.device:
        return self.bert.device

    def encode(self, batch: PackedBatch) -> Tensor:
        hidden_TD: Tensor = self.bert(batch, None if self.matches is None else self.matches(batch))
        return hidden_TD

    def document(self, snapshot: Snapshot, passage: int) -> np.ndarray:
        """Return a passage's wordpieces as this reader needs them: with word shapes if it has lexical features."""
        return snapshot.body(passage) if self.matches is None else snapshot.written(passage)

    def log_token(
        self, batch: PackedBatch, rows_M: Tensor, targets_M: Tensor | None, bodies: DocumentRows, sequence_M: Tensor
    ) -> Tensor:
        """Compute log p(y_j|z,x) at the packed rows ``rows_M``; all arguments are on the CPU.

        ``sequence_M`` is each mask's sequence, ascending. A sequence without a body (the null document) copies nothing.
        Without targets, the result is M x V, for the whole vocabulary.
        """
        counts_N = torch.bincount(sequence_M)
        number_M = torch.arange(len(sequence_M)) - (counts_N.cumsum(0) - counts_N)[sequence_M]
        most = int(counts_N.max()) if len(rows_M) else 0
        label_M = rows_M if targets_M is None else targets_M
        rows_M, sequence_M, number_M, label_M, rows_NL, is_valid_NL = to_device(
            self.device, rows_M, sequence_M, number_M, label_M, bodies.rows_NL, bodies.is_valid_NL
        )
        hidden_TD = self.encode(batch)
        hidden_MD = hidden_TD.index_select(0, rows_M)
        log_vocabulary_MU = self._log_vocabulary(hidden_MD, None if targets_M is None else label_M)
        if self.copy is None:
            return log_vocabulary_MU if targets_M is None else log_vocabulary_MU[:, 0]
        bodies = DocumentRows(rows_NL, is_valid_NL)
        attention_ML = self.copy.attention(hidden_MD, hidden_TD, bodies, sequence_M, number_M, most)
        token_ML = batch.tokens_T[rows_NL][sequence_M]
        if targets_M is None:
            mixed_MU = self.copy.mix_all(hidden_MD, log_vocabulary_MU, attention_ML, token_ML)
        else:
            p_copy_M1 = (attention_ML * (token_ML == label_M[:, None])).sum(-1, keepdim=True)
            mixed_MU = self.copy.mix(hidden_MD, log_vocabulary_MU, p_copy_M1)
        log_MU = torch.where(is_valid_NL.any(-1)[sequence_M][:, None], mixed_MU, log_vocabulary_MU)
        return log_MU if targets_M is None else log_MU[:, 0]

    def log_masked(
        self, masked: MaskedSentences, documents: Sequence[np.ndarray], column_BK: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """Compute log p(y_j|z,x) of every mask under every candidate, B x K x M, and whether each mask exists, B x M.

        ``documents`` has each candidate once, empty for the null document; ``column_BK`` indexes it, or is -1.
        """
        is_mask_BM = masked.is_mask_BM
        (count, longest), width = is_mask_BM.shape, column_BK.shape[1]
        pairs = [(b, k, column_BK[b, k]) for b, k in np.argwhere(column_BK >= 0).tolist()]
        log_token_N = self.log_masked_pairs(masked.select([b for b, *_ in pairs]), [documents[u] for *_, u in pairs])
        flat = [(b * width + k) * longest + np.arange(len(masked.positions[b])) for b, k, _ in pairs]
        out = log_token_N.new_zeros(count * width * longest)
        flat_N, is_mask_BM = to_device(self.device, torch.from_numpy(np.concatenate(flat)), is_mask_BM)
        return out.index_copy(0, flat_N, log_token_N).view(count, width, longest), is_mask_BM

    def log_masked_pairs(self, masked: MaskedSentences, documents: Sequence[np.ndarray]) -> Tensor:
        """Compute log p(y_j|z,x) of all masked wordpieces, length M, with one document per sentence."""
        batch, bodies = masked.join_documents(documents)
        return self.log_token(batch, masked.rows_M(batch), masked.targets_M, bodies, masked.sequence_M)

    def log_masked_words(self, masked: MaskedSentences, documents: Sequence[np.ndarray]) -> Tensor:
        """Compute log p(y_j|z,x) of the whole vocabulary at the masks of a single sentence, per document: K x M x V."""
        copies = masked.select([0] * len(documents))
        batch, bodies = copies.join_documents(documents)
        log_word_NV = self.log_token(batch, copies.rows_M(batch), None, bodies, copies.sequence_M)
        return log_word_NV.view(len(documents), len(masked.positions[0]), -1)

    def _log_vocabulary(self, hidden_MD: Tensor, targets_M: Tensor | None) -> Tensor:
        if self.masked_words is None:
            raise ValueError(
                f"the reader has {self.encoder.description}, which predicts no masked words; set "
                "ict.reader_steps=0 and pretrain.steps=0, or set retriever.init to an encoder with a masked word head"
            )
        logits_MV: Tensor = self.masked_words(hidden_MD, self.bert.word_vectors)
        if targets_M is None:
            return logits_MV.float().log_softmax(-1)
        return -F.cross_entropy(logits_MV.float(), targets_M, reduction="none")[:, None]


class LateInteractionReader(Reader):
    """Late-interaction reader: encodes x and z separately, each once; only the copy head combines them."""

    apart = True

    def log_masked(
        self, masked: MaskedSentences, documents: Sequence[np.ndarray], column_BK: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        full = [u for u, document in enumerate(documents) if len(document)]
        column_U = np.full(len(documents), len(full))  # the null document is the last column
        column_U[full] = np.arange(len(full))
        x, (z, bodies) = masked.queries, masked.pack_documents([documents[u] for u in full] or [_EMPTY])
        log_token_NU, log_null_N1 = self._log_late(x, masked.rows_M(x), masked.targets_M, z, bodies)
        log_token_NU = torch.cat([log_token_NU[:, : len(full)], log_null_N1], dim=1)
        index_BK, is_mask_BM = torch.from_numpy(column_U[np.maximum(column_BK, 0)]), masked.is_mask_BM
        index_BK, mask_2N, is_mask_BM = to_device(self.device, index_BK, is_mask_BM.nonzero().T, is_mask_BM)
        padded_BMU = log_token_NU.new_zeros(*is_mask_BM.shape, log_token_NU.shape[1])
        padded_BMU = padded_BMU.index_put(tuple(mask_2N), log_token_NU)
        index_BMK = index_BK[:, None, :].expand(-1, is_mask_BM.shape[1], -1)
        return padded_BMU.gather(2, index_BMK).transpose(1, 2), is_mask_BM

    def log_masked_pairs(self, masked: MaskedSentences, documents: Sequence[np.ndarray]) -> Tensor:
        x, (z, bodies) = masked.queries, masked.pack_documents(documents)
        log_token_MU, log_null_M1 = self._log_late(x, masked.rows_M(x), masked.targets_M, z, bodies)
        sequence_M = masked.sequence_M
        sequence_M, is_null_M = to_device(self.device, sequence_M, ~bodies.is_valid_NL.any(-1)[sequence_M])
        return torch.where(is_null_M, log_null_M1[:, 0], log_token_MU.gather(1, sequence_M[:, None])[:, 0])

    def log_masked_words(self, masked: MaskedSentences, documents: Sequence[np.ndarray]) -> Tensor:
        x, (z, bodies) = masked.queries, masked.pack_documents(documents)
        log_word_KMV, log_null_MV = self._log_late(x, masked.rows_M(x), None, z, bodies)
        has_body_K11 = bodies.is_valid_NL.any(-1)[:, None, None].to(self.device)
        return torch.where(has_body_K11, log_word_KMV, log_null_MV[None])

    def _log_late(
        self, x: PackedBatch, rows_M: Tensor, targets_M: Tensor | None, z: PackedBatch, bodies: DocumentRows
    ) -> tuple[Tensor, Tensor]:
        """Compute log p(y_j|z,x) under each of U documents, M x U, and log p(y_j|null,x), M x 1.

        Without targets: U x M x V and M x V, for the whole vocabulary.
        """
        assert self.copy is not None, "late interaction requires a copy head"
        x_TD, z_TD = self.bert(x), self.bert(z)
        label_M = rows_M if targets_M is None else targets_M
        rows_M, label_M, *body_tensors = to_device(x_TD.device, rows_M, label_M, bodies.rows_NL, bodies.is_valid_NL)
        hidden_MD, bodies = x_TD.index_select(0, rows_M), DocumentRows(*body_tensors)
        log_vocabulary_MU = self._log_vocabulary(hidden_MD, None if targets_M is None else label_M)
        attention_MUL, tokens_UL = self.copy.cross_attention(hidden_MD, z_TD, bodies), z.tokens_T[bodies.rows_NL]
        if targets_M is not None:
            p_copy_MU = (attention_MUL * (tokens_UL[None] == label_M[:, None, None])).sum(-1)
            return self.copy.mix(hidden_MD, log_vocabulary_MU, p_copy_MU), log_vocabulary_MU
        log_word_UMV = [
            self.copy.mix_all(
                hidden_MD, log_vocabulary_MU, attention_MUL[:, u], tokens_UL[u].expand(len(hidden_MD), -1)
            )
            for u in range(len(tokens_UL))
        ]
        return torch.stack(log_word_UMV), log_vocabulary_MU


READERS: dict[str, type[Reader]] = {"together": Reader, "apart": LateInteractionReader}  # by their names on disk


def _masked_softmax(score: Tensor, is_valid: Tensor, width: int) -> Tensor:
    """Compute scaled attention weights in fp32 over the last axis; 0 where not valid, even if no entry is."""
    score = (score.float() / width**0.5).masked_fill(~is_valid, -torch.inf)
    score = score - score.amax(-1, keepdim=True).clamp(min=-1e30).detach()
    weight = score.exp()
    weights: Tensor = weight / weight.sum(-1, keepdim=True).clamp(min=_MIN_PROBABILITY)
    return weights


class SpanHead(nn.Module):
    """ORQA's span score: w . LayerNorm(ReLU(W_s h_start + W_e h_end)) (the paper's MLP, section 3.2).

    LayerNorm and w have no bias, since a constant added to all scores cancels in the softmax over spans.
    """

    def __init__(self, width: int, span_width: int, eps: float = SPAN_NORM_EPS) -> None:
        super().__init__()
        self.start = nn.Linear(width, span_width)
        self.end = nn.Linear(width, span_width, bias=False)
        self.norm = nn.LayerNorm(span_width, eps=eps, bias=False)
        self.score = nn.Linear(span_width, 1, bias=False)

    def forward(self, hidden_TD: Tensor, start_S: Tensor, end_S: Tensor) -> Tensor:
        """Compute the scores S of the spans from row ``start_S`` to row ``end_S`` (inclusive)."""
        hidden_TD = pad_rows(hidden_TD)
        start_TD, end_TD = self.start(hidden_TD), self.end(hidden_TD)
        inner_SD = F.relu(start_TD.index_select(0, pad_rows(start_S)) + end_TD.index_select(0, pad_rows(end_S)))
        score_S: Tensor = self.score(self.norm(inner_SD))[: len(start_S), 0]
        return score_S.float()


def enumerate_spans(first_row: int, length: int, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Return first and last rows of all spans of up to ``longest`` wordpieces within ``length`` rows, in order."""
    start = np.repeat(np.arange(length), longest)
    end = start + np.tile(np.arange(longest), length)
    is_inside = end < length
    return first_row + start[is_inside], first_row + end[is_inside]
