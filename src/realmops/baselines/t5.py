"""Closed-book question answering: T5 writes the answer and retrieves nothing (paper, Table 1; Roberts et al. 2020).

What it knows it has from span corruption over the corpus (Raffel et al. 2020), or from its published weights.

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

from realmops.answering.answer import Answer, Found
from realmops.answering.retrieval import Answering
from realmops.artifacts import read_json, seed_for, write_json
from realmops.config import ClosedBookOptions, Optimiser
from realmops.corpus.question_sets import Question
from realmops.corpus.snapshot_reader import Snapshot
from realmops.devices import autocast
from realmops.hub import CONFIG, T5, TOKENIZER, encoder_folder, read_config
from realmops.model.sequences import SpecialTokens
from realmops.train.fine_tuning import finetune_steps
from realmops.train.loop import Context, DeferredMetrics, epoch_rows, fit
from realmops.train.optimiser import Group

FILE = "closed_book.json"
HIDDEN_SHARE, SPAN_LENGTH = 0.15, 3  # of a passage's wordpieces; mean, in wordpieces
SENTINELS = tuple(f"<extra_id_{n}>" for n in range(100))  # T5's names
JOIN = "<join>"  # between two pieces without a blank: WordPiece forgets how "12,340" was written


@dataclass(frozen=True)
class ClosedBook(Answering):
    """A sequence-to-sequence model and its tokenizer; ``net`` is a T5ForConditionalGeneration of transformers.

    ``vocabulary_hash`` is None for a pre-trained T5, which has a tokenizer of its own.
    """

    kind = "t5"
    together = 64
    net: Any
    tokenizer: Tokenizer
    question_wordpieces: int
    answer_wordpieces: int
    vocabulary_hash: str | None

    def __post_init__(self) -> None:
        self.tokenizer.encode_special_tokens = True  # "<join>" in a text is text
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()

    @classmethod
    def build(cls, options: ClosedBookOptions, snapshot: Snapshot, shape: Any, seed: int) -> Self:
        """The model that ``init`` names: ``small`` has the reader's shape in encoder and decoder each."""
        if options.init == "small":
            tokenizer = _tokenizer_of(snapshot)
            net, vocabulary_hash = _small(tokenizer, shape, seed), snapshot.vocabulary_hash
        else:
            (net, tokenizer), vocabulary_hash = _open(encoder_folder(options.init, T5)), None
        return cls(net, tokenizer, options.question_wordpieces, options.answer_wordpieces, vocabulary_hash)

    def save(self, folder: Path) -> None:
        """Write the net as transformers does, the tokenizer and the limits into a stage folder."""
        self.net.save_pretrained(folder)
        self.tokenizer.save(str(folder / TOKENIZER))
        limits = {"question_wordpieces": self.question_wordpieces, "answer_wordpieces": self.answer_wordpieces}
        write_json(folder / FILE, {**limits, "vocabulary_hash": self.vocabulary_hash})

    @classmethod
    def open(cls, folder: Path, snapshot: Snapshot, device: torch.device) -> Self:
        """Read a saved model onto a device; ValueError when it was trained with another vocabulary."""
        values = read_json(folder / FILE)
        trained_with = values["vocabulary_hash"]
        if trained_with not in (None, snapshot.vocabulary_hash):
            raise ValueError(
                f"{folder}: trained with the vocabulary {trained_with[:12]}, the snapshot has "
                f"{snapshot.vocabulary_hash[:12]}; train the closed-book model again"
            )
        net, tokenizer = _open(folder)
        return cls(net.to(device), tokenizer, **values)

    @cached_property
    def sentinels(self) -> np.ndarray:
        """The ids that stand for hidden spans, in the order of their use."""
        return np.array([self.tokenizer.token_to_id(name) for name in SENTINELS])

    @property
    def padding(self) -> int:
        """The id of padding, which also begins every target."""
        return int(self.net.config.pad_token_id)

    @property
    def end(self) -> int:
        """The id behind every input and every target."""
        return int(self.net.config.eos_token_id)

    def wordpieces(self, text: str) -> np.ndarray:
        return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def ended(self, ids: np.ndarray) -> np.ndarray:
        """A sequence with the end behind it."""
        return np.append(ids, self.end)

    def question(self, text: str) -> np.ndarray:
        return self.ended(self.wordpieces(text)[: self.question_wordpieces - 1])

    def target(self, answer: str) -> np.ndarray:
        """An answer as target; with WordPiece a mark joins pieces that no blank parts, as in "12,340"."""
        encoding, join = self.tokenizer.encode(answer, add_special_tokens=False), self.tokenizer.token_to_id(JOIN)
        ids: list[int] = []
        end = -1
        for piece, name, (start, stop) in zip(encoding.ids, encoding.tokens, encoding.offsets, strict=True):
            if join is not None and start == end and not name.startswith("##"):
                ids.append(join)
            ids.append(piece)
            end = stop
        return self.ended(np.array(ids[: self.answer_wordpieces - 1], dtype=np.int64))

    def text(self, ids: Sequence[int]) -> str:
        unwritten = {self.padding, self.end, *self.sentinels.tolist()}
        return str(self.tokenizer.decode([i for i in ids if i not in unwritten], skip_special_tokens=False))

    def loss(
        self, inputs: Sequence[np.ndarray], targets: Sequence[np.ndarray], dtype: torch.dtype
    ) -> tuple[Tensor, DeferredMetrics]:
        """Mean cross entropy of the targets' wordpieces; logs the share of them that is the most likely one."""
        self.net.train()
        input_BL, is_input_BL = self._padded(inputs)
        target_BT, is_target_BT = self._padded(targets)
        before_BT = F.pad(target_BT[:, :-1], (1, 0), value=self.padding)
        with autocast(self.net.device, dtype):
            logits_BTV = self.net(
                input_ids=input_BL, attention_mask=is_input_BL, decoder_input_ids=before_BT, use_cache=False
            ).logits
        logits_NV, target_N = logits_BTV[is_target_BT].float(), target_BT[is_target_BT]
        accuracy = (logits_NV.argmax(-1) == target_N).float().mean()
        return F.cross_entropy(logits_NV, target_N), DeferredMetrics(
            [accuracy], lambda share: {"accuracy": share.item()}
        )

    def check(self, question: str) -> None:
        """Every question can be asked: what is too long is cut."""

    def find(self, questions: Sequence[Question], ranked: int = 0) -> list[Found]:
        return [Found(question, (), (), (), ()) for question in questions]

    @torch.no_grad()
    def read(self, found: Sequence[Found], asked_about: Sequence[str | None] = ()) -> list[Answer]:
        """Greedy answers that rest on no passage, with the logarithm of their probability, the end included.

        Of another answer than the one given the probability is not known here: ``asked_about`` has none.
        """
        assert not any(asked_about), "only what is read can be asked about"
        self.net.eval()
        greedy = _transformers().GenerationConfig(
            max_new_tokens=self.answer_wordpieces,
            do_sample=False,
            num_beams=1,
            pad_token_id=self.padding,
            eos_token_id=self.end,
            decoder_start_token_id=self.padding,
        )
        input_BL, is_input_BL = self._padded([self.question(one.question.question) for one in found])
        said = self.net.generate(
            input_BL,
            attention_mask=is_input_BL,
            generation_config=greedy,
            output_logits=True,
            return_dict_in_generate=True,
        )
        token_BT = said.sequences[:, 1:]
        log_BTV = torch.stack(said.logits, 1).float().log_softmax(-1)
        log_BT = log_BTV.gather(-1, token_BT[..., None]).squeeze(-1)
        is_over_BT = F.pad((token_BT == self.end).cumsum(1), (1, -1)) > 0
        log_B = log_BT.masked_fill(is_over_BT, 0.0).sum(1)
        return [
            Answer(one.question.question, None, log_p, said=self.text(tokens))
            for one, tokens, log_p in zip(found, token_BT.tolist(), log_B.tolist(), strict=True)
        ]

    def _padded(self, sequences: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
        """The sequences as rows, and which of their places are filled: no text has the piece of padding."""
        rows = [torch.from_numpy(sequence) for sequence in sequences]
        ids = pad_sequence(rows, batch_first=True, padding_value=self.padding).to(self.net.device)
        return ids, ids != self.padding


def span_corruption(
    tokens: np.ndarray, sentinels: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Input and target of T5's pre-training, both without the end (Raffel et al. 2020, section 3.1.4).

    15 % of the wordpieces are hidden, in spans of 3 on average that lie anywhere but not side by side.  In the
    input one sentinel stands for each span; the target is each sentinel with the span behind it.
    """
    hidden = max(1, round(HIDDEN_SHARE * len(tokens)))
    spans = min(max(1, round(hidden / SPAN_LENGTH)), len(sentinels))
    widths = _parts(hidden, spans, rng)
    gaps = _parts(len(tokens) - hidden + 2, spans + 1, rng)
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


def _parts(total: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """``count`` numbers of at least 1 that add up to ``total``, all such rows equally likely."""
    borders = 1 + np.sort(rng.permutation(total - 1)[: count - 1])
    return np.diff(borders, prepend=0, append=total)


def pretrain(
    context: Context, model: ClosedBook, snapshot: Snapshot, options: ClosedBookOptions, optimiser: Optimiser
) -> int:
    """Span corruption over title and body of passages drawn at random; returns the journal's length at the end.

    Of a passage that is too long, a random part of the body stays.
    """

    def passage(number: int, rng: np.random.Generator) -> np.ndarray:
        title = model.wordpieces(snapshot.title(number))[: options.passage_wordpieces // 2]
        body = model.wordpieces(snapshot.text(number))
        room = options.passage_wordpieces - 1 - len(title)
        start = int(rng.integers(max(0, len(body) - room) + 1))
        return np.concatenate([title, body[start : start + room]])

    def step_loss(step: int) -> tuple[Tensor, DeferredMetrics]:
        rng = context.rng("batch", step)
        numbers = rng.integers(len(snapshot), size=options.batch_size).tolist()
        examples = [span_corruption(passage(number, rng), model.sentinels, rng) for number in numbers]
        inputs, targets = ([model.ended(ids) for ids in side] for side in zip(*examples, strict=True))
        return model.loss(inputs, targets, context.dtype)

    groups = [Group("closed_book", model.net.to(context.device), options.learning_rate)]
    every = options.checkpoint_every
    return fit(context, groups, optimiser, step_loss, steps=options.steps, checkpoint_every=every)


def answered_in_words(questions: Sequence[Question]) -> list[Question]:
    """The questions to train on: those whose answers are no regular expressions; ValueError when there is none."""
    usable = [question for question in questions if not question.is_regex]
    if not usable:
        raise ValueError(
            f"the answers of all {len(questions)} training questions are regular expressions, which are no text to "
            "learn; name a file with answers in words as questions.train"
        )
    return usable


def finetune(
    context: Context, model: ClosedBook, questions: Sequence[Question], options: ClosedBookOptions, optimiser: Optimiser
) -> int:
    """From question to one of its answers, drawn anew each time; returns the journal's length at the end.

    Questions that ``answered_in_words`` leaves out are left out; every epoch has an order of its own.
    """
    questions = answered_in_words(questions)
    inputs = [model.question(q.question) for q in questions]
    targets = [[model.target(answer) for answer in q.answers] for q in questions]
    rows_of = epoch_rows(context, len(questions), options.batch_size)

    def step_loss(step: int) -> tuple[Tensor, DeferredMetrics]:
        rng, rows = context.rng("answer", step), rows_of(step)
        drawn = [targets[row][rng.integers(len(targets[row]))] for row in rows]
        return model.loss([inputs[row] for row in rows], drawn, context.dtype)

    groups = [Group("closed_book", model.net.to(context.device), options.learning_rate)]
    steps, every = finetune_steps(len(questions), options), options.checkpoint_every
    return fit(context, groups, optimiser, step_loss, steps=steps, checkpoint_every=every)


def _transformers() -> Any:
    """Import transformers, without its log lines and progress bars."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def _tokenizer_of(snapshot: Snapshot) -> Tokenizer:
    """The snapshot's tokenizer with ids for joins and sentinels behind its own."""
    tokenizer = Tokenizer.from_str(snapshot.tokenizer.to_str())
    if not isinstance(tokenizer.decoder, decoders.WordPiece):  # blanks are parts of its pieces
        tokenizer.add_special_tokens(list(SENTINELS))
        return tokenizer
    tokenizer.add_special_tokens([JOIN, *SENTINELS])
    tokenizer.decoder = decoders.Sequence(
        [decoders.WordPiece(cleanup=False), decoders.Fuse(), decoders.Replace(f" {JOIN} ", "")]
    )
    return tokenizer


def _small(tokenizer: Tokenizer, shape: Any, seed: int) -> Any:
    """Return a T5 with the shape of an encoder's configuration twice, and T5's own start values."""
    transformers, special = _transformers(), SpecialTokens.of(tokenizer)
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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(seed, "closed_book"))
        return transformers.T5ForConditionalGeneration(config)


def _open(folder: Path) -> tuple[Any, Tokenizer]:
    """Model and tokenizer of a folder; ValueError names what is damaged or no T5."""
    transformers = _transformers()
    family = read_config(folder).get("model_type")
    if family != "t5":
        raise ValueError(
            f"{folder / CONFIG}: model_type is {family!r}; only T5 models can be used (model_type t5): choose such a "
            "model, for example google-t5/t5-base"
        )
    try:
        net, found = transformers.T5ForConditionalGeneration.from_pretrained(
            folder,
            use_safetensors=True,
            local_files_only=True,
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
        )
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    except Exception as error:  # whatever the libraries stumble over: the folder is of no use
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{folder}: no T5 that can be read ({type(error).__name__}: {reason}); fetch it again"
        ) from None
    if missing := sorted(found["missing_keys"]):
        raise ValueError(f"{folder}: the parameter {missing[0]} is missing; it is no whole T5: fetch it again")
    ids = [tokenizer.token_to_id(name) for name in SENTINELS]
    if None in ids or tokenizer.get_vocab_size() > net.config.vocab_size:
        raise ValueError(
            f"{folder / TOKENIZER}: no tokenizer of this T5, which has {net.config.vocab_size} pieces with "
            f"{SENTINELS[0]} to {SENTINELS[-1]} among them; fetch the folder again"
        )
    return net, tokenizer
