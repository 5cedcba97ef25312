"""The salient span tagger: BERT token classification, trained on CoNLL data (paper, section 3.4).

The vocabulary is uncased, names are not: whether a word starts with a capital enters as its segment.

Shape suffixes: T wordpieces of all sentences, D width, L tags.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from tokenizers import Tokenizer
from torch import Tensor, nn

from realmops.config import Optimiser, Tag
from realmops.corpus.phrases import Phrases
from realmops.corpus.snapshot_reader import Snapshot
from realmops.devices import autocast
from realmops.model.checkpoint_files import cpu_state
from realmops.model.encoder import Encoder
from realmops.model.encoder_files import described_encoder
from realmops.model.packed import Packed, length_batches
from realmops.model.sequences import SpecialTokens
from realmops.search.embed import MakeShard, Progress
from realmops.text.conll import TaggedSentence
from realmops.text.dates import find_dates
from realmops.train.loop import Context, fit
from realmops.train.optimiser import Group

DATE = "DATE"
TAGGER, WEIGHTS, SPANS = "tagger.json", "tagger.safetensors", "spans.json"
_TOGETHER = 2048  # passages whose sentences are put into batches of like lengths
Entity = tuple[int, int, str]
"""(first character, end, type)."""


class Tagger(nn.Module):
    """An encoder with a linear layer over its hidden states."""

    def __init__(self, encoder: Encoder, tags: Sequence[str]) -> None:
        super().__init__()
        self.bert, self.tags = encoder, tuple(tags)
        self.output = nn.Linear(encoder.width, len(tags))

    def forward(self, batch: Packed) -> Tensor:
        """Logits T x L."""
        logits_TL: Tensor = self.output(self.bert(batch))
        return logits_TL


@dataclass(frozen=True)
class _Encoded:
    tokens: np.ndarray
    capitals: np.ndarray
    first_piece: np.ndarray  # row of each word's first wordpiece; -1 where the word was cut off
    tags: np.ndarray  # tag of each row; [CLS] and [SEP] have O


def tag_names(sentences: Iterable[TaggedSentence]) -> list[str]:
    """O, then B- and I- of every type that occurs, sorted."""
    types = sorted({tag[2:] for s in sentences for tag in s.tags if tag != "O"})
    return ["O", *(f"{prefix}-{name}" for name in types for prefix in "BI")]


def _encode(sentence: TaggedSentence, tokenizer: Tokenizer, tags: Sequence[str], limit: int) -> _Encoded:
    special = SpecialTokens.of(tokenizer)
    number = {tag: i for i, tag in enumerate(tags)}
    tokens, capitals, labels, first = special.begin, [0] * len(special.begin), [0] * len(special.begin), []
    blank = "" if getattr(tokenizer.model, "continuing_subword_prefix", None) else " "  # words stand behind one
    for word, tag in zip(sentence.words, sentence.tags, strict=True):
        pieces = tokenizer.encode(blank + word, add_special_tokens=False).ids or [special.unknown]
        first.append(len(tokens) if len(tokens) + len(pieces) < limit else -1)
        if first[-1] < 0:
            continue
        inside = "I" + tag[1:] if tag != "O" else "O"
        tokens += pieces
        capitals += [int(word[:1].isupper())] * len(pieces)
        labels += [number.get(tag, 0)] + [number.get(inside, 0)] * (len(pieces) - 1)
    return _Encoded(np.array([*tokens, special.sep]), np.array([*capitals, 0]), np.array(first), np.array([*labels, 0]))


def train_tagger(
    context: Context,
    tagger: Tagger,
    sentences: Sequence[TaggedSentence],
    tokenizer: Tokenizer,
    options: Tag,
    optimiser: Optimiser,
) -> None:
    """Cross entropy over every wordpiece; the pieces of a word behind its first are inside the entity.

    A share of the wordpieces is hidden behind [MASK] at random, so that the tagger learns what stands around
    names instead of the names, which are others in another corpus.
    """
    encoded = [_encode(s, tokenizer, tagger.tags, options.wordpieces) for s in sentences]
    mask = SpecialTokens.of(tokenizer).mask

    def step_loss(step: int) -> tuple[Tensor, dict[str, float]]:
        tagger.train()
        rng = context.rng("batch", step)
        batch = [encoded[i] for i in rng.integers(len(encoded), size=options.batch_size)]
        hidden = [np.where(rng.random(len(e.tokens)) < options.hidden, mask, e.tokens) for e in batch]
        with autocast(context.device, context.dtype):
            logits_TL = tagger(Packed(hidden, [e.capitals for e in batch]))
        target_T = torch.from_numpy(np.concatenate([e.tags for e in batch])).to(logits_TL.device)
        return F.cross_entropy(logits_TL.float(), target_T), {}

    groups = [Group("tagger", tagger, options.learning_rate)]
    fit(context, groups, optimiser, step_loss, steps=options.steps, checkpoint_every=max(1, options.steps))


@torch.no_grad()
def _predict(
    tagger: Tagger, sequences: Sequence[tuple[np.ndarray, np.ndarray]], dtype: torch.dtype
) -> list[np.ndarray]:
    """The best tag of every row of every sequence."""
    tagger.eval()
    device = tagger.output.weight.device
    out: list[np.ndarray] = [np.zeros(0, dtype=np.int64)] * len(sequences)
    for rows in length_batches([len(tokens) for tokens, _ in sequences], device):
        batch = Packed([sequences[i][0] for i in rows], [sequences[i][1] for i in rows])
        with autocast(device, dtype):
            best_T = tagger(batch).argmax(-1).cpu().numpy()
        for i, part in zip(rows, np.split(best_T, batch.starts[1:-1]), strict=True):
            out[i] = part
    return out


def predict_words(
    tagger: Tagger, sentences: Sequence[TaggedSentence], tokenizer: Tokenizer, options: Tag, dtype: torch.dtype
) -> list[list[str]]:
    """One tag per word, that of its first wordpiece; for scoring against CoNLL data."""
    encoded = [_encode(s, tokenizer, tagger.tags, options.wordpieces) for s in sentences]
    best = _predict(tagger, [(e.tokens, e.capitals) for e in encoded], dtype)
    return [
        [tagger.tags[b[row]] if row >= 0 else "O" for row in e.first_piece] for e, b in zip(encoded, best, strict=True)
    ]


def tagger_files(tagger: Tagger | None, options: Tag) -> dict[str, bytes]:
    """What finds the spans of a passage, as files; without a tagger it finds dates alone."""
    known: dict[str, Any] = {"dates": options.dates or tagger is None}
    if tagger is None:
        return {TAGGER: json.dumps(known, sort_keys=True).encode()}
    known |= {"bert": tagger.bert.describe(), "tags": tagger.tags, "wordpieces": options.wordpieces}
    return {TAGGER: json.dumps(known, sort_keys=True).encode(), WEIGHTS: save_tensors(cpu_state(tagger))}


def tagging(snapshot: Snapshot, files: Mapping[str, bytes], device: torch.device, dtype: torch.dtype) -> MakeShard:
    """What finds the spans of a shard of the corpus, with the files of :func:`tagger_files`.

    They are dates, and the entities that touch none.
    """
    known, tagger = json.loads(files[TAGGER]), None
    if WEIGHTS in files:
        tagger = Tagger(described_encoder(known["bert"]), known["tags"])
        tagger.load_state_dict(load_tensors(files[WEIGHTS]))
        tagger.to(device)

    def make(first: int, end: int, progress: Progress) -> dict[str, bytes]:
        spans: list[list[Entity]] = []
        for low in range(first, end, _TOGETHER):
            passages = range(low, min(low + _TOGETHER, end))
            found = find_entities(tagger, snapshot, passages, known["wordpieces"], dtype) if tagger else {}
            spans += [_beside_dates(snapshot, p, found.get(p, []), known["dates"]) for p in passages]
            progress(len(passages))
        return {SPANS: json.dumps(spans).encode()}

    return make


def _beside_dates(snapshot: Snapshot, passage: int, found: Sequence[Entity], dates: bool) -> list[Entity]:
    """The dates of a passage, if they are wanted, and the entities that touch none."""
    places = find_dates(snapshot.text(passage), snapshot.language_of(passage)) if dates else []
    others = [e for e in found if not any(e[0] < stop and start < e[1] for start, stop in places)]
    return [*((start, stop, DATE) for start, stop in places), *others]


def phrases_and_dates(snapshot: Snapshot, dates: bool) -> Iterator[list[Entity]]:
    """Of each passage its spans without a tagger: names, phrases and numbers, and dates if they are wanted."""
    phrases = Phrases(snapshot)
    return (_beside_dates(snapshot, passage, phrases.of(passage), dates) for passage in range(len(snapshot)))


def spans_in(files: Mapping[str, bytes]) -> list[list[Entity]]:
    """For each passage of a shard its spans, which :func:`tagging` has found."""
    return [[(start, end, name) for start, end, name in spans] for spans in json.loads(files[SPANS])]


def find_entities(
    tagger: Tagger, snapshot: Snapshot, passages: range, limit: int, dtype: torch.dtype
) -> dict[int, list[Entity]]:
    """For each of some passages its entities, cut at whole words; ``limit`` wordpieces of a sentence are read."""
    special = SpecialTokens.of(snapshot.tokenizer)
    before = len(special.begin)
    sequences, places = [], []
    for passage in passages:
        body, text, chars = snapshot.body(passage), snapshot.text(passage), snapshot.chars(passage)
        continues = snapshot.continues(passage)
        for first, end in snapshot.sentences(passage).tolist():
            end = min(end, first + limit - before - 1)
            tokens = np.array([*special.begin, *body[first:end], special.sep])
            capitals = np.zeros(len(tokens), dtype=np.int64)
            for row in range(first, end):
                is_word = row == first or not continues[row]
                place = before + row - first
                capitals[place] = text[chars[row, 0]].isupper() if is_word else capitals[place - 1]
            sequences.append((tokens, capitals))
            places.append((passage, first, end))
    found: dict[int, list[Entity]] = {p: [] for p in passages}
    for (passage, first, end), best in zip(places, _predict(tagger, sequences, dtype), strict=True):
        chars, starts_word = snapshot.chars(passage), ~snapshot.continues(passage)[first:end]
        for start, stop, name in _runs([tagger.tags[b] for b in best[before:-1]], starts_word):
            found[passage].append((int(chars[first + start, 0]), int(chars[first + stop - 1, 1]), name))
    return found


def _runs(tags: Sequence[str], starts_word: np.ndarray) -> Iterator[tuple[int, int, str]]:
    """Entities as (first row, end row, type): whole words whose first wordpiece has the type's tag."""
    start, name = -1, ""
    for row, tag in enumerate(tags):
        if not (starts_word[row] or row == 0):
            continue  # the rest of a word goes where its first wordpiece went
        if start >= 0 and tag != f"I-{name}":
            yield start, row, name
            start = -1
        if tag != "O" and start < 0:
            start, name = row, tag[2:]
    if start >= 0:
        yield start, len(tags), name
