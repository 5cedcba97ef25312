"""The invented world of the sample corpus: entities with names that no other world has, and facts about them."""

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

LANGUAGE = "sample_language.yaml"
# Parts of the subjects by type, the rest are landmarks; lakes and regions come on top, without facts of their own.
_PARTS = {"person": 0.37, "city": 0.2, "organisation": 0.18, "work": 0.16, "prize": 0.025}
_LABELS = {"person": "PER", "organisation": "ORG", "work": "MISC", "prize": "MISC"}
_SAME_SPLIT = 0.65
# Fewer parts make names more alike: one family name for every 12 subjects, and so on.
_SUBJECTS_PER_PART = {
    "town": 15, "family": 12, "brand": 20, "landmark": 30, "woman": 25, "man": 25, "adjective": 25, "noun": 20,
    "ending": 50,
}  # fmt: skip
_CHARTER_YEARS = (1150, 1700)

T = TypeVar("T")


@dataclass(frozen=True)
class Relation:
    """One relation and every way of telling it; ``sample_language.yaml`` says what its fields mean."""

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
    """Something with a name; `year` is the year of birth, foundation or completion, 0 where there is none."""

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

    def is_a(self, wanted: tuple[str, ...]) -> bool:
        return self.type in wanted or self.kind in wanted

    def fits(self, relation: Relation, subject: Entity) -> bool:
        """Whether it may be the relation's object for a subject, by what it is and by the years."""
        low, high = relation.window or (self.year - subject.year,) * 2
        return self is not subject and self.is_a(relation.objects) and low <= self.year - subject.year <= high


@dataclass(frozen=True)
class Fact:
    """`answers` are the ways in which the object is written; `object` is None for a date or a number."""

    relation: Relation
    subject: Entity
    object: Entity | None
    answers: tuple[str, ...]
    year: int


@cache
def _language() -> dict[str, Any]:
    """The names, kinds and relations of all worlds, as people write them."""
    language: dict[str, Any] = yaml.load(Path(__file__).with_name(LANGUAGE).read_bytes(), yaml.CSafeLoader)
    return language


@cache
def relations() -> tuple[Relation, ...]:
    """The relations of all worlds."""
    found = []
    for name, said in _language()["relations"].items():
        fields: dict[str, Any] = {key: tuple(x) if isinstance(x, list) else x for key, x in said.items()}
        found.append(Relation(name, **fields))
    return tuple(found)


class Names:
    """Draws names that occur in no world drawn before it with the same `used`.

    Most names have two parts, each shared with other names of the world: only both together tell who is meant.
    """

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
        """A name by one of the forms, such as "{woman} {family}"; of any parts where the world's own are used up."""
        for attempt in range(1000):
            form = pick(self._rng, forms)
            parts = self._parts if attempt < 100 else self._pools
            keys = [key for _, key, _, _ in Formatter().parse(form) if key]
            name = form.format_map({key: pick(self._rng, parts[key]) for key in keys})
            if name not in self._used:
                self._used.add(name)
                return name
        raise ValueError(
            "the name pools of the sample corpus are used up: lower sample.subjects or sample.warmup_worlds"
        )


def draw_entities(
    names: Names, rng: np.random.Generator, subjects: int, test_share: float, dev_share: float
) -> list[Entity]:
    """All entities of a world, type by type, each type split by the shares."""
    counts = {type_: round(subjects * part) for type_, part in _PARTS.items()}
    counts["landmark"] = subjects - sum(counts.values())
    counts |= {"region": max(3, counts["city"] // 4), "lake": max(3, counts["landmark"] // 4)}
    entities: list[Entity] = []
    for type_, forms in _language()["entities"].items():
        tests, devs = round(counts[type_] * test_share), round(counts[type_] * dev_share)
        splits = ["test"] * tests + ["dev"] * devs + ["train"] * (counts[type_] - tests - devs)
        for number, split in enumerate(shuffled(rng, splits)):
            form = forms[number % len(forms)]
            kind = form["kinds"][number // len(forms) % len(form["kinds"])]
            name = names.new(*form["names"])
            year = int(rng.integers(*form["years"])) if "years" in form else 0
            she, her = form.get("pronouns", ("it", "its"))
            entities.append(Entity(name, "the " if "article" in form else "", type_, kind, year, (she, her), split))
    return entities


def draw_facts(entities: list[Entity], rng: np.random.Generator) -> list[Fact]:
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
            taken = paired | partners[subject.name]
            candidates = [other for other in entities if other.fits(relation, subject) and other.name not in taken]
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
    """One of a few candidates, the least mentioned: no name becomes frequent enough to be found by chance."""
    near = [other for other in candidates if other.split == split]
    pool = near if near and rng.random() < _SAME_SPLIT else candidates
    few = [pick(rng, pool) for _ in range(3)]
    return min(few, key=lambda other: mentions[other.name])


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
