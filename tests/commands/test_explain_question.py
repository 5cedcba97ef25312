"""`realmops explain --question`: an answer of the fine-tuned model taken apart, ids, and a corpus before and after."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import small_project
import yaml
from serving import QUESTION, update

from realmops.answering.corpus_states import CorpusState, before_and_after, pipeline_state
from realmops.answering.opened_model import Query
from realmops.answering.record import Record
from realmops.commands.explain import split_questions
from realmops.commands.masked import explain_sentence
from realmops.commands.open_model import open_run
from realmops.corpus.snapshot_reader import Snapshot
from realmops.evaluate.predictions import read_results
from realmops.questions.answer_matching import normalize_answer
from realmops.questions.question_sets import Question


@pytest.fixture(scope="module")
def root(answering: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with results and one update of its corpus."""
    project = Path(shutil.copytree(answering, tmp_path_factory.mktemp("question") / "project"))
    update(project, "Anna Berg was born in Bergen. She wrote The Cold Sea in 1931.")
    return project / "root"


def ask(root: Path, question: str = QUESTION, y: str | None = None, *, where: CorpusState | None = None) -> Record:
    [record] = open_run(root, where or pipeline_state(root)).answer([Query(question, y=y)])
    return record


def column(record: Record, name: str) -> list[Any]:
    return [passage[name] for passage in record["passages"]]


def test_one_softmax_over_all_spans_and_bayes(root: Path) -> None:
    """Over all answers that can be given p(y|x) sums to one; p(y, z|x) of an answer sums to p(y|x) over passages."""
    model = open_run(root, pipeline_state(root)).model
    snapshot, total = model.snapshot, 0.0
    found = model.find([Question("", QUESTION, ())])
    [first] = model.read(found)
    answers = {}
    for passage in first.passages:
        chars, text = snapshot.chars(passage), snapshot.text(passage)
        for start in range(len(chars)):
            for _, end in chars[start : start + model.options.answer_wordpieces]:
                span = text[chars[start][0] : end]
                answers[normalize_answer(span)] = span
    for answer in answers.values():
        [about] = model.read(found, [answer])
        assert about.p_y == pytest.approx(sum(z.p_y_z for z in about.read))
        assert [z.p_z_given_y for z in about.read] == pytest.approx([z.p_y_z / about.p_y for z in about.read])
        total += about.p_y
    assert total == pytest.approx(1)
    assert sum(z.p_z for z in first.read) == pytest.approx(1)
    assert first.p_y == model.read(found, [first.text])[0].p_y == pytest.approx(first.probability)


def test_an_answer_that_no_passage_has(root: Path) -> None:
    found = ask(root, y="Zanzibar")
    assert (found["y"], found["p_y"], found["citations"]) == ("Zanzibar", 0, [])
    assert column(found, "p_z_given_y") == [None] * 5
    assert found["probability"] > 0


@pytest.mark.parametrize("y", ["A", "The ", "!"])
def test_an_answer_without_a_normal_form_can_be_asked_about(root: Path, y: str) -> None:
    """The passages have "." and "The", which exact match takes for the same."""
    found = ask(root, y=y)
    assert found["y"] == y
    assert {one["quote"] for one in found["citations"]} == {".", "The"}
    assert found["p_y"] == pytest.approx(ask(root, y=".")["p_y"])


def test_an_answer_that_is_asked_about_is_cited_at_its_place(root: Path) -> None:
    given = ask(root)
    other = next(span for span in column(given, "span") if normalize_answer(span) != normalize_answer(given["answer"]))
    found = ask(root, y=other)
    assert found["answer"] == given["answer"]
    assert {normalize_answer(one["quote"]) for one in found["citations"]} == {normalize_answer(other)}
    assert 0 < found["p_y"] < 1
    assert "y" not in given


