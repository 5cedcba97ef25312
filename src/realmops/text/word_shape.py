"""How words are written, which an uncased vocabulary does not keep: capitals, digits, marks."""

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

FORM_STEP = 1 << 32  # a wordpiece may come with its word's form: its id plus the form times this


class Form(IntEnum):
    """The forms that are told apart; NONE is what is no word of a passage."""

    NONE = 0
    LOWER = 1
    FIRST = 2  # a capital, at the start of a sentence
    CAPITAL = 3  # a capital anywhere else
    CAPITALS = 4  # several, and nothing else
    MIXED = 5
    NUMBER = 6  # digits alone
    YEAR = 7  # four of them, from 1000 to 2999
    DIGITS = 8  # digits and letters
    MARK = 9


def form_of(word: str, *, starts_sentence: bool) -> Form:
    """The form of one word or mark."""
    if not any(map(str.isalnum, word)):
        return Form.MARK
    if word.isdecimal():
        return Form.YEAR if len(word) == 4 and word[0] in "12" else Form.NUMBER
    if any(map(str.isdecimal, word)):
        return Form.DIGITS
    if word == word.lower():
        return Form.LOWER
    if len(word) > 1 and word == word.upper():
        return Form.CAPITALS
    if word[1:] == word[1:].lower():
        return Form.FIRST if starts_sentence else Form.CAPITAL
    return Form.MIXED


def forms_of(
    text: str, chars: NDArray[np.int32], continues: NDArray[np.bool_], sentence_starts: NDArray[np.int32]
) -> NDArray[np.int64]:
    """[t] the form of each wordpiece's word; ``continues`` says which wordpieces continue one."""
    begins = ~continues
    begins[:1] = True
    starts = np.flatnonzero(begins)
    ends = np.append(starts, len(continues))[1:] - 1
    first = set(sentence_starts.tolist())
    words = zip(starts.tolist(), chars[starts, 0].tolist(), chars[ends, 1].tolist(), strict=True)
    found = [form_of(text[begin:end], starts_sentence=start in first) for start, begin, end in words]
    form: NDArray[np.int64] = np.array(found, np.int64)[np.cumsum(begins) - 1]
    return form
