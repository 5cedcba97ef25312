"""`realmops explain --question`: an answer of the fine-tuned model taken apart, ids, and a corpus before and after."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import small_project
import yaml
from small_world import DOCUMENTS

from realmops.artifacts import write_manifest
from realmops.commands.explain.question import QuestionExplanation, open_run
from realmops.commands.explain.results import sorted_out
from realmops.commands.explain.sentence import explain_sentence
from realmops.commands.update import before_and_after, of_pipeline
from realmops.corpus.answers import normal_form
from realmops.corpus.snapshot import Snapshot
from realmops.evaluate.predictions import read_results

QUESTION = "Where did Jon Vik build ships?"  # test-0
NEW_TEXT = "Anna Berg was born in Bergen. She wrote The Cold Sea in 1931."


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with results and one update of its corpus."""
    project = small_project.trained_project(tmp_path_factory.mktemp("question"))
    values = yaml.safe_load((project / "params.yaml").read_text())
    for name in ("finetune", "evaluate"):
        small_project.stage(name, values, project, project / "root")
    documents = [{"title": title, "text": text} for title, text, _ in DOCUMENTS]
    small_project.write_json_lines(
        project / "documents.jsonl", [{"title": "Anna Berg", "text": NEW_TEXT}, *documents[1:]]
    )
    assert small_project.cli("update", "--params", project / "params.yaml", "--root", project / "root").exit_code == 0
    return project / "root"


def ask(root: Path, question: str = QUESTION, answer: str | None = None) -> QuestionExplanation:
    return open_run(root).explain(question, answer)


def test_a_finished_run_is_opened_and_asked_in_few_lines(root: Path) -> None:
    """What the documentation shows: the answer, and the passages with what each is worth."""
    run = open_run(root)
    found = run.explain(QUESTION)
    best = max(found.candidates, key=lambda candidate: candidate.p_z_given_y or 0.0)
    assert 0 < found.probability <= 1
    assert best.span == found.prediction
    assert best.title in {title for title, _, _ in DOCUMENTS} | {"Anna Berg"}
    assert [c.p_z for c in found.candidates] == sorted((c.p_z for c in found.candidates), reverse=True)
    assert run.explain("Who wrote a novel?").question == "Who wrote a novel?", "the same run is asked again"


def test_the_answer_is_that_of_the_evaluation(root: Path) -> None:
    [stored] = [p for p in read_results(root) if p.question_id == "test-0"]
    found = ask(root)
    assert found.question == stored.question
    assert found.y == found.prediction == stored.prediction
    assert [c.passage_id for c in found.candidates] == list(stored.passage_ids)
    assert [c.p_z for c in found.candidates] == pytest.approx(stored.p_z, rel=1e-4)
    assert tuple(c.span for c in found.candidates) == stored.passage_spans
    assert [c.score for c in found.candidates] == pytest.approx(stored.passage_scores, rel=1e-4)
    assert max(c.score or 0.0 for c in found.candidates) == pytest.approx(stored.span_score, rel=1e-4)


def test_one_softmax_over_all_spans_and_bayes(root: Path) -> None:
    """Over all answers that can be given p(y|x) sums to one; p(y, z|x) of an answer sums to p(y|x) over passages."""
    run = open_run(root, of_pipeline(root))
    model, snapshot, total = run.model, run.model.snapshot, 0.0
    first = run.explain(QUESTION)
    row = {snapshot.passage_id(i): i for i in range(len(snapshot))}
    answers = {}
    for passage in (row[c.passage_id] for c in first.candidates):
        chars, text = snapshot.chars(passage), snapshot.text(passage)
        for start in range(len(chars)):
            for _, end in chars[start : start + model.options.answer_wordpieces]:
                span = text[chars[start][0] : end]
                answers[normal_form(span)] = span
    for answer in answers.values():
        found = run.explain(QUESTION, answer)
        assert found.p_y == pytest.approx(sum(c.p_y_z for c in found.candidates))
        assert [c.p_z_given_y for c in found.candidates] == pytest.approx(
            [c.p_y_z / found.p_y for c in found.candidates]
        )
        total += found.p_y
    assert total == pytest.approx(1)
    assert sum(c.p_z for c in first.candidates) == pytest.approx(1)
    assert first.probability == first.p_y == run.explain(QUESTION, first.prediction).p_y


def test_an_answer_that_no_passage_has(root: Path) -> None:
    found = ask(root, answer="Zanzibar")
    assert found.y == "Zanzibar"
    assert found.p_y == 0
    assert [c.p_z_given_y for c in found.candidates] == [None] * 5
    assert found.probability > 0


