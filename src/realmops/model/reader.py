"""The knowledge-augmented encoder: p(y|z,x) for masked words and for answer spans (paper, section 3.2).

Shape suffixes: N sequences, T wordpieces of all sequences, D width, M masked wordpieces, V vocabulary, L longest body,
X most masked wordpieces of a sequence, U passages, S spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from realmops.corpus.snapshot_reader import Snapshot
from realmops.devices import send
from realmops.model.encoder import Encoder
from realmops.model.lexical_features import Matches
from realmops.model.masked_word_head import MaskedWordHead
from realmops.model.packed import Packed, even_rows
from realmops.model.sequences import SpecialTokens, join_alone, join_reader

SPAN_NORM_EPS = 1e-5  # of our own span heads; published ones have 1e-3
_NOTHING = np.zeros(0, dtype=np.int64)
LEAST = 1e-20  # a probability of copying below it counts as this much, so that its logarithm is finite


@dataclass(frozen=True)
class Bodies:
    """Where the wordpieces of each sequence's document lie in a packed batch; a sequence may have none."""

    rows_NL: Tensor  # packed rows; 0 where ``there_NL`` is False
    there_NL: Tensor

    @staticmethod
    def of(first: Sequence[int], end: Sequence[int]) -> Bodies:
        """From the first packed row of each body, and the one behind its last; on the CPU."""
        first_N, end_N = np.asarray(first, np.int64), np.asarray(end, np.int64)
        rows_NL = first_N[:, None] + np.arange(max(1, int((end_N - first_N).max(initial=0))))
        there_NL = rows_NL < end_N[:, None]
        return Bodies(torch.from_numpy(np.where(there_NL, rows_NL, 0)), torch.from_numpy(there_NL))


@dataclass(frozen=True)
class Masked:
    """Masked sentences x as wordpieces, and how a network gets them: ``limit`` wordpieces, the rest is cut."""

    sentences: Sequence[np.ndarray]
    positions: Sequence[np.ndarray]  # of the masks of each
    targets: Sequence[np.ndarray]  # the wordpieces behind them
    special: SpecialTokens
    limit: int

    @property
    def is_mask_BM(self) -> Tensor:
        """Which masks a sentence has."""
        counts_B = torch.tensor([len(at) for at in self.positions])
        return torch.arange(int(counts_B.max()))[None, :] < counts_B[:, None]

    @property
    def targets_M(self) -> Tensor:
        """What all masks hid, one sentence after another."""
        return torch.from_numpy(np.concatenate(self.targets))

    @property
    def sequence_M(self) -> Tensor:
        """In which sentence each mask stands."""
        return torch.from_numpy(np.repeat(np.arange(len(self.positions)), [len(at) for at in self.positions]))

    @property
    def queries(self) -> Packed:
        """[CLS] x [SEP] of each sentence."""
        return Packed([join_alone(one, self.special, self.limit) for one in self.sentences])

    def rows_M(self, batch: Packed) -> Tensor:
        """The packed rows of the masks, where each sentence stands behind [CLS] of its sequence."""
        rows = [start + 1 + at for start, at in zip(batch.starts[:-1], self.positions, strict=True)]
        return torch.from_numpy(np.concatenate(rows))

    def taken(self, places: Sequence[int]) -> Masked:
        """The sentences at these places, as often as they are named."""
        return replace(
            self,
            sentences=[self.sentences[b] for b in places],
            positions=[self.positions[b] for b in places],
            targets=[self.targets[b] for b in places],
        )

    def joined(self, documents: Sequence[np.ndarray]) -> tuple[Packed, Bodies]:
        """[CLS] x [SEP] body [SEP] of each sentence with its document."""
        joined = [join_reader(x, z, self.special, self.limit) for x, z in zip(self.sentences, documents, strict=True)]
        batch = Packed([tokens for tokens, _, _ in joined], [segments for _, segments, _ in joined])
        first = [start + offset for start, (*_, offset) in zip(batch.starts[:-1], joined, strict=True)]
        return batch, Bodies.of(first, (batch.starts[1:] - 1).tolist())

    def alone(self, documents: Sequence[np.ndarray]) -> tuple[Packed, Bodies]:
        """Documents on their own: [CLS][SEP] body [SEP], the join of nothing with each."""
        nothing = [_NOTHING] * len(documents)
        return Masked(nothing, nothing, nothing, self.special, self.limit).joined(documents)


