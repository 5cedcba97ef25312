"""``realmops explain``: a question and a masked sentence, by the definitions of their numbers."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import small_project
from serving import QUESTION, update

from realmops.answering.corpus_states import CorpusState, newest_state, pipeline_state
from realmops.answering.opened_model import Query
from realmops.answering.record import Record
from realmops.artifacts import write_manifest
from realmops.commands.masked import explain_sentence
from realmops.config import load_params
from realmops.corpus.snapshot_reader import Snapshot
from realmops.evaluate.predictions import read_results
from realmops.opening import open_run
from realmops.questions.answer_matching import normalize_answer
from realmops.questions.question_sets import Question

SENTENCE = "Anna Berg was born in [MASK]."


@pytest.fixture(scope="module")
def root(answering: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with results and one update of its corpus."""
    project = Path(shutil.copytree(answering, tmp_path_factory.mktemp("question") / "project"))
    update(project, "Anna Berg was born in Bergen. She wrote The Cold Sea in 1931.")
    return project / "root"


def ask(root: Path, question: str = QUESTION, y: str | None = None, *, where: CorpusState | None = None) -> Record:
    [record] = open_run(root, where).answer([Query(question, y=y)])
    return record


def column(record: Record, name: str) -> list[Any]:
    return [passage[name] for passage in record["passages"]]


def test_one_softmax_over_all_spans_and_bayes(root: Path) -> None:
    """The sum of p(y|x) over all possible answers is one; that of p(y, z|x) over passages is p(y|x)."""
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


def test_a_requested_answer_is_cited_where_passages_have_it(root: Path) -> None:
    absent = ask(root, y="Zanzibar")
    assert (absent["y"], absent["p_y"], absent["citations"]) == ("Zanzibar", 0, [])
    assert column(absent, "p_z_given_y") == [None] * 5
    empty = ask(root, y="The ")  # without a normal form, like "."
    assert {citation["quote"] for citation in empty["citations"]} == {".", "The"}
    given = ask(root)
    other = next(span for span in column(given, "span") if normalize_answer(span) != normalize_answer(given["answer"]))
    found = ask(root, y=other)
    assert found["answer"] == given["answer"]
    assert {normalize_answer(citation["quote"]) for citation in found["citations"]} == {normalize_answer(other)}


def test_a_question_is_explained_at_the_terminal_as_json_and_as_a_page(root: Path, tmp_path: Path) -> None:
    both = small_project.cli("explain", "--root", root, "--question", "test-1", "--question", QUESTION)
    assert both.exit_code == 0, both.output
    assert "expected: Anna Berg" in both.output, "the one in results/"
    assert f"\n\n{QUESTION}\n  answer: " in both.output
    page = tmp_path / "question.html"
    printed = small_project.cli("explain", "--root", root, "--question", "test-0", "--json", "--html", page)
    values = json.loads(printed.stdout)
    assert values == ask(root), "the record that is served"
    assert "p(z|x,y)" in page.read_text()
    assert "http" not in page.read_text().replace("http://www.w3.org/2000/svg", "")
    page.write_text("mine")
    refused = small_project.cli("explain", "--root", root, "--question", "test-0", "--json", "--html", page)
    assert (refused.exit_code, page.read_text()) == (2, "mine")
    assert f"{page} exists with other content" in refused.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--question", QUESTION, "--failed-at", "reader"], "--failed-at selects answers in results/"),
        (["--question", QUESTION, "--question", "Who was it?", "--json"], "take one question"),
        (["--json"], "need a SENTENCE with"),
        ([QUESTION, "--question", "q"], "leave SENTENCE out"),
    ],
)
def test_conflicting_options_are_refused(root: Path, words: list[str], message: str) -> None:
    refused = small_project.cli("explain", "--root", root, *words)
    assert refused.exit_code == 2
    assert message in refused.output


def test_an_explanation_is_of_the_newest_corpus(root: Path) -> None:
    record, state = ask(root), newest_state(root)
    assert (state.number, record["model"]["index_generation"]) == (1, 1)
    sentence = explain_sentence("[MASK] wrote The Cold Sea.", root, "Bergen")
    passages = {*Snapshot.open(state.snapshot / "corpus").column("passage_id"), ""}
    assert {candidate["passage_id"] for candidate in sentence["candidates"]} <= passages
    assert str(state.finetune / "index.safetensors") in sentence["index"]


