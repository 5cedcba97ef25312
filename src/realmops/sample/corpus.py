"""Generator of the sample corpus: an encyclopedia of an invented world, its questions and typed entity spans.

Every fact is in three or four documents in different words. Questions avoid the words of the fact's sentences, and
fillers use those of questions without the answer, so that lexical matching alone is not enough.
"""

from __future__ import annotations

import gzip
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import Formatter
from typing import Any

import numpy as np

from realmops.artifacts import canonical_json, seed_for
from realmops.sample.world import Entity, Fact, Names, draw_entities, draw_facts, pick, shuffled

WARMUP_WORLDS = 4  # whose documents are text for the reader's warm-up; its names differ from the corpus'
NER_SENTENCES = {"train": 2000, "dev": 400}

# Probabilities, but for the words below which a pair of sentences gets a filler.
_FOURTH_STATEMENT = 0.25
_VISIT_FILLER = 0.25
_OWN_FILLER = 0.1
_PRONOUN = 0.12
_SHORT_WORDS = 19
_SECOND_TRAIN_QUESTION = 0.3
_TOKEN = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class Sentence:
    """A rendered template; ``spans`` are (start, end, label), ``fact`` indexes World.facts, -1 for a filler."""

    template: str
    text: str
    spans: tuple[tuple[int, int, str], ...]
    fact: int
    subject: str


@dataclass(frozen=True)
class Paragraph:
    """A document of the sample corpus: sentences of one article."""

    title: str
    sentences: tuple[Sentence, ...]

    @property
    def text(self) -> str:
        return " ".join(sentence.text for sentence in self.sentences)


@dataclass(frozen=True)
class World:
    """Entities, the facts about them, and the documents that state the facts."""

    entities: list[Entity]
    facts: list[Fact]
    passages: list[Paragraph]


def write_sample(folder: Path, *, seed: int, subjects: int, warmup_worlds: int = WARMUP_WORLDS) -> dict[str, Any]:
    """Write the sample corpus into an existing stage folder; the same arguments give the same bytes.

    ``subjects`` is the number of entities with facts: 300 give about 2,350 documents and names for 7 ``warmup_worlds``.
    """
    used: set[str] = set()

    def world(names: set[str], *stream: int | str) -> World:
        return build_world(seed_for(seed, "sample", *stream), subjects, names)

    target = world(used, "target")
    ner = {part: _ner_sentences(world(set(used), "ner", part), part) for part in NER_SENTENCES}
    warmup = [world(used, "warmup", number) for number in range(warmup_worlds)]
    questions = _questions(target, np.random.default_rng(seed_for(seed, "sample", "questions")))

    warmup_lines = [line for number, other in enumerate(warmup) for line in _documents(other, f"warmup{number}")]
    _write_lines(folder / "corpus.jsonl.gz", _documents(target, "doc"))
    _write_lines(folder / "warmup.jsonl.gz", warmup_lines)
    for split, rows in questions.items():
        _write_lines(folder / f"questions.{split}.jsonl.gz", rows)
    for part, sentences in ner.items():
        (folder / f"ner.{part}.conll").write_bytes("".join(map(_conll, sentences)).encode())
    return {
        "subjects": subjects,
        "relations": len({fact.relation.name for fact in target.facts}),
        "facts": len(target.facts),
        "documents": len(target.passages),
        "warmup_documents": sum(len(other.passages) for other in warmup),
        "questions": {split: len(rows) for split, rows in questions.items()},
        "ner_sentences": {part: len(sentences) for part, sentences in ner.items()},
    }


def build_world(seed: int, subjects: int, used: set[str] | None = None) -> World:
    """Generate a world with names that are not in ``used``, and add its names to ``used``."""
    rng = np.random.default_rng(seed)
    names = Names(rng, subjects, set() if used is None else used)
    entities = draw_entities(names, rng, subjects)
    facts = draw_facts(entities, rng)
    return World(entities, facts, _passages(entities, facts, rng))


def _render(template: str, fact: Fact, number: int, rng: np.random.Generator) -> Sentence:
    values = _values(fact)
    entities = {"s": fact.subject, "o": fact.object}
    text = ""
    spans = []
    for literal, key, _, _ in Formatter().parse(template):
        text += literal
        if entity := entities.get(key or ""):
            start = len(text) + len(entity.article)
            spans.append((start, start + len(entity.name), entity.label))
        if key:
            text += pick(rng, fact.answers) if key == "o" and fact.object is None else values[key]
    return Sentence(template, text[0].upper() + text[1:], tuple(spans), number, fact.subject.name)


