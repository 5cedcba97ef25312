"""Which text answers a question when many spans are likely: decoding by minimum Bayes risk."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from realmops.text.answer_matching import normal_form, words_f1
from realmops.text.languages import ENGLISH

CANDIDATES = 20  # spans of one question that are compared, those with the highest scores


def minimum_risk(texts: Sequence[str], p: NDArray[np.float64], language: str = ENGLISH) -> int:
    """Which of some texts has the highest expected score if each is the right answer with probability ``p``.

    The score is the mean of exact match and F1 (Rajpurkar et al. 2016), so that a text gains from those that say the
    same and from those that share its words (minimum Bayes risk, Kumar and Byrne 2004). ``texts`` and ``p`` are those
    of spans, the likeliest first; ``p`` need not sum to 1. Of equal ones the first is taken.
    """
    p_of: dict[str, float] = {}
    forms = [normal_form(text, language) for text in texts]
    for form, share in zip(forms, p.tolist(), strict=True):
        p_of[form] = p_of.get(form, 0.0) + share
    words = {form: form.split() for form in p_of}

    def expected(said: str) -> float:
        return sum(share * ((said == form) + words_f1(words[said], words[form])) for form, share in p_of.items())

    return forms.index(max(p_of, key=expected))
