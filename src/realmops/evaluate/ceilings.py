"""What bounds exact match before any model: is an answer in the corpus, in the passages read, in a span short enough.

Legend: Q questions, K ranked passages a question. Passages are rows of the snapshot, -1 is no passage.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from realmops.corpus.question_sets import Question
from realmops.corpus.snapshot_reader import Snapshot
from realmops.evaluate.recall import Rows, hits_at
from realmops.text.answer_matching import BETWEEN, answer_token_spans, contains_answer, expression, token_bytes

# Where these stand in an expression, a match in a passage may be none among other passages.
_LOOKS_AROUND = re.compile(r"\\[AZBGK]|\(\?(?!:)|[*+?}]\+")


def ceilings(
    snapshot: Snapshot,
    questions: Sequence[Question],
    ranked_QK: Rows,
    ranks_Q: NDArray[np.int64],
    rule: str,
    *,
    passages: int,
    wordpieces: int,
) -> dict[str, NDArray[np.bool_]]:
    """What the best reader could reach, by name: which questions are answerable at each narrowing.

    Args:
        ranks_Q: of the first passage in ``ranked_QK`` that holds an answer, as ``first_hit_ranks`` gives it.
        passages: that the reader reads; ``in_top_N`` is named for it.
        wordpieces: of the reader's longest span.
    """
    texts = (snapshot.text(i) for i in range(len(snapshot)))
    found = {
        "in_corpus": answered_in_corpus(questions, texts, rule=rule, known_Q=hits_at(ranks_Q, ranked_QK.shape[1])),
        f"in_top_{passages}": reader_can_answer(questions, ranked_QK[:, :passages], snapshot, rule, wordpieces),
    }
    if not questions[0].is_regex:  # an expression has no length
        found["short_answer"] = answer_fits_reader(questions, snapshot.tokenizer, wordpieces)
    return found


def answered_in_corpus(
    questions: Sequence[Question],
    texts: Iterable[str],
    *,
    rule: str,
    known_Q: NDArray[np.bool_] | None = None,
    progress: Callable[[int], None] | None = None,
) -> NDArray[np.bool_]:
    """For each question whether any passage contains an answer: nothing can be right above this share.

    One pass over the corpus, many passages at a time; a question is dropped once it is answered. ``known_Q``
    marks those that a ranking answered already (``hits_at``), which spares work.

    Returns:
        bool [Q].
    """
    answered = np.zeros(len(questions), bool) if known_Q is None else known_Q.copy()
    open_questions = np.flatnonzero(~answered).tolist()
    answers = {index: questions[index].answers for index in open_questions}
    finder = _ByteFinder(_ENCODINGS[rule], answers) if rule in _ENCODINGS else _ExpressionFinder(rule, answers)
    for chunk in _chunks(texts, finder.characters):
        find = finder.within(chunk)
        for index in open_questions:
            answered[index] = find(index)
        open_questions = [index for index in open_questions if not answered[index]]
        if progress:
            progress(len(chunk))
    return answered


def _chunks(texts: Iterable[str], characters: int) -> Iterator[list[str]]:
    chunk: list[str] = []
    size = 0
    for text in texts:
        chunk.append(text)
        size += len(text)
        if size >= characters:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


_ENCODINGS: dict[str, Callable[[str], bytes]] = {"substring": str.encode, "token_boundary": token_bytes}


class _ByteFinder:
    """Answers as bytes in the bytes of many passages."""

    characters = 1 << 20

    def __init__(self, encode: Callable[[str], bytes], answers: Mapping[int, Sequence[str]]) -> None:
        self.encode = encode
        self.wanted = {index: [run for run in map(encode, texts) if run] for index, texts in answers.items()}

    def within(self, texts: Sequence[str]) -> Callable[[int], bool]:
        content = BETWEEN.join(map(self.encode, texts))
        return lambda index: any(run in content for run in self.wanted[index])


class _ExpressionFinder:
    """Expressions in many passages at once, which is cheap, then in the one passage where something was found."""

    characters = 1 << 16

    def __init__(self, rule: str, answers: Mapping[int, Sequence[str]]) -> None:
        self.rule, self.answers = rule, answers

    def within(self, texts: Sequence[str]) -> Callable[[int], bool]:
        content = "\n".join(texts)
        starts = [0, *accumulate(len(text) + 1 for text in texts[:-1])]

        def find(answer: str) -> bool:
            place = expression(answer).first(content, 0)
            while place >= 0:
                passage = bisect_right(starts, place) - 1
                if contains_answer(texts[passage], [answer], self.rule):
                    return True
                if passage + 1 == len(texts):
                    return False
                place = expression(answer).first(content, starts[passage + 1])
            return False

        def found(answer: str) -> bool:
            if self.rule == "regex_search" and not _LOOKS_AROUND.search(answer) and not expression(answer).timed_out:
                with suppress(TimeoutError):
                    return find(answer)
            return any(contains_answer(text, [answer], self.rule) for text in texts)

        return lambda index: any(map(found, self.answers[index]))


def answer_fits_reader(questions: Sequence[Question], tokenizer: Tokenizer, most: int) -> NDArray[np.bool_]:
    """For each question whether an answer has at most so many wordpieces, the reader's longest span."""

    def fits(answer: str) -> bool:
        return len(tokenizer.encode(answer, add_special_tokens=False).ids) <= most

    return np.array([any(map(fits, question.answers)) for question in questions], bool)


def reader_can_answer(
    questions: Sequence[Question], ranked_QK: Rows, snapshot: Snapshot, rule: str, wordpieces: int
) -> NDArray[np.bool_]:
    """For each question whether one of its passages holds an answer as a span of at most so many wordpieces."""

    def holds(passage: int, answers: Sequence[str]) -> bool:
        text, chars = snapshot.text(passage), snapshot.chars(passage)
        return bool(answer_token_spans(text, answers, chars, rule=rule, max_wordpieces=wordpieces))

    pairs = zip(questions, ranked_QK.tolist(), strict=True)
    return np.array([any(p >= 0 and holds(p, q.answers) for p in passages) for q, passages in pairs], bool)
