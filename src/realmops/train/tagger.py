"""The salient span tagger: BERT token classification, trained on CoNLL data (paper, section 3.4).

The vocabulary is uncased but names are not: capitalisation of a word is fed in as its segment id.

Shape suffixes: T wordpieces of all sentences, D width, L tags.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from tokenizers import Tokenizer
from torch import Tensor, nn

from realmops.corpus.phrases import Entity, with_dates
from realmops.corpus.snapshot_reader import Snapshot
from realmops.devices import autocast
from realmops.model.encoder import Encoder
from realmops.model.encoder_files import cpu_state, encoder_from_description
from realmops.model.packed import PackedBatch, batch_by_length
from realmops.model.sequences import SpecialTokens
from realmops.options import Tag
from realmops.search.embed import MakeShard, Progress
from realmops.train.conll import TaggedSentence, entity_spans, iob2
from realmops.train.loop import DeferredMetrics, LossAndMetrics, TrainingContext, fit
from realmops.train.optimiser import Group

TAGGER, WEIGHTS, SPANS = "tagger.json", "tagger.safetensors", "spans.json"
BATCH_SIZE = 32  # sentences
HIDDEN_SMALL, HIDDEN = 0.3, 0.1  # share of masked wordpieces: of an encoder from scratch, of a pre-trained one
SENTENCE_WORDPIECES = 96  # longer sentences are truncated
_CHUNK = 2048  # passages whose sentences are batched by length together


class Tagger(nn.Module):
    """Encoder with a token classification head."""

    def __init__(self, encoder: Encoder, tags: Sequence[str]) -> None:
        super().__init__()
        self.bert, self.tags = encoder, tuple(tags)
        self.limit = min(SENTENCE_WORDPIECES, encoder.positions)  # wordpieces of a sentence
        self.output = nn.Linear(encoder.width, len(tags))

    def forward(self, batch: PackedBatch) -> Tensor:
        logits_TL: Tensor = self.output(self.bert(batch))
        return logits_TL


@dataclass(frozen=True)
class _Encoded:
    tokens: np.ndarray
    capitals: np.ndarray
    first_piece: np.ndarray  # row of each word's first wordpiece; -1 where the word was cut off
    tags: np.ndarray  # tag of each row; [CLS] and [SEP] have O


def tag_names(sentences: Iterable[TaggedSentence]) -> list[str]:
    """Return O and the B- and I- tags of every type in the sentences, sorted by type."""
    types = sorted({tag[2:] for s in sentences for tag in s.tags if tag != "O"})
    return ["O", *(f"{prefix}-{name}" for name in types for prefix in "BI")]


def _encode(sentence: TaggedSentence, tokenizer: Tokenizer, tags: Sequence[str], limit: int) -> _Encoded:
    special = SpecialTokens.of(tokenizer)
    number = {tag: i for i, tag in enumerate(tags)}
    tokens, capitals, labels, first_piece = special.begin, [0] * len(special.begin), [0] * len(special.begin), []
    marks_words = not getattr(tokenizer.model, "continuing_subword_prefix", None)  # pieces mark a preceding blank
    for word, tag in zip(sentence.words, sentence.tags, strict=True):
        pieces = tokenizer.encode(marks_words * " " + word, add_special_tokens=False).ids or [special.unknown]
        first_piece.append(len(tokens) if len(tokens) + len(pieces) < limit else -1)
        if first_piece[-1] < 0:
            continue
        inside = "I" + tag[1:] if tag != "O" else "O"
        tokens += pieces
        capitals += [int(word[:1].isupper())] * len(pieces)
        labels += [number.get(tag, 0)] + [number.get(inside, 0)] * (len(pieces) - 1)
    return _Encoded(
        np.array([*tokens, special.sep]), np.array([*capitals, 0]), np.array(first_piece), np.array([*labels, 0])
    )


def train_tagger(
    context: TrainingContext,
    tagger: Tagger,
    sentences: Sequence[TaggedSentence],
    tokenizer: Tokenizer,
    options: Tag,
    hidden: float,
) -> None:
    """Train by cross entropy over every wordpiece; the later pieces of a word have its I- tag.

    A share of the wordpieces, ``hidden``, is masked, so that the tagger learns from the context, not the names.
    """
    encoded = [_encode(s, tokenizer, tagger.tags, tagger.limit) for s in sentences]
    mask = SpecialTokens.of(tokenizer).mask

    def step_loss(step: int) -> LossAndMetrics:
        tagger.train()
        rng = context.rng("batch", step)
        batch = [encoded[i] for i in rng.integers(len(encoded), size=BATCH_SIZE)]
        masked = [np.where(rng.random(len(e.tokens)) < hidden, mask, e.tokens) for e in batch]
        with autocast(context.device, context.dtype):
            logits_TL = tagger(PackedBatch(masked, [e.capitals for e in batch]))
        target_T = torch.from_numpy(np.concatenate([e.tags for e in batch])).to(logits_TL.device)
        return F.cross_entropy(logits_TL.float(), target_T), DeferredMetrics((), dict)

    groups = [Group("tagger", tagger, options.learning_rate)]
    fit(context, groups, step_loss, steps=options.steps)


@torch.no_grad()
def _predict(
    tagger: Tagger, sequences: Sequence[tuple[np.ndarray, np.ndarray]], dtype: torch.dtype
) -> list[np.ndarray]:
    """Return the best tag of every wordpiece of each sequence."""
    tagger.eval()
    device = tagger.output.weight.device
    best: list[np.ndarray] = [np.zeros(0, dtype=np.int64)] * len(sequences)
    for rows in batch_by_length([len(tokens) for tokens, _ in sequences], device):
        batch = PackedBatch([sequences[i][0] for i in rows], [sequences[i][1] for i in rows])
        with autocast(device, dtype):
            best_T = tagger(batch).argmax(-1).cpu().numpy()
        for i, part in zip(rows, np.split(best_T, batch.starts[1:-1]), strict=True):
            best[i] = part
    return best


def predict_words(
    tagger: Tagger, sentences: Sequence[TaggedSentence], tokenizer: Tokenizer, dtype: torch.dtype
) -> list[list[str]]:
    """Return one tag per word, that of its first wordpiece, for evaluation on CoNLL data."""
    encoded = [_encode(s, tokenizer, tagger.tags, tagger.limit) for s in sentences]
    best = _predict(tagger, [(e.tokens, e.capitals) for e in encoded], dtype)
    return [
        [tagger.tags[b[row]] if row >= 0 else "O" for row in e.first_piece] for e, b in zip(encoded, best, strict=True)
    ]


def tagger_files(tagger: Tagger | None) -> dict[str, bytes]:
    """Serialise a tagger; without one, the files describe a search for dates alone."""
    if tagger is None:
        return {TAGGER: b"{}"}
    settings = {"bert": tagger.bert.describe(), "tags": tagger.tags}
    return {TAGGER: json.dumps(settings, sort_keys=True).encode(), WEIGHTS: save_tensors(cpu_state(tagger))}


def make_span_finder(
    snapshot: Snapshot, files: Mapping[str, bytes], device: torch.device, dtype: torch.dtype
) -> MakeShard:
    """Return a function that finds the spans of a shard: dates, and entities that overlap none."""
    settings, tagger = json.loads(files[TAGGER]), None
    if WEIGHTS in files:
        tagger = Tagger(encoder_from_description(settings["bert"]), settings["tags"])
        tagger.load_state_dict(load_tensors(files[WEIGHTS]))
        tagger.to(device)

    def make(first: int, end: int, progress: Progress) -> dict[str, bytes]:
        spans: list[list[Entity]] = []
        for low in range(first, end, _CHUNK):
            passages = range(low, min(low + _CHUNK, end))
            entities = find_entities(tagger, snapshot, passages, dtype) if tagger else {}
            spans += [with_dates(snapshot, p, entities.get(p, [])) for p in passages]
            progress(len(passages))
        return {SPANS: json.dumps(spans).encode()}

    return make


def read_spans(files: Mapping[str, bytes]) -> list[list[Entity]]:
    return [[(start, end, name) for start, end, name in spans] for spans in json.loads(files[SPANS])]


def find_entities(tagger: Tagger, snapshot: Snapshot, passages: range, dtype: torch.dtype) -> dict[int, list[Entity]]:
    """Return the entities of each passage as whole words, from the first wordpieces of each sentence."""
    special = SpecialTokens.of(snapshot.tokenizer)
    prefix = len(special.begin)
    sequences, sentences = [], []
    for passage in passages:
        body, text, chars = snapshot.body(passage), snapshot.text(passage), snapshot.chars(passage)
        continues = snapshot.continues(passage)
        for first, end in snapshot.sentences(passage).tolist():
            end = min(end, first + tagger.limit - prefix - 1)
            tokens = np.array([*special.begin, *body[first:end], special.sep])
            capitals = np.zeros(len(tokens), dtype=np.int64)
            for row in range(first, end):
                is_word = row == first or not continues[row]
                position = prefix + row - first
                capitals[position] = text[chars[row, 0]].isupper() if is_word else capitals[position - 1]
            sequences.append((tokens, capitals))
            sentences.append((passage, first, end))
    entities: dict[int, list[Entity]] = {p: [] for p in passages}
    for (passage, first, end), best in zip(sentences, _predict(tagger, sequences, dtype), strict=True):
        chars, starts_word = snapshot.chars(passage), ~snapshot.continues(passage)[first:end]
        for start, stop, name in word_entities([tagger.tags[b] for b in best[prefix:-1]], starts_word):
            entities[passage].append((int(chars[first + start, 0]), int(chars[first + stop - 1, 1]), name))
    return entities


def word_entities(tags: Sequence[str], starts_word: np.ndarray) -> list[tuple[int, int, str]]:
    """Return entities as (first row, end row, type): whole words whose first wordpiece has the type's tag."""
    rows = [row for row in range(len(tags)) if row == 0 or starts_word[row]]
    ends = [*rows, len(tags)]
    return [(rows[first], ends[end], name) for first, end, name in entity_spans(iob2([tags[row] for row in rows]))]
