"""Published readers of answer spans: transformers' ``AutoModelForQuestionAnswering`` with its own tokenizer.

A reader scores every wordpiece of a passage as start and as end of the answer. The first wordpiece of the sequence
([CLS]) is the null answer of SQuAD 2 (Rajpurkar et al. 2018): the passage has no answer. Long passages are read in
overlapping windows, as transformers' question answering pipeline (4.57) does.

Shape suffixes: N windows, L wordpieces of the longest window, P wordpieces and S spans of one passage, A longest span.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.lib.stride_tricks import sliding_window_view
from tokenizers import Encoding, Tokenizer
from torch import Tensor, nn

from realmops.artifacts import seed_for
from realmops.credentials import error_line
from realmops.devices import async_to, autocast, disable_autocast
from realmops.hub import CONFIG, read_config, read_weights
from realmops.model.encoder import Encoder, set_dropout
from realmops.model.packed import batch_by_length
from realmops.model.transformers_models import (
    ANSWER_SPANS,
    has_auto_class,
    import_transformers,
    load_transformers_model,
    model_type_of,
    save_transformers_model,
)

OVERLAP = 128  # wordpieces that consecutive windows share, at most half a window; that of transformers' pipeline
_HEAD = "qa_outputs"  # name of the span head in all models of transformers


@dataclass(frozen=True)
class PassageWindow:
    """A question with a passage, or with a part of a long one, as wordpieces."""

    pair: int  # index of the question and its passage
    encoding: Encoding
    first: int  # first wordpiece of the passage
    end: int
    offset: int  # wordpieces of the passage before ``first``
    null_positions: tuple[int, ...]  # of the null answer; empty for a reader without one

    def chars(self, text: str) -> np.ndarray:
        """Return start and end character of each wordpiece of the passage, [L, 2], without blanks around text."""
        offsets_L2 = np.array(self.encoding.offsets[self.first : self.end], np.int64).reshape(-1, 2)
        chars_L2 = _trim(text, offsets_L2)
        return np.where(chars_L2[:, :1] < chars_L2[:, 1:], chars_L2, offsets_L2)


@dataclass(frozen=True)
class PassageSpans:
    """Spans of a passage as answers: p(span|x, z), whose sum with the null answer is at most 1."""

    chars: np.ndarray  # start and end in the passage's text, S x 2
    log_p: np.ndarray  # float64 [S]
    log_null: float  # that the passage has no answer; -inf for a reader without a null answer


class SpanScores(nn.Module):
    """The span head, a linear layer to start and end scores, computed in fp32 also under autocast."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, hidden_NLD: Tensor) -> Tensor:
        with disable_autocast(hidden_NLD.device):
            return F.linear(hidden_NLD.float(), self.weight, self.bias)


