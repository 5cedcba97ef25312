"""`realmops explain "sentence with [MASK]"`: the numbers against their definitions, and refusals."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import small_project

from realmops.artifacts import write_manifest
from realmops.commands.masked import explain_sentence

SENTENCE = "Anna Berg was born in [MASK]."


@pytest.fixture(scope="module")
def root(trained: Path) -> Path:
    return trained / "root"


@pytest.fixture(scope="module")
def found(root: Path) -> dict[str, Any]:
    return explain_sentence(SENTENCE, root, "Oslo")


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


def test_the_prediction_is_the_most_probable_guess_of_all_candidates(root: Path) -> None:
    found = explain_sentence(SENTENCE, root)
    best = found["with_retrieval"]
    guesses = {c["guess"] for c in found["candidates"]}
    assert best["words"] == found["y"]
    assert best["words"] in guesses
    assert found["p_y"] == pytest.approx(best["probability"])
    for guess in guesses:
        if "#" not in guess and "[" not in guess:
            assert explain_sentence(SENTENCE, root, guess)["p_y"] <= best["probability"] * (1 + 1e-9)


def test_one_mask_is_expanded_to_all_wordpieces_of_the_answer(root: Path) -> None:
    assert explain_sentence("He lived in [MASK] until 1950.", root, "Bergen Oslo")["y"] == "bergen oslo"


@pytest.mark.parametrize(
    ("sentence", "answer", "message"),
    [
        ("Anna Berg was born in Oslo.", None, r"no \[MASK\] in the sentence"),
        ("[MASK] Berg [MASK]", "Oslo " * 9, "with an answer write one"),
        ("[MASK] was born.", " ", "has no wordpieces"),
        ("[MASK] " + "was born " * 90, None, "wordpieces; at most 94 are allowed"),
    ],
)
def test_a_sentence_that_does_not_fit_is_refused(root: Path, sentence: str, answer: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        explain_sentence(sentence, root, answer)


def test_terminal_json_and_page_show_table_3(root: Path, tmp_path: Path, found: dict[str, Any]) -> None:
    words = "explain", SENTENCE, "--root", root, "--answer", "Oslo"
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
    assert "http" not in page.read_text().replace("http://www.w3.org/2000/svg", "")


def test_an_imported_model_without_training_options_is_refused(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "models/pretrain", tmp_path / "models/pretrain")
    write_manifest(tmp_path / "models/pretrain", "pretrain", fingerprint="imported")
    with pytest.raises(ValueError, match="models/pretrain was imported, so its training options"):
        explain_sentence(SENTENCE, tmp_path)
