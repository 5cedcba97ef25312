"""``realmops questions`` and ``ceilings``, and an evaluation with regular expressions."""

import shutil
from pathlib import Path

import pytest
from small_project import Quiet, cli, stage, toy_values

from realmops.artifacts import read_manifest
from realmops.evaluate.predictions import FAILED_AT, read_results
from realmops.questions.question_sets import is_in_orqa_dev, read_questions

TREC = "".join(f"{'lfb' if n % 4 == 0 else 't'}{n}\tfactoid\tquestion {n}?\tyear {n}\n" for n in range(100))


def test_questions_are_converted_and_split(tmp_path: Path) -> None:
    trec, out = tmp_path / "trec.tsv", tmp_path / "out"
    trec.write_text(TREC)
    result = cli("questions", trec, "--orqa-split", "--drop-id-prefix", "lfb", "--out", out)
    assert result.exit_code == 0, result.output
    parts = {name: read_questions([out / f"questions.{name}.jsonl"], format="jsonl") for name in ("train", "dev")}
    assert len(parts["train"]) + len(parts["dev"]) == 75
    assert all(is_in_orqa_dev(q.question) == (name == "dev") for name, part in parts.items() for q in part)
    assert all(q.is_regex and q.id.startswith("t") for part in parts.values() for q in part)
    train, dev = (len(part) for part in parts.values())
    assert result.stdout.splitlines() == [
        "100 questions read",
        "25 dropped: the id starts with lfb",
        f"{train} written to {out / 'questions.train.jsonl'}",
        f"{dev} written to {out / 'questions.dev.jsonl'}",
    ]
    assert read_manifest(out, "converted questions")["written"] == {
        "questions.train.jsonl": train,
        "questions.dev.jsonl": dev,
    }


@pytest.fixture(scope="module")
def project(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(trained, tmp_path_factory.mktemp("questions") / "project"))


def test_ceilings_need_no_model(project: Path) -> None:
    """Both test answers are in the corpus of twelve passages; an answer that no passage has lowers the share."""
    root = project / "root"
    result = cli("ceilings", project / "questions.test.jsonl", "--root", root)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "2 questions against 12 passages"
    assert lines[1].startswith("substring: answer in the corpus 100.0%; in the top passages of BM25 ")
    assert lines[1].endswith("100.0% in 100")
    assert lines[2].startswith("token_boundary: answer in the corpus 100.0%")
    assert lines[3].startswith("as a span of at most 10 wordpieces in the top 5 of BM25 (token_boundary): ")
    assert lines[4] == "with an answer of at most 10 wordpieces: 100.0%"
    trec = project / "trec.tsv"
    trec.write_text("1\tx\tWhere did Jon Vik build ships?\tBergen|Nowhere\n2\tx\tWho?\tNobody\\sat all\n")
    lines = cli("ceilings", trec, "--root", root).stdout.splitlines()
    assert lines[1].startswith("regex_match: answer in the corpus 50.0%")
    assert lines[2].startswith("regex_search: answer in the corpus 50.0%")
    assert lines[3].endswith("(regex_search): 50.0%")


def test_expressions_go_from_training_to_the_explanation(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on regular expressions, of which one never ends, reports its id and continues."""
    monkeypatch.setattr("realmops.questions.answer_matching.MATCH_SECONDS", 0.05)
    slow = r"(.*)(.*)(.*)(.*)(.*)(.*)(.*)\1\2[#%]"
    (project / "train.tsv").write_text("1\tx\tWhere was the poet Anna Berg born?\tOslo?\n2\tx\tWhen?\t19\\d\\d\n")
    (project / "test.tsv").write_text(
        f"10\tx\tWhere did Jon Vik build ships?\tBerg[ae]n\n11\tx\tWho wrote a novel?\t{slow}\n"
        "12\tx\tWho owns it?\tNobody at all\n"
    )
    splits = {"train": "train.tsv", "dev": "train.tsv", "test": "test.tsv"}
    values = toy_values(pretrain={"steps": 0, "builder": "external"}, questions=splits)
    report = Quiet()
    tuned = stage("finetune", values, project, project / "root", report)
    assert tuned["regex_timeouts"] == 0
    assert tuned["no_correct_span"] < 1
    metrics = stage("evaluate", values, project, project / "root", report)
    assert metrics["regex_timeouts"] == 1
    [warning] = report.warned
    assert "regular expressions of 1 questions" in warning
    assert ": 11;" in warning
    assert metrics["em"] == metrics["em_regex_match"] <= metrics["em_regex_search"]
    assert metrics["recall_at_100_regex_search"] == metrics["ceiling_in_corpus"] == pytest.approx(1 / 3)
    assert sum(metrics[f"failed_at_{name}"] for name in FAILED_AT if name != "correct") + metrics["em"] == 1
    predictions = read_results(project / "root")
    assert [p.failed_at for p in predictions][1:] == ["not_in_corpus"] * 2
    assert predictions[2].first_hit == -1
