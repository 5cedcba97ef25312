"""Minimum Bayes risk decoding: choose an answer text among the spans of a question."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from realmops.corpus.languages import ENGLISH
from realmops.questions.answer_matching import normalize_answer, words_f1


def minimum_bayes_risk(texts: Sequence[str], p: NDArray[np.float64], language: str = ENGLISH) -> int:
    """Return the index of the text with the highest expected score (minimum Bayes risk, Kumar and Byrne 2004).

    The score is the mean of exact match and F1. The candidates are most probable first, and the first one wins ties;
    ``p`` need not sum to 1.
    """
    p_of: dict[str, float] = {}
    forms = [normalize_answer(text, language) for text in texts]
    for form, share in zip(forms, p.tolist(), strict=True):
        p_of[form] = p_of.get(form, 0.0) + share
    words = {form: form.split() for form in p_of}

    def expected_score(answer: str) -> float:
        return sum(share * ((answer == form) + words_f1(words[answer], words[form])) for form, share in p_of.items())

    return forms.index(max(p_of, key=expected_score))
