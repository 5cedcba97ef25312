"""Synthetic cloze questions from the corpus: a salient span is cut out of its sentence and becomes the answer.

The evidence is the source passage in training (others taught the reader half as much), never in dev and test
(``Question.not_in``). Words of the clause are shuffled (noisy clozes, Lewis et al. 2019): without noise the reader
learns to match identical texts.
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
from realmops.corpus.languages import ENGLISH, NO_BLANKS, compile_regex, load_languages
from realmops.corpus.masking import MAX_PASSAGES, count_passages
from realmops.corpus.snapshot_reader import Snapshot
from realmops.corpus.spans import token_spans
from realmops.questions.question_sets import Question

DATE, NUMBER = "DATE", "NUMBER"  # labels of dates found by expression, and of numbers (here only)
# Question word of each label; the default is "what".
WORDS = {"PER": "who", "PERSON": "who", "LOC": "where", "GPE": "where", DATE: "when", NUMBER: "how many"}
MIN_WORDS, MAX_WORDS = 4, 16  # per clause
MAX_SPAN_WORDPIECES = 16
WORD_DROP_RATE = 0.15
MAX_SHIFT = 3.0  # words
HELD_OUT_SHARE = 0.05  # share of the passages for dev, and as many for test
MAX_HELD_OUT = 500  # questions of dev, and of test
PARTS = ("train", "dev", "test")
KIND = "questions"  # manifest kind of a folder of generated questions
CLOZE_ID = "cloze-"  # id prefix
_MARKS, _SENTENCE_ENDS = ',;:()"', ".!? "
_NUMBER, _YEAR = re.compile(r"(?<![\w.,-])\d+(?:[.,]\d+)*(?![\w-])"), re.compile(r"\d{4}")
_CLAUSE_ENDS = re.compile(r"[;:()]|,(?=\s)")
# Counterparts for languages other than English.
_OTHER_MARKS, _OTHER_SENTENCE_ENDS = _MARKS + "，、；：（）「」『』《》“”„«»¿¡", _SENTENCE_ENDS + "。！？"
_OTHER_LETTER = rf"[\w--[{NO_BLANKS}\p{{Hangul}}]]"
_OTHER_NUMBER = rf"(?<!{_OTHER_LETTER}|[.,-])\d+(?:[.,]\d+)*(?!{_OTHER_LETTER}|-)"
# A word, or two characters of a script without spaces; combining marks stay with their character.
_OTHER_WORD = rf"(?:[[{NO_BLANKS}]--\p{{M}}]\p{{M}}*){{1,2}}|[^\s{NO_BLANKS}]+"
_BLANK_BETWEEN_CHARACTERS = rf"(?<=[{NO_BLANKS}]) (?=[{NO_BLANKS}])"
_OTHER_CLAUSE_ENDS = re.compile(r"[;:()，、；：（）]|,(?=\s)")


def clause_around_gap(before: str, after: str, language: str = ENGLISH) -> tuple[list[str], list[str]] | None:
    """Return the words before and after a gap in its clause or sentence; None if fewer than ``MIN_WORDS`` remain."""
    after = after.rstrip(_SENTENCE_ENDS if language == ENGLISH else _OTHER_SENTENCE_ENDS)
    ends = _CLAUSE_ENDS if language == ENGLISH else _OTHER_CLAUSE_ENDS
    left, right = _words(ends.split(before)[-1], language), _words(ends.split(after)[0], language)
    if len(left) + len(right) < MIN_WORDS:
        left, right = _words(before, language), _words(after, language)
    if len(left) + len(right) < MIN_WORDS:
        return None
    while len(left) + len(right) > MAX_WORDS:
        if len(left) > len(right):
            left = left[1:]
        else:
            right = right[:-1]
    return left, right


def add_noise(left: list[str], right: list[str], rng: np.random.Generator) -> list[str]:
    """Join both halves in random order, drop words at ``WORD_DROP_RATE``, and shift the rest by up to ``MAX_SHIFT``."""
    words = right + left if rng.random() < 0.5 else left + right
    rows = np.flatnonzero(rng.random(len(words)) >= WORD_DROP_RATE)
    rows = rows if len(rows) else np.arange(len(words))
    order = np.argsort(np.arange(len(rows)) + MAX_SHIFT * rng.random(len(rows)), kind="stable")
    return [words[row] for row in rows[order]]


def find_numbers(snapshot: Snapshot, spans: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return numbers that share no wordpiece with a salient span, as rows in the layout of ``spans``."""
    occupied = defaultdict(list)
    for passage, _, _, start, stop in spans.tolist():
        occupied[passage].append((start, stop))
    rows = []
    for passage in range(len(snapshot)):
        free = np.ones(len(snapshot.body(passage)), bool)
        for start, stop in occupied[passage]:
            free[start:stop] = False
        expression = _NUMBER if snapshot.language_of(passage) == ENGLISH else compile_regex(_OTHER_NUMBER)
        matches = [match.span() for match in expression.finditer(snapshot.text(passage))]
        sentences = snapshot.sentences(passage)
        for span in token_spans(matches, snapshot.chars(passage), sentences):
            if span is not None and free[span[1] : span[2]].all():
                rows.append((passage, *sentences[span[0]].tolist(), span[1], span[2]))
    return np.array(rows, np.int64).reshape(-1, 5)


