"""The answers under results/: which of them are wanted, and what each rests on, in lines of text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from realmops.evaluate.predictions import FAILED_AT, Prediction, read_results, results_file


def stored_answers(root: Path, ids: Collection[str], failures: Collection[str], limit: int) -> str:
    """What failed where, and the answers with these ids and failures, at most so many."""
    predictions = read_results(root)
    found = chosen(predictions, ids, failures)
    lines = [*overview(predictions), *("\n" + "\n".join(answer_lines(one)) for one in found[:limit])]
    if len(found) > limit:
        lines.append(f"\n{len(found) - limit} more; --limit, --question and --failed-at choose others")
    return "\n".join(lines)


def sorted_out(values: Sequence[str], root: Path, *, anew: bool) -> tuple[list[str], tuple[str, ...]]:
    """Of the values of ``--question`` the questions to ask now, and the ids of answers under results/ to show.

    An id among the predictions under results/ is one; ``anew`` asks its question again. Everything else is a question
    of its own, and so is all where there are no results. ValueError for what looks like a mistyped id: no white space.
    """
    file = results_file(root)
    known = {p.question_id: p.question for p in read_results(root)} if values and file.is_file() else {}
    for value in values:
        if known and value not in known and not any(map(str.isspace, value)):
            raise ValueError(
                f"--question {value!r} is no id among the {len(known)} of {file} (the first is {next(iter(known))!r}), "
                "and no question either: that has white space in it, if only at its end"
            )
    texts = [known.get(value, value) for value in values if anew or value not in known]
    return texts, tuple(value for value in values if not anew and value in known)


def chosen(predictions: Sequence[Prediction], ids: Collection[str], failures: Collection[str]) -> list[Prediction]:
    """The predictions with one of the ids and one of the failures, where any are named; ValueError for unknown ones."""
    for name in failures:
        if name not in FAILED_AT:
            raise ValueError(f"no question fails at {name!r}; choose {', '.join(FAILED_AT)}")
    known = {prediction.question_id for prediction in predictions}
    for identifier in ids:
        if identifier not in known:
            raise ValueError(
                f"there is no question {identifier!r} among {len(known)}; the first is {predictions[0].question_id!r}"
            )
    return [
        prediction
        for prediction in predictions
        if (not ids or prediction.question_id in ids) and (not failures or prediction.failed_at in failures)
    ]


def overview(predictions: Sequence[Prediction]) -> Iterator[str]:
    """How many questions failed at what."""
    counts = Counter(prediction.failed_at for prediction in predictions)
    yield f"{len(predictions)} questions"
    for name, meaning in FAILED_AT.items():
        yield f"{counts[name]:>7} {counts[name] / len(predictions):6.1%}  {name}: {meaning}"


def answer_lines(prediction: Prediction) -> Iterator[str]:
    """One question, its answer and the passages that were read."""
    yield f"{prediction.question_id}  {prediction.question}"
    yield f"  wanted: {'; '.join(prediction.answers)}"
    yield f"  answer: {prediction.prediction or '(none)'}  (score {prediction.span_score:.2f})"
    if prediction.confidence is not None:
        yield f"  confidence: {prediction.confidence:.2f}{' (abstained)' if prediction.abstained else ''}"
    yield f"  failed at: {prediction.failed_at} ({FAILED_AT[prediction.failed_at]})"
    if prediction.gold_span is not None:
        yield f"  best right span: {prediction.gold_span}  (score {prediction.gold_score:.2f})"
    hit = prediction.first_hit
    yield f"  first passage with an answer: {f'number {hit + 1}' if hit >= 0 else 'none of those retrieved'}"
    rows = zip(
        prediction.p_z,
        prediction.passage_scores,
        prediction.titles,
        prediction.passage_ids,
        prediction.passage_spans,
        strict=True,
    )
    yield "   p(z|x)   score  passage, its best span"
    for number, (p_z, score, title, passage, span) in enumerate(rows):
        mark = ">" if number == prediction.evidence_rank else " "
        shown = f"{score:7.2f}" if score is not None else "      -"
        yield f"  {mark}{p_z:6.3f} {shown}  {title} [{passage}]: {span or '(none)'}"
