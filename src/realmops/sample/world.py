"""Generator of the sample corpus's world: entities, with names unique among all worlds, and facts about them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import Formatter
from typing import Any, TypeVar

import numpy as np
import yaml

LANGUAGE = "language.yaml"
TEST_SHARE, DEV_SHARE = 0.37, 0.21  # of the entities of each type
# Shares of the subjects by type, landmarks being the others; lakes and regions are added and are subjects of no fact.
_TYPE_SHARES = {"person": 0.37, "city": 0.2, "organisation": 0.18, "work": 0.16, "prize": 0.025}
_LABELS = {"person": "PER", "organisation": "ORG", "work": "MISC", "prize": "MISC"}
_SAME_SPLIT = 0.65  # probability that a fact's object is drawn from the subject's split
# Fewer parts give more similar names: one family name for every 12 subjects, and so on.
_SUBJECTS_PER_PART = {
    "town": 15, "family": 12, "brand": 20, "landmark": 30, "woman": 25, "man": 25, "adjective": 25, "noun": 20,
    "ending": 50,
}  # fmt: skip
_CHARTER_YEARS = (1150, 1700)

T = TypeVar("T")


@dataclass(frozen=True)
class Relation:
    """A relation and its sentence templates; ``language.yaml`` documents the fields."""

    name: str
    subjects: tuple[str, ...]
    objects: tuple[str, ...]
    share: float
    forward: tuple[str, ...]
    questions: tuple[str, ...]
    fillers: tuple[str, ...]
    inverse: tuple[str, ...] = ()
    inverse_questions: tuple[str, ...] = ()
    window: tuple[int, int] | None = None
    symmetric: bool = False


@dataclass(frozen=True)
class Entity:
    """A named entity; ``year`` is the year of birth, foundation or completion, 0 if there is none."""

    name: str
    article: str
    type: str
    kind: str
    year: int
    pronouns: tuple[str, str]
    split: str

    @property
    def mention(self) -> str:
        return self.article + self.name

    @property
    def label(self) -> str:
        return _LABELS.get(self.type, "LOC")

    def is_a(self, types: tuple[str, ...]) -> bool:
        return self.type in types or self.kind in types

    def fits(self, relation: Relation, subject: Entity) -> bool:
        low, high = relation.window or (self.year - subject.year,) * 2
        return self is not subject and self.is_a(relation.objects) and low <= self.year - subject.year <= high


@dataclass(frozen=True)
class Fact:
    """A fact; ``answers`` are the spellings of the object, ``object`` is None for a date or a number."""

    relation: Relation
    subject: Entity
    object: Entity | None
    answers: tuple[str, ...]
    year: int


@cache
def _language() -> dict[str, Any]:
    language: dict[str, Any] = yaml.load(Path(__file__).with_name(LANGUAGE).read_bytes(), yaml.CSafeLoader)
    return language


@cache
def relations() -> tuple[Relation, ...]:
    result = []
    for name, entry in _language()["relations"].items():
        fields: dict[str, Any] = {key: tuple(x) if isinstance(x, list) else x for key, x in entry.items()}
        result.append(Relation(name, **fields))
    return tuple(result)


class Names:
    """Generator of unique names, most of two parts that other names share: only the full name is unambiguous."""

    def __init__(self, rng: np.random.Generator, subjects: int, used: set[str]) -> None:
        self._rng = rng
        self._used = used
        self._pools: dict[str, list[str]] = {
            pool: parts.split()
            if isinstance(parts, str)
            else [head + tail for head in parts["heads"].split() for tail in parts["tails"].split()]
            for pool, parts in _language()["name_parts"].items()
        }
        self._parts = {
            pool: shuffled(rng, parts)[: max(6, subjects // _SUBJECTS_PER_PART.get(pool, 1))]
            for pool, parts in self._pools.items()
        }

    def new(self, *forms: str) -> str:
        """Draw a name of one of the forms, such as "{woman} {family}"; if the world's parts are exhausted, from all."""
        for attempt in range(1000):
            form = pick(self._rng, forms)
            parts = self._parts if attempt < 100 else self._pools
            keys = [key for _, key, _, _ in Formatter().parse(form) if key]
            name = form.format_map({key: pick(self._rng, parts[key]) for key in keys})
            if name not in self._used:
                self._used.add(name)
                return name
        raise ValueError("name pools of the sample corpus are exhausted; lower sample.subjects")


