"""Recall@k under each rule, on a corpus of four passages."""

import numpy as np
import pytest
from four_passages import QUESTIONS, TEXTS

from realmops.evaluate.recall import first_hit_ranks, hit_ranks_by_rule, recall_metrics
from realmops.questions.question_sets import Question

RANKED = np.array([[3, 1, 0, 2], [0, 3, 1, 2], [2, 1, 0, 3]])


def ranks(rule: str) -> list[int]:
    return first_hit_ranks(QUESTIONS, RANKED, TEXTS.__getitem__, rule=rule).tolist()


def test_first_hits_differ_by_rule() -> None:
    # The raw string misses "TOR HOLLOW" and finds "1" in "1995"; whole tokens do the opposite.
    assert ranks("substring") == [1, 0, 4]
    assert ranks("token_boundary") == [0, 1, 4]


def test_recall_metrics_name_k_and_rule() -> None:
    padded = np.pad(RANKED, ((0, 0), (0, 96)), constant_values=-1)
    metrics = recall_metrics(hit_ranks_by_rule(QUESTIONS, padded, TEXTS.__getitem__), prefix="zero_shot_")
    third = pytest.approx(1 / 3)
    assert metrics["zero_shot_recall_at_1_substring"] == third
    assert metrics["zero_shot_recall_at_1_token_boundary"] == third
    assert metrics["zero_shot_recall_at_5_token_boundary"] == pytest.approx(2 / 3)
    assert sorted(metrics) == sorted(
        f"zero_shot_recall_at_{k}_{rule}" for k in (1, 5, 20, 100) for rule in ("substring", "token_boundary")
    )


def test_expressions_have_separate_rules() -> None:
    hollow = Question("born", "Where?", ("tor hollow",), is_regex=True)
    padded = np.pad(RANKED[:1], ((0, 0), (0, 96)), constant_values=-1)
    found = hit_ranks_by_rule([hollow], padded, TEXTS.__getitem__)
    # "TOR HOLLOW has 1 mill." stands first, and begins with it.
    assert {rule: ranks.tolist() for rule, ranks in found.items()} == {"regex_match": [0], "regex_search": [0]}
    later = hit_ranks_by_rule([hollow], padded[:, 1:].repeat(2, axis=1), TEXTS.__getitem__)
    assert later["regex_search"].tolist() == [0]
    assert later["regex_match"].tolist() == [198]
    with pytest.raises(ValueError, match="'born' by regex_search, 'mills' by token_boundary"):
        hit_ranks_by_rule([hollow, QUESTIONS[1]], padded.repeat(2, axis=0), TEXTS.__getitem__)