def test_a_retriever_by_words_is_explained_and_updated_without_an_index(root: Path, tmp_path: Path) -> None:
    project = root.parent
    changes = {"finetune.retriever": "bm25", "finetune.reader": "ict"}
    values = load_params(project / "params.yaml").replace(changes)
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
    assert not (newest_state(copy).finetune / "index.safetensors").exists()
    assert column(ask(copy), "title") == ["Jon Vik", "Rain"]
    assert ask(copy, where=pipeline_state(copy)) == found


@pytest.fixture(scope="module")
def found(trained: Path) -> dict[str, Any]:
    return explain_sentence(SENTENCE, trained / "root", "Oslo")


def test_equation_1_and_bayes_hold_over_the_candidates(found: dict[str, Any]) -> None:
    *passages, null = found["candidates"]
    assert sum(c["p_z"] for c in found["candidates"]) == pytest.approx(1)
    assert found["p_y"] == pytest.approx(sum(c["p_z"] * c["p_y"] for c in found["candidates"]))
    for candidate in found["candidates"]:
        assert candidate["p_z_given_y"] == pytest.approx(candidate["p_z"] * candidate["p_y"] / found["p_y"])
        assert candidate["utility"] == pytest.approx(math.log(candidate["p_y"] / found["p_y_without"]))
    assert (null["title"], null["p_y"]) == ("(null document)", found["p_y_without"])
    assert found["p_y_best"] == max(passage["p_y"] for passage in passages)
    assert "Anna Berg" not in [passage["title"] for passage in passages], "her passage contains the sentence"
    assert found["index"] == "12 passages, embedded now, with the weights of pretrain after step 0"


def test_the_prediction_is_the_most_probable_guess_of_all_candidates(trained: Path) -> None:
    found = explain_sentence(SENTENCE, trained / "root")
    best = found["with_retrieval"]
    guesses = {c["guess"] for c in found["candidates"]}
    assert best["words"] == found["y"]
    assert best["words"] in guesses
    assert found["p_y"] == pytest.approx(best["probability"])
    for guess in guesses:
        if "#" not in guess and "[" not in guess:
            assert explain_sentence(SENTENCE, trained / "root", guess)["p_y"] <= best["probability"] * (1 + 1e-9)


def test_one_mask_is_expanded_to_all_wordpieces_of_the_answer(trained: Path) -> None:
    assert explain_sentence("He lived in [MASK] until 1950.", trained / "root", "Bergen Oslo")["y"] == "bergen oslo"


@pytest.mark.parametrize(
    ("sentence", "answer", "message"),
    [
        ("Anna Berg was born in Oslo.", None, r"no \[MASK\] in the sentence"),
        ("[MASK] Berg [MASK]", "Oslo " * 9, "with an answer write one"),
        ("[MASK] was born.", " ", "has no wordpieces"),
        ("[MASK] " + "was born " * 90, None, "wordpieces; at most 94 are allowed"),
    ],
)
def test_a_sentence_that_does_not_fit_is_refused(
    trained: Path, sentence: str, answer: str | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        explain_sentence(sentence, trained / "root", answer)


def test_terminal_json_and_page_show_table_3(trained: Path, tmp_path: Path, found: dict[str, Any]) -> None:
    words = "explain", SENTENCE, "--root", trained / "root", "--answer", "Oslo"
    terminal = small_project.cli(*words)
    assert terminal.exit_code == 0, terminal.output
    best = max(found["candidates"][:-1], key=lambda c: c["p_y"])
    lines = [" ".join(line.split()) for line in terminal.stdout.splitlines()]
    assert lines[4:7] == [
        f"BERT, without retrieval: p(y|x) = {found['p_y_without']:.3g} (the reader with the null document)",
        f"REALM given the best z: p(y|x,z) = {best['p_y']:.3g} ({best['title']} [{best['passage_id'][:12]}])",
        f"REALM, marginal over top 2: p(y|x) = {found['p_y']:.3g} (and the null document)",
    ]
    page = tmp_path / "sentence.html"
    values = json.loads(small_project.cli(*words, "--json", "--html", page).stdout)
    assert (values["y"], len(values["candidates"])) == (found["y"], 3)
    assert "(null document)" in page.read_text()


def test_an_imported_model_without_training_options_is_refused(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "root" / "models/pretrain", tmp_path / "models/pretrain")
    write_manifest(tmp_path / "models/pretrain", "pretrain", fingerprint="imported")
    with pytest.raises(ValueError, match="models/pretrain was imported, so its training options"):
        explain_sentence(SENTENCE, tmp_path)