class CopyHead(nn.Module):
    """A pointer from a masked wordpiece to the wordpieces of the document, and the gate that mixes it in.

    p(y|z,x) = (1 - g) p_vocabulary(y) + g sum of the attention on the wordpieces of z that are y, as in pointer
    networks with a generator (See et al. 2017). It is not in REALM's paper: a short pre-training is too short for the
    reader to learn to copy, and without it the retriever gets no signal. Query and key start as the identity and the
    gate at one half, so that it copies from the first step.
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
        self, hidden_MD: Tensor, hidden_TD: Tensor, bodies: Bodies, sequence_M: Tensor, place_M: Tensor, most: int
    ) -> Tensor:
        """The attention of each mask on its own sequence's body, M x L; 0 where there is no wordpiece.

        A mask is the one at ``place_M``, from 0, of at most ``most`` in the sequence ``sequence_M``.
        """
        query_MD, key_TD = self.query(hidden_MD), self.key(hidden_TD)
        shape = (len(bodies.rows_NL), most, query_MD.shape[1])
        query_NXD = query_MD.new_zeros(shape).index_put((sequence_M, place_M), query_MD)
        score_NXL = query_NXD @ key_TD[bodies.rows_NL].transpose(1, 2)
        return _softmax(score_NXL[sequence_M, place_M], bodies.there_NL[sequence_M], key_TD.shape[1])

    def attention_apart(self, hidden_MD: Tensor, z_TD: Tensor, bodies: Bodies) -> Tensor:
        """The attention of each mask on the body of each document, M x U x L."""
        score_MT = self.query(hidden_MD) @ self.key(z_TD).T
        return _softmax(score_MT[:, bodies.rows_NL], bodies.there_NL[None], z_TD.shape[1])

    def mixed(self, hidden_MD: Tensor, log_vocabulary_MU: Tensor, p_copy_MU: Tensor) -> Tensor:
        """log p(y|z,x), M x U, from the vocabulary's log probability and the probability of copying y from z."""
        gate_M1 = self.gate(hidden_MD).float()
        log_copy_MU = p_copy_MU.clamp(min=LEAST).log()
        return torch.logaddexp(F.logsigmoid(-gate_M1) + log_vocabulary_MU, F.logsigmoid(gate_M1) + log_copy_MU)

    def words(self, hidden_MD: Tensor, log_vocabulary_MV: Tensor, attention_ML: Tensor, token_ML: Tensor) -> Tensor:
        """The same of every wordpiece y of the vocabulary, M x V."""
        p_copy_MV = torch.zeros_like(log_vocabulary_MV).scatter_add(1, token_ML, attention_ML)
        return self.mixed(hidden_MD, log_vocabulary_MV, p_copy_MV)


