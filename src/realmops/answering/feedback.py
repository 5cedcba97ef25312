"""What people said of answers: kept in a file below a run's work folder, and made into questions."""

import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from realmops.artifacts import WORK, digest_of, make_folder, sync_folder
from realmops.corpus.documents import read_json_lines
from realmops.corpus.question_sets import Question, text_key

FILE = "feedback.jsonl"
LINE_LIMIT = 1 << 15  # bytes of one judgement
FILE_LIMIT = 1 << 26  # bytes of all of them


class Full(Exception):
    """The file is as long as it may be."""


@dataclass(frozen=True)
class Feedback:
    """What somebody said of an answer: whether it is right and, if it is not, which one is."""

    question: str
    answer: str
    right: bool
    correct_answer: str = ""
    passage_id: str = ""
    time: float = field(default_factory=time.time)  # in seconds since 1970

    def __post_init__(self) -> None:
        """ValueError where nothing can be learned of it."""
        for name in ("question", "answer"):
            if not getattr(self, name).strip():
                raise ValueError(f"{name} is empty: say what was asked and what the answer was")
        if self.right and self.correct_answer:
            raise ValueError("correct_answer belongs to an answer that is not right: leave it out, or say right: false")
        if self.correct_answer and not self.correct_answer.strip():
            raise ValueError(f"correct_answer is {self.correct_answer!r}, which is blank: leave it out")

    @property
    def known(self) -> str:
        """The answer that is right, or "" where nobody knows it."""
        return self.answer if self.right else self.correct_answer


def feedback_file(root: Path) -> Path:
    """Where the feedback on a run's answers lies."""
    return root / WORK / FILE


def keep(root: Path, feedback: Feedback) -> None:
    """Add one judgement at the end of the file; it is there after a power cut. Several processes may do so.

    Raises ValueError for a text that cannot be written or is too long, Full where no more fits, and OSError.
    """
    try:
        line = f"{json.dumps(asdict(feedback), ensure_ascii=False)}\n".encode()
    except UnicodeEncodeError:
        raise ValueError("a text holds half a surrogate pair; write it whole") from None
    if len(line) > LINE_LIMIT:
        raise ValueError(f"the feedback has {len(line)} bytes, at most {LINE_LIMIT} are kept")
    path = feedback_file(root)
    make_folder(path.parent)
    is_new = not path.exists()
    with open(path, "ab+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        end = _whole(file.fileno())
        if end + len(line) > FILE_LIMIT:
            raise Full(f"{path.name} has {end} of {FILE_LIMIT} bytes: move it away")
        file.truncate(end)  # without half a line of a process that was killed
        file.write(line)
        file.flush()
        os.fsync(file.fileno())
    if is_new:
        sync_folder(path.parent)


def _whole(descriptor: int) -> int:
    """How many bytes of an open file are whole lines."""
    size = os.fstat(descriptor).st_size
    begin = max(0, size - LINE_LIMIT)
    return begin + os.pread(descriptor, size - begin, begin).rfind(b"\n") + 1


def read_feedback(path: Path) -> Iterator[Feedback]:
    """What was kept, in order; ValueError names a file that is not there, and a line that is damaged."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist: nobody has said yet which answers are right")
    for place, line in read_json_lines(path):
        try:
            yield Feedback(**_checked(line))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{place}: no feedback of this version ({error})") from None


def _checked(line: dict[str, Any]) -> dict[str, Any]:
    kinds = {"right": bool, "time": (int, float)}
    for name, value in line.items():
        if not isinstance(value, kinds.get(name, str)):  # type: ignore[arg-type]
            raise ValueError(f"{name} is {value!r}")
    return line


def questions_of(feedback: Sequence[Feedback]) -> list[Question]:
    """The questions whose right answer is known: confirmed ones and corrected ones, each text once (``text_key``).

    What was said last of a question counts; where that is only that its answer is wrong, the question is left out.
    """
    last = {text_key(one.question): one for one in feedback}
    return [
        Question(
            f"feedback-{digest_of(question)[:12]}",
            question,
            (one.known,),
            passage_id=one.passage_id or None if one.right else None,
        )
        for question, one in last.items()
        if one.known
    ]
