"""``realmops ask``: answer questions at the terminal."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from realmops.answering.answer import InvalidRequest
from realmops.answering.confidence import TOO_FEW_RIGHT
from realmops.answering.opened_model import Query
from realmops.answering.record import Record
from realmops.commands.open_model import open_model
from realmops.evaluate.exact_match import is_exact_match
from realmops.questions.question_sets import assign_languages, read_questions, rows_of_people


def ask(
    root: Path, model: str | None, questions: Sequence[str], file: Path | None, log: Callable[[str], None]
) -> Iterator[Record]:
    """Yield answer records for questions, then for a question file, without the passages that a question is from.

    A question of the file that the model cannot take has a record with ``error``; one of ``questions`` raises at once.
    """
    queries = [Query(text) for text in questions]
    from_file = [] if file is None else read_questions([file], asked=True)
    if not queries and file is None:
        raise ValueError("no questions: give QUESTION, or --from with a file that has some")
    opened = open_model(root, model)
    for query in queries:
        opened.check(query)
    first = [opened.probe(*queries[:1])]
    if not opened.model.gives_answers:
        log("ask: search, not answers: the run has no reader; set reader.init, and run finetune again")
    elif opened.confidence and not opened.confidence.holds_all:
        log(f"ask: p is the probability that an answer is right, {opened.confidence.description}")
    else:
        reason = TOO_FEW_RIGHT if opened.confidence else "the model was not calibrated on enough questions of people"
        log(f"ask: {reason}: a score ranks answers, no probability")
    yield from first[: len(queries)]
    for query in queries[1:]:
        yield from opened.answer([query])
    answerable = [question for question in from_file if question.answers or question.relevant]
    people, unanswerable = rows_of_people(answerable), len(from_file) - len(answerable)
    correct = abstained = 0
    for question in assign_languages(from_file, opened.model.snapshot.common_languages):
        query = Query(question.question, question.not_in)
        try:
            opened.check(query)
        except InvalidRequest as error:
            yield {"question": question.question, "error": str(error)}
            continue
        [record] = opened.answer([query])
        if question.answers or question.relevant:
            correct += question.measures_answers and is_exact_match(record["answer"] or "", question)
        else:
            abstained += record["abstained"] or not record["answer"]
        yield record
    if people and opened.model.gives_answers:
        log(f"exact match {correct / len(people):.3f}: {correct} of {len(people)} questions of {file} are correct")
    if unanswerable and opened.model.gives_answers:
        log(f"ask: {abstained} of {unanswerable} questions without answers in {file} are abstained from")
