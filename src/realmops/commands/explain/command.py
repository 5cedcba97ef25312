"""``realmops explain``: what its options ask for, and what is shown for that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from realmops.artifacts import write_bytes
from realmops.commands.explain.question import open_run
from realmops.commands.explain.render import Explanation, as_json, as_page, lines, side_by_side
from realmops.commands.explain.results import sorted_out, stored_answers
from realmops.commands.explain.sentence import explain_sentence
from realmops.commands.update import before_and_after, of_pipeline

if TYPE_CHECKING:
    from rich.table import Table

ASKED_NOW = "--answer, --json, --html and --before-after"  # options that want an answer of the model of now


def explain(
    root: Path,
    *,
    sentence: str | None,
    questions: Sequence[str],
    failures: Sequence[str],
    limit: int,
    answer: str | None,
    before_after: bool,
    json: bool,
    html: Path | None,
) -> Iterator[str | Table]:
    """Texts and tables for a masked sentence, for questions or, without both, for the answers under results/.

    Args:
        questions: ids of answers under results/, or questions to ask now.
        failures: keys of ``FAILED_AT``; only answers that failed there are shown.
        limit: so many answers of results/ are shown at most.
        answer: y, if not the prediction.
        before_after: over the corpus of before and of after the newest update.
        json: everything as JSON.
        html: the page to write.

    Raises ValueError for options that do not belong together.
    """
    anew = answer is not None or json or html is not None or before_after
    if sentence is not None and (questions or failures):
        raise ValueError("--question and --failed-at are about questions: leave the sentence out")
    about_results = sentence is None and not questions
    if about_results and anew:
        raise ValueError(f"{ASKED_NOW} are about a sentence with [MASK] or a --question: give one")
    texts, ids = sorted_out(questions, root, anew=anew)
    if texts and failures:
        raise ValueError("--failed-at is about the answers under results/: leave it out, or name --question by id")
    if len(texts) > 1 and anew:
        raise ValueError(f"{ASKED_NOW} take one question: ask the others apart")
    if ids or about_results:
        yield stored_answers(root, ids, failures, limit)
    if sentence is None and not texts:
        return
    explanations: list[list[Explanation]] = []  # by side
    for side in before_and_after(root) if before_after else (of_pipeline(root),):
        if sentence is not None:
            explanations.append([explain_sentence(sentence, root, side, answer)])
        else:
            opened = open_run(root, side)
            explanations.append([opened.explain(text, answer) for text in texts])
    for number, found in enumerate(zip(*explanations, strict=True)):
        if ids or number:
            yield ""
        if html is not None:
            write_bytes(html, as_page(found).encode())
        if json:
            yield as_json(found)
        else:
            yield "\n".join(lines(found[0].sheet())) if len(found) == 1 else side_by_side(*found)
