"""Word shapes (capitals, digits, punctuation), which an uncased vocabulary loses."""

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

SHAPE_STEP = 1 << 32  # a wordpiece and its shape in one integer: id + shape * FORM_STEP


class WordShape(IntEnum):
    """Shape of a word; NONE for wordpieces outside passages."""

    NONE = 0
    LOWER = 1
    FIRST = 2  # capitalized, at the start of a sentence
    CAPITAL = 3  # capitalized, elsewhere
    CAPITALS = 4  # all capitals, two or more
    MIXED = 5
    NUMBER = 6  # only digits
    YEAR = 7  # four digits, 1000 to 2999
    DIGITS = 8  # digits and letters
    MARK = 9  # punctuation and symbols


def classify_word(word: str, *, starts_sentence: bool) -> WordShape:
    if not any(map(str.isalnum, word)):
        return WordShape.MARK
    if word.isdecimal():
        return WordShape.YEAR if len(word) == 4 and word[0] in "12" else WordShape.NUMBER
    if any(map(str.isdecimal, word)):
        return WordShape.DIGITS
    if word == word.lower():
        return WordShape.LOWER
    if len(word) > 1 and word == word.upper():
        return WordShape.CAPITALS
    if word[1:] == word[1:].lower():
        return WordShape.FIRST if starts_sentence else WordShape.CAPITAL
    return WordShape.MIXED


def classify_words(
    text: str, chars: NDArray[np.int32], continues: NDArray[np.bool_], sentence_starts: NDArray[np.int32]
) -> NDArray[np.int64]:
    """Return the ``WordShape`` of each wordpiece's word, int64 [t]; ``sentence_starts`` are first wordpieces."""
    is_start = ~continues
    is_start[:1] = True
    starts = np.flatnonzero(is_start)
    ends = np.append(starts, len(continues))[1:] - 1
    first = set(sentence_starts.tolist())
    words = zip(starts.tolist(), chars[starts, 0].tolist(), chars[ends, 1].tolist(), strict=True)
    word_forms = [classify_word(text[begin:end], starts_sentence=start in first) for start, begin, end in words]
    forms: NDArray[np.int64] = np.array(word_forms, np.int64)[np.cumsum(is_start) - 1]
    return forms
