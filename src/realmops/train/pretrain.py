"""REALM pre-training: retrieve, read, and learn both from masked words (paper, sections 3.1 to 3.4).

Shape suffixes: B examples, K candidates (the null document last), E embedding width, M most masks of an
example, N sequences, P passages, U unique passages of a batch, Q queries.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from realmops.artifacts import seed_for
from realmops.bert import Bert, Packed, autocast, send
from realmops.config import Optimiser, Pretrain
from realmops.corpus.masking import mask_positions, recurring
from realmops.corpus.snapshot import Snapshot
from realmops.corpus.spans import Spans
from realmops.corpus.wordpieces import contains
from realmops.index.embed import document_sequences, embed, embed_there, query_sequences
from realmops.index.hybrid import Hybrid, Words, words_share
from realmops.index.mips import PassageIndex, exact
from realmops.index.staleness import top_k_change
from realmops.model import likelihood
from realmops.model.reader import Reader, log_token_of_pairs, log_words_of_pairs, read_apart
from realmops.model.retriever import Retriever
from realmops.model.sequences import SpecialTokens, join_document, join_query
from realmops.train.ict import SentencesWithSpans, crop_run, dropped_words
from realmops.train.loop import Context, Later, fit
from realmops.train.optimiser import Group
from realmops.train.parallel import ALONE, Team

NULL = -1
COLLAPSE_WINDOW = 50


@dataclass(frozen=True)
class Example:
    """A masked sentence: ``x`` with [MASK] in place, where the masks are, what they hid, where it is from."""

    passage: int  # NULL when x is not from the corpus that is searched
    original: np.ndarray
    x: np.ndarray
    positions: np.ndarray
    targets: np.ndarray
    words: str  # x as text without what is masked, for a search by words


class Examples:
    """Masked sentences of a text, drawn by seed and step.

    The text is the corpus that is searched, or (``elsewhere``) another one, as CC-News in the paper's Table 1.
    """

    def __init__(self, snapshot: Snapshot, spans: Spans, options: Pretrain, *, elsewhere: bool = False) -> None:
        self.snapshot, self.options, self.elsewhere = snapshot, options, elsewhere
        self.special = SpecialTokens.of(snapshot.tokenizer)
        self.spans, self.rows = spans, SentencesWithSpans(snapshot, spans)
        self.usable = np.ones(len(self.rows), dtype=bool)
        if options.masking == "recurring":
            self.usable = recurring(snapshot, self.rows[:], options.max_masks)
            if not self.usable.any():
                raise ValueError(
                    f"{spans.folder}: no salient span stands in a second passage; set pretrain.masking to salient"
                )
        self._draws_from(self.usable)

    def _draws_from(self, usable: np.ndarray) -> None:
        self.drawn = np.flatnonzero(usable).astype(np.int32)
        place = np.searchsorted(self.drawn, self.spans.offsets)
        there = place[1:] > place[:-1]
        self.first_row, self.end_row = place[:-1][there], place[1:][there]

    def hold_out(self, rows: np.ndarray) -> None:
        """Draw no span of the sentences of these rows from now on; where nothing would be left, they are drawn."""
        sentence_N = self.spans.rows[:, 1]
        held_S = np.zeros(len(self.snapshot.sentence_rows), dtype=bool)
        held_S[sentence_N[rows]] = True
        left = self.usable & ~held_S[sentence_N]
        if left.any():
            self._draws_from(left)

    def draw(self, rng: np.random.Generator) -> Example:
        """A passage uniform among those with a span, then one of its spans uniform; x is the span's sentence."""
        chosen = int(rng.integers(len(self.first_row)))
        row = int(self.drawn[rng.integers(self.first_row[chosen], self.end_row[chosen])])
        return self.example(row, rng)

    def example(self, row: int, rng: np.random.Generator) -> Example:
        """The sentence of one span, masked."""
        passage, first, end, start, stop = self.rows[row].tolist()
        limit = min(self.options.query_wordpieces - 2, self.options.reader_wordpieces - 3)
        if start >= first + limit:  # the span lies behind the limit: take the sentence's end instead of its start
            first, end = max(first, min(start, stop - limit)), stop
        end = min(end, first + limit)
        original = self.snapshot.body(passage)[first:end]
        salient = (start - first, min(stop, end) - first)
        continues = self.snapshot.continues_word[original]
        at = mask_positions(self.options.masking, rng, salient, continues, self.options.max_masks)
        x = original.copy()
        x[at] = self.special.mask
        words = unmasked_text(self.snapshot.text(passage), self.snapshot.chars(passage)[first:end], at)
        return Example(NULL if self.elsewhere else passage, original, x, at, original[at], words)


