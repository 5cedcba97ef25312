"""Questions made from the corpus: a salient span is taken out of its sentence, and it is the answer.

Only spans that stand in another passage too are taken.  The reader learns from the passage with the sentence; learning
from the others taught it half as much.  For dev and test the passages with the sentence do not count as evidence
(``Question.not_in``), so that the answer has to be found elsewhere.

A question is a question word and the clause without the span, in disorder (the noisy clozes of Lewis et al. 2019): else
the reader learns to lay two equal texts side by side.  Numbers are asked for beside the salient spans.  There are
question words of twelve languages; where words have no blanks, two characters are moved as a word.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realmops.artifacts import seed_for
from realmops.corpus.masking import MOST_PASSAGES, passages_with
from realmops.corpus.question_sets import Question
from realmops.corpus.snapshot_reader import Snapshot
from realmops.text.languages import ENGLISH, NO_BLANKS, compiled, languages
from realmops.text.spans import token_spans

DATE, NUMBER = "DATE", "NUMBER"  # labels: of dates by expression, and one that only stands here
WORDS = {"PER": "who", "PERSON": "who", "LOC": "where", "GPE": "where", DATE: "when", NUMBER: "how many"}  # else: what
FEWEST_WORDS, MOST_WORDS = 4, 16  # of a clause
LONGEST_SPAN = 16  # wordpieces
DROPPED = 0.15  # share of a question's words
MOVED = 3.0  # places that a word may come nearer to the end
HELD_OUT = 0.05  # share of the passages whose questions are for dev, and for test
MOST_HELD_OUT = 500
PARTS = ("train", "dev", "test")
KIND = "questions"  # of the manifest of a folder of questions
CLOZE_ID = "cloze-"  # what their ids begin with
_MARKS, _SENTENCE_ENDS = ',;:()"', ".!? "
_NUMBER, _YEAR = re.compile(r"(?<![\w.,-])\d+(?:[.,]\d+)*(?![\w-])"), re.compile(r"\d{4}")
_CLAUSE_ENDS = re.compile(r"[;:()]|,(?=\s)")
# The same in other languages than English.
_OTHER_MARKS, _OTHER_SENTENCE_ENDS = _MARKS + "，、；：（）「」『』《》“”„«»¿¡", _SENTENCE_ENDS + "。！？"
_OTHER_LETTER = rf"[\w--[{NO_BLANKS}\p{{Hangul}}]]"
_OTHER_NUMBER = rf"(?<!{_OTHER_LETTER}|[.,-])\d+(?:[.,]\d+)*(?!{_OTHER_LETTER}|-)"
# A word, or two characters of a script without blanks; no mark is parted from its character.
_OTHER_WORD = rf"(?:[[{NO_BLANKS}]--\p{{M}}]\p{{M}}*){{1,2}}|[^\s{NO_BLANKS}]+"
_BLANK_BETWEEN_CHARACTERS = rf"(?<=[{NO_BLANKS}]) (?=[{NO_BLANKS}])"
_OTHER_CLAUSE_ENDS = re.compile(r"[;:()，、；：（）]|,(?=\s)")


def clause(before: str, after: str, language: str = ENGLISH) -> tuple[list[str], list[str]] | None:
    """The words before and behind a gap, of its clause; None where too little is left to ask about.

    A clause ends at a mark; where it has few words the whole sentence is taken. Of more than ``MOST_WORDS`` those
    nearest to the gap are kept.
    """
    after = after.rstrip(_SENTENCE_ENDS if language == ENGLISH else _OTHER_SENTENCE_ENDS)
    ends = _CLAUSE_ENDS if language == ENGLISH else _OTHER_CLAUSE_ENDS
    left, right = _words(ends.split(before)[-1], language), _words(ends.split(after)[0], language)
    if len(left) + len(right) < FEWEST_WORDS:
        left, right = _words(before, language), _words(after, language)
    if len(left) + len(right) < FEWEST_WORDS:
        return None
    while len(left) + len(right) > MOST_WORDS:
        if len(left) > len(right):
            left = left[1:]
        else:
            right = right[:-1]
    return left, right


def noisy(left: list[str], right: list[str], rng: np.random.Generator) -> list[str]:
    """Both halves in a random order, ``DROPPED`` of the words left out, the others moved by up to ``MOVED`` places."""
    words = right + left if rng.random() < 0.5 else left + right
    kept = np.flatnonzero(rng.random(len(words)) >= DROPPED)
    kept = kept if len(kept) else np.arange(len(words))
    return [words[row] for row in kept[np.argsort(np.arange(len(kept)) + MOVED * rng.random(len(kept)), kind="stable")]]


def numbers(snapshot: Snapshot, spans: NDArray[np.int64]) -> NDArray[np.int64]:
    """Numbers that share no wordpiece with a salient span, as rows like those of the spans."""
    taken = defaultdict(list)
    for passage, _, _, start, stop in spans.tolist():
        taken[passage].append((start, stop))
    rows = []
    for passage in range(len(snapshot)):
        free = np.ones(len(snapshot.body(passage)), bool)
        for start, stop in taken[passage]:
            free[start:stop] = False
        expression = _NUMBER if snapshot.language_of(passage) == ENGLISH else compiled(_OTHER_NUMBER)
        found = [match.span() for match in expression.finditer(snapshot.text(passage))]
        sentences = snapshot.sentences(passage)
        for place in token_spans(found, snapshot.chars(passage), sentences):
            if place is not None and free[place[1] : place[2]].all():
                rows.append((passage, *sentences[place[0]].tolist(), place[1], place[2]))
    return np.array(rows, np.int64).reshape(-1, 5)


def question_word(label: str, answer: str, rng: np.random.Generator, language: str = ENGLISH) -> str:
    """What begins a question, "" in a language whose words are not known; of a year sometimes "what year"."""
    asks = WORDS.get(label, "what")
    if label == DATE and _YEAR.fullmatch(answer) and rng.random() < 0.5:
        asks = "what year"
    if language == ENGLISH:
        return asks
    known = languages()[language].questions.get(asks, "")
    return known if isinstance(known, str) else str(known[0])


def _words(text: str, language: str) -> list[str]:
    """The words of a text, without the marks round them; two characters where a script has no blanks."""
    parts = text.split() if language == ENGLISH else compiled(_OTHER_WORD).findall(text)
    marks = _MARKS if language == ENGLISH else _OTHER_MARKS
    return [part.strip(marks) for part in parts if any(c.isalnum() for c in part)]


def as_question(words: Sequence[str], language: str) -> str:
    """Words as a question, with blanks between them but for scripts without."""
    if language == ENGLISH:
        return " ".join(words) + "?"
    text = " ".join(word for word in words if word)
    text = compiled(_BLANK_BETWEEN_CHARACTERS).sub("", text)
    return f"¿{text}?" if language == "es" else f"{text}？" if language in ("zh", "ja") else f"{text}?"


def cloze_questions(
    snapshot: Snapshot, rows: NDArray[np.int64], labels: Sequence[str], seed: int, limit: int
) -> list[Question]:
    """At most one question of each sentence, ``limit`` in all, drawn by the seed.

    ``rows`` are (passage, sentence start, sentence end, span start, span end) of salient spans, with a label each.
    """
    more = numbers(snapshot, rows)
    rows, labels = np.concatenate([rows, more]), [*labels, *[NUMBER] * len(more)]
    known: dict[bytes, list[int]] = defaultdict(list)
    for passage in range(len(snapshot)):
        body = snapshot.body(passage)
        for first, end in snapshot.sentences(passage).tolist():
            known[body[first:end].tobytes()].append(passage)
    there = passages_with(snapshot, rows, LONGEST_SPAN)
    short = rows[:, 4] - rows[:, 3] <= LONGEST_SPAN
    usable = np.flatnonzero((there >= 2) & (there <= MOST_PASSAGES) & short)
    rng = np.random.default_rng(seed_for(seed, "cloze"))
    drawn = rng.permutation(usable)
    questions: list[Question] = []
    asked: set[bytes] = set()
    for row in drawn.tolist():
        passage, first, end, start, stop = rows[row].tolist()
        sentence = snapshot.body(passage)[first:end].tobytes()
        sources = sorted(set(known[sentence]))
        if sentence in asked or there[row] <= len(sources):  # it stands nowhere but in copies of the sentence
            continue
        text, chars = snapshot.text(passage), snapshot.chars(passage)
        before, after = text[chars[first, 0] : chars[start, 0]], text[chars[stop - 1, 1] : chars[end - 1, 1]]
        language = snapshot.language_of(passage)
        parts = clause(before, after, language)
        if parts is None:
            continue
        asked.add(sentence)
        answer = text[chars[start, 0] : chars[stop - 1, 1]]
        question = as_question([question_word(labels[row], answer, rng, language), *noisy(*parts, rng)], language)
        not_in = tuple(dict.fromkeys(snapshot.passage_id(p) for p in sources))
        said = "" if language == ENGLISH else language
        questions.append(Question(f"{CLOZE_ID}{len(questions)}", question, (answer,), not_in=not_in, language=said))
        if len(questions) == limit:
            break
    return questions


def split(questions: Sequence[Question], seed: int) -> dict[str, list[Question]]:
    """Questions for train, dev and test, each made from passages of its own; ValueError where there are too few.

    Those for train may be answered by the passage that they were made from, which is named instead of left out.

    A share ``HELD_OUT`` of the passages is for dev and as many for test, of whose questions the first are taken.
    A question whose passages are of several parts is left out.
    """
    passages = sorted({question.not_in[0] for question in questions})
    if len(passages) < len(PARTS):
        raise ValueError(
            f"{len(questions)} questions from {len(passages)} passages can be made of the corpus, and train, dev and "
            "test want passages of their own; give more documents, or find more spans (the section tag): a span "
            "counts when it stands in another passage too"
        )
    held_out = max(1, round(HELD_OUT * len(passages)))
    drawn = np.random.default_rng(seed_for(seed, "cloze split")).permutation(len(passages))
    part_of = {passages[row]: "train" for row in drawn.tolist()}
    part_of |= {passages[row]: "dev" for row in drawn[:held_out].tolist()}
    part_of |= {passages[row]: "test" for row in drawn[held_out : 2 * held_out].tolist()}
    parts: dict[str, list[Question]] = {name: [] for name in PARTS}
    # the few of dev and test choose first among the passages that are never a first source
    for question in sorted(questions, key=lambda q: part_of[q.not_in[0]] == "train"):
        name = part_of[question.not_in[0]]
        own = {part_of.get(passage, name) for passage in question.not_in}
        if own == {name} and (name == "train" or len(parts[name]) < MOST_HELD_OUT):
            parts[name].append(question)
            part_of |= dict.fromkeys(question.not_in, name)
    parts["train"] = [replace(q, passage_id=q.not_in[0], not_in=()) for q in parts["train"]]
    return parts


class Sources:
    """Which passages of a snapshot a question was made from: they are no evidence for its answer."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    @cached_property
    def _row_of(self) -> dict[str, int]:
        return {name: row for row, name in enumerate(self._snapshot.column("passage_id"))}

    def of(self, question: Question) -> list[int]:
        """Their numbers; a passage that the snapshot has no longer is left out."""
        return [self._row_of[name] for name in question.not_in if name in self._row_of]

    def lost(self, questions: Sequence[Question]) -> tuple[int, int]:
        """How many of the passages that questions were made from the snapshot does not have, and of how many."""
        named = {name for question in questions for name in question.not_in}
        return (len(named - self._row_of.keys()), len(named)) if named else (0, 0)

    def among(self, questions: Sequence[Question], id_QK: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
        """Which of the passages found for each question they are, Q x K."""
        return np.stack([np.isin(id_K, self.of(question)) for question, id_K in zip(questions, id_QK, strict=True)])

    def left_out(self, questions: Sequence[Question], id_QK: NDArray[np.integer[Any]]) -> NDArray[np.integer[Any]]:
        """The passages found without them, -1 behind the others in their place."""
        if not any(question.not_in for question in questions):
            return id_QK
        source_QK = self.among(questions, id_QK)
        order_QK = np.argsort(source_QK, axis=1, kind="stable")
        return np.take_along_axis(np.where(source_QK, -1, id_QK), order_QK, axis=1)
