"""A file of questions that people answered, at the terminal or by feedback on answers, for ``questions.dev``."""

import json
import math
import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from realmops.answering.confidence import MIN_CALIBRATION
from realmops.artifacts import digest_of, make_folder, wait_for_lock, write_bytes
from realmops.questions.question_sets import read_questions, text_key
from realmops.readers.documents import read_json_lines

OWN_QUESTIONS = Path("questions/own.jsonl")  # default file, next to params.yaml
WHAT_THEY_BRING = (  # figures of bootstrap_interval
    "From 20 questions of people on, answers get a probability once 11 are right; models are not trained on them.",
    "A 95 % interval of EM or recall is .30 to .70 around .50 and .60 to .95 around .80 with 20 questions, .33 to .67 "
    "and .67 to .93 with 30.",
    "A difference between two models below about .25 does not show with 20.",
)


@dataclass(frozen=True)
class Label:
    """A question with the answer that a person gave, and the id of a passage that contains it, "" if unknown."""

    question: str
    answer: str
    passage_id: str = ""
    time: float = field(default_factory=time.time)  # Unix time in seconds

    def record(self) -> dict[str, Any]:
        question = text_key(self.question)
        passage = {"passage_id": self.passage_id} if self.passage_id else {}
        id_ = f"own-{digest_of(question)[:12]}"
        return {"id": id_, "question": question, "answers": [self.answer], **passage, "time": self.time}


def check_label_file(path: Path) -> None:
    if path.is_dir() or path.suffix in (".gz", ".bz2"):
        kind = "a folder" if path.is_dir() else "compressed"
        raise ValueError(f"{path} is {kind}; expected a file of JSON lines, such as {OWN_QUESTIONS}; set it with --out")
    parent = next(folder for folder in path.absolute().parents if os.path.lexists(folder))
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ValueError(f"{path} cannot be written: {parent} is no writable folder; choose another one with --out")
    read_labels(path)


def read_labels(path: Path) -> dict[str, dict[str, Any]]:
    """Return the lines of a file of questions by ``text_key``, also if they have other fields; {} without a file."""
    if not path.is_file() or not path.stat().st_size:
        return {}
    read_questions([path], format="jsonl")
    labels: dict[str, dict[str, Any]] = {}
    for place, line in read_json_lines(path):
        key = text_key(line["question"])
        if key in labels:
            raise ValueError(f"{place}: the question {key!r} is already in the file; keep one of the two lines")
        labels[key] = line
    return labels


def save_labels(path: Path, new: Sequence[Label], *, only_newer: bool = False) -> int:
    """Add labels to a file of questions, atomically and durably; return the number that were written.

    A question of the same text is replaced; with ``only_newer`` a newer answer, or one without a time, is kept.
    """
    make_folder(path.absolute().parent)
    with open(path.with_name(f".{path.name}.lock"), "ab") as lock:  # several processes may label at a time
        wait_for_lock(lock)
        existing = read_labels(path)
        times = {key: line.get("time", math.inf) for key, line in existing.items()}
        chosen = [n for n in new if not only_newer or n.time > times.get(text_key(n.question), -math.inf)]
        records = existing | {text_key(label.question): label.record() for label in chosen}
        write_bytes(
            path, "".join(f"{json.dumps(record, ensure_ascii=False)}\n" for record in records.values()).encode()
        )
    return len(chosen)


def progress_line(path: Path) -> str:
    count = len(read_labels(path))
    left = f"of {MIN_CALIBRATION} questions, {MIN_CALIBRATION - count} left"
    return f"{path}: {count} {left if count < MIN_CALIBRATION else 'questions'}"


def usage_lines(root: Path, file: Path) -> list[str]:
    if not read_labels(file):
        return [progress_line(file)]
    option = f"--set questions.dev={shlex.quote(str(file))}"
    place = "" if root.resolve() == Path.cwd() else f" --root {shlex.quote(str(root))}"
    return [
        progress_line(file),
        *WHAT_THEY_BRING,
        f"next: realmops run all {option}{place}",
        f"to keep the option in params.yaml: realmops params {option} --write",
    ]
