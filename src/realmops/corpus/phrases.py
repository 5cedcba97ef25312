"""Salient spans without a tagger: names by their capitals, and where those say nothing, phrases that recur.

- Where a capital marks a name: runs of capitalised words; at the start of a sentence only a word that has its capital
  elsewhere too.
- German writes every noun with a capital, and puts an article or an adjective before most of them, but not before a
  name. A capitalised word counts that stands twice or more, and so at most once in ten times; so do runs of two.
- Scripts without capitals: runs of characters or words that stand in 2 to 50 passages, hold together (their parts are
  seen together far more often than by chance) and are no part of a longer run as frequent. What is known of them is
  learned from a million characters or words at most.

Numbers count everywhere. ``docs/data.md`` says how many answers of people are found in this way.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from realmops.corpus.masking import MOST_PASSAGES
from realmops.corpus.snapshot_reader import Snapshot
from realmops.text.languages import LETTERS, NO_BLANKS, compiled, languages, placed

NAME, PHRASE, NUMBER = "NAME", "PHRASE", "NUMBER"
LONGEST, LONGEST_CHARACTERS = 4, 8  # words, and characters of scripts without blanks, of a phrase
TOGETHER = 4.0  # least logarithm of how much more often parts stand side by side than by chance
AS_NOUN = 0.1  # share of a German word's places behind an article or an adjective, above which it is no name
_ADJECTIVES = ("en", "er", "es", "em")  # how they end
FEW = 5  # passages that a phrase may stand in, in a corpus of some hundred
MOST_UNITS = 1_000_000
_WITHOUT_CAPITALS = ("ar", "fa", "he", "hi", "ja", "ko", "ne", "ta", "th", "zh")
_INSIDE = frozenset(
    ["al", "da", "de", "del", "della", "di", "do", "of", "van", "von"]
)  # a name, between two capitalised words
_UNIT = (
    rf"\d+(?:[.,]\d+)*|[{NO_BLANKS}]\p{{M}}*"
    rf"|[[\p{{L}}\p{{M}}]--[{NO_BLANKS}]][[\p{{L}}\p{{M}}\p{{N}}'’-]--[{NO_BLANKS}]]*"
)
_TWO_LETTERS = rf"(?:[[{LETTERS}]--[{NO_BLANKS}]][\p{{M}}'’.,-]*){{2}}"
Entity = tuple[int, int, str]
Unit = tuple[str, int, int]  # a word, or a character of a script without blanks, and its characters in the text


class Phrases:
    """What is learned of the passages of a snapshot in each of its languages; ``of`` finds the spans of a passage."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._names: dict[str, tuple[set[str], set[str]]] = {}
        self._phrases: dict[str, dict[str, float]] = {}
        for code in snapshot.languages:
            some = list(self._some(np.flatnonzero(snapshot.code_P == code.encode()).tolist()))
            if code in _WITHOUT_CAPITALS:
                self._phrases[code] = _phrases([(text, units) for text, units, _ in some], languages()[code].stop)
            else:
                self._names[code] = _capitalised(some, code)

    def of(self, passage: int) -> list[Entity]:
        """The spans of a passage, in characters, in order and without overlap."""
        text, language = self._snapshot.text(passage), self._snapshot.language_of(passage)
        units = _units(text)
        found = [(start, end, NUMBER) for word, start, end in units if word.isdecimal() and len(word) > 1]
        if language in _WITHOUT_CAPITALS:
            found += [(start, end, PHRASE) for start, end in _recurring(text, units, self._phrases[language])]
            found += [(start, end, NAME) for start, end in _names(text, units, set(), (set(), set()), language)]
        else:
            names = _names(text, units, self._starts(passage), self._names[language], language)
            found += [(start, end, NAME) for start, end in names]
        kept: list[Entity] = []
        for one in sorted(found):
            if not kept or kept[-1][1] <= one[0]:
                kept.append(one)
        return kept

    def _starts(self, passage: int) -> set[int]:
        """The characters at which its sentences begin."""
        chars = self._snapshot.chars(passage)
        return {int(chars[first, 0]) for first, _ in self._snapshot.sentences(passage).tolist()}

    def _some(self, passages: Sequence[int]) -> Iterator[tuple[str, list[Unit], set[int]]]:
        """Texts of the first of some passages, their units, and where their sentences begin."""
        count = 0
        for passage in passages:
            text = self._snapshot.text(passage)
            units = _units(text)
            yield text, units, self._starts(passage)
            count += len(units)
            if count > MOST_UNITS:
                return


def _units(text: str) -> list[Unit]:
    return [*placed(_composed_units, text)]


def _composed_units(text: str) -> Iterator[Unit]:
    return ((match[0], *match.span()) for match in compiled(_UNIT).finditer(text))


def _is_word(unit: str) -> bool:
    """Return whether a unit has two letters, as words have; combining marks are no letters."""
    return compiled(_TWO_LETTERS).match(unit) is not None


def _beside(text: str, left: Unit, right: Unit) -> bool:
    """Whether nothing, or one blank between words, parts two units."""
    return text[left[2] : right[1]] in ("", " ")


def _is_capitalised(word: str) -> bool:
    return word[0].isupper()


def _capitalised(some: Iterable[tuple[str, list[Unit], set[int]]], language: str) -> tuple[set[str], set[str]]:
    """The words that are names by their capital inside of sentences, and all words that also stand without one."""
    places: Counter[str] = Counter()
    without: Counter[str] = Counter()
    as_noun: Counter[str] = Counter()
    known = languages()[language]
    articles = known.articles | known.before_nouns
    for _, units, starts in some:
        words = ["", "", *(word.lower() for word, _, _ in units)]
        for (farther, before), (word, start, _) in zip(pairwise(words), units, strict=False):
            if not _is_capitalised(word):
                without[word] += 1
            elif start not in starts:
                places[word] += 1
                is_adjective = before.endswith(_ADJECTIVES) and before not in known.stop
                as_noun[word] += before in articles or is_adjective or (before.endswith("e") and farther in articles)
    if known.before_nouns:
        return {word for word, n in places.items() if n > 1 and as_noun[word] <= AS_NOUN * n}, set(without)
    return {word for word, n in places.items() if n > without[word.lower()]}, set(without)


