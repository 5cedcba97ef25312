"""Questions that a person answers at the terminal, from the passages that are retrieved for them."""

from collections.abc import Callable, Iterator
from pathlib import Path

from realmops.answering.answer import InvalidRequest
from realmops.answering.own_questions import Label, progress_line, read_labels, save_labels
from realmops.answering.passage_search import format_passages
from realmops.answering.record import Record
from realmops.questions.answer_matching import token_boundary_spans
from realmops.questions.question_sets import text_key

SHOWN = 5  # passages for each question
Search = Callable[[str, int], Record]
Ask = Callable[[str], str]  # prints a prompt and returns the line that was typed; EOFError at the end of the input


def label_questions(search: Search, propose: Callable[[str], str], path: Path, ask: Ask) -> Iterator[str]:
    """Ask for questions and their answers until an empty question or the end of the input; yield lines to print.

    Each answer is saved at once. ``search`` takes a question and a number of passages; ``propose`` may return "".
    """
    yield progress_line(path)
    try:
        while question := ask("\nQuestion (empty: end): ").strip():
            try:
                yield from _label(question, search(question, SHOWN), propose(question), path, ask)
            except (InvalidRequest, UnicodeError) as error:
                yield f"not added: {error}"
    except (EOFError, KeyboardInterrupt):
        yield ""


def _label(question: str, found: Record, proposed: str, path: Path, ask: Ask) -> Iterator[str]:
    passages: list[Record] = found["passages"]
    earlier = read_labels(path).get(text_key(question))
    yield from format_passages(found)
    if earlier:
        yield f"This question has the answer {earlier.get('answers') or earlier['answer']!r}; a new one replaces it."
    if proposed:
        yield f"The model's answer: {proposed}"
    choices = ["the answer"]
    choices += ["a passage's number to copy it from there"] if passages else []
    choices += ["+ for the model's answer"] if proposed else []
    answer = ask(f"Type {', '.join(choices)}, - if the documents have none (empty: skip): ").strip()
    if answer.isascii() and answer.isdigit() and 1 <= int(answer) <= len(passages):
        chosen = passages[int(answer) - 1]
        yield chosen["text"]
        passages = [chosen, *passages]
        answer = ask(f"Answer, copied from passage {answer}: ").strip()
    elif answer == "+" and proposed:
        answer = proposed
    if answer in ("", "-"):
        yield "not added: skipped" if not answer else "not added: a question needs an answer that is in the documents"
        return
    holding = next((passage for passage in passages if token_boundary_spans(passage["text"], answer)), None)
    if holding is None:
        reply = ask(f"No passage shown contains {answer!r}. Keep this answer? (y/N) ").strip()
        if reply.lower() not in ("y", "yes"):
            yield "not added"
            return
    save_labels(path, [Label(question, answer, holding["passage_id"] if holding else "")])
    yield f"{'replaced' if earlier else 'added'}; {progress_line(path)}"