class ExtractiveReader(nn.Module):
    """A reader of answer spans: a model of ``AutoModelForQuestionAnswering`` and its fast tokenizer.

    With ``batches=False`` every window is read alone: its model is not invariant to the padding of a batch.
    """

    def __init__(self, model: Any, tokenizer: Any, *, batches: bool = True) -> None:
        super().__init__()
        setattr(model, _HEAD, SpanScores(getattr(model, _HEAD)))
        self.model, self.tokenizer, self.batches = model, tokenizer, batches
        self._truncating: dict[int | None, Tokenizer] = {}

    @property
    def device(self) -> torch.device:
        return self.word_vectors.device

    @property
    def word_vectors(self) -> Tensor:
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight

    @cached_property
    def longest(self) -> int:
        """Maximum length of a sequence in wordpieces."""
        spare = 2 if self.model.config.model_type != "bert" else 0  # RoBERTa's offset
        return int(min(self.tokenizer.model_max_length, self.model.config.max_position_embeddings - spare))

    def longest_question(self, limit: int) -> int:
        """Return the maximum length of a question: windows of ``limit`` wordpieces advance by at least a 32nd."""
        limit = min(limit, self.longest)
        special: int = self.tokenizer.num_special_tokens_to_add(pair=True)
        return max(1, min(limit // 2, limit - _overlap(limit) - special - max(1, limit // 32)))

    @cached_property
    def _input_names(self) -> set[str]:
        """Inputs of the model; ``model_input_names`` of transformers 5 omits segments of ALBERT's, for example."""
        has_segments = getattr(self.model.config, "type_vocab_size", 2) > 1
        names = {"input_ids", "attention_mask", "token_type_ids"} if has_segments else {"input_ids", "attention_mask"}
        return names & inspect.signature(self.model.forward).parameters.keys()

    def set_dropout(self, p: float) -> None:
        set_dropout(self.model, p)

    @property
    def head(self) -> SpanScores:
        head: SpanScores = getattr(self.model, _HEAD)
        return head

    def freeze_unseen_biases(self) -> None:
        """Freeze biases that add the same to all scores of a softmax, whose gradients are rounding errors."""
        encoder = Encoder(self.model.base_model, packs=False)  # for its output biases
        for bias in (self.head.bias, *encoder.output_biases):
            bias.requires_grad_(False)

    def tokenize(self, text: str) -> Encoding:
        return self._backend(None).encode(text, add_special_tokens=False)

    def _backend(self, limit: int | None) -> Tokenizer:
        """Return a tokenizer that cuts pairs into windows; that of transformers is not thread-safe."""
        if limit not in self._truncating:
            tokenizer = Tokenizer.from_str(self.tokenizer.backend_tokenizer.to_str())
            tokenizer.no_padding()
            tokenizer.no_truncation()
            if limit is not None:
                tokenizer.enable_truncation(limit, stride=_overlap(limit), strategy="only_second")
            self._truncating[limit] = tokenizer
        return self._truncating[limit]

    def windows(self, pairs: Sequence[tuple[str, str]], limit: int) -> list[PassageWindow]:
        """Tokenize questions, cut to ``longest_question``, with passages, in windows of ``limit`` wordpieces."""
        limit = min(limit, self.longest)
        questions = {question: self._cut(question, self.longest_question(limit)) for question, _ in pairs}
        cut = [(questions[question], passage) for question, passage in pairs]
        windows = []
        for index, whole in enumerate(self._backend(limit).encode_batch(cut)):
            offset = 0
            for encoding in (whole, *whole.overflowing):
                is_passage = np.array(encoding.sequence_ids) == 1  # None is False
                [rows] = np.nonzero(is_passage)
                nulls = np.flatnonzero((np.array(encoding.ids) == self.tokenizer.cls_token_id) & ~is_passage).tolist()
                first, end = (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, 0)
                windows.append(PassageWindow(index, encoding, first, end, offset, tuple(nulls)))
                offset += end - first - _overlap(limit)
        return windows

    def _cut(self, question: str, longest: int) -> str:
        while len(offsets := self.tokenize(question).offsets) > longest:  # the shorter text can have other wordpieces
            question = question[: min(offsets[longest][0], len(question) - 1)]
        return question

    def log_probabilities(self, windows: Sequence[PassageWindow]) -> tuple[Tensor, Tensor]:
        """Compute log p of each wordpiece as start and as end of the answer, N x L; -inf but for passage and null."""
        longest = max(len(window.encoding.ids) for window in windows)
        if len(windows) > 1 and not self.batches:
            rows = [torch.cat(self.log_probabilities([window])) for window in windows]  # start and end, 2 x L
            log_N2L = torch.stack([F.pad(row, (0, longest - row.shape[1]), value=-torch.inf) for row in rows])
            return log_N2L[:, 0], log_N2L[:, 1]
        padding = {"input_ids": self.tokenizer.pad_token_id or 0, "attention_mask": 0, "token_type_ids": 0}
        inputs = {name: np.full((len(windows), longest), value) for name, value in padding.items()}
        is_candidate_NL = np.zeros((len(windows), longest), bool)
        for n, window in enumerate(windows):
            row = slice(len(window.encoding.ids))
            inputs["input_ids"][n, row] = window.encoding.ids
            inputs["attention_mask"][n, row] = 1
            inputs["token_type_ids"][n, row] = window.encoding.type_ids
            is_candidate_NL[n, window.first : window.end] = True
            is_candidate_NL[n, [*window.null_positions]] = True
        tensors = {name: async_to(torch.from_numpy(inputs[name]), self.device) for name in sorted(self._input_names)}
        out = self.model(**tensors)
        is_other_NL = async_to(torch.from_numpy(~is_candidate_NL), self.device)
        scores = (logits.float().masked_fill(is_other_NL, -torch.inf) for logits in (out.start_logits, out.end_logits))
        log_start_NL, log_end_NL = (score_NL.log_softmax(-1) for score_NL in scores)
        return log_start_NL, log_end_NL

    @torch.no_grad()
    def read(
        self, pairs: Sequence[tuple[str, str]], *, limit: int, answer_wordpieces: int, dtype: torch.dtype
    ) -> list[PassageSpans]:
        """Compute the probability of every span of up to ``answer_wordpieces`` of each pair's passage.

        p(span|x, z) is p(start) p(end) in the window where that is largest, and the null answer's the smallest of all
        windows, as in transformers' pipeline. If windows overlap so that the sum exceeds 1, it is normalised.
        """
        windows = self.windows(pairs, limit)
        passages = [_SpanTable(text, np.empty((0, 2), np.int64), np.empty((0, answer_wordpieces))) for _, text in pairs]
        for window in windows:
            passages[window.pair].add_wordpieces(window)
        for rows in batch_by_length([len(window.encoding.ids) for window in windows], self.device):
            batch = [windows[n] for n in rows]
            with autocast(self.device, dtype):
                logs = self.log_probabilities(batch)
            start_NL, end_NL = (log_NL.double().cpu().numpy() for log_NL in logs)
            for window, log_start, log_end in zip(batch, start_NL, end_NL, strict=True):
                passages[window.pair].add_scores(window, log_start, log_end)
        return [passage.spans() for passage in passages]

    def save(self, folder: Path) -> None:
        self.tokenizer.backend_tokenizer.no_truncation()
        self.tokenizer.backend_tokenizer.no_padding()
        save_transformers_model(self.model, folder)
        self.tokenizer.save_pretrained(folder)


def load_extractive_reader(
    folder: Path, *, seed: int | None = None, warn: Callable[[str], None] | None = None
) -> ExtractiveReader:
    """Load a published reader without executing its code; ``seed`` is that of a new span head, None allows none."""
    values = read_config(folder)
    kind = model_type_of(values)
    if not has_auto_class(ANSWER_SPANS, kind):
        reason = "needs custom code (auto_map), which is never executed" if "auto_map" in values else "reads no spans"
        raise ValueError(
            f"{folder / CONFIG}: model_type {kind!r} {reason}; set reader.init to a model of transformers' "
            "AutoModelForQuestionAnswering, for example deepset/roberta-base-squad2"
        )
    model, missing = load_transformers_model(read_weights(folder), values, str(folder), ANSWER_SPANS)
    head = getattr(model, _HEAD, None)
    if not isinstance(head, nn.Linear) or head.out_features != 2:
        raise ValueError(
            f"{folder}: {type(model).__name__} has no linear layer {_HEAD!r} for spans; use another reader"
        )
    if missing and seed is None:
        raise ValueError(
            f"{folder} has no trained span head ({min(missing)}): it is an encoder, not a reader; set reader.init "
            "to a reader, make one with 'realmops reader', or train it with finetune.epochs above 0"
        )
    if missing:
        generator = torch.Generator().manual_seed(seed_for(seed or 0, "spans"))
        with torch.no_grad():
            head.weight.normal_(0.0, 0.02, generator=generator)
            head.bias.zero_()
        if warn is not None:
            warn(f"{folder} has no span head: a new one is trained")
    tokenizer = _load_tokenizer(folder)
    batches = Encoder(model.base_model, packs=False).ignores_padding(str(folder))
    if not batches and warn is not None:
        warn(f"{folder}: a {kind} is not invariant to the padding of a batch: it reads passages one by one, slowly")
    return ExtractiveReader(model, tokenizer, batches=batches)


def _load_tokenizer(folder: Path) -> Any:
    transformers = import_transformers()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # any error of the library: the folder is unusable
        raise ValueError(f"{folder}: transformers cannot open its tokenizer ({error_line(error)})") from None
    if not tokenizer.is_fast or tokenizer.padding_side == "left":
        raise ValueError(f"{folder}: its tokenizer gives no character offsets, or pads on the left; use another reader")
    return tokenizer


def _overlap(limit: int) -> int:
    return min(OVERLAP, limit // 2)


@dataclass
class _SpanTable:
    """Log p of the spans of a passage by first wordpiece and length, the largest of all its windows."""

    text: str
    offsets_P2: np.ndarray
    log_p_PA: np.ndarray
    log_nulls: list[float] = field(default_factory=list)  # of the windows

    def add_wordpieces(self, window: PassageWindow) -> None:
        """Append the wordpieces that earlier windows lack."""
        added = window.encoding.offsets[window.first + len(self.offsets_P2) - window.offset : window.end]
        self.offsets_P2 = np.concatenate([self.offsets_P2, np.array(added, np.int64).reshape(-1, 2)])
        self.log_p_PA = np.full((len(self.offsets_P2), self.log_p_PA.shape[1]), -np.inf)

    def add_scores(self, window: PassageWindow, log_start_L: np.ndarray, log_end_L: np.ndarray) -> None:
        nulls = window.null_positions[:1]
        self.log_nulls.append(float(log_start_L[nulls[0]] + log_end_L[nulls[0]]) if nulls else -np.inf)
        passage, longest = slice(window.first, window.end), self.log_p_PA.shape[1]
        log_end_L = np.concatenate([log_end_L[passage], np.full(longest, -np.inf)])
        score_LA = log_start_L[passage, None] + sliding_window_view(log_end_L, longest)[:-1]
        part_LA = self.log_p_PA[window.offset : window.offset + window.end - window.first]
        np.maximum(part_LA, score_LA, out=part_LA)

    def spans(self) -> PassageSpans:
        """Return all spans with text, normalised if windows overlap so that their sum exceeds 1."""
        chars_P2 = _trim(self.text, self.offsets_P2)
        start_S, length_S = np.nonzero(self.log_p_PA > -np.inf)
        spans_S2 = np.column_stack([chars_P2[start_S, 0], chars_P2[start_S + length_S, 1]])
        is_text_S = spans_S2[:, 0] < spans_S2[:, 1]  # a wordpiece can be a blank
        log_p_S, log_null = self.log_p_PA[start_S, length_S][is_text_S], min(self.log_nulls)
        if len(self.log_nulls) > 1 and (excess := np.logaddexp.reduce([*log_p_S, log_null])) > 0:
            log_p_S, log_null = log_p_S - excess, log_null - excess
        return PassageSpans(spans_S2[is_text_S], log_p_S, float(log_null))


def _trim(text: str, offsets_P2: np.ndarray) -> np.ndarray:
    """Return spans of a text without the blanks at their ends, P x 2; one without text ends before it starts."""
    [visible] = np.nonzero([not character.isspace() for character in text])
    start_P, end_P = offsets_P2.T
    next_start_P = np.append(visible, len(text))[np.searchsorted(visible, start_P)]
    last_end_P = np.insert(visible + 1, 0, 0)[np.searchsorted(visible, end_P)]
    return np.column_stack([next_start_P, last_end_P])
