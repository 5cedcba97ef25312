"""Rule-based reader, a lower bound for trained readers.

It answers with the capitalised or numeric span of a passage that is nearest to the words of the question and not part
of the question.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from realmops.corpus.languages import WordSpan, find_with_offsets, normalize_unicode
from realmops.corpus.snapshot_reader import Snapshot
from realmops.questions.question_sets import Question
from realmops.search.bm25 import STOP_WORDS, stems

MAX_DISTANCE = 20  # words; also the distance of a word that the passage lacks
_WORD = re.compile(r"\d+(?:[.,:]\d+)*\w*|[^\W\d_]+(?:['’.-]?[^\W_]+)*")
_SEPARATOR = re.compile(r"[ \-]|\. ?")  # between two words of a name; a full stop only after an initial
_PARTICLES = ("of", "the", "de", "von", "van", "and", "for", "in")  # within a name, between two capitalised words
_STOP = {  # ignored in questions, and not names at the start of a sentence
    *STOP_WORDS,
    "about", "after", "also", "although", "any", "before", "been", "being", "between", "both", "can", "could",
    "despite", "did", "do", "does", "during", "from", "had", "has", "have", "he", "her", "him", "his", "how",
    "however", "i", "its", "many", "more", "most", "much", "other", "our", "she", "should", "since", "some", "than",
    "them", "we", "were", "what", "when", "where", "which", "while", "who", "whom", "whose", "why", "would", "you",
}  # fmt: skip
_NUMBER_QUESTION = re.compile(
    r"\b(?:when|how (?:many|much|long|old|far|large|tall|high|big|often)|number of|percent(?:age)?"
    r"|(?:what|which) (?:year|date|time|century|decade))\b"
)
_NAME_QUESTION = re.compile(r"\b(?:who|whom|whose|where)\b")


def answer_by_rule(snapshot: Snapshot, questions: Sequence[Question], first: Sequence[int]) -> list[str]:
    """Return the answer of ``nearest_span`` in the first passage of each question, "" if there is none."""
    answers = []
    for question, passage in zip(questions, first, strict=True):
        text = snapshot.text(passage) if passage >= 0 else ""
        span = nearest_span(question.question, text)
        answers.append(text[slice(*span)] if span else "")
    return answers


def nearest_span(question: str, passage: str) -> tuple[int, int] | None:
    """Return (start, end) characters of the answer, or None if all names and numbers occur in the question, too.

    The distance of a span is the sum, over the distinct words of the question (stems, without stop words), of the words
    between their nearest occurrence and the span, at most ``MAX_DISTANCE`` each; ties go to the first span. Questions
    for a number ("when", "how many") prefer numbers, questions for a name ("who", "where") prefer names.
    """
    words = [*find_with_offsets(_words, passage)]
    passage_stems = stems([word.lower() for word, _, _ in words])
    question_stems = set(
        stems([w for w in map(str.lower, _WORD.findall(normalize_unicode(question))) if w not in _STOP])
    )
    positions: dict[str, list[int]] = {}
    for position, stem in enumerate(passage_stems):
        if stem in question_stems:
            positions.setdefault(stem, []).append(position)
    lowered = question.lower()
    answer_kind = "number" if _NUMBER_QUESTION.search(lowered) else "name" if _NAME_QUESTION.search(lowered) else ""
    best, answer = (True, float("inf")), None
    for first, end, kind in _spans(words, passage):
        if all(passage_stems[i] in question_stems or words[i][0].lower() in _STOP for i in range(first, end)):
            continue
        distances = [min(max(first - p, p - end + 1, 0) for p in at) for at in positions.values()]
        distance = float(sum(min(value, MAX_DISTANCE) for value in distances))
        rank = (kind != answer_kind and bool(answer_kind), distance)
        if answer is None or rank < best:
            best, answer = rank, (words[first][1], words[end - 1][2])
    return answer


def _words(text: str) -> Iterator[WordSpan]:
    return ((match[0], *match.span()) for match in _WORD.finditer(text))


def _spans(words: list[tuple[str, int, int]], text: str) -> list[tuple[int, int, str]]:
    """Return (first word, end, kind) of the numbers and the longest names, in the order of the text."""
    spans, first = [], 0
    while first < len(words):
        word, end = words[first][0], first + 1
        if word[0].isdigit():
            spans.append((first, end, "number"))
        elif word[0].isupper() and word.lower() not in _STOP:
            while step := _continuation(words[end - 1 : end + 2], text):
                end += step
            spans.append((first, end, "name"))
        first = end
    return spans


def _continuation(words: list[tuple[str, int, int]], text: str) -> int:
    """Return how many words after the first continue its name: 0, 1, or 2 with a particle between."""
    is_joined = []
    for (word, _, end), (_, start, _) in pairwise(words):
        gap = text[end:start]
        is_joined.append(bool(_SEPARATOR.fullmatch(gap)) and (len(word) == 1 or not gap.startswith(".")))
    if not is_joined or not is_joined[0]:
        return 0
    if words[1][0][0].isupper():
        return 1
    return 2 if words[1][0] in _PARTICLES and is_joined[1:] == [True] and words[2][0][0].isupper() else 0