class Reader(nn.Module):
    """An encoder over join(x, z) with a masked word head; fine-tuning adds ORQA's span head.

    With ``matches`` it is told how z compares with x. With ``copy`` it may copy masked words from z. Another reader
    of masked words overrides the three methods ``log_masked...``, and has a name in ``READERS``.
    """

    apart = False  # whether what was read for one sentence can be tried for all others

    def __init__(
        self, encoder: Encoder, head: MaskedWordHead | None, *, copies: bool = False, matches: bool = False
    ) -> None:
        super().__init__()
        self.bert, self.masked_words = encoder, head
        self.copy = CopyHead(encoder.width) if copies else None
        self.matches = Matches(encoder.vocabulary, encoder.added_width) if matches else None
        self.spans: SpanHead | None = None

    @property
    def encoder(self) -> Encoder:
        """The network below; the names of its parameters on disk begin with ``bert.``."""
        return self.bert

    @property
    def device(self) -> torch.device:
        return self.bert.device

    def encode(self, batch: Packed) -> Tensor:
        """Hidden states T x D of a batch of join(x, z)."""
        hidden_TD: Tensor = self.bert(batch, None if self.matches is None else self.matches(batch))
        return hidden_TD

    def document(self, snapshot: Snapshot, passage: int) -> np.ndarray:
        """The wordpieces of a passage as this reader takes them: where it compares, with the form of their words."""
        return snapshot.body(passage) if self.matches is None else snapshot.written(passage)

    def log_token(
        self, batch: Packed, rows_M: Tensor, targets_M: Tensor | None, bodies: Bodies, sequence_M: Tensor
    ) -> Tensor:
        """log p(y_j|z,x) of the wordpieces ``targets_M`` at the packed rows ``rows_M``, length M.

        Without targets that of every wordpiece of the vocabulary, M x V. ``sequence_M`` says in which sequence a mask
        stands, ascending; all arguments are on the CPU. The head is evaluated at those rows only. Without a body, as
        with the null document, the vocabulary alone counts.
        """
        counts_N = torch.bincount(sequence_M)
        place_M = torch.arange(len(sequence_M)) - (counts_N.cumsum(0) - counts_N)[sequence_M]
        most = int(counts_N.max()) if len(rows_M) else 0
        wanted_M = rows_M if targets_M is None else targets_M
        rows_M, sequence_M, place_M, wanted_M, rows_NL, there_NL = send(
            self.device, rows_M, sequence_M, place_M, wanted_M, bodies.rows_NL, bodies.there_NL
        )
        hidden_TD = self.encode(batch)
        hidden_MD = hidden_TD.index_select(0, rows_M)
        log_vocabulary_MU = self._log_vocabulary(hidden_MD, None if targets_M is None else wanted_M)
        if self.copy is None:
            return log_vocabulary_MU if targets_M is None else log_vocabulary_MU[:, 0]
        bodies = Bodies(rows_NL, there_NL)
        attention_ML = self.copy.attention(hidden_MD, hidden_TD, bodies, sequence_M, place_M, most)
        token_ML = batch.tokens_T[rows_NL][sequence_M]
        if targets_M is None:
            mixed_MU = self.copy.words(hidden_MD, log_vocabulary_MU, attention_ML, token_ML)
        else:
            p_copy_M1 = (attention_ML * (token_ML == wanted_M[:, None])).sum(-1, keepdim=True)
            mixed_MU = self.copy.mixed(hidden_MD, log_vocabulary_MU, p_copy_M1)
        log_MU = torch.where(there_NL.any(-1)[sequence_M][:, None], mixed_MU, log_vocabulary_MU)
        return log_MU if targets_M is None else log_MU[:, 0]

    def log_masked(
        self, masked: Masked, documents: Sequence[np.ndarray], column_BK: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """log p(y_j|z,x) of every masked wordpiece under every candidate of its sentence: B x K x M; and which j exist.

        Args:
            documents: wordpieces of the candidates of all sentences, each once; one without any is the null document.
            column_BK: the candidates of each sentence among these, -1 where it has fewer, and the result no meaning.
        """
        is_mask_BM = masked.is_mask_BM
        (count, longest), width = is_mask_BM.shape, column_BK.shape[1]
        pairs = [(b, k, column_BK[b, k]) for b, k in np.argwhere(column_BK >= 0).tolist()]
        log_token_N = self.log_masked_pairs(masked.taken([b for b, *_ in pairs]), [documents[u] for *_, u in pairs])
        flat = [(b * width + k) * longest + np.arange(len(masked.positions[b])) for b, k, _ in pairs]
        out = log_token_N.new_zeros(count * width * longest)
        flat_N, is_mask_BM = send(self.device, torch.from_numpy(np.concatenate(flat)), is_mask_BM)
        return out.index_copy(0, flat_N, log_token_N).view(count, width, longest), is_mask_BM

    def log_masked_pairs(self, masked: Masked, documents: Sequence[np.ndarray]) -> Tensor:
        """log p(y_j|z,x) of masked wordpieces, each sentence with one document of its own, length M."""
        batch, bodies = masked.joined(documents)
        return self.log_token(batch, masked.rows_M(batch), masked.targets_M, bodies, masked.sequence_M)

    def log_masked_words(self, masked: Masked, documents: Sequence[np.ndarray]) -> Tensor:
        """log p(y_j|z,x) of every wordpiece at the masks of one sentence, for each document: K x M x V."""
        each = masked.taken([0] * len(documents))
        batch, bodies = each.joined(documents)
        log_word_NV = self.log_token(batch, each.rows_M(batch), None, bodies, each.sequence_M)
        return log_word_NV.view(len(documents), len(masked.positions[0]), -1)

    def _log_vocabulary(self, hidden_MD: Tensor, targets_M: Tensor | None) -> Tensor:
        """log p of the targets by the masked word head, M x 1; without targets of all wordpieces, M x V."""
        if self.masked_words is None:
            raise ValueError(
                f"the reader has {self.encoder.words}, which predicts no masked words; set ict.reader_steps=0 and "
                "pretrain.steps=0, or choose an encoder with bert.init"
            )
        logits_MV: Tensor = self.masked_words(hidden_MD, self.bert.word_vectors)
        if targets_M is None:
            return logits_MV.float().log_softmax(-1)
        return -F.cross_entropy(logits_MV.float(), targets_M, reduction="none")[:, None]


class ReaderApart(Reader):
    """Encodes x and z each on its own, once, and the copy head alone brings them together.

    Any number of passages can then be tried for any number of sentences. It needs ``copies``.
    """

    apart = True

    def log_masked(
        self, masked: Masked, documents: Sequence[np.ndarray], column_BK: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """As ``Reader.log_masked``, each sentence and each document read once."""
        full = [u for u, document in enumerate(documents) if len(document)]
        place_U = np.full(len(documents), len(full))  # of the null document: behind the others
        place_U[full] = np.arange(len(full))
        x, (z, bodies) = masked.queries, masked.alone([documents[u] for u in full] or [_NOTHING])
        log_token_NU, log_null_N1 = self._log_apart(x, masked.rows_M(x), masked.targets_M, z, bodies)
        log_token_NU = torch.cat([log_token_NU[:, : len(full)], log_null_N1], dim=1)
        there_BK, is_mask_BM = torch.from_numpy(place_U[np.maximum(column_BK, 0)]), masked.is_mask_BM
        there_BK, at_2N, is_mask_BM = send(self.device, there_BK, is_mask_BM.nonzero().T, is_mask_BM)
        padded_BMU = log_token_NU.new_zeros(*is_mask_BM.shape, log_token_NU.shape[1])
        padded_BMU = padded_BMU.index_put(tuple(at_2N), log_token_NU)
        columns_BMK = there_BK[:, None, :].expand(-1, is_mask_BM.shape[1], -1)
        return padded_BMU.gather(2, columns_BMK).transpose(1, 2), is_mask_BM

    def log_masked_pairs(self, masked: Masked, documents: Sequence[np.ndarray]) -> Tensor:
        x, (z, bodies) = masked.queries, masked.alone(documents)
        log_token_MU, log_null_M1 = self._log_apart(x, masked.rows_M(x), masked.targets_M, z, bodies)
        sequence_M = masked.sequence_M
        sequence_M, is_null_M = send(self.device, sequence_M, ~bodies.there_NL.any(-1)[sequence_M])
        return torch.where(is_null_M, log_null_M1[:, 0], log_token_MU.gather(1, sequence_M[:, None])[:, 0])

    def log_masked_words(self, masked: Masked, documents: Sequence[np.ndarray]) -> Tensor:
        x, (z, bodies) = masked.queries, masked.alone(documents)
        log_word_KMV, log_null_MV = self._log_apart(x, masked.rows_M(x), None, z, bodies)
        there_K = bodies.there_NL.any(-1)[:, None, None].to(self.device)
        return torch.where(there_K, log_word_KMV, log_null_MV[None])

    def _log_apart(
        self, x: Packed, rows_M: Tensor, targets_M: Tensor | None, z: Packed, bodies: Bodies
    ) -> tuple[Tensor, Tensor]:
        """log p(y_j|z,x) under each of U documents, M x U, and log p(y_j|null,x), M x 1; x and z are read apart.

        Without targets the same of every wordpiece of the vocabulary: U x M x V, and M x V.
        """
        assert self.copy is not None, "only the copy head joins what is read apart"
        x_TD, z_TD = self.bert(x), self.bert(z)
        wanted_M = rows_M if targets_M is None else targets_M
        rows_M, wanted_M, *of_bodies = send(x_TD.device, rows_M, wanted_M, bodies.rows_NL, bodies.there_NL)
        hidden_MD, bodies = x_TD.index_select(0, rows_M), Bodies(*of_bodies)
        log_vocabulary_MU = self._log_vocabulary(hidden_MD, None if targets_M is None else wanted_M)
        attention_MUL, tokens_UL = self.copy.attention_apart(hidden_MD, z_TD, bodies), z.tokens_T[bodies.rows_NL]
        if targets_M is not None:
            p_copy_MU = (attention_MUL * (tokens_UL[None] == wanted_M[:, None, None])).sum(-1)
            return self.copy.mixed(hidden_MD, log_vocabulary_MU, p_copy_MU), log_vocabulary_MU
        words = [
            self.copy.words(hidden_MD, log_vocabulary_MU, attention_MUL[:, u], tokens_UL[u].expand(len(hidden_MD), -1))
            for u in range(len(tokens_UL))
        ]
        return torch.stack(words), log_vocabulary_MU


READERS: dict[str, type[Reader]] = {"together": Reader, "apart": ReaderApart}
"""The classes of readers, as a checkpoint names them."""


def _softmax(score: Tensor, there: Tensor, width: int) -> Tensor:
    """Attention in fp32 over the last axis; 0 where nothing is there, also where that is everywhere."""
    score = (score.float() / width**0.5).masked_fill(~there, -torch.inf)
    score = score - score.amax(-1, keepdim=True).clamp(min=-1e30).detach()
    weight = score.exp()
    weights: Tensor = weight / weight.sum(-1, keepdim=True).clamp(min=LEAST)
    return weights


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
        hidden_TD = even_rows(hidden_TD)
        start_TD, end_TD = self.start(hidden_TD), self.end(hidden_TD)
        inner_SD = F.relu(start_TD.index_select(0, even_rows(start_S)) + end_TD.index_select(0, even_rows(end_S)))
        score_S: Tensor = self.score(self.norm(inner_SD))[: len(start_S), 0]
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