def draw_entities(names: Names, rng: np.random.Generator, subjects: int) -> list[Entity]:
    counts = {type_: round(subjects * part) for type_, part in _TYPE_SHARES.items()}
    counts["landmark"] = subjects - sum(counts.values())
    counts |= {"region": max(3, counts["city"] // 4), "lake": max(3, counts["landmark"] // 4)}
    entities: list[Entity] = []
    for type_, forms in _language()["entities"].items():
        tests, devs = round(counts[type_] * TEST_SHARE), round(counts[type_] * DEV_SHARE)
        splits = ["test"] * tests + ["dev"] * devs + ["train"] * (counts[type_] - tests - devs)
        for number, split in enumerate(shuffled(rng, splits)):
            form = forms[number % len(forms)]
            kind = form["kinds"][number // len(forms) % len(form["kinds"])]
            name = names.new(*form["names"])
            year = int(rng.integers(*form["years"])) if "years" in form else 0
            article = "the " if "article" in form else ""
            subject, possessive = form.get("pronouns", ("it", "its"))
            entities.append(Entity(name, article, type_, kind, year, (subject, possessive), split))
    return entities


def draw_facts(entities: list[Entity], rng: np.random.Generator) -> list[Fact]:
    """Draw facts for all relations; a subject and an object have at most one relation."""
    facts: list[Fact] = []
    mentions: Counter[str] = Counter()
    partners: dict[str, set[str]] = defaultdict(set)
    for relation in relations():
        paired: set[str] = set()
        for subject in entities:
            if not subject.is_a(relation.subjects) or rng.random() >= relation.share:
                continue
            if not relation.inverse:
                facts.append(_literal(relation, subject, rng))
                continue
            if subject.name in paired:
                continue
            excluded = paired | partners[subject.name]
            candidates = [other for other in entities if other.fits(relation, subject) and other.name not in excluded]
            if not candidates:
                continue
            chosen = _choose(candidates, subject.split, mentions, rng)
            mentions[chosen.name] += 1
            partners[subject.name].add(chosen.name)
            partners[chosen.name].add(subject.name)
            if relation.symmetric:
                paired.update((subject.name, chosen.name))
            facts.append(Fact(relation, subject, chosen, (chosen.name,), 0))
    return facts


def _choose(candidates: list[Entity], split: str, mentions: Counter[str], rng: np.random.Generator) -> Entity:
    """Choose the least mentioned of three candidates, so that no name becomes frequent enough to guess."""
    same_split = [other for other in candidates if other.split == split]
    pool = same_split if same_split and rng.random() < _SAME_SPLIT else candidates
    sample = [pick(rng, pool) for _ in range(3)]
    return min(sample, key=lambda other: mentions[other.name])


def _literal(relation: Relation, subject: Entity, rng: np.random.Generator) -> Fact:
    match relation.objects:
        case ("population",):
            return Fact(relation, subject, None, (f"{10 * int(rng.integers(150, 9900)):,}",), 0)
        case ("height",):
            return Fact(relation, subject, None, (f"{int(rng.integers(1100, 4400)):,}",), 0)
        case ("day",):
            year, month, day = subject.year, pick(rng, _language()["months"]), int(rng.integers(1, 29))
            return Fact(relation, subject, None, (f"{day} {month} {year}", f"{month} {day}, {year}"), year)
        case ("charter_year",):
            year = int(rng.integers(*_CHARTER_YEARS))
        case _:  # ("year",)
            assert relation.window is not None, relation.name
            year = subject.year + int(rng.integers(relation.window[0], relation.window[1] + 1))
    return Fact(relation, subject, None, (str(year),), year)


def pick(rng: np.random.Generator, items: Sequence[T]) -> T:
    return items[int(rng.integers(len(items)))]


def shuffled(rng: np.random.Generator, items: Sequence[T]) -> list[T]:
    return [items[index] for index in rng.permutation(len(items))]
