"""``realmops update``: a changed corpus of a trained model."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result
from safetensors.torch import load_file
from small_project import cli, write_json_lines
from small_world import DOCUMENTS

from realmops.answering.corpus_states import CorpusState, newest_state
from realmops.artifacts import read_manifest, write_manifest
from realmops.commands.update import CHANGES, changed_answers, changes_table
from realmops.corpus.snapshot_reader import Snapshot
from realmops.evaluate.predictions import Prediction

PLAIN = [{"title": title, "text": text} for title, text, _ in DOCUMENTS]
NEW_TEXT = "Anna Berg was born in Bergen. She wrote The Cold Sea in 1931."


@pytest.fixture(scope="module")
def project(answering: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(answering, tmp_path_factory.mktemp("update") / "project"))


def run(project: Path, *words: str) -> Result:
    return cli(*words, "--params", project / "params.yaml", "--root", project / "root")


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".lock"}


def test_only_what_changed_is_embedded_and_answers_are_compared(project: Path) -> None:
    root = project / "root"
    before = {name: files(root / name) for name in ("data", "models", "results")}
    old = Snapshot.open(root / "data/snapshot/corpus")
    fresh = {"title": "Fresh", "text": "A fresh page of nothing."}
    write_json_lines(project / "documents.jsonl", [{"title": "Anna Berg", "text": NEW_TEXT}, *PLAIN[1:-1], fresh])
    result = run(project, "update")
    assert result.exit_code == 0, result.output
    assert {name: files(root / name) for name in before} == before
    [folder] = (root / "updates").iterdir()
    new = Snapshot.open(folder / "snapshot/corpus")
    assert new.vocabulary_hash == old.vocabulary_hash
    assert [new.text(0), new.text(len(new) - 1)] == [NEW_TEXT, "A fresh page of nothing."]
    metrics = json.loads((folder / "metrics.json").read_text())
    assert len(DOCUMENTS) == len(old) == len(new) == 12
    assert {key: metrics[key] for key in metrics if key.startswith("passages")} == {
        "passages": 12,
        "passages_unchanged": 10,
        "passages_changed": 0,  # a document without an id that changed is another document
        "passages_new": 2,
        "passages_removed": 2,
    }
    indices = (root / "models/finetune/index.safetensors", folder / "finetune/index.safetensors")
    rows = [load_file(str(path))["embeddings"] for path in indices]
    assert rows[0][1:11].equal(rows[1][1:11])
    assert not rows[0][0].allclose(rows[1][0])
    lines = [json.loads(line) for line in (folder / CHANGES).read_text().splitlines()]
    answered = json.loads((folder / "results/metrics.json").read_text())
    assert (answered["answers_changed"], answered["questions"]) == (len(lines), 2)
    assert (folder / "results/report.html").is_file()

    again = run(project, "update")
    assert again.exit_code == 0, again.output
    assert "nothing to do" in again.stderr

    write_json_lines(project / "documents.jsonl", [*PLAIN[:-1], fresh])
    assert run(project, "update").exit_code == 0
    second = [json.loads(path.read_text()) for path in (root / "updates").glob("*/metrics.json")]
    assert sorted(one["passages_unchanged"] for one in second) == [10, 11]  # against the first update
    assert list((root / ".realmops/work").glob("*")) == []


def kill(*arguments: object, **named: object) -> None:
    raise KeyboardInterrupt


def test_a_killed_update_leaves_the_newest_and_starts_again(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = project / "root"
    before = newest_state(root)
    write_json_lines(project / "documents.jsonl", [{"title": "Fresh", "text": "A page."}])
    with monkeypatch.context() as patched:
        patched.setattr("realmops.commands.update._embed", kill)
        assert run(project, "update", "--may-shrink").exit_code != 0
    assert newest_state(root) == before
    (root / ".realmops/work/update/snapshot").mkdir(parents=True)  # as after SIGKILL
    result = run(project, "update", "--may-shrink")
    assert result.exit_code == 0, result.output
    assert newest_state(root).number == before.number + 1
    assert list((root / ".realmops/work").glob("*")) == []


def test_an_update_serves_before_it_has_answers_and_gets_them_later(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kill the next call answers the questions, also after the documents have changed once more."""
    root = project / "root"
    before = newest_state(root)

    def killed(text: str) -> CorpusState:
        write_json_lines(project / "documents.jsonl", [{"title": "Fresh", "text": text}])
        with monkeypatch.context() as patched:
            patched.setattr("realmops.commands.update.evaluate.run", kill)
            assert run(project, "update", "--may-shrink").exit_code != 0
        return newest_state(root)

    first = killed("A page about the first.")
    assert first.number == before.number + 1
    assert not first.results.exists()
    files_of_first = files(first.snapshot.parent)
    assert run(project, "update", "--may-shrink").exit_code == 0
    assert files_of_first.items() <= files(first.snapshot.parent).items()
    assert read_manifest(first.results, "answers")
    assert "nothing to do" in run(project, "update", "--may-shrink").stderr

    second = killed("A page about the second.")
    third = killed("A page about the third.")
    assert (second.number, third.number) == (first.number + 1, first.number + 2)
    assert run(project, "update", "--may-shrink").exit_code == 0
    assert [state.results.exists() for state in (second, third)] == [False, True]
    assert newest_state(root) == third


