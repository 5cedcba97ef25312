"""`realmops explain "sentence with [MASK]"`: the numbers against the definitions, and what is refused."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import small_project

from realmops.answering.corpus_states import pipeline_state
from realmops.artifacts import write_manifest
from realmops.commands.explain import _sentence_sheet
from realmops.commands.masked import explain_sentence
from realmops.corpus.snapshot_reader import Snapshot

SENTENCE = "Anna Berg was born in [MASK]."


def explain(sentence: str, root: Path, *, answer: str | None = None) -> dict[str, Any]:
    return explain_sentence(sentence, root, pipeline_state(root), answer)


@pytest.fixture(scope="module")
def root(trained: Path) -> Path:
    return trained / "root"


@pytest.fixture(scope="module")
def found(root: Path) -> dict[str, Any]:
    return explain(SENTENCE, root, answer="Oslo")


def test_equation_1_and_bayes_hold_over_the_candidates(found: dict[str, Any]) -> None:
    assert sum(c["p_z"] for c in found["candidates"]) == pytest.approx(1)
    assert found["p_y"] == pytest.approx(sum(c["p_z"] * c["p_y"] for c in found["candidates"]))
    assert found["p_y_without"] == found["candidates"][-1]["p_y"]
    for candidate in found["candidates"]:
        assert candidate["p_z_given_y"] == pytest.approx(candidate["p_z"] * candidate["p_y"] / found["p_y"])
        assert candidate["utility"] == pytest.approx(math.log(candidate["p_y"] / found["p_y_without"]))
    assert found["candidates"][-1]["title"] == "(null document)"


def test_a_passage_that_holds_the_sentence_is_no_candidate(found: dict[str, Any], root: Path) -> None:
    assert "Anna Berg" not in [c["title"] for c in found["candidates"]], "her passage says it word for word"
    open_ended = explain(SENTENCE, root)
    assert open_ended["y"] == open_ended["with_retrieval"]["words"]
    assert len(open_ended["candidates"]) == 3


def test_the_guess_is_the_likeliest_of_all_that_a_candidate_makes(root: Path) -> None:
    found = explain(SENTENCE, root)
    best = found["with_retrieval"]
    assert best["words"] in {c["guess"] for c in found["candidates"]}
    assert found["p_y"] == pytest.approx(best["probability"]), "y is the guess"
    for guess in {c["guess"] for c in found["candidates"]}:
        if "#" not in guess and "[" not in guess:
            assert explain(SENTENCE, root, answer=guess)["p_y"] <= best["probability"] * (1 + 1e-9)


def test_one_mask_is_expanded_to_all_wordpieces_of_the_answer(root: Path) -> None:
    one = explain("He lived in [MASK] until 1950.", root, answer="Bergen Oslo")
    assert one["y"] == "bergen oslo"
    tokenizer = Snapshot.open(root / "data/snapshot/corpus").tokenizer
    masks = " [MASK]" * len(tokenizer.encode("Bergen Oslo", add_special_tokens=False).ids)
    assert masks.count("[MASK]") >= 2
    assert one["p_y"] == explain(f"He lived in{masks} until 1950.", root, answer="Bergen Oslo")["p_y"]


@pytest.mark.parametrize(
    ("sentence", "answer", "message"),
    [
        ("Anna Berg was born in Oslo.", None, r"no \[MASK\] in the sentence"),
        ("[MASK] Berg [MASK]", "Oslo " * 9, "wordpieces, the sentence 2 "),
        ("[MASK] was born.", " ", "has no wordpieces"),
        ("[MASK] " + "was born " * 90, None, "wordpieces; at most 94 are allowed"),
    ],
)
def test_what_cannot_be_explained_is_refused(root: Path, sentence: str, answer: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        explain(sentence, root, answer=answer)


def test_terminal_json_and_page(root: Path, tmp_path: Path) -> None:
    shown = small_project.cli("explain", SENTENCE, "--root", root, "--answer", "Oslo")
    assert shown.exit_code == 0, shown.output
    assert "without retrieval:" in shown.output
    assert "p(z|x,y)" in shown.output
    page = tmp_path / "sentence.html"
    printed = small_project.cli("explain", SENTENCE, "--root", root, "--answer", "Oslo", "--json", "--html", page)
    values = json.loads(printed.output)
    assert values["y"] == explain(SENTENCE, root, answer="Oslo")["y"]
    assert len(values["candidates"]) == 3
    assert "(null document)" in page.read_text()
    assert "http" not in page.read_text().replace("http://www.w3.org/2000/svg", "")
    refused = small_project.cli("explain", "no mask", "--root", root)
    assert refused.exit_code == 2
    wrong = ((["--json"], "need a SENTENCE"), ([SENTENCE, "--question", "q"], "leave SENTENCE out"))
    for words, message in wrong:
        refused = small_project.cli("explain", *words, "--root", root)
        assert refused.exit_code == 2
        assert message in refused.output


def test_the_three_lines_of_table_3(found: dict[str, Any]) -> None:
    passages = found["candidates"][:-1]
    best = max(passages, key=lambda c: c["p_y"])
    assert found["p_y_best"] == best["p_y"]
    said = [" ".join(line.split()) for line in _sentence_sheet(found).summary]
    assert said[3:6] == [
        f"BERT, without retrieval: p(y|x) = {found['p_y_without']:.3g} (the reader with the null document)",
        f"REALM given the best z: p(y|x,z) = {best['p_y']:.3g} ({best['title']} [{best['passage_id'][:12]}])",
        f"REALM, marginal over top 2: p(y|x) = {found['p_y']:.3g} (and the null document)",
    ]


def test_the_index_is_named_with_the_step_of_its_weights(found: dict[str, Any]) -> None:
    """Pre-training took no step here, and nothing is fine-tuned, so passages are embedded for the explanation."""
    assert found["index"] == "12 passages, embedded now, with the weights of pretrain after step 0"


def test_an_imported_model_is_refused_with_its_name(root: Path, tmp_path: Path) -> None:
    """Its options of pre-training are not known."""
    trained = tmp_path / "models/pretrain"
    shutil.copytree(root / "models/pretrain", trained)
    write_manifest(trained, "pretrain", fingerprint="imported")
    with pytest.raises(ValueError, match="models/pretrain was imported, so its training options"):
        explain(SENTENCE, tmp_path)
