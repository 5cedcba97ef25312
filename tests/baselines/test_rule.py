"""The rule without learning, on passages whose distances can be counted."""

import pytest

from realmops.baselines.rule import nearest_span

BRIDGE = "In 1871 the Moor family of Tor Hollow built the Lintel Bridge. It burned in 1902, and Ada Vell wept."


@pytest.mark.parametrize(
    ("question", "passage", "answer"),
    [
        # The words from "Bridge" are 10 to "1871", 8 to "Moor", 4 to "Tor Hollow" and none to the span that it is in.
        ("Which bridge was it?", BRIDGE, "Lintel Bridge"),
        ("What is the Lintel Bridge?", BRIDGE, "Tor Hollow"),  # the span is in the question
        ("When did it burn?", BRIDGE, "1902"),  # "Lintel Bridge" is as near and first, but no number
        ("Who wept?", BRIDGE, "Ada Vell"),
        ("Who burned?", BRIDGE, "Lintel Bridge"),  # 2 words before; "Ada Vell" is 4 after
        ("In which year did Moor build it?", BRIDGE, "1871"),  # 2 words from "Moor"; "1902" is 12 after
        ("What?", BRIDGE, "1871"),  # no word to be near to: the first span
        ("Who wept?", "They saw Dvor\u030ca\u0301k and wept.", "Dvor\u030ca\u0301k"),
        ("What did Dvořák see?", "There Dvor\u030ca\u0301k saw Oslo.", "Oslo"),
        ("Who came?", "There came J. Moor of Tor. Berg left.", "J. Moor of Tor"),
        ("Who came?", "There came Anna-Maria Moor of late.", "Anna-Maria Moor"),
        ("Who came?", "There came Ada. Berg left.", "Ada"),
        ("What was sold?", "It was sold. The mill was sold. However, they sold Fjell.", "Fjell"),
        ("When did Ada sing?", "Ada sang in Oslo.", "Oslo"),
        ("Who met?", "Ada met Jon.", "Ada"),
        ("Who is Ada Vell?", "", None),
        ("Who is Ada Vell?", "nothing with a name is here", None),
        ("Who is Ada Vell?", "Ada Vell", None),
    ],
)
def test_the_answer_is_the_nearest_name_or_number(question: str, passage: str, answer: str | None) -> None:
    span = nearest_span(question, passage)
    assert (None if span is None else passage[slice(*span)]) == answer
