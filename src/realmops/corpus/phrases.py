"""Salient spans without a tagger: capitalised names, recurring phrases in scripts without capitals, and numbers.

German capitalises every noun: a name follows an article or an adjective in at most one of ten places. A phrase occurs
in 2 to 50 passages, and the pointwise mutual information of its parts is high.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from realmops.corpus.dates import find_dates
from realmops.corpus.languages import LETTERS, NO_BLANKS, compile_regex, find_with_offsets, load_languages
from realmops.corpus.masking import MAX_PASSAGES
from realmops.corpus.snapshot_reader import Snapshot

NAME, PHRASE, NUMBER, DATE = "NAME", "PHRASE", "NUMBER", "DATE"
MAX_WORDS, MAX_CHARACTERS = 4, 8  # per phrase: words, or characters of scripts without spaces
MIN_COHESION = 4.0  # pointwise mutual information of a phrase's parts, in nats
MAX_NOUN_SHARE = 0.1  # a German word that follows an article or adjective more often is not a name
_ADJECTIVE_ENDINGS = ("en", "er", "es", "em")
MIN_PASSAGE_LIMIT = 5  # lower bound of the passages that a phrase may occur in, for corpora of some hundred
MAX_UNITS = 1_000_000
_WITHOUT_CAPITALS = ("ar", "fa", "he", "hi", "ja", "ko", "ne", "ta", "th", "zh")
_PARTICLES = frozenset(
    ["al", "da", "de", "del", "della", "di", "do", "of", "van", "von"]
)  # within a name, between two capitalised words
_UNIT = (
    rf"\d+(?:[.,]\d+)*|[{NO_BLANKS}]\p{{M}}*"
    rf"|[[\p{{L}}\p{{M}}]--[{NO_BLANKS}]][[\p{{L}}\p{{M}}\p{{N}}'’-]--[{NO_BLANKS}]]*"
)
_TWO_LETTERS = rf"(?:[[{LETTERS}]--[{NO_BLANKS}]][\p{{M}}'’.,-]*){{2}}"
Entity = tuple[int, int, str]
Unit = tuple[str, int, int]  # (word, or character of a script without spaces; start; end)


class PhraseFinder:
    """Finder of salient spans, with statistics of the snapshot's passages for each language."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._names: dict[str, tuple[set[str], set[str]]] = {}
        self._phrases: dict[str, dict[str, float]] = {}
        for code in snapshot.languages:
            sample = list(self._sample(np.flatnonzero(snapshot.code_P == code.encode()).tolist()))
            if code in _WITHOUT_CAPITALS:
                self._phrases[code] = _learn_phrases(
                    [(text, units) for text, units, _ in sample], load_languages()[code].stop
                )
            else:
                self._names[code] = _learn_names(sample, code)

    def of(self, passage: int) -> list[Entity]:
        """Return the spans of a passage as (start, end, label) in characters, in order and without overlap."""
        text, language = self._snapshot.text(passage), self._snapshot.language_of(passage)
        units = _units(text)
        candidates = [(start, end, NUMBER) for word, start, end in units if word.isdecimal() and len(word) > 1]
        if language in _WITHOUT_CAPITALS:
            candidates += [(start, end, PHRASE) for start, end in _match_phrases(text, units, self._phrases[language])]
            candidates += [(start, end, NAME) for start, end in _names(text, units, set(), (set(), set()), language)]
        else:
            names = _names(text, units, self._starts(passage), self._names[language], language)
            candidates += [(start, end, NAME) for start, end in names]
        spans: list[Entity] = []
        for span in sorted(candidates):
            if not spans or spans[-1][1] <= span[0]:
                spans.append(span)
        return spans

    def _starts(self, passage: int) -> set[int]:
        chars = self._snapshot.chars(passage)
        return {int(chars[first, 0]) for first, _ in self._snapshot.sentences(passage).tolist()}

    def _sample(self, passages: Sequence[int]) -> Iterator[tuple[str, list[Unit], set[int]]]:
        """Yield (text, units, sentence starts) of the first passages, up to ``MAX_UNITS`` units."""
        count = 0
        for passage in passages:
            text = self._snapshot.text(passage)
            units = _units(text)
            yield text, units, self._starts(passage)
            count += len(units)
            if count > MAX_UNITS:
                return


