"""The rule without learning, on passages whose distances can be counted."""

import pytest

from realmops.baselines.rule import nearest_span

BRIDGE = "In 1871 the Moor family of Tor Hollow built the Lintel Bridge. It burned in 1902, and Ada Vell wept."


def found(question: str, passage: str) -> str | None:
    span = nearest_span(question, passage)
    return None if span is None else passage[slice(*span)]


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        # The words from "Bridge" are 10 to "1871", 8 to "Moor", 4 to "Tor Hollow" and none to the span that it is in.
        ("Which bridge was it?", "Lintel Bridge"),
        ("What is the Lintel Bridge?", "Tor Hollow"),  # the span is in the question
        ("When did it burn?", "1902"),  # 2 words from "burned"; "Lintel Bridge" is as near and first, but no number
        ("Who wept?", "Ada Vell"),
        ("Who burned?", "Lintel Bridge"),  # 2 words before; "Ada Vell" is 4 behind
        ("In which year did Moor build it?", "1871"),  # 2 words from "Moor"; "1902" is 12 behind
        ("What?", "1871"),  # no word to be near to: the first span
    ],
)
def test_the_nearest_name_or_number(question: str, answer: str) -> None:
    assert found(question, BRIDGE) == answer


def test_a_decomposed_name_is_one_word_with_its_places() -> None:
    assert found("Who wept?", "They saw Dvor\u030ca\u0301k and wept.") == "Dvor\u030ca\u0301k"
    assert found("What did Dvořák see?", "There Dvor\u030ca\u0301k saw Oslo.") == "Oslo"


def test_small_words_join_names_and_full_stops_only_initials() -> None:
    assert found("Who came?", "There came J. Moor of Tor. Berg left.") == "J. Moor of Tor"
    assert found("Who came?", "There came Anna-Maria Moor of late.") == "Anna-Maria Moor"
    assert found("Who came?", "There came Ada. Berg left.") == "Ada"


def test_the_start_of_a_sentence_is_no_name() -> None:
    assert found("What was sold?", "It was sold. The mill was sold. However, they sold Fjell.") == "Fjell"


def test_without_a_wanted_kind_another_is_taken() -> None:
    assert found("When did Ada sing?", "Ada sang in Oslo.") == "Oslo"


def test_of_equally_near_spans_the_first() -> None:
    assert found("Who met?", "Ada met Jon.") == "Ada"


@pytest.mark.parametrize("passage", ["", "nothing with a name stands here", "Ada Vell"])
def test_nothing_to_choose(passage: str) -> None:
    assert found("Who is Ada Vell?", passage) is None