def unmasked_text(text: str, chars: np.ndarray, positions: np.ndarray) -> str:
    """The text of a run of wordpieces without those at ``positions``; ``chars`` are the run's characters in it."""
    if not len(chars):
        return ""
    kept = list(text[chars[0, 0] : chars[-1, 1]])
    for start, end in (chars[positions] - chars[0, 0]).tolist():
        kept[start:end] = " " * (end - start)
    return "".join(kept)


@dataclass
class Index:
    """An adopted generation: the embedded passages, the retriever it belongs to, and when its weights were made."""

    step: int
    passages: PassageIndex
    retriever: Retriever
    published: float
    new: bool  # False for the one that a resumed run had in use already


class IndexSource(Protocol):
    """The trainer's side of the exchange, as the loop sees it."""

    def at_step(self, step: int, retriever: Retriever) -> Index | None:
        """Publish and adopt as the options say; the generation to use from this step on, or None to go on."""


@dataclass(frozen=True)
class SharedSource:
    """The first process's own indexes for all that train together: it alone has the exchange.

    Embeddings are sent from host memory to host memory; those of an approximate index need not fit on a GPU.
    """

    team: Team
    own: IndexSource | None
    passages: Callable[[Tensor, Retriever], PassageIndex]
    device: torch.device

    def at_step(self, step: int, retriever: Retriever) -> Index | None:
        """What the first process's source says."""
        index = None if self.own is None else self.own.at_step(step, retriever)
        if self.team.size == 1:
            return index
        embedding_PE = index.passages.embedding_PE.cpu() if index else torch.empty(0, 0)
        head = [1, index.step, *embedding_PE.shape, index.published, index.new] if index else [0] * 6
        there, made_at, passages, width, published, new = self.team.send_numbers(head, self.device)
        if not there:
            return None
        if index is None:
            embedding_PE = torch.empty(int(passages), int(width))
        searcher = index.retriever if index else copy.deepcopy(retriever).eval()
        self.team.send([embedding_PE, *searcher.parameters()])
        return index or Index(int(made_at), self.passages(embedding_PE, searcher), searcher, published, bool(new))


def depth(options: Pretrain) -> int:
    """How many passages are asked for, of which some are trivial."""
    return options.documents + 8