def question_word(label: str, answer: str, rng: np.random.Generator, language: str = ENGLISH) -> str:
    asks = WORDS.get(label, "what")
    if label == DATE and _YEAR.fullmatch(answer) and rng.random() < 0.5:
        asks = "what year"
    if language == ENGLISH:
        return asks
    translated = load_languages()[language].questions.get(asks, "")
    return translated if isinstance(translated, str) else str(translated[0])


def _words(text: str, language: str) -> list[str]:
    """Split a text into words without surrounding marks, or into pairs of characters if the script has no spaces."""
    parts = text.split() if language == ENGLISH else compile_regex(_OTHER_WORD).findall(text)
    marks = _MARKS if language == ENGLISH else _OTHER_MARKS
    return [part.strip(marks) for part in parts if any(c.isalnum() for c in part)]


def format_question(words: Sequence[str], language: str) -> str:
    text = " ".join(word for word in words if word)
    text = compile_regex(_BLANK_BETWEEN_CHARACTERS).sub("", text)
    return f"¿{text}?" if language == "es" else f"{text}？" if language in ("zh", "ja") else f"{text}?"


def cloze_questions(
    snapshot: Snapshot, rows: NDArray[np.int64], labels: Sequence[str], seed: int, limit: int
) -> list[Question]:
    """Generate at most one question per sentence, ``limit`` in total; ``rows`` are those of ``SentencesWithSpans``."""
    numbers = find_numbers(snapshot, rows)
    rows, labels = np.concatenate([rows, numbers]), [*labels, *[NUMBER] * len(numbers)]
    passages_of: dict[bytes, list[int]] = defaultdict(list)
    for passage in range(len(snapshot)):
        body = snapshot.body(passage)
        for first, end in snapshot.sentences(passage).tolist():
            passages_of[body[first:end].tobytes()].append(passage)
    counts = count_passages(snapshot, rows, MAX_SPAN_WORDPIECES)
    is_short = rows[:, 4] - rows[:, 3] <= MAX_SPAN_WORDPIECES
    usable = np.flatnonzero((counts >= 2) & (counts <= MAX_PASSAGES) & is_short)
    rng = np.random.default_rng(seed_for(seed, "cloze"))
    drawn = rng.permutation(usable)
    questions: list[Question] = []
    used_sentences: set[bytes] = set()
    for row in drawn.tolist():
        passage, first, end, start, stop = rows[row].tolist()
        sentence = snapshot.body(passage)[first:end].tobytes()
        sources = sorted(set(passages_of[sentence]))
        if sentence in used_sentences or counts[row] <= len(sources):  # all passages are copies of the sentence
            continue
        text, chars = snapshot.text(passage), snapshot.chars(passage)
        before, after = text[chars[first, 0] : chars[start, 0]], text[chars[stop - 1, 1] : chars[end - 1, 1]]
        language = snapshot.language_of(passage)
        parts = clause_around_gap(before, after, language)
        if parts is None:
            continue
        used_sentences.add(sentence)
        answer = text[chars[start, 0] : chars[stop - 1, 1]]
        words = [question_word(labels[row], answer, rng, language), *add_noise(*parts, rng)]
        not_in = tuple(dict.fromkeys(snapshot.passage_id(p) for p in sources))
        code = "" if language == ENGLISH else language
        question, number = format_question(words, language), len(questions)
        questions.append(Question(f"{CLOZE_ID}{number}", question, (answer,), not_in=not_in, language=code))
        if len(questions) == limit:
            break
    return questions