def _names(
    text: str, units: Sequence[Unit], starts: set[int], known: tuple[set[str], set[str]], language: str
) -> Iterator[tuple[int, int]]:
    """Runs of capitalised words, a first word of a sentence only where it is a name elsewhere or never without one."""
    names, without = known
    nouns = languages()[language].before_nouns
    never = nouns | languages()[language].articles | languages()[language].stop
    at = 0
    while at < len(units):
        first, at = at, at + 1
        if not _is_capitalised(units[first][0]):
            continue
        while more := _more(text, units[at - 1 : at + 2]):
            at += more
        begins, word = units[first][1] in starts, units[first][0]
        if begins and word not in names and (at - first == 1 or word.lower() in never or word.lower() in without):
            first += 1
        while first < at and not _is_capitalised(units[first][0]):
            first += 1
        alone = first + 1 == at and (len(units[first][0]) == 1 or (bool(nouns) and units[first][0] not in names))
        if first < at and not alone:
            yield units[first][1], units[at - 1][2]


def _more(text: str, units: Sequence[Unit]) -> int:
    """How many of the words behind the first belong to the same name: 0, 1, or 2 with a small word between."""
    if len(units) < 2 or not _beside(text, *units[:2]):
        return 0
    if _is_capitalised(units[1][0]):
        return 1
    inside = units[1][0] in _INSIDE and len(units) > 2 and _beside(text, *units[1:])
    return 2 if inside and _is_capitalised(units[2][0]) else 0


def _phrases(some: Sequence[tuple[str, list[Unit]]], stop: frozenset[str]) -> dict[str, float]:
    """The phrases of some texts, each with the logarithm of how much more often it is seen than by chance."""
    seen: Counter[str] = Counter()
    within: Counter[str] = Counter()  # passages
    kept: set[str] = set()
    reaches = [_reach(text, units) for text, units in some]
    for size in range(1, LONGEST_CHARACTERS + 2):  # the last only to know what is a part of it
        here: Counter[str] = Counter()
        passages: Counter[str] = Counter()
        for (text, units), reach in zip(some, reaches, strict=True):
            found = [
                text[low:high]
                for low, middle, end, high in _runs(units, reach, size)
                if size == 1 or (text[low:middle] in kept and text[end:high] in kept)
            ]
            here.update(found)
            passages.update(set(found))
        kept = {one for one, count in passages.items() if count > 1}
        if not kept:
            break
        seen.update({one: here[one] for one in kept})
        within.update({one: passages[one] for one in kept})
    total, most = sum(len(units) for _, units in some), min(MOST_PASSAGES, max(FEW, len(some) // 50))
    longer: Counter[str] = Counter()  # the most frequent run that is one longer
    cohesion: dict[str, float] = {}
    for one in seen:
        units = _units(one)
        if len(units) > 1:
            for part in (one[: units[-2][2]], one[units[1][1] :]):
                longer[part] = max(longer[part], seen[one])
        splits = [seen[one[: left[2]]] * seen[one[right[1] :]] for left, right in pairwise(units)]
        together = min((math.log(seen[one] * total / split) for split in splits if split), default=0.0)
        ends = units[0][0], units[-1][0]
        usable = within[one] <= most and not stop & {*ends} and not any(map(_is_kana, ends))
        usable = usable and len(units) <= LONGEST_CHARACTERS
        alone = len(units) == 1 and _is_word(one)
        if usable and (together >= TOGETHER or alone):
            cohesion[one] = together
    return {one: value for one, value in cohesion.items() if longer[one] < 0.8 * seen[one]}


def _is_kana(unit: str) -> bool:
    return "\u3040" <= unit <= "\u309f"  # hiragana: particles and endings


def _reach(text: str, units: Sequence[Unit]) -> list[int]:
    """How many units a phrase may have that begins with each: neighbours, few words, and no number first."""
    reach = [1] * len(units)
    for first in range(len(units) - 2, -1, -1):
        if _beside(text, units[first], units[first + 1]):
            reach[first] += reach[first + 1]
    for first, (word, _, _) in enumerate(units):
        reach[first] = 0 if word[0].isdecimal() else min(reach[first], LONGEST + 1) if _is_word(word) else reach[first]
    return reach


def _runs(units: Sequence[Unit], reach: Sequence[int], size: int) -> Iterator[tuple[int, int, int, int]]:
    """Of each run of so many units: its start, the end of the last but one, the start of the second, its end."""
    for first, (_, low, _) in enumerate(units):
        if reach[first] >= size:
            last = first + size - 1
            yield low, units[max(last - 1, first)][2], units[min(first + 1, last)][1], units[last][2]


def _recurring(text: str, units: Sequence[Unit], known: dict[str, float]) -> list[tuple[int, int]]:
    """The longest known phrases of a text, of equally long ones those that hold together most."""
    found, reach = [], _reach(text, units)
    for size in range(1, LONGEST_CHARACTERS + 1):
        for low, _, _, high in _runs(units, reach, size):
            if text[low:high] in known:
                found.append((-size, -known[text[low:high]], low, high))
    taken: list[tuple[int, int]] = []
    for _, _, low, high in sorted(found):
        if all(high <= start or end <= low for start, end in taken):
            taken.append((low, high))
    return taken