@pytest.mark.parametrize("change", ["blanks", "url", "file"])
def test_places_that_changed_are_published_and_citations_hold(project: Path, change: str) -> None:
    root = project / "root"
    # With ids, blanks change the characters at which passages begin, and nothing else.
    documents = [{**document, "id": f"own {count}"} for count, document in enumerate(PLAIN)]
    write_json_lines(project / "documents.jsonl", documents)
    run(project, "update")
    number = newest_state(root).number
    for count, document in enumerate(documents):
        document |= {
            "blanks": {"text": f" \n {document['text']}"},
            "url": {"url": f"https://host/{count}"},
            "file": {},
        }[change]
    write_json_lines(project / "documents.jsonl", documents)
    path = project / "documents.jsonl"
    if change == "file":
        path = path.rename(project / "renamed.jsonl")
    done = run(project, "update", "--set", f"snapshot.documents={path}")
    assert done.exit_code == 0, done.output
    newest = newest_state(root)
    assert newest.number == number + 1
    assert Snapshot.open(newest.snapshot / "corpus").uri(0) == ("https://host/0" if change == "url" else path.name)
    assert json.loads((newest.snapshot.parent / "metrics.json").read_text())["passages_unchanged"] == len(documents)
    asked = cli("ask", "Where was Anna Berg born?", "--json", "--root", root)
    (project / "answers.jsonl").write_text(asked.stdout)
    verified = cli("verify", project / "answers.jsonl", path)
    assert verified.exit_code == 0, verified.output
    assert "nothing to do" in run(project, "update", "--set", f"snapshot.documents={path}").output


def test_less_than_half_of_the_passages_are_not_published(project: Path) -> None:
    root = project / "root"
    before = newest_state(root)
    write_json_lines(project / "documents.jsonl", [{"title": "Anna Berg", "text": NEW_TEXT}])
    refused = run(project, "update")
    assert refused.exit_code == 2
    assert "1 passages, less than half of the previous 12: nothing was published" in " ".join(refused.output.split())
    assert newest_state(root) == before
    assert run(project, "update", "--may-shrink").exit_code == 0
    assert newest_state(root).number == before.number + 1
    for kept in (12, 6, 12):  # a half is no less than a half
        write_json_lines(project / "documents.jsonl", PLAIN[:kept])
        assert run(project, "update").exit_code == 0


def test_an_update_whose_answers_are_damaged_is_not_compared_with(project: Path) -> None:
    path = newest_state(project / "root").results / "predictions.parquet"
    content = path.read_bytes()
    path.write_bytes(content + b"\n")
    refused = run(project, "update")
    path.write_bytes(content)
    assert (refused.exit_code, "predictions.parquet has" in refused.stderr.replace("\n", "")) == (2, True)


def test_an_update_of_another_model_is_kept(project: Path) -> None:
    root = project / "root"
    manifests = {path: read_manifest(path, "update", verify=False) for path in (root / "updates").iterdir()}
    for path, manifest in manifests.items():  # as if an earlier model had made each
        fields = {key: manifest[key] for key in ("number", "corpus_hash")}
        write_manifest(path, "update", model="other", **fields)
    kept = {path: files(path) for path in manifests}
    write_json_lines(project / "documents.jsonl", [{**document, "text": f" {document['text']}"} for document in PLAIN])
    assert run(project, "update").exit_code == 0
    assert {path: files(path) for path in manifests} == kept
    assert newest_state(root).number == 1


def test_an_update_that_is_being_written_is_not_the_newest(project: Path) -> None:
    root = project / "root"
    before = newest_state(root)
    shutil.copytree(before.snapshot.parent, root / "updates" / f".0123456789ab.{'0' * 32}")
    manifest = json.loads((before.snapshot.parent / "manifest.json").read_text())
    fields = {key: manifest[key] for key in ("model", "corpus_hash")}
    write_manifest(root / "updates" / f".0123456789ab.{'0' * 32}", "update", number=99, **fields)
    assert newest_state(root) == before
    shutil.rmtree(root / "updates" / f".0123456789ab.{'0' * 32}")