def split_questions(questions: Sequence[Question], seed: int) -> dict[str, list[Question]]:
    """Split questions into train, dev and test so that no source passage is shared between parts.

    The source of a training question, which may answer it, becomes its ``passage_id`` and not an entry of ``not_in``.
    """
    passages = sorted({question.not_in[0] for question in questions})
    if len(passages) < len(PARTS):
        raise ValueError(
            f"too few cloze questions: {len(questions)} questions from {len(passages)} passages; train, dev and test "
            "need at least one passage each; give more documents, or find more spans (the section tag): a span "
            "counts if it recurs in another passage"
        )
    held_out = max(1, round(HELD_OUT_SHARE * len(passages)))
    order = np.random.default_rng(seed_for(seed, "cloze split")).permutation(len(passages))
    part_of = {passages[row]: "train" for row in order.tolist()}
    part_of |= {passages[row]: "dev" for row in order[:held_out].tolist()}
    part_of |= {passages[row]: "test" for row in order[held_out : 2 * held_out].tolist()}
    parts: dict[str, list[Question]] = {name: [] for name in PARTS}
    # dev and test, which have few questions, claim secondary source passages before train does
    for question in sorted(questions, key=lambda q: part_of[q.not_in[0]] == "train"):
        name = part_of[question.not_in[0]]
        source_parts = {part_of.get(passage, name) for passage in question.not_in}
        if source_parts == {name} and (name == "train" or len(parts[name]) < MAX_HELD_OUT):
            parts[name].append(question)
            part_of |= dict.fromkeys(question.not_in, name)
    parts["train"] = [replace(q, passage_id=q.not_in[0], not_in=()) for q in parts["train"]]
    return parts


class SourcePassages:
    """Lookup of the passages that a question was generated from, which are no evidence for its answer."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    @cached_property
    def _row_of(self) -> dict[str, int]:
        return {name: row for row, name in enumerate(self._snapshot.column("passage_id"))}

    def of(self, question: Question) -> list[int]:
        return [self._row_of[name] for name in question.not_in if name in self._row_of]

    def lost(self, questions: Sequence[Question]) -> tuple[int, int]:
        named = {name for question in questions for name in question.not_in}
        return (len(named - self._row_of.keys()), len(named)) if named else (0, 0)

    def among(self, questions: Sequence[Question], id_QK: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
        return np.stack([np.isin(id_K, self.of(question)) for question, id_K in zip(questions, id_QK, strict=True)])

    def left_out(self, questions: Sequence[Question], id_QK: NDArray[np.integer[Any]]) -> NDArray[np.integer[Any]]:
        """Remove source passages from retrieved ids, int [Q, K]; each row is padded at its end with -1."""
        if not any(question.not_in for question in questions):
            return id_QK
        is_source_QK = self.among(questions, id_QK)
        order_QK = np.argsort(is_source_QK, axis=1, kind="stable")
        return np.take_along_axis(np.where(is_source_QK, -1, id_QK), order_QK, axis=1)
