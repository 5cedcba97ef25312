"""``realmops ask``: questions answered at the terminal."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from realmops.answering.answer import InvalidRequest
from realmops.answering.opened_model import Query
from realmops.answering.record import Record
from realmops.commands.open_model import open_model
from realmops.corpus.question_sets import in_languages, read_questions
from realmops.evaluate.exact_match import is_right


def ask(
    root: Path, model: str | None, questions: Sequence[str], file: Path | None, log: Callable[[str], None]
) -> Iterator[Record]:
    """Yield the records of questions, and of those of a question file, each answered by itself.

    A question of the file that cannot be asked has a record with ``error`` instead. Passages that a question was made
    from are not read for it. At the end ``log`` gets the exact match over the file's questions.

    Raises InvalidRequest for another question that cannot be asked, before the first is answered.
    """
    queries = [Query(text) for text in questions]
    listed = [] if file is None else read_questions([file], format="auto")
    if not queries and not listed:
        raise ValueError("there is nothing to ask: give a question, or --from FILE")
    opened = open_model(root, model)
    opened.probe()
    for query in queries:
        opened.check(query)
    for query in queries:
        yield from opened.answer([query])
    right = 0
    for question in in_languages(listed, opened.model.snapshot.common_languages):
        query = Query(question.question, question.not_in)
        try:
            opened.check(query)
        except InvalidRequest as error:
            yield {"question": question.question, "error": str(error)}
            continue
        [record] = opened.answer([query])
        right += is_right(record["answer"] or "", question)
        yield record
    if listed:
        log(f"exact match {right / len(listed):.3f}: {right} of {len(listed)} questions of {file} answered right")
