"""User feedback on answers: appended to a file in a run's work folder, and converted to labelled questions."""

import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from realmops.answering.own_questions import Label, check_label_file, save_labels, usage_lines
from realmops.artifacts import WORK_FOLDER, make_folder, sync_folder
from realmops.questions.question_sets import text_key
from realmops.readers.documents import read_json_lines

FILE = "feedback.jsonl"
LINE_LIMIT = 1 << 15  # bytes of one entry
FILE_LIMIT = 1 << 26  # bytes of the file


class FeedbackFileFull(Exception):
    """The feedback file has reached ``FILE_LIMIT``."""


@dataclass(frozen=True)
class Feedback:
    """A user's judgement of an answer: whether it is right and, if not, optionally the correct one."""

    question: str
    answer: str  # the answer that was shown or held back; "" if there was none, which needs ``correct_answer``
    right: bool
    correct_answer: str = ""  # the correct answer if the answer is wrong or there was none, else ""
    passage_id: str = ""  # id of the passage that the answer was quoted from
    correct_passage_id: str = ""  # id of a passage that contains the correct answer, "" if unknown
    time: float = field(default_factory=time.time)  # Unix time in seconds

    def __post_init__(self) -> None:
        """Raise ValueError for blank or contradictory fields."""
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

    @property
    def known(self) -> str:
        return self.answer if self.right else self.correct_answer


def feedback_file(root: Path) -> Path:
    return root / WORK_FOLDER / FILE


def append_feedback(root: Path, feedback: Feedback) -> None:
    """Append an entry durably, also concurrently; ValueError, FeedbackFileFull or OSError if it cannot be."""
    try:
        line = f"{json.dumps(asdict(feedback), ensure_ascii=False)}\n".encode()
    except UnicodeEncodeError:
        raise ValueError("a text contains an unpaired surrogate; send valid Unicode") from None
    if len(line) > LINE_LIMIT:
        raise ValueError(f"the feedback has {len(line)} bytes; allowed: {LINE_LIMIT}; shorten it")
    path = feedback_file(root)
    make_folder(path.parent)
    is_new = not path.exists()
    with open(path, "ab+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
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
    """Return the number of bytes up to the end of the last complete line."""
    size = os.fstat(descriptor).st_size
    begin = max(0, size - LINE_LIMIT)
    return begin + os.pread(descriptor, size - begin, begin).rfind(b"\n") + 1


def read_feedback(path: Path) -> Iterator[Feedback]:
    """Yield all entries in order; raise ValueError for a missing file or a damaged line."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist: no feedback was given yet")
    for place, line in read_json_lines(path):
        try:
            yield Feedback(**_check_types(line))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{place}: not a feedback entry of this version ({error})") from None


def _check_types(line: dict[str, Any]) -> dict[str, Any]:
    types = {"right": bool, "time": (int, float)}
    for name, value in line.items():
        if not isinstance(value, types.get(name, str)):  # type: ignore[arg-type]
            raise ValueError(f"{name} is {value!r}")
    return line


def confirmed_labels(feedback: Sequence[Feedback]) -> list[Label]:
    """Return a question with its answer for each confirmed or corrected answer.

    The last entry of each question text (``text_key``) counts; a question whose correct answer is unknown is omitted.
    """
    last = {text_key(entry.question): entry for entry in feedback}
    return [
        Label(question, entry.known, entry.passage_id if entry.right else entry.correct_passage_id, entry.time)
        for question, entry in last.items()
        if entry.known
    ]


def save_confirmed_labels(root: Path, file: Path) -> list[str]:
    """Add the questions whose answers users confirmed or corrected to a file of labels; return lines to print.

    The newest answer to a question counts. Raises ValueError if no answer in ``root`` is confirmed or corrected.
    """
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