def _values(fact: Fact) -> dict[str, str]:
    subject, other = fact.subject, fact.object
    return {
        "s": subject.mention,
        "o": other.mention if other else fact.answers[0],
        "kind": subject.kind,
        "a_kind": _with_article(subject.kind),
        "okind": other.kind if other else "",
        "a_okind": _with_article(other.kind) if other else "",
        "his": subject.pronouns[1],
        "year": str(fact.year),
        "decade": f"{fact.year // 10 * 10}s",
    }


def _with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _with_pronoun(sentence: Sentence, subject: Entity) -> Sentence:
    opening = subject.mention[0].upper() + subject.mention[1:]
    remainder = sentence.text.removeprefix(opening + " ")
    if remainder == sentence.text or remainder.startswith("and "):
        return sentence
    text = f"{subject.pronouns[0].capitalize()} {remainder}"
    shift = len(text) - len(sentence.text)
    spans = tuple((start + shift, end + shift, label) for start, end, label in sentence.spans[1:])
    return replace(sentence, text=text, spans=spans)


class _Fillers:
    """Supply of sentences about a subject that state no fact, each used at most once."""

    def __init__(self, facts: Sequence[Fact], rng: np.random.Generator) -> None:
        self._rng = rng
        self._queues: defaultdict[str, list[tuple[Fact, str]]] = defaultdict(list)
        for fact in shuffled(rng, facts):
            for template in rng.permutation(list(fact.relation.fillers)):
                self._queues[fact.subject.name].append((fact, str(template)))

    def next(self, subject: str) -> Sentence | None:
        if not (queue := self._queues[subject]):
            return None
        fact, template = queue.pop(0)
        return _render(template, fact, -1, self._rng)


def _passages(entities: Sequence[Entity], facts: Sequence[Fact], rng: np.random.Generator) -> list[Paragraph]:
    """Build documents of two or three sentences, grouped by article (title), in the order of the entities."""
    own, visits, guests = _statements(facts, rng)
    fillers = _Fillers(facts, rng)
    visit_groups = [
        [_lengthened(pair, fillers) for pair in _visit_pairs(visits[entity.name], guests, fillers, rng)]
        for entity in entities
    ]
    passages = []
    for entity, groups in zip(entities, visit_groups, strict=True):
        sentences = own[entity.name] + guests[entity.name]
        for _ in sentences:
            if rng.random() < _OWN_FILLER and (filler := fillers.next(entity.name)):
                sentences.append(filler)
        if len(sentences) % 2 and (filler := fillers.next(entity.name)):
            sentences.append(filler)
        for pair in _distinct_pairs(sentences, fillers, rng):
            first, *later = _lengthened(pair, fillers)
            later = [_with_pronoun(sentence, entity) if rng.random() < _PRONOUN else sentence for sentence in later]
            passages.append(Paragraph(entity.name, (first, *later)))
        passages += [Paragraph(entity.name, group) for group in groups]
    return passages


def _statements(
    facts: Sequence[Fact], rng: np.random.Generator
) -> tuple[dict[str, list[Sentence]], dict[str, list[Sentence]], dict[str, list[Sentence]]]:
    """Render all facts for three places: the subject's article, the object's, and a neighbour's."""
    own: dict[str, list[Sentence]] = defaultdict(list)
    visits: dict[str, list[Sentence]] = defaultdict(list)
    guests: dict[str, list[Sentence]] = defaultdict(list)
    for number, fact in enumerate(facts):
        count = 1 + int(rng.random() < _FOURTH_STATEMENT)
        sentences = [_render(template, fact, number, rng) for template in shuffled(rng, fact.relation.forward)]
        own[fact.subject.name] += sentences[:2]
        if fact.object is None:
            guests[fact.subject.name] += sentences[2 : 2 + count]
        else:
            for template in shuffled(rng, fact.relation.inverse)[:count]:
                visits[fact.object.name].append(_render(template, fact, number, rng))
    return own, visits, guests


def _visit_pairs(
    visits: list[Sentence], guests: dict[str, list[Sentence]], fillers: _Fillers, rng: np.random.Generator
) -> list[tuple[Sentence, ...]]:
    """Pair sentences in which other subjects mention the article's entity with one more about the same subject."""
    pairs: list[tuple[Sentence, ...]] = []
    alone: list[Sentence] = []
    for visit in visits:
        if guests[visit.subject]:
            pairs.append((visit, guests[visit.subject].pop(0)))
        elif rng.random() < _VISIT_FILLER and (filler := fillers.next(visit.subject)):
            pairs.append((visit, filler))
        else:
            alone.append(visit)
    return pairs + _distinct_pairs(alone, fillers, rng)


