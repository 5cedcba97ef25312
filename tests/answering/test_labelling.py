"""Questions that a person labels at the terminal: the dialogue over a pipe, and the file that keeps the answers."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from power import Disk
from small_project import cli

from realmops.answering.confidence import MIN_CALIBRATION
from realmops.answering.labelling import label_questions
from realmops.answering.own_questions import WHAT_THEY_BRING, Label, read_labels, save_labels
from realmops.cli import main
from realmops.questions.question_sets import read_questions

BORN = "Where was Anna Berg born?"
BUILT = "Who built The Star?"


@pytest.fixture(scope="module")
def root(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has a snapshot and nothing else."""
    folder = tmp_path_factory.mktemp("labels")
    shutil.copytree(trained / "root/data/snapshot", folder / "data/snapshot")
    return folder


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "own.jsonl"


def typed(root: Path, file: Path, *lines: str) -> Result:
    """The command's result for these lines on standard input."""
    options = ["questions", "--label", "--root", str(root), "--out", str(file)]
    return CliRunner().invoke(main, options, input="".join(f"{line}\n" for line in lines))


def answers(file: Path) -> dict[str, tuple[str, str | None]]:
    return {q.question: (q.answers[0], q.passage_id) for q in read_questions([file], format="jsonl")}


def test_questions_are_labelled_with_a_snapshot_alone(root: Path, file: Path) -> None:
    """Typed, and copied from a passage by its number; without an answer in the documents, or any, none is added."""
    result = typed(root, file, BORN, "oslo", BUILT, "1", "Jon Vik", "Who is Karl?", "-", "Who is Fjell?", "", "")
    assert result.exit_code == 0, result.output
    first = json.loads(cli("search", BUILT, "--root", root, "-k", "5", "--json").stdout)["passages"][0]
    assert list(answers(file)) == [BORN, BUILT]
    assert (answers(file)[BORN][0], answers(file)[BUILT]) == ("oslo", ("Jon Vik", first["passage_id"]))
    for part in (
        f"{file}: 0 of 20 questions, 20 left",
        f": {first['text']}\n",
        f"added; {file}: 2 of 20 questions, 18 left",
        "not added: a question needs an answer that is in the documents",
        "not added: skipped",
        *WHAT_THEY_BRING,
        f"next: realmops run all --set questions.dev={file} --root {root}",
    ):
        assert part in result.stdout, part
    assert "model's answer" not in result.stdout


def test_the_file_is_continued_and_a_question_replaced(root: Path, file: Path) -> None:
    file.write_text(
        f'{{"question": "{BORN}", "answer": "Bergen", "note": "mine"}}\n{{"question": "b", "answers": ["c"]}}\n'
    )
    kept = typed(root, file, f" {BORN.replace(' ', '  ')}", "")
    assert "This question has the answer 'Bergen'; a new one replaces it." in kept.stdout
    assert '"note": "mine"' in file.read_text()
    assert f"replaced; {file}: 2 of 20 questions" in typed(root, file, BORN, "Oslo").stdout
    assert {question: answer for question, (answer, _) in answers(file).items()} == {BORN: "Oslo", "b": "c"}
    save_labels(file, [Label(f"{n}?", "x") for n in range(MIN_CALIBRATION)])
    assert typed(root, file).stdout.startswith(f"{file}: 22 questions\n")


@pytest.mark.parametrize(("reply", "count"), [("y", 1), ("", 0)])
def test_an_answer_that_no_passage_contains_needs_a_confirmation(
    root: Path, file: Path, reply: str, count: int
) -> None:
    """By token boundaries: "Osl" is in no passage."""
    result = typed(root, file, BORN, "Osl", reply, "")
    assert result.stdout.count("No passage shown contains 'Osl'. Keep this answer? (y/N)") == 1
    assert len(read_labels(file)) == count


