"""The REALM model: p(y|x) of masked sentences, marginalised over documents (paper, equation 1), and its loss.

Shape suffixes: B examples, K candidates (the null document last), E embedding width, M maximum of masks per
example, N sequences, U unique passages of a batch, V vocabulary, Q queries.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from realmops.corpus.snapshot_reader import Snapshot
from realmops.devices import autocast, to_device
from realmops.model import likelihood
from realmops.model.encoder import Encoder
from realmops.model.packed import PackedBatch
from realmops.model.reader import MaskedSentences, Reader
from realmops.model.retriever import Retriever
from realmops.model.sequences import SpecialTokens, join_document, join_query
from realmops.options import Pretrain
from realmops.search.bm25 import Bm25
from realmops.search.embed import document_sequences
from realmops.search.hybrid import normalised_bm25
from realmops.train.inverse_cloze import crop_run, drop_words
from realmops.train.loop import DeferredMetrics, LossAndMetrics
from realmops.train.masked_sentences import NULL, Example
from realmops.train.parallel import SINGLE_PROCESS, ProcessGroup

_EMPTY = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class Embedded:
    """Query and document embeddings of a batch by the current parameters."""

    query_BE: Tensor
    document_UE: Tensor
    row_of: dict[int, int]  # from passage id to row of document_UE


@dataclass(eq=False)
class Realm:
    """Retriever and reader over a corpus: likelihood, loss and metrics of masked sentences."""

    retriever: Retriever
    reader: Reader
    snapshot: Snapshot
    options: Pretrain
    dtype: torch.dtype
    bm25: Bm25 | None = None  # lexical index of a hybrid retriever

    def __post_init__(self) -> None:
        self.special = SpecialTokens.of(self.snapshot.tokenizer)
        self.device = self.reader.device
        self.null = join_document(_EMPTY, _EMPTY, self.special, self.snapshot.block_wordpieces)
        for module in (*self.retriever.modules(), *self.reader.modules()):
            if isinstance(module, Encoder):
                module.set_gradient_checkpointing(self.options.gradient_checkpointing)

    def queries(self, examples: Sequence[Example]) -> list[np.ndarray]:
        """Return [CLS] x [SEP] of each masked sentence."""
        return [join_query(e.x, self.special, self.options.query_wordpieces) for e in examples]

    def embed(self, examples: Sequence[Example], candidates: Sequence[Sequence[int]]) -> Embedded:
        """Embed the sentences and each distinct passage of the batch, the null document last."""
        passages = sorted({p for row in candidates for p in row})
        documents = document_sequences(self.snapshot, passages)
        documents += [self.null] if self.options.null_document or not documents else []
        with autocast(self.device, self.dtype):
            query_BE = self.retriever.query(PackedBatch(self.queries(examples)))
            document_UE = self.retriever.documents(PackedBatch([d[0] for d in documents], [d[1] for d in documents]))
        return Embedded(query_BE, document_UE, {p: i for i, p in enumerate(passages)} | {NULL: len(passages)})

    def log_prior(
        self, examples: Sequence[Example], candidates: Sequence[Sequence[int]], embedded: Embedded | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return log p(z|x), B x K with the null document last, and the mask of padding among the candidates (CPU).

        ``embedded`` is the result of :meth:`embed`, if it exists already.

        Raises:
            ValueError: a sentence has no candidate and there is no null document.
        """
        embedded = embedded or self.embed(examples, candidates)
        id_BK, missing_BK = self._pad(candidates)
        row_BK = torch.tensor([[embedded.row_of[p] for p in row] for row in id_BK.tolist()])
        if missing_BK.all(-1).any():
            raise ValueError(
                "a masked sentence has no candidate: every retrieved passage is its own or contains it, and "
                "pretrain.null_document is false; set it to true, or use a larger corpus"
            )
        row_BK, missing_on_device_BK = to_device(self.device, row_BK, missing_BK)
        dense_BK = self.retriever.relevance(embedded.query_BE, embedded.document_UE[row_BK])
        mixture = self.retriever.mixture
        bm25_BK = normalised_bm25(self.bm25, mixture, [e.visible_text for e in examples], id_BK, dense_BK.device)
        relevance_BK = mixture.combine(dense_BK, bm25_BK).masked_fill(missing_on_device_BK, -torch.inf)
        return likelihood.log_prior(relevance_BK), missing_BK

    def _pad(self, candidates: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Pad candidates to B x K ids, the null document (-1) last; return the ids and a mask of the padding."""
        null: list[int | None] = [NULL] if self.options.null_document else []
        width = max(self.options.documents, *(len(row) for row in candidates))
        padded = [[*row, *[None] * (width - len(row)), *null] for row in candidates]
        filler = next((p for row in candidates for p in row), NULL) if not null else NULL
        missing = torch.tensor([[p is None for p in row] for row in padded])
        return torch.tensor([[filler if p is None else p for p in row] for row in padded]), missing

    def log_token(self, examples: Sequence[Example], candidates: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Return log p(y_j|z,x) of every masked wordpiece under every candidate, B x K x M; and the mask of j."""
        passages = sorted({p for row in candidates for p in row})
        documents = [*(self.reader.document(self.snapshot, p) for p in passages), _EMPTY]
        column_of = {p: i for i, p in enumerate(passages)} | {NULL: len(passages)}
        id_BK, missing_BK = self._pad(candidates)
        column_BK = np.array([[column_of[p] for p in row] for row in id_BK.tolist()])
        with autocast(self.device, self.dtype):
            column_BK = np.where(missing_BK.numpy(), -1, column_BK)
            return self.reader.log_masked(self._masked(examples), documents, column_BK)

    def _masked(self, examples: Sequence[Example]) -> MaskedSentences:
        sentences, positions, targets = ([getattr(e, name) for e in examples] for name in ("x", "positions", "targets"))
        return MaskedSentences(sentences, positions, targets, self.special, self.options.reader_wordpieces)

    def log_words(self, example: Example, candidates: Sequence[int]) -> Tensor:
        """Return log p(y_j|z,x) of every wordpiece at every mask under each candidate, null last: K x M x V."""
        documents = [*(self.reader.document(self.snapshot, p) for p in candidates), _EMPTY]
        with autocast(self.device, self.dtype):
            return self.reader.log_masked_words(self._masked([example]), documents)

    @torch.no_grad()
    def guess(self, example: Example, candidates: Sequence[int]) -> dict[str, float]:
        """Return log p(y|x) (equation 1, nats) of an example's masked words, and whether the best are all correct.

        With a null document, the names with ``_without`` are the same for p(y|null,x), without retrieval.
        """
        log_prior_BK, missing_BK = self.log_prior([example], [candidates])
        log_prior_K = log_prior_BK[0, ~missing_BK[0]]
        log_word_KMV = self.log_words(example, candidates)[: len(log_prior_K)]
        targets_M = torch.from_numpy(example.targets).to(log_word_KMV.device)
        target_KM1 = targets_M.expand(len(log_word_KMV), -1)[:, :, None]
        log_likelihood_K = log_word_KMV.gather(2, target_KM1)[:, :, 0].sum(-1)
        best_M = (log_prior_K[:, None, None] + log_word_KMV).logsumexp(0).argmax(-1)
        metrics = {
            "masked_log_p": float((log_prior_K + log_likelihood_K).logsumexp(0)),
            "masked_accuracy": float(torch.equal(best_M, targets_M)),
        }
        if self.options.null_document:
            correct = torch.equal(log_word_KMV[-1].argmax(-1), targets_M)
            metrics |= {"masked_log_p_without": float(log_likelihood_K[-1]), "masked_accuracy_without": float(correct)}
        return metrics

    def loss(
        self,
        examples: Sequence[Example],
        candidates: Sequence[Sequence[int]],
        *,
        retriever_learns: bool,
        weight: float = 1.0,
        crops: np.random.Generator | None = None,
        processes: ProcessGroup = SINGLE_PROCESS,
    ) -> LossAndMetrics:
        """Return the mean of -log p(y|x) over examples (joint) or masked wordpieces (per_token), and metrics.

        ``crops`` is the generator of the crop loss, which ``pretrain.crop_weight`` adds; it is equal in all
        ``processes``, which share the batch.
        """
        with torch.set_grad_enabled(retriever_learns):
            embedded = self.embed(examples, candidates)
            log_prior_BK, missing_BK = self.log_prior(examples, candidates, embedded)
        log_token_BKM, is_mask_BM = self.log_token(examples, candidates)
        log_likelihood_BK = likelihood.log_likelihood_given_document(log_token_BKM, is_mask_BM)
        log_joint_B = likelihood.log_marginal_joint(log_prior_BK, log_likelihood_BK)
        if self.options.marginal == "joint":
            loss = -log_joint_B.mean()
        else:
            loss = -likelihood.log_marginal_per_token(log_prior_BK, log_token_BKM, is_mask_BM).sum() / is_mask_BM.sum()
        tensors = [log_prior_BK, log_likelihood_BK, log_joint_B]
        loss = weight * loss
        if self.options.crop_weight and retriever_learns and crops is not None:
            passages, document_UE = self._gather_passages(embedded, processes)
            if len(passages) > 1:
                crop_loss = self._crop_loss(passages, document_UE, crops, processes)
                loss = loss + self.options.crop_weight * crop_loss
                tensors.append(crop_loss)
        return loss, DeferredMetrics(tensors, partial(self._metrics, missing_BK))

    def _gather_passages(self, embedded: Embedded, processes: ProcessGroup) -> tuple[list[int], Tensor]:
        """Return the distinct passages of all processes, ascending, and their embeddings."""
        passages = list(embedded.row_of)[:-1]
        document_UE = embedded.document_UE[: len(passages)]
        if processes.size == 1:
            return passages, document_UE
        padding = processes.max(len(passages), self.device) - len(passages)
        id_N = processes.gather(torch.tensor([*passages, *[NULL] * padding], device=self.device))
        document_NE = processes.gather(F.pad(document_UE, (0, 0, 0, padding)))
        row = {p: n for n, p in reversed(list(enumerate(id_N.tolist()))) if p != NULL}
        return sorted(row), document_NE[[row[p] for p in sorted(row)]]

    def _crop_loss(
        self, passages: Sequence[int], document_UE: Tensor, rng: np.random.Generator, processes: ProcessGroup
    ) -> Tensor:
        """Return the inverse cloze loss of random crops, one per sentence, against all passages of the batch.

        The result is scaled so that its mean over processes is the mean over all crops.
        """
        drawn = []
        for row in rng.integers(len(passages), size=self.options.batch_size).tolist():
            body, continues = self.snapshot.body(passages[row]), self.snapshot.continues(passages[row])
            first, end = crop_run(continues, rng)
            crop = drop_words(body[first:end], continues[first:end], rng)
            drawn.append((row, join_query(crop, self.special, self.options.query_wordpieces)))
        local, weight = processes.split_batch(drawn)
        with autocast(self.device, self.dtype):
            query_QE = self.retriever.query(PackedBatch([query for _, query in local]))
        relevance_QU = self.retriever.scores(query_QE, document_UE)
        (own_Q,) = to_device(relevance_QU.device, torch.tensor([row for row, _ in local]))
        return weight * likelihood.in_batch_loss(relevance_QU, own_Q).mean()

    def _metrics(
        self,
        missing_BK: Tensor,
        log_prior_BK: Tensor,
        log_likelihood_BK: Tensor,
        log_joint_B: Tensor,
        crop_loss: Tensor | None = None,
    ) -> dict[str, float]:
        prior_BK = log_prior_BK.exp()
        metrics = {"log_marginal": log_joint_B.mean().item(), "top_share": prior_BK.amax(-1).mean().item()}
        if self.options.null_document and self.options.candidates > 1:
            null_B = log_likelihood_BK[:, -1]
            utility_BK = likelihood.retrieval_utility(log_likelihood_BK, null_B)[:, :-1]
            exists_BK = ~missing_BK[:, :-1]
            best_B = utility_BK.masked_fill(~exists_BK, -torch.inf).amax(-1)
            metrics |= {
                "p_null": prior_BK[:, -1].mean().item(),
                "marginal_gain": likelihood.marginal_gain(log_joint_B, null_B).mean().item(),
            }
            has_any_B = exists_BK[:, 0]
            if has_any_B.any():
                metrics |= {
                    "retrieval_utility": utility_BK[exists_BK].mean().item(),
                    "retrieval_utility_top": utility_BK[has_any_B, 0].mean().item(),
                    "retrieval_utility_best": best_B[has_any_B].mean().item(),
                }
        return metrics if crop_loss is None else metrics | {"crop_loss": crop_loss.item()}