@pytest.mark.parametrize(("question", "message"), [(" ", "has 0 wordpieces, 1 to"), ("who " * 90, "are read")])
def test_a_question_that_cannot_be_read_is_refused(root: Path, question: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ask(root, question)


def test_an_id_is_shown_words_are_asked_and_a_mistyped_id_is_refused(root: Path) -> None:
    words = "Who painted the sea?"
    assert split_questions(["test-1", words], root, live=False) == ([words], ("test-1",))
    assert split_questions(["test-1", words], root, live=True) == (["Who wrote a novel?", words], ())
    with pytest.raises(ValueError, match=r"'test-9' is not among the 2 ids in .* \(the first is 'test-0'\)"):
        split_questions(["test-9"], root, live=False)
    assert split_questions(["test-9 "], root, live=False) == (["test-9 "], ())
    assert split_questions(["test-1"], root / "nowhere", live=False) == (["test-1"], ())


def test_terminal_json_and_page(root: Path, tmp_path: Path) -> None:
    both = small_project.cli("explain", "--root", root, "--question", "test-1", "--question", QUESTION)
    assert both.exit_code == 0, both.output
    assert "expected: Anna Berg" in both.output, "the one under results/"
    assert f"\n\n{QUESTION}\n  answer: " in both.output
    assert ", index 0\n" in both.output
    page = tmp_path / "question.html"
    printed = small_project.cli("explain", "--root", root, "--question", "test-0", "--json", "--html", page)
    values = json.loads(printed.output)
    assert values["question"] == QUESTION
    assert values == ask(root), "the record that is served, too"
    assert len(values["passages"]) == 5
    assert "p(z|x,y)" in page.read_text()
    assert "http" not in page.read_text().replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--question", QUESTION, "--failed-at", "reader"], "--failed-at selects answers in results/"),
        (["--question", QUESTION, "--question", "Who was it?", "--json"], "take one question"),
        (["--before-after"], "need a SENTENCE with"),
        (["--question", "test9"], "the text of a question needs white space"),
        (["Who was it?"], "use --question for a question"),
    ],
)
def test_options_that_do_not_belong_together(root: Path, words: list[str], message: str) -> None:
    refused = small_project.cli("explain", "--root", root, *words)
    assert refused.exit_code == 2
    assert message in refused.output


def test_before_and_after_an_update(root: Path) -> None:
    """The same models; passages and index are those of each side."""
    before, after = before_and_after(root)
    assert (before.number, after.number) == (0, 1)
    printed = small_project.cli("explain", "--root", root, "--question", "test-0", "--before-after", "--json")
    values = json.loads(printed.output)
    assert values == {"before": ask(root), "after": ask(root, where=after)}
    assert [values[side]["model"]["index_generation"] for side in ("before", "after")] == [0, 1]
    sides = [explain_sentence("[MASK] wrote The Cold Sea.", root, side, "Bergen") for side in (before, after)]
    ids = [{c["passage_id"] for c in side["candidates"]} for side in sides]
    snapshots = [Snapshot.open(side.snapshot / "corpus") for side in (before, after)]
    assert all(side <= {*s.column("passage_id"), ""} for side, s in zip(ids, snapshots, strict=True))
    for side, state in zip(sides, (before, after), strict=True):
        assert str(state.finetune / "index.safetensors") in side["index"]
    assert sides[0]["p_y_without"] == sides[1]["p_y_without"], "the reader alone knows no corpus"


def test_a_retriever_by_words_is_explained_and_updated_without_an_index(root: Path, tmp_path: Path) -> None:
    project = root.parent
    values = yaml.safe_load((project / "params.yaml").read_text())
    values["finetune"] |= {"retriever": "bm25", "reader": "ict"}
    params = small_project.write_params(tmp_path / "params.yaml", values)
    for name in ("documents.jsonl", *(f"questions.{split}.jsonl" for split in small_project.QUESTIONS)):
        shutil.copy(project / name, tmp_path / name)
    copy = tmp_path / "root"
    for folder in ("data", "models"):
        shutil.copytree(root / folder, copy / folder)
    for name in ("finetune", "evaluate"):
        small_project.stage(name, values, tmp_path, copy)
    [stored] = [p for p in read_results(copy) if p.question_id == "test-0"]
    found = ask(copy)
    assert found["answer"] == stored.prediction
    assert column(found, "passage_id") == list(stored.passage_ids)
    moved = [{"title": "Jon Vik", "text": "Jon Vik built ships in Oslo."}, {"title": "Rain", "text": "It rains."}]
    small_project.write_json_lines(tmp_path / "documents.jsonl", moved)
    done = small_project.cli("update", "--params", params, "--root", copy, "--may-shrink")
    assert done.exit_code == 0, done.output
    before, after = before_and_after(copy)
    assert not (after.finetune / "index.safetensors").exists()
    assert column(ask(copy, where=after), "title") == ["Jon Vik", "Rain"]
    assert ask(copy, where=before) == found