@pytest.mark.parametrize("lines", [(), (BORN,), (BORN, "3"), (BORN, "nowhere")])
def test_the_end_of_the_input_keeps_earlier_answers(root: Path, file: Path, lines: tuple[str]) -> None:
    result = typed(root, file, BUILT, "Jon Vik", *lines)
    assert (result.exit_code, "next: realmops run all" in result.stdout) == (0, True)
    assert list(answers(file)) == [BUILT]


@pytest.mark.parametrize("error", [KeyboardInterrupt, EOFError])
def test_each_answer_is_durable_before_the_next_question(file: Path, error: type[BaseException]) -> None:
    lines = iter(["Where?", "Oslo", "Who?", "Anna"])
    passage = {"text": "Oslo, Anna", "passage_id": "p", "title": "", "document_id": "d", "uri": "u", "score": 1.0}
    passage |= {"start": 0, "end": 10, "highlights": []}
    with Disk(file.parent) as disk:

        def ask(prompt: str) -> str:
            if prompt.startswith("\n") and file.exists():
                assert disk.lost(file) == []
            if line := next(lines, None):
                return line
            raise error

        printed = list(label_questions(lambda *_: {"passages": [passage]}, lambda _: "", file, ask))
    assert printed[-2:] == [f"added; {file}: 2 of 20 questions, 18 left", ""]
    assert list(answers(file).values()) == [("Oslo", "p"), ("Anna", "p")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"question": "a", "answers": ["b"]}\n{"question": ', ":2: "),
        ("a,b\n", ":1: "),
        ('{"question": "a", "answer": "b"}\n{"question": " a", "answer": "c"}\n', ":2: the question 'a' is already in"),
    ],
)
def test_a_damaged_file_is_named_with_its_line_and_unchanged(
    root: Path, file: Path, content: str, message: str
) -> None:
    file.write_text(content)
    result = typed(root, file, BORN, "Oslo")
    assert (result.exit_code, f"{file}{message}" in result.stderr) == (2, True), result.output
    assert file.read_text() == content


def test_a_file_that_cannot_be_written_is_reported_before_the_first_question(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = os.access
    monkeypatch.setattr(
        "realmops.answering.own_questions.os.access",
        lambda path, mode: not (mode == os.W_OK and "read-only" in str(path)) and access(path, mode),
    )
    (tmp_path / "text").write_text("no folder")
    (tmp_path / "read-only").mkdir()
    for name, problem in (
        ("text/own.jsonl", "text is no writable folder"),
        ("read-only/new/own.jsonl", "read-only is no writable folder"),
        ("read-only", "is a folder; expected a file"),
        ("own.jsonl.gz", "is compressed; expected a file"),
    ):
        result = typed(root, tmp_path / name, BORN, "Oslo")
        assert (result.exit_code, problem in result.stderr, result.stdout) == (2, True, ""), result.output


def test_a_full_disk_leaves_the_earlier_answers(root: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_labels(file, [Label(BUILT, "Jon Vik")])
    before = file.read_bytes()

    def full(*_: object) -> Iterator[Path]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))

    monkeypatch.setattr("realmops.answering.own_questions.write_bytes", full)
    result = typed(root, file, BORN, "Oslo")
    assert (result.exit_code, "No space left" in result.stderr) == (2, True)
    assert file.read_bytes() == before


def test_the_answer_of_a_fine_tuned_model_is_proposed(answering: Path, file: Path) -> None:
    proposed = json.loads(cli("ask", BUILT, "--root", answering / "root", "--json").stdout)["answer"]
    result = typed(answering / "root", file, "who " * 90, BUILT, "+", "y", "")
    assert result.exit_code == 0, result.output
    assert "not added: the question 'who who" in result.stdout
    assert f"The model's answer: {proposed}\n" in result.stdout
    assert {question: answer for question, (answer, _) in answers(file).items()} == {BUILT: proposed}


def test_labels_of_eight_writers_are_all_kept(file: Path) -> None:
    with ThreadPoolExecutor(8) as writers:
        list(writers.map(lambda n: [save_labels(file, [Label(f"{n} {k}?", "x")]) for k in range(5)], range(8)))
    assert len(read_labels(file)) == 40
