"""Upper bounds of exact match. Q questions, K ranked passages per question: rows of the snapshot, -1 is no passage."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from realmops.corpus.snapshot_reader import Snapshot
from realmops.evaluate.recall import Rows
from realmops.questions.answer_matching import TOKEN_SEPARATOR, answer_token_spans, contains_answer, token_bytes
from realmops.questions.question_sets import Question

_JOINED = 1 << 20  # characters of the passages that are searched at once
_ENCODINGS: dict[str, Callable[[str], bytes]] = {"substring": str.encode, "token_boundary": token_bytes}


def compute_ceilings(
    snapshot: Snapshot,
    questions: Sequence[Question],
    ranked_QK: Rows,
    ranks_Q: NDArray[np.int64],
    rule: str,
    *,
    passages: int,
    wordpieces: int,
) -> dict[str, NDArray[np.bool_]]:
    """Return which questions are answerable under each restriction, bool [Q], by the upper bound's name."""
    texts = (snapshot.text(i) for i in range(len(snapshot)))
    answerable = {
        "in_corpus": answered_in_corpus(questions, texts, rule=rule, known_Q=ranks_Q < ranked_QK.shape[1]),
        f"in_top_{passages}": reader_can_answer(questions, ranked_QK[:, :passages], snapshot, rule, wordpieces),
    }
    if not questions[0].is_regex:  # regular expressions have no length
        answerable["short_answer"] = answer_fits_reader(questions, snapshot.tokenizer, wordpieces)
    return answerable


def answered_in_corpus(
    questions: Sequence[Question],
    texts: Iterable[str],
    *,
    rule: str,
    known_Q: NDArray[np.bool_] | None = None,
    progress: Callable[[int], None] | None = None,
) -> NDArray[np.bool_]:
    """Return whether any passage contains an answer, bool [Q]; ``known_Q`` marks questions that a ranking answered."""
    answered = np.zeros(len(questions), bool) if known_Q is None else known_Q.copy()
    open_questions = np.flatnonzero(~answered).tolist()
    answers = {index: questions[index].answers for index in open_questions}
    encode = _ENCODINGS.get(rule)
    if encode is not None:
        patterns = {index: [run for run in map(encode, texts) if run] for index, texts in answers.items()}
    for chunk in _chunks(texts, _JOINED):
        if encode is None:
            answered[open_questions] = [
                any(contains_answer(text, answers[index], rule) for text in chunk) for index in open_questions
            ]
        else:
            content = TOKEN_SEPARATOR.join(map(encode, chunk))
            answered[open_questions] = [any(run in content for run in patterns[index]) for index in open_questions]
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


def answer_fits_reader(questions: Sequence[Question], tokenizer: Tokenizer, max_wordpieces: int) -> NDArray[np.bool_]:
    """Return whether an answer has at most ``max_wordpieces``, the length of the reader's longest span, bool [Q]."""

    def fits(answer: str) -> bool:
        return len(tokenizer.encode(answer, add_special_tokens=False).ids) <= max_wordpieces

    return np.array([any(map(fits, question.answers)) for question in questions], bool)


def reader_can_answer(
    questions: Sequence[Question], ranked_QK: Rows, snapshot: Snapshot, rule: str, wordpieces: int
) -> NDArray[np.bool_]:
    """Return whether a retrieved passage contains an answer as a span of at most ``wordpieces``, bool [Q]."""

    def holds(passage: int, answers: Sequence[str]) -> bool:
        text, chars = snapshot.text(passage), snapshot.chars(passage)
        return bool(answer_token_spans(text, answers, chars, rule=rule, max_wordpieces=wordpieces))

    pairs = zip(questions, ranked_QK.tolist(), strict=True)
    return np.array([any(p >= 0 and holds(p, q.answers) for p in passages) for q, passages in pairs], bool)
