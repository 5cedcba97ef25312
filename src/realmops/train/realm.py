"""Retriever and reader joined: p(y|x) of masked sentences, summed over documents (paper, equation 1), and its loss.

Shape suffixes: B examples, K candidates (the null document last), E embedding width, M most masks of an
example, N sequences, U unique passages of a batch, V vocabulary, Q queries.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from realmops.config import Pretrain
from realmops.corpus.snapshot_reader import Snapshot
from realmops.devices import autocast, send
from realmops.model import likelihood
from realmops.model.encoder import Encoder
from realmops.model.packed import Packed
from realmops.model.reader import Masked, Reader
from realmops.model.retriever import Retriever
from realmops.model.sequences import SpecialTokens, join_document, join_query
from realmops.search.bm25 import Bm25
from realmops.search.embed import document_sequences
from realmops.search.hybrid import words_share
from realmops.train.examples import NULL, Example
from realmops.train.inverse_cloze import crop_run, dropped_words
from realmops.train.loop import DeferredMetrics
from realmops.train.parallel import ALONE, Team

_EMPTY = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class Embedded:
    """A batch as the retriever embeds it with fresh parameters; ``place`` gives each passage's row."""

    query_BE: Tensor
    document_UE: Tensor
    place: dict[int, int]


@dataclass(eq=False)
class Realm:
    """The two models joined: the loss of a batch of masked sentences and what there is to say about it."""

    retriever: Retriever
    reader: Reader
    snapshot: Snapshot
    options: Pretrain
    dtype: torch.dtype
    words: Bm25 | None = None

    def __post_init__(self) -> None:
        self.special = SpecialTokens.of(self.snapshot.tokenizer)
        self.device = self.reader.device
        self.null = join_document(_EMPTY, _EMPTY, self.special, self.snapshot.block_wordpieces)
        for module in (*self.retriever.modules(), *self.reader.modules()):
            if isinstance(module, Encoder):
                module.gradient_checkpointing = self.options.gradient_checkpointing

    def queries(self, examples: Sequence[Example]) -> list[np.ndarray]:
        """[CLS] x [SEP] of masked sentences."""
        return [join_query(e.x, self.special, self.options.query_wordpieces) for e in examples]

    def embed(self, examples: Sequence[Example], candidates: Sequence[Sequence[int]]) -> Embedded:
        """The sentences, and each passage of the batch once, the null document last."""
        passages = sorted({p for row in candidates for p in row})
        documents = document_sequences(self.snapshot, passages)
        documents += [self.null] if self.options.null_document or not documents else []
        with autocast(self.device, self.dtype):
            query_BE = self.retriever.query(Packed(self.queries(examples)))
            document_UE = self.retriever.documents(Packed([d[0] for d in documents], [d[1] for d in documents]))
        return Embedded(query_BE, document_UE, {p: i for i, p in enumerate(passages)} | {NULL: len(passages)})

    def log_prior(
        self, examples: Sequence[Example], candidates: Sequence[Sequence[int]], embedded: Embedded | None = None
    ) -> tuple[Tensor, Tensor]:
        """log p(z|x) with fresh parameters over each example's candidates, the null document last: B x K.

        ``embedded`` is what :meth:`embed` made of them.  The second result, on the CPU, marks candidates that do not
        exist.
        """
        embedded = embedded or self.embed(examples, candidates)
        id_BK, missing_BK = self._rows(candidates)
        rows_BK = torch.tensor([[embedded.place[p] for p in row] for row in id_BK.tolist()])
        if missing_BK.all(-1).any():
            raise ValueError(
                "a masked sentence has no candidate: every passage found is its own or contains it, and "
                "pretrain.null_document is false; set it to true, or use a larger corpus"
            )
        rows_BK, missing_there_BK = send(self.device, rows_BK, missing_BK)
        dense_BK = self.retriever.relevance(embedded.query_BE, embedded.document_UE[rows_BK])
        mixture = self.retriever.mixture
        words_BK = words_share(self.words, mixture, [e.words for e in examples], id_BK, dense_BK.device)
        relevance_BK = mixture.of(dense_BK, words_BK).masked_fill(missing_there_BK, -torch.inf)
        return likelihood.log_prior(relevance_BK), missing_BK

    def _rows(self, candidates: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """The candidates' ids as B x K, the null document (-1) last and in the place of those that do not exist."""
        null: list[int | None] = [NULL] if self.options.null_document else []
        width = max(self.options.documents, *(len(row) for row in candidates))
        full = [[*row, *[None] * (width - len(row)), *null] for row in candidates]
        first = next((p for row in candidates for p in row), NULL) if not null else NULL
        missing = torch.tensor([[p is None for p in row] for row in full])
        return torch.tensor([[first if p is None else p for p in row] for row in full]), missing

    def log_token(self, examples: Sequence[Example], candidates: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """log p(y_j|z,x) of every masked wordpiece under every candidate, null last: B x K x M; and which j exist."""
        passages = sorted({p for row in candidates for p in row})
        documents = [*(self.reader.document(self.snapshot, p) for p in passages), _EMPTY]
        place = {p: i for i, p in enumerate(passages)} | {NULL: len(passages)}
        id_BK, missing_BK = self._rows(candidates)
        column_BK = np.array([[place[p] for p in row] for row in id_BK.tolist()])
        with autocast(self.device, self.dtype):
            return self.reader.log_masked(
                self._masked(examples), documents, np.where(missing_BK.numpy(), -1, column_BK)
            )

    def _masked(self, examples: Sequence[Example]) -> Masked:
        sentences, positions, targets = ([getattr(e, name) for e in examples] for name in ("x", "positions", "targets"))
        return Masked(sentences, positions, targets, self.special, self.options.reader_wordpieces)

    def log_words(self, example: Example, candidates: Sequence[int]) -> Tensor:
        """log p(y_j|z,x) of every wordpiece at every mask, for each candidate and the null document last: K x M x V."""
        documents = [*(self.reader.document(self.snapshot, p) for p in candidates), _EMPTY]
        with autocast(self.device, self.dtype):
            return self.reader.log_masked_words(self._masked([example]), documents)

    @torch.no_grad()
    def guess(self, example: Example, candidates: Sequence[int]) -> dict[str, float]:
        """How well the words behind the masks are guessed: ``masked_log_p``, which is log p(y|x) (equation 1) in nats,
        and ``masked_accuracy``, 1 where the likeliest wordpiece of every mask is the right one.

        With a null document also ``..._without``: the same of p(y|null,x), without retrieval.
        """
        log_prior_BK, missing_BK = self.log_prior([example], [candidates])
        log_prior_K = log_prior_BK[0, ~missing_BK[0]]
        log_word_KMV = self.log_words(example, candidates)[: len(log_prior_K)]
        targets_M = torch.from_numpy(example.targets).to(log_word_KMV.device)
        at_KM1 = targets_M.expand(len(log_word_KMV), -1)[:, :, None]
        log_likelihood_K = log_word_KMV.gather(2, at_KM1)[:, :, 0].sum(-1)
        best_M = (log_prior_K[:, None, None] + log_word_KMV).logsumexp(0).argmax(-1)
        found = {
            "masked_log_p": float((log_prior_K + log_likelihood_K).logsumexp(0)),
            "masked_accuracy": float(torch.equal(best_M, targets_M)),
        }
        if self.options.null_document:
            right = torch.equal(log_word_KMV[-1].argmax(-1), targets_M)
            found |= {"masked_log_p_without": float(log_likelihood_K[-1]), "masked_accuracy_without": float(right)}
        return found

    def loss(
        self,
        examples: Sequence[Example],
        candidates: Sequence[Sequence[int]],
        *,
        retriever_learns: bool,
        weight: float = 1.0,
        crops: np.random.Generator | None = None,
        team: Team = ALONE,
    ) -> tuple[Tensor, DeferredMetrics]:
        """-log p(y|x), the mean over examples (joint) or over masked wordpieces (per_token), times ``weight``.

        With ``pretrain.crop_weight`` also that much of the crops' loss. Generators of equal state, one of each process,
        draw ``crops`` for the whole team.
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
            passages, document_UE = self._of_all(embedded, team)
            if len(passages) > 1:
                crop_loss = self._crop_loss(passages, document_UE, crops, team)
                loss = loss + self.options.crop_weight * crop_loss
                tensors.append(crop_loss)
        return loss, DeferredMetrics(tensors, partial(self._metrics, missing_BK))

    def _of_all(self, embedded: Embedded, team: Team) -> tuple[list[int], Tensor]:
        """The passages that the processes of a team have embedded, each once and ascending, and their embeddings."""
        passages = list(embedded.place)[:-1]
        document_UE = embedded.document_UE[: len(passages)]
        if team.size == 1:
            return passages, document_UE
        missing = team.most(len(passages), self.device) - len(passages)
        id_N = team.gather(torch.tensor([*passages, *[NULL] * missing], device=self.device))
        document_NE = team.gather(F.pad(document_UE, (0, 0, 0, missing)))
        row = {p: n for n, p in reversed(list(enumerate(id_N.tolist()))) if p != NULL}
        return sorted(row), document_NE[[row[p] for p in sorted(row)]]

    def _crop_loss(self, passages: Sequence[int], document_UE: Tensor, rng: np.random.Generator, team: Team) -> Tensor:
        """The inverse cloze task on crops of passages of a batch, one for each sentence, against all of its passages.

        It is this process's part of the mean: the mean over the team is that of all crops.
        """
        drawn = []
        for place in rng.integers(len(passages), size=self.options.batch_size).tolist():
            body, continues = self.snapshot.body(passages[place]), self.snapshot.continues(passages[place])
            first, end = crop_run(continues, rng)
            crop = dropped_words(body[first:end], continues[first:end], rng)
            drawn.append((place, join_query(crop, self.special, self.options.query_wordpieces)))
        mine, weight = team.share(drawn)
        with autocast(self.device, self.dtype):
            query_QE = self.retriever.query(Packed([query for _, query in mine]))
        relevance_QU = self.retriever.scores(query_QE, document_UE)
        (own_Q,) = send(relevance_QU.device, torch.tensor([place for place, _ in mine]))
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
            there_BK = ~missing_BK[:, :-1]
            best_B = utility_BK.masked_fill(~there_BK, -torch.inf).amax(-1)
            metrics |= {
                "p_null": prior_BK[:, -1].mean().item(),
                "marginal_gain": likelihood.marginal_gain(log_joint_B, null_B).mean().item(),
            }
            has_any_B = there_BK[:, 0]
            if has_any_B.any():
                metrics |= {
                    "retrieval_utility": utility_BK[there_BK].mean().item(),
                    "retrieval_utility_top": utility_BK[has_any_B, 0].mean().item(),
                    "retrieval_utility_best": best_B[has_any_B].mean().item(),
                }
        return metrics if crop_loss is None else metrics | {"crop_loss": crop_loss.item()}