def _units(text: str) -> list[Unit]:
    expression = compile_regex(_UNIT)
    return [*find_with_offsets(lambda whole: ((m[0], *m.span()) for m in expression.finditer(whole)), text)]


def _is_word(unit: str) -> bool:
    return compile_regex(_TWO_LETTERS).match(unit) is not None


def _is_adjacent(text: str, left: Unit, right: Unit) -> bool:
    return text[left[2] : right[1]] in ("", " ")


def _is_capitalised(word: str) -> bool:
    return word[0].isupper()


def _learn_names(sample: Iterable[tuple[str, list[Unit], set[int]]], language: str) -> tuple[set[str], set[str]]:
    """Return (words that are names by their capital within sentences, words that also occur in lower case)."""
    capitalised: Counter[str] = Counter()
    lower_case: Counter[str] = Counter()
    as_noun: Counter[str] = Counter()
    rules = load_languages()[language]
    articles = rules.articles | rules.before_nouns
    for _, units, starts in sample:
        words = ["", "", *(word.lower() for word, _, _ in units)]
        for (farther, before), (word, start, _) in zip(pairwise(words), units, strict=False):
            if not _is_capitalised(word):
                lower_case[word] += 1
            elif start not in starts:
                capitalised[word] += 1
                is_adjective = before.endswith(_ADJECTIVE_ENDINGS) and before not in rules.stop
                as_noun[word] += before in articles or is_adjective or (before.endswith("e") and farther in articles)
    if rules.before_nouns:
        names = {word for word, n in capitalised.items() if n > 1 and as_noun[word] <= MAX_NOUN_SHARE * n}
        return names, set(lower_case)
    return {word for word, n in capitalised.items() if n > lower_case[word.lower()]}, set(lower_case)


def _names(
    text: str, units: Sequence[Unit], starts: set[int], learned: tuple[set[str], set[str]], language: str
) -> Iterator[tuple[int, int]]:
    names, lower_case = learned
    nouns = load_languages()[language].before_nouns
    excluded = nouns | load_languages()[language].articles | load_languages()[language].stop
    end = 0
    while end < len(units):
        first, end = end, end + 1
        if not _is_capitalised(units[first][0]):
            continue
        while step := _continuation(text, units[end - 1 : end + 2]):
            end += step
        is_start, word = units[first][1] in starts, units[first][0]
        is_doubtful = end - first == 1 or word.lower() in excluded or word.lower() in lower_case
        if is_start and word not in names and is_doubtful:
            first += 1
        while first < end and not _is_capitalised(units[first][0]):
            first += 1
        is_letter = first + 1 == end and len(units[first][0]) == 1
        is_noun = first + 1 == end and bool(nouns) and units[first][0] not in names
        if first < end and not is_letter and not is_noun:
            yield units[first][1], units[end - 1][2]


def _continuation(text: str, units: Sequence[Unit]) -> int:
    """Return how many words after the first continue its name: 0, 1, or 2 with a particle between."""
    if len(units) < 2 or not _is_adjacent(text, *units[:2]):
        return 0
    if _is_capitalised(units[1][0]):
        return 1
    has_particle = units[1][0] in _PARTICLES and len(units) > 2 and _is_adjacent(text, *units[1:])
    return 2 if has_particle and _is_capitalised(units[2][0]) else 0


