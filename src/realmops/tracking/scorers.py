"""Scorers for ``mlflow.genai.evaluate`` over records of answers; none asks a model.

``outputs`` is a record as ``realmops ask --json`` and the registered model give it. ``expectations`` has the acceptable
answers as ``answers`` (a list), or one as ``expected_response``, as feedback on answers is kept; ``language`` is the
code of the language by whose rules an answer is right, English's without it.
"""

from collections.abc import Mapping
from typing import Any

from mlflow.entities import Feedback
from mlflow.genai.scorers import scorer

from realmops.corpus import answers
from realmops.corpus.languages import ENGLISH

Record = Mapping[str, Any]


def _is_right(outputs: Record, expectations: Mapping[str, Any] | None) -> bool:
    """Whether the answer is an acceptable one; ValueError where none is named."""
    named = expectations or {}
    wanted = named.get("answers") or ([named["expected_response"]] if named.get("expected_response") else [])
    if not wanted:
        raise ValueError("expectations name no answer: give 'answers', or 'expected_response'")
    return bool(outputs["answer"]) and answers.exact_match(outputs["answer"], wanted, named.get("language") or ENGLISH)


@scorer
def exact_match(outputs: Record, expectations: dict[str, Any]) -> bool:
    """Whether the answer is an acceptable one, but for case, punctuation and articles; held back or not."""
    return _is_right(outputs, expectations)


@scorer
def citation_holds(outputs: Record) -> Feedback:
    """Whether each quotation stands in its passage where the record says, and the answer is quoted first."""
    passages = {one["passage_id"]: one for one in outputs["passages"]}
    for one in outputs["citations"]:
        passage = passages.get(one["passage_id"])
        if passage is None:
            return Feedback(value=False, rationale=f"passage {one['passage_id']} was not read")
        if one["quote"] != passage["text"][one["start"] - passage["start"] : one["end"] - passage["start"]]:
            return Feedback(value=False, rationale=f"{one['quote']!r} does not stand there in {one['passage_id']}")
    quoted = outputs["citations"][0]["quote"] if outputs["citations"] else ""
    if not outputs["abstained"] and outputs["answer"] != quoted:
        return Feedback(value=False, rationale=f"the answer {outputs['answer']!r} is not what is quoted first")
    return Feedback(value=True, rationale=f"{len(outputs['citations'])} quotations stand where they should")


@scorer
def abstained_rightly(outputs: Record, expectations: dict[str, Any]) -> bool:
    """Whether a right answer was given, or a wrong one held back."""
    return bool(outputs["abstained"]) is not _is_right(outputs, expectations)


SCORERS = (exact_match, citation_holds, abstained_rightly)
