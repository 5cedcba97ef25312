"""The sample corpus: an encyclopedia of an invented world, its questions and typed entity spans.

A world is a list of entities and a list of facts (subject, relation, object); ``sample_language.yaml`` has the words
for them. Every fact is told in three or four documents in different words: in the subject's article and in the
object's, or in that of a neighbour when the object is a date or a number. Questions use words that the fact's own
sentences avoid where they can, and filler sentences use the words of questions without the answer, so that matching
words is not enough.
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
from realmops.corpus.sample_world import Entity, Fact, Names, draw_entities, draw_facts, pick, shuffled

NER_SENTENCES = {"train": 2000, "dev": 400}

_FOURTH_TELLING = 0.25
_VISIT_FILLER = 0.25
_OWN_FILLER = 0.1
_PRONOUN = 0.12
_SHORT_WORDS = 19
_SECOND_TRAIN_QUESTION = 0.3
_TOKEN = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class Sentence:
    """`spans` are (character start, end, label); `fact` indexes World.facts, -1 for a filler."""

    template: str
    text: str
    spans: tuple[tuple[int, int, str], ...]
    fact: int
    subject: str


@dataclass(frozen=True)
class Paragraph:
    title: str
    sentences: tuple[Sentence, ...]

    @property
    def text(self) -> str:
        return " ".join(sentence.text for sentence in self.sentences)


@dataclass(frozen=True)
class World:
    entities: list[Entity]
    facts: list[Fact]
    passages: list[Paragraph]


def write_sample(
    folder: Path, *, seed: int, subjects: int, warmup_worlds: int, test_share: float, dev_share: float
) -> dict[str, Any]:
    """Write the sample corpus into an existing stage folder; the same arguments give the same bytes.

    `subjects` is the number of entities with facts (300 give about 2,350 documents), `warmup_worlds` that of other
    worlds of that size in warmup.jsonl.gz (at 300 subjects there are names for 7), `test_share` and `dev_share` are
    parts of the subjects. The entity that a question names belongs to the question's split, and so does the fact's
    subject. Returns counts. Raises ValueError when there are too few names for so many worlds.
    """
    used: set[str] = set()

    def world(names: set[str], *stream: int | str) -> World:
        return build_world(seed_for(seed, "sample", *stream), subjects, test_share, dev_share, names)

    target = world(used, "target")
    ner = {part: _ner_sentences(world(set(used), "ner", part), part) for part in NER_SENTENCES}
    warmup = [world(used, "warmup", number) for number in range(warmup_worlds)]
    questions = _questions(target, np.random.default_rng(seed_for(seed, "sample", "questions")))

    others = [line for number, other in enumerate(warmup) for line in _documents(other, f"warmup{number}")]
    _write_lines(folder / "corpus.jsonl.gz", _documents(target, "doc"))
    _write_lines(folder / "warmup.jsonl.gz", others)
    for split, asked in questions.items():
        _write_lines(folder / f"questions.{split}.jsonl.gz", asked)
    for part, sentences in ner.items():
        (folder / f"ner.{part}.conll").write_bytes("".join(map(_conll, sentences)).encode())
    return {
        "subjects": subjects,
        "relations": len({fact.relation.name for fact in target.facts}),
        "facts": len(target.facts),
        "documents": len(target.passages),
        "warmup_documents": sum(len(other.passages) for other in warmup),
        "questions": {split: len(asked) for split, asked in questions.items()},
        "ner_sentences": {part: len(sentences) for part, sentences in ner.items()},
    }


def build_world(seed: int, subjects: int, test_share: float, dev_share: float, used: set[str] | None = None) -> World:
    """One world; names already in `used` are avoided and the new ones added to it."""
    rng = np.random.default_rng(seed)
    names = Names(rng, subjects, set() if used is None else used)
    entities = draw_entities(names, rng, subjects, test_share, dev_share)
    facts = draw_facts(entities, rng)
    return World(entities, facts, _passages(entities, facts, rng))


def _render(template: str, fact: Fact, number: int, rng: np.random.Generator) -> Sentence:
    """A template with a fact's words in it, and where the entities are named."""
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
    """The sentence with its opening mention of the subject replaced by a pronoun, if there is one."""
    opening = subject.mention[0].upper() + subject.mention[1:]
    rest = sentence.text.removeprefix(opening + " ")
    if rest == sentence.text or rest.startswith("and "):
        return sentence
    text = f"{subject.pronouns[0].capitalize()} {rest}"
    shift = len(text) - len(sentence.text)
    spans = tuple((start + shift, end + shift, label) for start, end, label in sentence.spans[1:])
    return replace(sentence, text=text, spans=spans)


class _Fillers:
    """Hands out sentences about a subject that tell no fact, each at most once."""

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
    """Two sentences each, grouped by article (title), in the order of the entities."""
    own, visits, guests = _tellings(facts, rng)
    fillers = _Fillers(facts, rng)
    by_others = [
        [_lengthened(pair, fillers) for pair in _visit_pairs(visits[entity.name], guests, fillers, rng)]
        for entity in entities
    ]
    passages = []
    for entity, told_by_others in zip(entities, by_others, strict=True):
        sentences = own[entity.name] + guests[entity.name]
        for _ in sentences:
            if rng.random() < _OWN_FILLER and (filler := fillers.next(entity.name)):
                sentences.append(filler)
        if len(sentences) % 2 and (filler := fillers.next(entity.name)):
            sentences.append(filler)
        for pair in _distinct_pairs(sentences, fillers, rng):
            first, *rest = _lengthened(pair, fillers)
            rest = [_with_pronoun(later, entity) if rng.random() < _PRONOUN else later for later in rest]
            passages.append(Paragraph(entity.name, (first, *rest)))
        passages += [Paragraph(entity.name, told) for told in told_by_others]
    return passages


