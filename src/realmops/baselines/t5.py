"""Closed-book question answering: T5 generates the answer without retrieval (paper, Table 1; Roberts et al. 2020).

Its knowledge is from span corruption on the corpus (Raffel et al. 2020), or from published weights.

Shape suffixes: B sequences of a batch, L input wordpieces, T target wordpieces, N target wordpieces of all
sequences, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from realmops.answering.answer import Answer, RetrievedPassages
from realmops.answering.retrieval import AnswerModel
from realmops.artifacts import seed_for
from realmops.corpus.snapshot_reader import Snapshot
from realmops.corpus.vocabulary import open_tokenizer
from realmops.credentials import error_line
from realmops.devices import autocast
from realmops.hub import CONFIG, T5, TOKENIZER, encoder_folder, read_config, read_weights
from realmops.model.reader_files import READER_FOLDER
from realmops.model.sequences import SpecialTokens
from realmops.model.transformers_models import (
    BUILD_LOCK,
    import_transformers,
    load_transformers_model,
    save_transformers_model,
)
from realmops.options import ClosedBookOptions
from realmops.questions.question_sets import Question
from realmops.train.loop import DeferredMetrics, LossAndMetrics, TrainingContext, fit, fit_epochs
from realmops.train.optimiser import Group

BATCH_SIZE = 32  # passages or questions
LEARNING_RATE = 1e-3  # T5's for fine-tuning
PASSAGE_WORDPIECES = 64  # of the corrupted title and text
QUESTION_WORDPIECES, ANSWER_WORDPIECES = 64, 16  # maximum lengths, end of sequence included
NOISE_DENSITY, MEAN_SPAN_LENGTH = 0.15, 3  # share of a passage's wordpieces; wordpieces
SENTINELS = tuple(f"<extra_id_{n}>" for n in range(100))  # as in T5
Pair = tuple[np.ndarray, list[np.ndarray]]  # wordpieces of a question and of its answers
JOIN = "<join>"  # between two pieces without a space: WordPiece cannot restore "12,340"


@dataclass(frozen=True)
class ClosedBook(AnswerModel):
    """A T5 model with its tokenizer, which has sentinels and parses special tokens in a text as text."""

    kind = "t5"
    batch_size = 64
    net: Any  # T5ForConditionalGeneration of transformers
    tokenizer: Tokenizer

    @classmethod
    def build(cls, options: ClosedBookOptions, snapshot: Snapshot, shape: Any, seed: int) -> Self:
        """Build the model of ``closed_book.init``; ``small`` has an encoder and a decoder in the reader's shape."""
        if options.init != "small":
            return cls(*_open(encoder_folder(options.init, T5)))
        tokenizer = _add_sentinels(snapshot)
        return cls(_build_small(tokenizer, shape, seed), tokenizer)

    def save(self, folder: Path) -> None:
        save_transformers_model(self.net, folder / READER_FOLDER)
        self.tokenizer.save(str(folder / READER_FOLDER / TOKENIZER))

    @classmethod
    def open(cls, folder: Path, device: torch.device) -> Self:
        """Load a model from the folder of a stage."""
        net, tokenizer = _open(folder / READER_FOLDER)
        return cls(net.to(device), tokenizer)

    @cached_property
    def sentinel_ids(self) -> np.ndarray:
        """Ids that replace masked spans, in the order of their use."""
        return np.array([self.tokenizer.token_to_id(name) for name in SENTINELS])

    @property
    def pad_id(self) -> int:
        """Id of padding, which is also the decoder's start token."""
        return int(self.net.config.pad_token_id)

    @property
    def eos_id(self) -> int:
        """Id at the end of every input and target."""
        return int(self.net.config.eos_token_id)

    def encode(self, text: str) -> np.ndarray:
        return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def encode_question(self, text: str) -> np.ndarray:
        return np.append(self.encode(text)[: QUESTION_WORDPIECES - 1], self.eos_id)

    def encode_target(self, answer: str) -> np.ndarray:
        """Return an answer as target; for WordPiece, ``JOIN`` is inserted between pieces without a space ("12,340")."""
        encoding, join = self.tokenizer.encode(answer, add_special_tokens=False), self.tokenizer.token_to_id(JOIN)
        ids: list[int] = []
        end = -1
        for piece, name, (start, stop) in zip(encoding.ids, encoding.tokens, encoding.offsets, strict=True):
            if join is not None and start == end and not name.startswith("##"):
                ids.append(join)
            ids.append(piece)
            end = stop
        return np.array([*ids[: ANSWER_WORDPIECES - 1], self.eos_id], dtype=np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without padding, end and sentinels."""
        skipped = {self.pad_id, self.eos_id, *self.sentinel_ids.tolist()}
        return str(self.tokenizer.decode([i for i in ids if i not in skipped], skip_special_tokens=False))

    def loss(self, inputs: Sequence[np.ndarray], targets: Sequence[np.ndarray], dtype: torch.dtype) -> LossAndMetrics:
        """Return the mean cross entropy of the targets' wordpieces, and their accuracy as a deferred metric."""
        self.net.train()
        input_BL, is_input_BL = self._padded(inputs)
        target_BT, is_target_BT = self._padded(targets)
        before_BT = F.pad(target_BT[:, :-1], (1, 0), value=self.pad_id)
        with autocast(self.net.device, dtype):
            logits_BTV = self.net(
                input_ids=input_BL, attention_mask=is_input_BL, decoder_input_ids=before_BT, use_cache=False
            ).logits
        logits_NV, target_N = logits_BTV[is_target_BT].float(), target_BT[is_target_BT]
        accuracy = (logits_NV.argmax(-1) == target_N).float().mean()
        deferred = DeferredMetrics([accuracy], lambda share: {"accuracy": share.item()})
        return F.cross_entropy(logits_NV, target_N), deferred

    def check(self, question: str) -> None:
        """Accept every question: long ones are truncated."""

    def find(self, questions: Sequence[Question], ranked: int = 0) -> list[RetrievedPassages]:
        return [RetrievedPassages(question, (), (), (), (), {}) for question in questions]

    @torch.no_grad()
    def read(self, found: Sequence[RetrievedPassages], target_answers: Sequence[str | None] = ()) -> list[Answer]:
        """Decode answers greedily, with their log probability including the end of sequence."""
        assert not any(target_answers), "a closed-book model cannot score given answers"
        self.net.eval()
        greedy = import_transformers().GenerationConfig(
            max_new_tokens=ANSWER_WORDPIECES,
            do_sample=False,
            num_beams=1,
            pad_token_id=self.pad_id,
            eos_token_id=self.eos_id,
            decoder_start_token_id=self.pad_id,
        )
        input_BL, is_input_BL = self._padded([self.encode_question(item.question.question) for item in found])
        output = self.net.generate(
            input_BL,
            attention_mask=is_input_BL,
            generation_config=greedy,
            output_logits=True,
            return_dict_in_generate=True,
        )
        token_BT = output.sequences[:, 1:]
        log_BT = self.net.compute_transition_scores(output.sequences, output.logits, normalize_logits=True)
        is_over_BT = F.pad((token_BT == self.eos_id).cumsum(1), (1, -1)) > 0
        log_B = log_BT.masked_fill(is_over_BT, 0.0).sum(1)
        return [
            Answer(item.question.question, None, log_p, generated=self.decode(tokens))
            for item, tokens, log_p in zip(found, token_BT.tolist(), log_B.tolist(), strict=True)
        ]

    def _padded(self, sequences: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
        """Return sequences as padded rows, and the mask of real tokens; no text contains the padding id."""
        rows = [torch.from_numpy(sequence) for sequence in sequences]
        ids = pad_sequence(rows, batch_first=True, padding_value=self.pad_id).to(self.net.device)
        return ids, ids != self.pad_id


def span_corruption(
    tokens: np.ndarray, sentinels: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return input and target of T5's pre-training without end of sequence (Raffel et al. 2020, section 3.1.4).

    In the input one sentinel replaces each span; the target is each sentinel followed by its span.
    """
    masked = max(1, round(NOISE_DENSITY * len(tokens)))
    spans = min(max(1, round(masked / MEAN_SPAN_LENGTH)), len(sentinels))
    widths = _random_partition(masked, spans, rng)
    gaps = _random_partition(len(tokens) - masked + 2, spans + 1, rng)
    gaps[[0, -1]] -= 1  # a span may begin or end the text
    starts = np.cumsum(gaps[:-1]) + np.cumsum(widths) - widths
    inputs: list[np.ndarray] = []
    target: list[np.ndarray] = []
    end = 0
    for sentinel, start, width in zip(np.split(sentinels[:spans], spans), starts, widths, strict=True):
        inputs += [tokens[end:start], sentinel]
        end = start + width
        target += [sentinel, tokens[start:end]]
    return np.concatenate([*inputs, tokens[end:]]), np.concatenate(target)


def _random_partition(total: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return ``count`` positive integers that sum to ``total``, drawn uniformly."""
    borders = 1 + np.sort(rng.permutation(total - 1)[: count - 1])
    return np.diff(borders, prepend=0, append=total)


def pretrain(context: TrainingContext, model: ClosedBook, snapshot: Snapshot, options: ClosedBookOptions) -> None:
    """Pre-train by span corruption on title and body of random passages, long bodies cropped at random."""

    def passage(number: int, rng: np.random.Generator) -> np.ndarray:
        title = model.encode(snapshot.title(number))[: PASSAGE_WORDPIECES // 2]
        body = model.encode(snapshot.text(number))
        room = PASSAGE_WORDPIECES - 1 - len(title)
        start = int(rng.integers(max(0, len(body) - room) + 1))
        return np.concatenate([title, body[start : start + room]])

    def step_loss(step: int) -> LossAndMetrics:
        rng = context.rng("batch", step)
        numbers = rng.integers(len(snapshot), size=BATCH_SIZE).tolist()
        examples = [span_corruption(passage(number, rng), model.sentinel_ids, rng) for number in numbers]
        inputs, targets = ([np.append(ids, model.eos_id) for ids in side] for side in zip(*examples, strict=True))
        return model.loss(inputs, targets, context.dtype)

    groups = [Group("closed_book", model.net.to(context.device), LEARNING_RATE)]
    fit(context, groups, step_loss, steps=options.steps)


def drop_regex_questions(questions: Sequence[Question]) -> list[Question]:
    """Return the questions with answers in words; raise ValueError if there are none."""
    usable = [question for question in questions if question.answers and not question.is_regex]
    if not usable:
        raise ValueError(
            f"the answers of all {len(questions)} training questions are regular expressions or missing, but training "
            "needs texts; set questions.train to a file with literal answers"
        )
    return usable


def finetune(
    context: TrainingContext,
    model: ClosedBook,
    questions: Sequence[Question],
    options: ClosedBookOptions,
) -> None:
    """Fine-tune on pairs of a question and an answer, drawn at random in each epoch."""
    pairs = [(model.encode_question(q.question), [*map(model.encode_target, q.answers)]) for q in questions]

    def draw(batch: Sequence[Pair], step: int) -> list[tuple[np.ndarray, np.ndarray]]:
        rng = context.rng("answer", step)
        return [(question, answers[rng.integers(len(answers))]) for question, answers in batch]

    def loss(drawn: Sequence[tuple[np.ndarray, np.ndarray]]) -> LossAndMetrics:
        return model.loss([x for x, _ in drawn], [y for _, y in drawn], context.dtype)

    groups = [Group("closed_book", model.net.to(context.device), LEARNING_RATE)]
    fit_epochs(
        context, groups, pairs, draw, loss,
        batch_size=BATCH_SIZE, epochs=options.epochs,
    )  # fmt: skip


def _add_sentinels(snapshot: Snapshot) -> Tokenizer:
    """Return a copy of the snapshot's tokenizer with additional ids for sentinels, and for ``JOIN`` with WordPiece."""
    tokenizer = open_tokenizer(snapshot.tokenizer.to_str())
    if not isinstance(tokenizer.decoder, decoders.WordPiece):  # its pieces contain spaces
        tokenizer.add_special_tokens(list(SENTINELS))
        return tokenizer
    tokenizer.add_special_tokens([JOIN, *SENTINELS])
    tokenizer.decoder = decoders.Sequence(
        [decoders.WordPiece(cleanup=False), decoders.Fuse(), decoders.Replace(f" {JOIN} ", "")]
    )
    return tokenizer


def _build_small(tokenizer: Tokenizer, shape: Any, seed: int) -> Any:
    """Build a T5 whose encoder and decoder have the shape of an encoder's configuration, initialised as in T5."""
    transformers, special = import_transformers(), SpecialTokens.of(tokenizer)
    config = transformers.T5Config(
        vocab_size=tokenizer.get_vocab_size(),
        d_model=shape.hidden_size,
        d_kv=shape.hidden_size // shape.num_attention_heads,
        d_ff=getattr(shape, "intermediate_size", 4 * shape.hidden_size),
        num_layers=shape.num_hidden_layers,
        num_heads=shape.num_attention_heads,
        dropout_rate=0.0,
        pad_token_id=special.padding,
        eos_token_id=special.sep,
        decoder_start_token_id=special.padding,
        attn_implementation="eager",
    )
    with BUILD_LOCK, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(seed, "closed_book"))
        return transformers.T5ForConditionalGeneration(config)


def _open(folder: Path) -> tuple[Any, Tokenizer]:
    """Load model and tokenizer of a folder; raise ValueError if it is damaged or not a T5."""
    values = read_config(folder)
    if (family := values.get("model_type")) != "t5":
        raise ValueError(
            f"{folder / CONFIG}: model_type is {family!r}; only T5 models are supported (model_type t5); use for "
            "example google-t5/t5-base"
        )
    values |= {"attn_implementation": "eager"}
    net, missing = load_transformers_model(read_weights(folder), values, str(folder), "AutoModelForSeq2SeqLM")
    if missing:
        raise ValueError(f"{folder}: the parameter {min(missing)} is missing; download the folder again")
    try:
        tokenizer = open_tokenizer((folder / TOKENIZER).read_text("utf-8"))
        ids = [tokenizer.token_to_id(name) for name in SENTINELS]
    except Exception as error:  # tokenizers raises plain Exceptions
        raise ValueError(
            f"{folder / TOKENIZER}: tokenizer cannot be opened ({error_line(error)}); download it again"
        ) from None
    if None in ids or tokenizer.get_vocab_size() > net.config.vocab_size:
        raise ValueError(
            f"{folder / TOKENIZER}: tokenizer does not match this T5, which has {net.config.vocab_size} pieces "
            f"including {SENTINELS[0]} to {SENTINELS[-1]}; download the folder again"
        )
    return net, tokenizer