@pytest.mark.parametrize(("question", "message"), [(" ", "has 0 wordpieces, 1 to"), ("who " * 90, "are read: change")])
def test_what_cannot_be_asked_is_said(root: Path, question: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ask(root, question)


def test_an_id_is_shown_words_are_asked_and_a_mistyped_id_is_told(root: Path) -> None:
    words = "Who painted the sea?"
    assert sorted_out(["test-1", words], root, anew=False) == ([words], ("test-1",))
    assert sorted_out(["test-1", words], root, anew=True) == (["Who wrote a novel?", words], ())
    with pytest.raises(ValueError, match=r"'test-9' is no id among the 2 of .* \(the first is 'test-0'\)"):
        sorted_out(["test-9"], root, anew=False)
    assert sorted_out(["test-9 "], root, anew=False) == (["test-9 "], ())
    assert sorted_out(["test-1"], root / "nowhere", anew=False) == (["test-1"], ())


def test_terminal_json_and_page(root: Path, tmp_path: Path) -> None:
    both = small_project.cli("explain", "--root", root, "--question", "test-1", "--question", QUESTION)
    assert both.exit_code == 0, both.output
    assert "wanted: Anna Berg" in both.output, "the one under results/"
    assert f"\n\n{QUESTION}\n  answer: " in both.output
    assert "finetune/index.safetensors, with the weights of pretrain after step 0\n" in both.output
    page = tmp_path / "question.html"
    printed = small_project.cli("explain", "--root", root, "--question", "test-0", "--json", "--html", page)
    values = json.loads(printed.output)
    assert values["question"] == QUESTION
    assert values["probability"] == pytest.approx(ask(root).probability)
    assert values["index"]["step"] == 0
    assert len(values["candidates"]) == 5
    assert "p(y,z|x)" in page.read_text()
    assert "http" not in page.read_text().replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--question", QUESTION, "--failed-at", "reader"], "--failed-at is about the answers under results/"),
        (["--question", QUESTION, "--question", "Who was it?", "--json"], "take one question"),
        (["--before-after"], "are about a sentence with"),
        (["--question", "test9"], "no question either"),
        (["Who was it?"], "--question asks a question"),
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
    alone = open_run(root, after).explain(QUESTION)
    assert values["before"]["candidates"][0]["passage_id"] == ask(root).candidates[0].passage_id
    assert values["after"]["prediction"] == alone.prediction
    assert str(after.finetune) in values["after"]["index"]["file"]
    sides = [explain_sentence("[MASK] wrote The Cold Sea.", root, side, "Bergen") for side in (before, after)]
    ids = [{c.passage_id for c in side.candidates} for side in sides]
    snapshots = [Snapshot.open(side.snapshot / "corpus") for side in (before, after)]
    assert all(side <= {*s.column("passage_id"), ""} for side, s in zip(ids, snapshots, strict=True))
    assert [side.index.file for side in sides] == [str(s.finetune / "index.safetensors") for s in (before, after)]
    assert sides[0].p_y_without == sides[1].p_y_without, "the reader alone knows no corpus"


def test_before_and_after_are_shown_beside_each_other(root: Path, tmp_path: Path) -> None:
    page = tmp_path / "swap.html"
    sentence = "Anna Berg was born in [MASK]."
    shown = small_project.cli(
        "explain", sentence, "--root", root, "--answer", "Bergen", "--before-after", "--html", page
    )
    assert shown.exit_code == 0, shown.output
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.output.splitlines() if "│" in line]
    assert rows[0] == [sentence, sentence]
    assert all(len(row) == 2 for row in rows)
    assert [row[0].startswith("y = bergen") and row[1].startswith("y = bergen") for row in rows].count(True) == 1
    assert [f"<h2>{side}</h2>" in page.read_text() for side in ("before", "after")] == [True, True]


def test_without_an_update_there_is_no_after(root: Path, tmp_path: Path) -> None:
    for name in ("models", "data"):
        shutil.copytree(root / name, tmp_path / name)
    refused = small_project.cli("explain", "--root", tmp_path, "--question", QUESTION, "--before-after")
    assert refused.exit_code == 2
    assert "holds no update of the present model; run 'realmops update' first" in refused.output


def test_an_imported_model_is_asked_with_the_options_of_its_evaluation(root: Path, tmp_path: Path) -> None:
    for name in ("models", "data", "results"):
        shutil.copytree(root / name, tmp_path / name)
    tuned = tmp_path / "models/finetune"
    write_manifest(tuned, "finetune", fingerprint="imported")
    found = ask(tmp_path)
    assert found.candidates == ask(root).candidates
    assert "with the weights of pretrain at a step that is not known" in str(found.index)


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
    assert found.prediction == stored.prediction
    assert [c.passage_id for c in found.candidates] == list(stored.passage_ids)
    assert str(found.index).endswith("passages, ranked by bm25")
    moved = [{"title": "Jon Vik", "text": "Jon Vik built ships in Oslo."}, {"title": "Rain", "text": "It rains."}]
    small_project.write_json_lines(tmp_path / "documents.jsonl", moved)
    done = small_project.cli("update", "--params", params, "--root", copy)
    assert done.exit_code == 0, done.output
    before, after = before_and_after(copy)
    assert not (after.finetune / "index.safetensors").exists()
    again = open_run(copy, after).explain(QUESTION)
    assert again.candidates[0].title == "Jon Vik"
    assert len(again.candidates) == 2
    assert open_run(copy, before).explain(QUESTION) == found