def _learn_phrases(sample: Sequence[tuple[str, list[Unit]]], stop: frozenset[str]) -> dict[str, float]:
    """Return the phrases of the sample with their cohesion, the least pointwise mutual information of all splits."""
    frequency: Counter[str] = Counter()
    passage_frequency: Counter[str] = Counter()
    frequent: set[str] = set()
    reaches = [_reach(text, units) for text, units in sample]
    for size in range(1, MAX_CHARACTERS + 2):  # the last size only counts extensions of phrases
        run_counts: Counter[str] = Counter()
        passage_counts: Counter[str] = Counter()
        for (text, units), reach in zip(sample, reaches, strict=True):
            runs = [
                text[low:high]
                for low, middle, end, high in _runs(units, reach, size)
                if size == 1 or (text[low:middle] in frequent and text[end:high] in frequent)
            ]
            run_counts.update(runs)
            passage_counts.update(set(runs))
        frequent = {run for run, count in passage_counts.items() if count > 1}
        if not frequent:
            break
        frequency.update({run: run_counts[run] for run in frequent})
        passage_frequency.update({run: passage_counts[run] for run in frequent})
    total = sum(len(units) for _, units in sample)
    passage_limit = min(MAX_PASSAGES, max(MIN_PASSAGE_LIMIT, len(sample) // 50))
    extension_frequency: Counter[str] = Counter()  # of the most frequent run that is one unit longer
    cohesion_of: dict[str, float] = {}
    for run in frequency:
        units = _units(run)
        if len(units) > 1:
            for part in (run[: units[-2][2]], run[units[1][1] :]):
                extension_frequency[part] = max(extension_frequency[part], frequency[run])
        splits = [frequency[run[: left[2]]] * frequency[run[right[1] :]] for left, right in pairwise(units)]
        cohesion = min((math.log(frequency[run] * total / split) for split in splits if split), default=0.0)
        ends = units[0][0], units[-1][0]
        is_usable = passage_frequency[run] <= passage_limit and not stop & {*ends} and not any(map(_is_hiragana, ends))
        is_usable = is_usable and len(units) <= MAX_CHARACTERS
        is_single_word = len(units) == 1 and _is_word(run)
        if is_usable and (cohesion >= MIN_COHESION or is_single_word):
            cohesion_of[run] = cohesion
    return {run: value for run, value in cohesion_of.items() if extension_frequency[run] < 0.8 * frequency[run]}


def _is_hiragana(unit: str) -> bool:
    return "\u3040" <= unit <= "\u309f"  # particles and endings


def _reach(text: str, units: Sequence[Unit]) -> list[int]:
    """Return the maximum number of units of a phrase that begins at each unit, 0 at numbers."""
    reach = [1] * len(units)
    for first in range(len(units) - 2, -1, -1):
        if _is_adjacent(text, units[first], units[first + 1]):
            reach[first] += reach[first + 1]
    for first, (word, _, _) in enumerate(units):
        if word[0].isdecimal():
            reach[first] = 0
        elif _is_word(word):
            reach[first] = min(reach[first], MAX_WORDS + 1)
    return reach


def _runs(units: Sequence[Unit], reach: Sequence[int], size: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (start, end of the last but one unit, start of the second unit, end) of each run of ``size`` units."""
    for first, (_, low, _) in enumerate(units):
        if reach[first] >= size:
            last = first + size - 1
            yield low, units[max(last - 1, first)][2], units[min(first + 1, last)][1], units[last][2]


def _match_phrases(text: str, units: Sequence[Unit], phrases: dict[str, float]) -> list[tuple[int, int]]:
    candidates, reach = [], _reach(text, units)
    for size in range(1, MAX_CHARACTERS + 1):
        for low, _, _, high in _runs(units, reach, size):
            if text[low:high] in phrases:
                candidates.append((-size, -phrases[text[low:high]], low, high))
    spans: list[tuple[int, int]] = []
    for _, _, low, high in sorted(candidates):
        if all(high <= start or end <= low for start, end in spans):
            spans.append((low, high))
    return spans


def with_dates(snapshot: Snapshot, passage: int, entities: Sequence[Entity]) -> list[Entity]:
    date_spans = find_dates(snapshot.text(passage), snapshot.language_of(passage))
    disjoint = [e for e in entities if not any(e[0] < stop and start < e[1] for start, stop in date_spans)]
    return [*((start, stop, DATE) for start, stop in date_spans), *disjoint]


def find_phrases_and_dates(snapshot: Snapshot) -> Iterator[list[Entity]]:
    phrases = PhraseFinder(snapshot)
    return (with_dates(snapshot, passage, phrases.of(passage)) for passage in range(len(snapshot)))