@pytest.mark.parametrize(("change", "questions"), [({"id": "other"}, 1), ({"language": "de"}, 2)])
def test_an_update_with_other_test_questions_is_refused(project: Path, change: dict[str, str], questions: int) -> None:
    before = files(project / "root")
    asked = [json.loads(line) for line in (project / "questions.test.jsonl").read_text().splitlines()]
    other = write_json_lines(project / "questions.other.jsonl", [one | change for one in asked[:questions]])
    result = run(project, "update", "--set", f"questions.test={other}")
    assert result.exit_code == 2
    assert f"with {questions} questions, but" in result.stderr
    assert "repeat the --set, --preset or --params of the training" in result.stderr
    assert files(project / "root") == before


def prediction(question: str, text: str, *, em: bool = False) -> Prediction:
    passages = {"passage_ids": ("p1", "p2"), "titles": ("T1", "T2"), "p_z": (0.7, 0.3), "passage_spans": (None, text)}
    span = {"evidence": "E", "evidence_rank": 1, "char_start": 0, "char_end": 1, "span_score": 2.0}
    gold = {"f1": float(em), "passage_scores": (None, 2.0), "gold_span": None, "gold_score": None, "first_hit": -1}
    known = {"failed_at": "reader", "confidence": None, "abstained": None, "page": None}
    known |= {"answer_rule": "en", "is_generated": False, "ndcg_at_10": None}
    return Prediction(question, f"{question}?", text, ("a",), em, **passages, **span, **gold, **known)


def test_changed_answers_are_of_questions_that_both_results_have() -> None:
    before = [prediction("q1", "The Köln"), prediction("q2", "x"), prediction("gone", "x")]
    after = [prediction("q1", "The  Ko\u0308ln"), prediction("q2", "a", em=True), prediction("came", "x")]
    [change] = changed_answers(before, after)
    assert change["id"] == "q2"
    assert change["before"]["answer"] == "x"
    assert change["after"] == {"answer": "a", "right": True, "title": "T2", "passage_id": "p2", "evidence": "E"}
    for rank, title, passage in ((0, "T1", "p1"), (-1, "", "")):
        [change] = changed_answers(before, [replace(after[1], evidence_rank=rank)])
        assert (change["after"]["title"], change["after"]["passage_id"]) == (title, passage)


def test_answers_are_escaped_in_markdown_and_limited(tmp_path: Path) -> None:
    side = {"answer": "a|b", "right": False, "title": "*A*", "passage_id": "", "evidence": "<i>x</i>\n\ny_z"}
    change = {"id": "q", "question": "Which `one`?", "answers": ["5"], "before": side, "after": {**side, "right": True}}
    (tmp_path / CHANGES).parent.mkdir()
    (tmp_path / CHANGES).write_text(f"{json.dumps(change)}\n" * 3)
    table = changes_table(tmp_path, 2)
    assert (
        table.to_markdown().splitlines()[2:] == [r"| Which \`one\`? | a\|b | a\|b ✓ | \*A\*: \<i\>x\</i\> y\_z |"] * 2
    )


def test_a_document_that_changed_under_its_id_is_not_new(project: Path) -> None:
    documents = [{**document, "id": document["title"]} for document in PLAIN]
    write_json_lines(project / "documents.jsonl", documents)
    assert run(project, "update", "--may-shrink").exit_code == 0
    write_json_lines(
        project / "documents.jsonl",
        [{**documents[0], "text": NEW_TEXT}, *documents[2:], {"title": "F", "text": "New.", "id": "F"}],
    )
    assert run(project, "update", "--may-shrink").exit_code == 0
    metrics = json.loads((newest_state(project / "root").snapshot.parent / "metrics.json").read_text())
    assert {key: metrics[key] for key in metrics if key.startswith("passages")} == {
        "passages": 12,
        "passages_unchanged": 10,
        "passages_changed": 1,
        "passages_new": 1,
        "passages_removed": 2,
    }


def test_a_damaged_newest_update_is_refused(project: Path) -> None:
    root = project / "root"
    path = newest_state(root).snapshot.parent / "metrics.json"
    content = path.read_bytes()
    path.write_bytes(content.replace(b"1", b"2"))  # as many bytes as before
    with pytest.raises(ValueError, match=r"metrics\.json has sha256 .*, its manifest lists"):
        newest_state(root)
    path.write_bytes(content)
    assert newest_state(root).number
