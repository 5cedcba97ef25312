"""User feedback on answers: appended to a file in a run's work folder, and converted to labelled questions."""

import dataclasses
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from realmops.answering.answer import QUESTION_LIMIT
from realmops.answering.own_questions import Label, check_label_file, save_labels, usage_lines
from realmops.artifacts import WORK_FOLDER, make_folder, sync_folder, wait_for_lock
from realmops.credentials import refuse_credentials
from realmops.questions.question_sets import text_key
from realmops.readers.documents import read_json_lines

FILE = "feedback.jsonl"
LINE_LIMIT = 1 << 15  # bytes of one entry, which no entry exceeds
FILE_LIMIT = 1 << 26  # bytes of the file
Text = Annotated[str, Field(max_length=QUESTION_LIMIT, strict=True)]
PassageId = Annotated[str, Field(max_length=80)]


class FeedbackFileFull(Exception):
    """The feedback file has reached ``FILE_LIMIT``."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Rating:
    """A user's judgement of an answer: whether it is right and, if not, optionally the correct one."""

    question: Text
    answer: Annotated[Text, Field(description="The answer that was returned or held back; empty if there was none.")]
    right: Annotated[bool, Field(strict=True)]
    correct_answer: Text = Field("", description="The correct answer, if this one is wrong or there was none.")
    passage_id: PassageId = Field("", description="The passage that the answer was quoted from.")
    correct_passage_id: PassageId = Field("", description="A passage that contains the correct answer.")

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        refuse_credentials([self.question, self.answer, self.correct_answer], "feedback")
        if not self.question.strip():
            raise ValueError("question is empty; send the question that was answered")
        if not self.answer.strip() and (self.right or not self.correct_answer):
            raise ValueError("answer is empty; send the answer that was shown or, if there was none, correct_answer")
        if self.right and self.correct_answer:
            raise ValueError("correct_answer is set although right is true; omit it, or set right to false")
        if self.correct_answer and not self.correct_answer.strip():
            raise ValueError(f"correct_answer is {self.correct_answer!r}, which is blank; omit it")
        if self.correct_passage_id and not self.correct_answer:
            raise ValueError("correct_passage_id is set without correct_answer; send both, or omit it")
        return self


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Feedback(Rating):
    """A rating with its Unix time in seconds."""

    time: float = dataclasses.field(default_factory=time.time)

    @property
    def known(self) -> str:
        """The correct answer, or "" if it is unknown."""
        return self.answer if self.right else self.correct_answer


def feedback_file(root: Path) -> Path:
    return root / WORK_FOLDER / FILE


def append_feedback(root: Path, feedback: Feedback) -> None:
    """Append an entry durably, also concurrently; FeedbackFileFull or OSError if it cannot be."""
    line = f"{json.dumps(dataclasses.asdict(feedback), ensure_ascii=False)}\n".encode()
    assert len(line) <= LINE_LIMIT
    path = feedback_file(root)
    make_folder(path.parent)
    is_new = not path.exists()
    with open(path, "ab+") as file:
        wait_for_lock(file)
        end = _complete_bytes(file.fileno())
        if end + len(line) > FILE_LIMIT:
            raise FeedbackFileFull(f"{path.name} is full: {end} of {FILE_LIMIT} bytes; move it to another folder")
        file.truncate(end)  # drops the partial line of a killed process
        file.write(line)
        file.flush()
        os.fsync(file.fileno())
    if is_new:
        sync_folder(path.parent)


def _complete_bytes(descriptor: int) -> int:
    size = os.fstat(descriptor).st_size
    begin = max(0, size - LINE_LIMIT)
    return begin + os.pread(descriptor, size - begin, begin).rfind(b"\n") + 1


def read_feedback(path: Path) -> Iterator[Feedback]:
    if not path.is_file():
        raise ValueError(f"{path} does not exist: no feedback was given yet")
    for place, line in read_json_lines(path):
        refuse_credentials(line, place)
        try:
            yield Feedback(**line)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{place}: not a feedback entry of this version ({error})") from None


def confirmed_labels(feedback: Sequence[Feedback]) -> list[Label]:
    """Return a question for each confirmed or corrected answer, by the last entry of each question (``text_key``)."""
    last = {text_key(entry.question): entry for entry in feedback}
    return [
        Label(question, entry.known, entry.passage_id if entry.right else entry.correct_passage_id, entry.time)
        for question, entry in last.items()
        if entry.known
    ]


def save_confirmed_labels(root: Path, file: Path) -> list[str]:
    """Add the questions whose answers users confirmed or corrected to a file of labels; return lines to print."""
    check_label_file(file)
    path = feedback_file(root)
    feedback = list(read_feedback(path))
    labels = confirmed_labels(feedback)
    if not labels:
        raise ValueError(f"{path}: none of {len(feedback)} answers is confirmed or corrected; collect feedback first")
    added = save_labels(file, labels, only_newer=True)
    kept = f"; {len(labels) - added} are in the file already, or have a newer answer there"
    line = f"{len(feedback)} judgements read, {added} questions added or replaced"
    return [line + (kept if added < len(labels) else ""), *usage_lines(root, file)]
