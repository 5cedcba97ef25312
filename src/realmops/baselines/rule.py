"""A rule without learning, which every trained reader should beat: the nearest name or number to the question's words.

Of a passage it takes the capitalised or numeric span that is nearest to the words of the question and not a part of it.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from realmops.corpus.question_sets import Question
from realmops.corpus.snapshot_reader import Snapshot
from realmops.search.bm25 import STOP_WORDS, stems
from realmops.text.languages import Placed, composed, placed

FARTHEST = 20  # words: a word of the question that is farther away than that, or not there, counts so
_WORD = re.compile(r"\d+(?:[.,:]\d+)*\w*|[^\W\d_]+(?:['’.-]?[^\W_]+)*")
_BETWEEN = re.compile(r"[ \-]|\. ?")  # two words of one name; a full stop only behind an initial
_INSIDE = ("of", "the", "de", "von", "van", "and", "for", "in")  # a name, between two capitalised words
_EMPTY = {  # no words to be near to, and no names at the start of a sentence
    *STOP_WORDS,
    "about", "after", "also", "although", "any", "before", "been", "being", "between", "both", "can", "could",
    "despite", "did", "do", "does", "during", "from", "had", "has", "have", "he", "her", "him", "his", "how",
    "however", "i", "its", "many", "more", "most", "much", "other", "our", "she", "should", "since", "some", "than",
    "them", "we", "were", "what", "when", "where", "which", "while", "who", "whom", "whose", "why", "would", "you",
}  # fmt: skip
_NUMBER = re.compile(
    r"\b(?:when|how (?:many|much|long|old|far|large|tall|high|big|often)|number of|percent(?:age)?"
    r"|(?:what|which) (?:year|date|time|century|decade))\b"
)
_NAME = re.compile(r"\b(?:who|whom|whose|where)\b")


def answers_by_rule(snapshot: Snapshot, questions: Sequence[Question], first: Sequence[int]) -> list[str]:
    """The answers that ``nearest_span`` finds in one passage of each question, empty where it finds none."""
    texts = snapshot.texts(first)
    answers = []
    for question, passage in zip(questions, first, strict=True):
        text = texts[passage] if passage >= 0 else ""
        span = nearest_span(question.question, text)
        answers.append(text[slice(*span)] if span else "")
    return answers


def nearest_span(question: str, passage: str) -> tuple[int, int] | None:
    """(start, end) characters of the span in the passage, None where it has no name and no number outside the question.

    The distance is the sum over the different words of the question (stems, without stop words) of the words from there
    to the span, ``FARTHEST`` at most; of equally near spans the first is taken. A question for a number ("when", "how
    many") takes numbers and one for a name ("who", "where") names, if there are any.
    """
    words = [*placed(_words, passage)]
    stem = stems([word.lower() for word, _, _ in words])
    asked = set(stems([w for w in map(str.lower, _WORD.findall(composed(question))) if w not in _EMPTY]))
    places: dict[str, list[int]] = {}
    for place, word in enumerate(stem):
        if word in asked:
            places.setdefault(word, []).append(place)
    wanted = "number" if _NUMBER.search(question.lower()) else "name" if _NAME.search(question.lower()) else ""
    best, found = (True, float("inf")), None
    for first, end, kind in _spans(words, passage):
        if all(stem[i] in asked or words[i][0].lower() in _EMPTY for i in range(first, end)):
            continue
        near = [min(max(first - p, p - end + 1, 0) for p in at) for at in places.values()]
        rank = (kind != wanted and bool(wanted), float(sum(min(distance, FARTHEST) for distance in near)))
        if found is None or rank < best:
            best, found = rank, (words[first][1], words[end - 1][2])
    return found


def _words(text: str) -> Iterator[Placed]:
    return ((match[0], *match.span()) for match in _WORD.finditer(text))


def _spans(words: list[tuple[str, int, int]], text: str) -> list[tuple[int, int, str]]:
    """(first word, end, kind) of the numbers and the longest names, in the order of the text."""
    found, at = [], 0
    while at < len(words):
        word, end = words[at][0], at + 1
        if word[0].isdigit():
            found.append((at, end, "number"))
        elif word[0].isupper() and word.lower() not in _EMPTY:
            while length := _more(words[end - 1 : end + 2], text):
                end += length
            found.append((at, end, "name"))
        at = end
    return found


def _more(words: list[tuple[str, int, int]], text: str) -> int:
    """How many of the words behind the first one belong to the same name: 0, 1, or 2 with a small word between."""
    together = []
    for (word, _, end), (_, start, _) in pairwise(words):
        gap = text[end:start]
        together.append(bool(_BETWEEN.fullmatch(gap)) and (len(word) == 1 or not gap.startswith(".")))
    if not together or not together[0]:
        return 0
    if words[1][0][0].isupper():
        return 1
    return 2 if words[1][0] in _INSIDE and together[1:] == [True] and words[2][0][0].isupper() else 0