def _tellings(
    facts: Sequence[Fact], rng: np.random.Generator
) -> tuple[dict[str, list[Sentence]], dict[str, list[Sentence]], dict[str, list[Sentence]]]:
    """Sentences that tell facts: for the subject's article, for the object's, for a neighbour's."""
    own: dict[str, list[Sentence]] = defaultdict(list)
    visits: dict[str, list[Sentence]] = defaultdict(list)
    guests: dict[str, list[Sentence]] = defaultdict(list)
    for number, fact in enumerate(facts):
        elsewhere = 1 + int(rng.random() < _FOURTH_TELLING)
        told = [_render(template, fact, number, rng) for template in shuffled(rng, fact.relation.forward)]
        own[fact.subject.name] += told[:2]
        if fact.object is None:
            guests[fact.subject.name] += told[2 : 2 + elsewhere]
        else:
            for template in shuffled(rng, fact.relation.inverse)[:elsewhere]:
                visits[fact.object.name].append(_render(template, fact, number, rng))
    return own, visits, guests


def _visit_pairs(
    visits: list[Sentence], guests: dict[str, list[Sentence]], fillers: _Fillers, rng: np.random.Generator
) -> list[tuple[Sentence, ...]]:
    """Sentences in which others mention the article's entity, each with one more about the same other."""
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
    """Pairs in random order, never of one fact twice, nor of two in the same words; the odd one out gets a filler."""
    left = shuffled(rng, sentences)
    pairs: list[tuple[Sentence, ...]] = []
    while left:
        first = left.pop(0)
        words, fact = first.template, first.fact
        apart = (i for i, other in enumerate(left) if other.template != words and not other.fact == fact >= 0)
        match = next(apart, None)
        second = left.pop(match) if match is not None else fillers.next(first.subject)
        pairs.append((first,) if second is None else (first, second))
    return pairs


def _lengthened(sentences: tuple[Sentence, ...], fillers: _Fillers) -> tuple[Sentence, ...]:
    """A short pair with a filler as its third sentence."""
    words = sum(len(_TOKEN.findall(sentence.text)) for sentence in sentences)
    filler = fillers.next(sentences[-1].subject) if words <= _SHORT_WORDS else None
    return sentences if filler is None else (*sentences, filler)


def _questions(world: World, rng: np.random.Generator) -> dict[str, list[dict[str, Any]]]:
    """Forward questions on every fact, inverse ones where the answer is unique and of the same split."""
    told: list[set[str]] = [set() for _ in world.facts]  # words, by fact
    for sentence in (sentence for passage in world.passages for sentence in passage.sentences):
        if sentence.fact >= 0:
            told[sentence.fact].update(_stems(sentence.text))
    objects = Counter((fact.relation.name, fact.object.name) for fact in world.facts if fact.object)
    asked: dict[str, list[dict[str, Any]]] = {"train": [], "dev": [], "test": []}

    def ask(fact: Fact, wordings: Sequence[str], about: Entity, answers: tuple[str, ...]) -> None:
        for wording in wordings:
            line = {"question": wording.format_map(_values(fact)), "answers": list(answers)}
            asked[about.split].append({**line, "subject": about.name, "relation": fact.relation.name})

    for number, fact in enumerate(world.facts):
        train = fact.subject.split == "train"
        count = 2 if train and rng.random() < _SECOND_TRAIN_QUESTION else 1
        wordings = _hardest_first(fact.relation.questions, told[number], rng)
        ask(fact, wordings[:count], fact.subject, fact.answers)
        if (
            fact.object
            and fact.relation.inverse_questions
            and fact.object.split == fact.subject.split
            and objects[fact.relation.name, fact.object.name] == 1
        ):
            wordings = _hardest_first(fact.relation.inverse_questions, told[number], rng)
            ask(fact, wordings[:1], fact.object, (fact.subject.name,))
    return {
        split: [{"id": f"{split}-{number:04d}", **line} for number, line in enumerate(shuffled(rng, lines))]
        for split, lines in asked.items()
    }


def _hardest_first(wordings: Sequence[str], told: set[str], rng: np.random.Generator) -> list[str]:
    """The wordings, those that share the fewest words with the fact's own sentences first."""
    return sorted(shuffled(rng, wordings), key=lambda wording: sum(stem in told for stem in _stems(wording)))


def _stems(text: str) -> list[str]:
    """Long words cut to five letters, enough to see that painted and painter are alike."""
    return [word[:5] for word in _TOKEN.findall(text.lower()) if len(word) > 3]


def _documents(world: World, prefix: str) -> list[dict[str, Any]]:
    return [
        {"id": f"{prefix}-{number:05d}", "title": passage.title, "text": passage.text}
        for number, passage in enumerate(world.passages)
    ]


def _ner_sentences(world: World, part: str) -> list[Sentence]:
    """Sentences spread evenly over the world's articles."""
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
    """Gzipped JSON lines whose bytes depend on the lines alone (no time, no file name in the header)."""
    with open(path, "wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as file:
        file.writelines(canonical_json(line) + b"\n" for line in lines)