def _distinct_pairs(
    sentences: list[Sentence], fillers: _Fillers, rng: np.random.Generator
) -> list[tuple[Sentence, ...]]:
    """Pair sentences at random, never of the same fact or template; an unpaired sentence gets a filler."""
    remaining = shuffled(rng, sentences)
    pairs: list[tuple[Sentence, ...]] = []
    while remaining:
        first = remaining.pop(0)
        words, fact = first.template, first.fact
        matches = (i for i, other in enumerate(remaining) if other.template != words and not other.fact == fact >= 0)
        match = next(matches, None)
        second = remaining.pop(match) if match is not None else fillers.next(first.subject)
        pairs.append((first,) if second is None else (first, second))
    return pairs


def _lengthened(sentences: tuple[Sentence, ...], fillers: _Fillers) -> tuple[Sentence, ...]:
    words = sum(len(_TOKEN.findall(sentence.text)) for sentence in sentences)
    filler = fillers.next(sentences[-1].subject) if words <= _SHORT_WORDS else None
    return sentences if filler is None else (*sentences, filler)


def _questions(world: World, rng: np.random.Generator) -> dict[str, list[dict[str, Any]]]:
    """Generate forward questions on every fact, and inverse ones if the answer is unique and in the same split."""
    stems_of: list[set[str]] = [set() for _ in world.facts]  # of the sentences of each fact
    for sentence in (sentence for passage in world.passages for sentence in passage.sentences):
        if sentence.fact >= 0:
            stems_of[sentence.fact].update(_stems(sentence.text))
    objects = Counter((fact.relation.name, fact.object.name) for fact in world.facts if fact.object)
    rows: dict[str, list[dict[str, Any]]] = {"train": [], "dev": [], "test": []}

    def add(fact: Fact, wordings: Sequence[str], about: Entity, answers: tuple[str, ...]) -> None:
        for wording in wordings:
            row = {"question": wording.format_map(_values(fact)), "answers": list(answers)}
            rows[about.split].append({**row, "subject": about.name, "relation": fact.relation.name})

    for number, fact in enumerate(world.facts):
        is_train = fact.subject.split == "train"
        count = 2 if is_train and rng.random() < _SECOND_TRAIN_QUESTION else 1
        wordings = _hardest_first(fact.relation.questions, stems_of[number], rng)
        add(fact, wordings[:count], fact.subject, fact.answers)
        if (
            fact.object
            and fact.relation.inverse_questions
            and fact.object.split == fact.subject.split
            and objects[fact.relation.name, fact.object.name] == 1
        ):
            wordings = _hardest_first(fact.relation.inverse_questions, stems_of[number], rng)
            add(fact, wordings[:1], fact.object, (fact.subject.name,))
    return {
        split: [{"id": f"{split}-{number:04d}", **row} for number, row in enumerate(shuffled(rng, split_rows))]
        for split, split_rows in rows.items()
    }


def _hardest_first(wordings: Sequence[str], stems: set[str], rng: np.random.Generator) -> list[str]:
    return sorted(shuffled(rng, wordings), key=lambda wording: sum(stem in stems for stem in _stems(wording)))


def _stems(text: str) -> list[str]:
    """Return the words of four letters or more, cut to five, so that "painted" and "painter" match."""
    return [word[:5] for word in _TOKEN.findall(text.lower()) if len(word) > 3]


def _documents(world: World, prefix: str) -> list[dict[str, Any]]:
    return [
        {"id": f"{prefix}-{number:05d}", "title": passage.title, "text": passage.text}
        for number, passage in enumerate(world.passages)
    ]


def _ner_sentences(world: World, part: str) -> list[Sentence]:
    sentences = [sentence for passage in world.passages for sentence in passage.sentences]
    count = min(NER_SENTENCES[part], len(sentences))
    return [sentences[index * len(sentences) // count] for index in range(count)]


def _conll(sentence: Sentence) -> str:
    lines = []
    for match in _TOKEN.finditer(sentence.text):
        tag = "O"
        for start, end, label in sentence.spans:
            if start <= match.start() and match.end() <= end:
                tag = f"{'B' if match.start() == start else 'I'}-{label}"
        lines.append(f"{match.group()}\t{tag}\n")
    return "".join(lines) + "\n"


def _write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Write gzipped JSON lines reproducibly: the header has no time and no file name."""
    with open(path, "wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as file:
        file.writelines(canonical_json(line) + b"\n" for line in lines)