class Candidates:
    """Retrieval for training: the top passages of an index, trivial ones excluded."""

    def __init__(self, snapshot: Snapshot, options: Pretrain, words: Words | None = None) -> None:
        self.snapshot, self.options, self.words = snapshot, options, words
        self.counts = Counter[str]()  # passages that each rule dropped, and examples short of candidates

    def retrieve(self, examples: Sequence[Example], query_BE: Tensor, index: Index) -> list[list[int]]:
        """Passage ids for each example, best first; fewer than wanted where a search 16 times deeper has no more.

        Dropped are the passage of x itself and every passage that contains the unmasked sentence.
        """
        wanted = self.options.documents
        search = Hybrid(index.passages, self.words, index.retriever.mixture, index.retriever.scale)
        ids = search.search(query_BE, [e.words for e in examples], depth(self.options)).id_QK
        result = []
        for row, example in enumerate(examples):
            kept, dropped = self._keep(example, ids[row].tolist(), wanted)
            if len(kept) < wanted and ids.shape[1] < len(self.snapshot):
                more = search.search(query_BE[row : row + 1], [example.words], 16 * depth(self.options)).id_QK
                kept, dropped = self._keep(example, more[0].tolist(), wanted)
            self.counts.update(dropped)
            self.counts["short"] += len(kept) < wanted
            result.append(kept)
        return result

    def shared(self, examples: Sequence[Example], found: Sequence[Sequence[int]]) -> list[list[int]]:
        """Each example's own candidates, and behind them what was found for the others and the passages they are from.

        A reader that reads sentences and passages apart has read them all in any case.  Trivial ones are left out.
        Where no passage is wanted (``candidates: 1``, the null document alone) there are none of others either.
        """
        if not self.options.documents:
            return [list(row) for row in found]
        pool = sorted({p for row in found for p in row} | {e.passage for e in examples if e.passage != NULL})
        result = []
        for example, own in zip(examples, found, strict=True):
            known = set(own)
            others, dropped = self._keep(example, [p for p in pool if p not in known], len(pool))
            self.counts.update(dropped)
            result.append([*own, *others])
        return result

    def _keep(self, example: Example, ids: list[int], wanted: int) -> tuple[list[int], Counter[str]]:
        dropped = Counter[str]()
        if not self.options.exclude_trivial:
            return [passage for passage in ids[:wanted] if passage >= 0], dropped
        kept: list[int] = []
        for passage in ids:
            if len(kept) == wanted or passage < 0:
                break
            if passage == example.passage:
                dropped["dropped_own"] += 1
            elif contains(self.snapshot.body(passage), example.original):
                dropped["dropped_containing"] += 1
            else:
                kept.append(passage)
        return kept, dropped


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
    words: Words | None = None

    def __post_init__(self) -> None:
        self.special = SpecialTokens.of(self.snapshot.tokenizer)
        self.device = self.reader.bert.word.weight.device
        self.null = join_document(_EMPTY, _EMPTY, self.special, self.snapshot.block_wordpieces)
        for module in (*self.retriever.modules(), *self.reader.modules()):
            if isinstance(module, Bert):
                module.gradient_checkpointing = self.options.gradient_checkpointing

    def queries(self, examples: Sequence[Example]) -> list[np.ndarray]:
        """[CLS] x [SEP] of masked sentences."""
        return [join_query(e.x, self.special, self.options.query_wordpieces) for e in examples]

    def log_prior(self, examples: Sequence[Example], candidates: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """log p(z|x) with fresh parameters over each example's candidates, the null document last: B x K.

        Each passage of the batch is embedded once.  The second result, on the CPU, marks candidates that do not exist.
        """
        return self._log_prior(examples, candidates, self.embed(examples, candidates))

    def embed(self, examples: Sequence[Example], candidates: Sequence[Sequence[int]]) -> Embedded:
        """The sentences, and each passage of the batch once, the null document last."""
        passages = sorted({p for row in candidates for p in row})
        documents = document_sequences(self.snapshot, passages)
        documents += [self.null] if self.options.null_document or not documents else []
        with autocast(self.device, self.dtype):
            query_BE = self.retriever.query(Packed(self.queries(examples)))
            document_UE = self.retriever.documents(Packed([d[0] for d in documents], [d[1] for d in documents]))
        return Embedded(query_BE, document_UE, {p: i for i, p in enumerate(passages)} | {NULL: len(passages)})

    def _log_prior(
        self, examples: Sequence[Example], candidates: Sequence[Sequence[int]], embedded: Embedded
    ) -> tuple[Tensor, Tensor]:
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
        longest = max(len(e.positions) for e in examples)
        is_mask_BM = torch.arange(longest)[None, :] < torch.tensor([len(e.positions) for e in examples])[:, None]
        if self.reader.apart:
            return self._log_token_apart(examples, candidates, is_mask_BM)
        count = max(self.options.candidates, *(len(row) + int(self.options.null_document) for row in candidates))
        sentences, documents, flat = [], [], []
        for b, (example, row) in enumerate(zip(examples, candidates, strict=True)):
            bodies = [self.reader.document(self.snapshot, p) for p in row]
            slots = list(range(len(bodies)))
            if self.options.null_document:
                bodies, slots = [*bodies, _EMPTY], [*slots, count - 1]
            for k, body in zip(slots, bodies, strict=True):
                sentences.append(example)
                documents.append(body)
                flat.append((b * count + k) * longest + np.arange(len(example.positions)))
        with autocast(self.device, self.dtype):
            log_token_N = log_token_of_pairs(
                self.reader,
                [e.x for e in sentences],
                [e.positions for e in sentences],
                torch.from_numpy(np.concatenate([e.targets for e in sentences])),
                documents,
                self.special,
                self.options.reader_wordpieces,
            )
        out = log_token_N.new_zeros(len(examples) * count * longest)
        flat_N, is_mask_BM = send(self.device, torch.from_numpy(np.concatenate(flat)), is_mask_BM)
        return out.index_copy(0, flat_N, log_token_N).view(len(examples), count, longest), is_mask_BM

    def _log_token_apart(
        self, examples: Sequence[Example], candidates: Sequence[Sequence[int]], is_mask_BM: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same with each sentence and each passage of the batch read once."""
        passages = sorted({p for row in candidates for p in row})
        place = {p: i for i, p in enumerate(passages)} | {NULL: len(passages)}
        x = Packed(self.queries(examples))
        z, bodies = read_apart(
            [self.snapshot.body(p) for p in passages] or [_EMPTY],
            self.special,
            self.options.reader_wordpieces,
        )
        rows = np.concatenate([s + 1 + e.positions for s, e in zip(x.starts[:-1], examples, strict=True)])
        targets = np.concatenate([e.targets for e in examples])
        with autocast(self.device, self.dtype):
            log_token_NU, log_null_N = self.reader.log_token_apart(
                x, torch.from_numpy(rows), torch.from_numpy(targets), z, bodies
            )
        log_token_NU = torch.cat([log_token_NU[:, : len(passages)], log_null_N[:, None]], dim=1)
        id_BK, _ = self._rows(candidates)
        column_BK = torch.tensor([[place[p] for p in row] for row in id_BK.tolist()])
        column_BK, at_2N, is_mask_BM = send(self.device, column_BK, is_mask_BM.nonzero().T, is_mask_BM)
        padded_BMU = log_token_NU.new_zeros(*is_mask_BM.shape, log_token_NU.shape[1])
        padded_BMU = padded_BMU.index_put(tuple(at_2N), log_token_NU)
        columns_BMK = column_BK[:, None, :].expand(-1, is_mask_BM.shape[1], -1)
        return padded_BMU.gather(2, columns_BMK).transpose(1, 2), is_mask_BM

    def log_words(self, example: Example, candidates: Sequence[int]) -> Tensor:
        """log p(y_j|z,x) of every wordpiece at every mask, for each candidate and the null document last: K x M x V."""
        documents = [*(self.reader.document(self.snapshot, p) for p in candidates), _EMPTY]
        with autocast(self.device, self.dtype):
            return log_words_of_pairs(
                self.reader, example.x, example.positions, documents, self.special, self.options.reader_wordpieces
            )

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
    ) -> tuple[Tensor, Later]:
        """-log p(y|x), the mean over examples (joint) or over masked wordpieces (per_token), times ``weight``.

        With ``pretrain.crop_weight`` also that much of the crops' loss. Generators of equal state, one of each process,
        draw ``crops`` for the whole team.
        """
        with torch.set_grad_enabled(retriever_learns):
            embedded = self.embed(examples, candidates)
            log_prior_BK, missing_BK = self._log_prior(examples, candidates, embedded)
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
        return loss, Later(tensors, partial(self._metrics, missing_BK))

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
            body, continues = self.snapshot.body(passages[place]), self.snapshot.continues_word
            first, end = crop_run(body, continues, rng)
            crop = dropped_words(body[first:end], continues, rng)
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


class CollapseAlarm:
    """The vicious cycle of section 3.4: null, or one passage for everybody, takes all mass and gradients die."""

    def __init__(self, share: float, warn: Callable[[str], None]) -> None:
        self.share, self.warn = share, warn
        self.null: list[float] = []
        self.first: list[int] = []
        self.raised = False

    def watch(self, step: int, p_null: float, first_choices: Sequence[int]) -> bool:
        """Take one step's numbers; warns once, and returns whether the retriever has collapsed."""
        self.null = [*self.null, p_null][-COLLAPSE_WINDOW:]
        self.first = [*self.first, *first_choices][-COLLAPSE_WINDOW * max(1, len(first_choices)) :]
        if len(self.null) < COLLAPSE_WINDOW:
            return False
        null = float(np.mean(self.null))
        values, counts = np.unique(self.first, return_counts=True)
        one = float(counts.max() / counts.sum()) if len(counts) else 0.0
        collapsed = null > self.share or one > self.share
        if collapsed and not self.raised:
            what = (
                f"the null document has {null:.0%} of p(z|x)"
                if null > self.share
                else f"passage {values[counts.argmax()]} comes first for {one:.0%} of the queries"
            )
            self.warn(
                f"step {step}: the retriever has collapsed: {what} over the last {COLLAPSE_WINDOW} steps, "
                "and its gradient dies. "
                "Train ict longer, raise pretrain.retriever_delay or lower pretrain.retriever_learning_rate"
            )
        self.raised = self.raised or collapsed
        return collapsed


def pretrain(
    context: Context,
    realm: Realm,
    examples: Examples,
    optimiser: Optimiser,
    source: IndexSource,
    *,
    evaluate: Callable[[Index], dict[str, float]],
    warn: Callable[[str], None],
) -> None:
    """Run REALM pre-training: the examples' words are guessed with passages of the realm's snapshot.

    ``evaluate`` gives metrics of every adopted index, logged at its step.  The weights of words and embeddings of a
    hybrid retriever stay as they are.
    """
    options, retriever, reader = realm.options, realm.retriever, realm.reader
    candidates = Candidates(realm.snapshot, options, realm.words)
    alarm = CollapseAlarm(options.collapse_share, warn)
    current: list[Index] = []
    adopted: dict[str, float] = {}

    def at_step(step: int) -> None:
        new = source.at_step(step, retriever)
        if new is None:
            assert current, "the first step needs an index"
            return
        if current and options.staleness_queries and context.team.leads:
            adopted["top_k_change"] = _change(current[0], new, examples, realm, context)
        current[:] = [new]
        if new.new and context.team.leads:
            adopted.update(evaluate(new), refreshed=1.0)

    def step_loss(step: int) -> tuple[Tensor, Later]:
        index = current[0]
        rng = np.random.default_rng(seed_for(context.seed, context.stream, "batch", step))
        drawn = [examples.draw(rng) for _ in range(options.batch_size)]
        counts = [len(e.positions) for e in drawn] if options.marginal == "per_token" else None
        batch, weight = context.team.share(drawn, counts)
        searcher = index.retriever if options.query_encoder == "snapshot" else retriever
        asked = drawn if reader.apart else batch  # then what is found for one sentence is a candidate of all
        query_BE = embed_there(searcher.query, query_sequences(realm.queries(asked)), realm.dtype)
        found = candidates.retrieve(asked, query_BE, index)
        if reader.apart:
            found = list(context.team.share(candidates.shared(drawn, found))[0])
        crops = np.random.default_rng(seed_for(context.seed, context.stream, "crops", step))
        learns = step >= options.retriever_delay
        loss, later = realm.loss(batch, found, retriever_learns=learns, weight=weight, crops=crops, team=context.team)
        learned_from = max(index.step, min(step, options.retriever_delay))  # it stands still during the delay
        known = {"staleness_steps": float(step - learned_from), "staleness_seconds": time.time() - index.published}
        known |= {name: float(count) for name, count in candidates.counts.items()} | adopted
        candidates.counts.clear()
        adopted.clear()

        def metrics(*tensors: Tensor) -> dict[str, float]:
            said = later.metrics(*tensors) | known
            collapsed = alarm.watch(step, said.get("p_null", 0.0), [row[0] for row in found if row])
            return said | {"collapsed": float(collapsed)}

        return loss, Later(later.tensors, metrics)

    groups = [
        Group("retriever", retriever, options.retriever_learning_rate, options.retriever_delay),
        Group("reader", reader, options.reader_learning_rate),
    ]
    every = options.refresh_every
    fit(context, groups, optimiser, step_loss, steps=options.steps, checkpoint_every=every, at_step=at_step)


def _change(old: Index, new: Index, examples: Examples, realm: Realm, context: Context) -> float:
    """Share of the top k of sampled queries that the new generation changes."""
    rng = np.random.default_rng(seed_for(context.seed, context.stream, "staleness"))
    queries = query_sequences(realm.queries([examples.draw(rng) for _ in range(realm.options.staleness_queries)]))
    ids: list[Any] = []
    for index in (old, new):
        query_QE = embed(index.retriever.query, queries, realm.dtype)
        all_of_them = exact(index.passages.embedding_PE, index.retriever.vectors)
        ids.append(all_of_them.search(query_QE, realm.options.candidates)[1].cpu().numpy())
    return top_k_change(ids[0], ids[1])
