"""Questions made from the corpus: their words, what is asked and where it counts; documents alone, end to end."""

import html
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from small_open_qa import open_qa
from small_project import Quiet, cli, stage, toy_values, write_json_lines, write_project
from small_world import World, build_world

from realmops.answering.own_questions import WHAT_THEY_BRING
from realmops.artifacts import read_manifest
from realmops.commands.report import ask_commands
from realmops.corpus.masking import SentencesWithSpans
from realmops.evaluate.predictions import read_results
from realmops.questions.cloze import (
    SourcePassages,
    add_noise,
    clause_around_gap,
    cloze_questions,
    find_numbers,
    question_word,
    split_questions,
)
from realmops.questions.question_sets import Question, read_questions
from realmops.train.fine_tuning import fit_weights_on_questions, question_loss
from realmops.train.reader_training import reader_trainer

# All that can be asked of the twelve documents: words of the sentence without the span, the span, and the passages with
# the sentence. One span of each sentence; 1950 stands in a third passage, Maria Holm's sentences are too short without
# her, 1931 stands once.
MADE = {
    ("Jon Vik built it in", "1950", (9,)), ("Anna Berg was born in", "Oslo", (0,)), ("It is set in", "Oslo", (1,)),
    ("The Cold Sea is a novel by", "Anna Berg", (1,)), ("He lived in Bergen until", "1950", (2, 3)),
    ("Oslo is a city in", "Norway", (4,)), ("The poet was born there", "Anna Berg", (4,)),
    ("Jon Vik built ships in", "Bergen", (8,)), ("He sold one to", "Karl Lund", (8,)),
    ("Fjell is a town in", "Norway", (10,)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after", "left", "right"),
    [
        ("The poet ", " was born there.", "The poet", "was born there"),
        ("", " was born in Oslo, a city; it rains.", "", "was born in Oslo"),
        ("Then, it is said, the book by ", ", a novel, was sold.", "Then it is said the book by", "a novel was sold"),
        ("In 1931 (or so) she met the painter ", " in Bergen: he lived there.", "she met the painter", "in Bergen"),
        ("It was , -- the ", " !", None, None),
        ("", " rains.", None, None),
    ],
)
def test_a_question_has_the_clause_around_the_gap(before: str, after: str, left: str | None, right: str) -> None:
    """Between two marks; the sentence if the clause has under four words, of long ones the words nearest to the gap."""
    assert clause_around_gap(before, after) == (None if left is None else (left.split(), right.split()))
    words = [str(n) for n in range(20)]
    assert clause_around_gap(" ".join(words) + " ", " a b c.") == (words[-13:], ["a", "b", "c"])
    assert clause_around_gap(" ".join(words), " ".join(words)) == (words[-8:], words[:8])


def test_noise_drops_some_words_and_moves_the_others_a_little() -> None:
    left, right = [f"b{n}" for n in range(8)], [f"a{n}" for n in range(8)]
    many = [add_noise(left, right, np.random.default_rng(seed)) for seed in range(400)]
    assert 0.8 < np.mean([len(words) for words in many]) / 16 < 0.9
    assert all(words and len({*words}) == len(words) and {*words} <= {*left, *right} for words in many)
    first = np.mean([words.index("a4") < words.index("b4") for words in many if {"a4", "b4"} <= {*words}])
    assert 0.4 < first < 0.6, "either half comes first"
    assert any(words.index("b2") > words.index("b3") for words in many if {"b2", "b3"} <= {*words})
    assert not any(words.index("b0") > words.index("b7") for words in many if {"b0", "b7"} <= {*words})
    assert {len(add_noise(["b"], [], np.random.default_rng(seed))) for seed in range(50)} == {1}, "never all"


def test_the_question_word_is_that_of_the_label() -> None:
    rng = np.random.default_rng(0)
    assert {question_word("DATE", "1950", rng) for _ in range(50)} == {"when", "what year"}
    words = {"PER": "who", "LOC": "where", "NUMBER": "how many", "NORP": "what"}
    assert {label: question_word(label, "1950", rng) for label in words} == words


def test_numbers_outside_of_spans_are_answers(tmp_path: Path) -> None:
    text = "In 1950 he sold 1,250.5 of 30% there, 3 in B2 and a 4-door. Then 7."
    world = build_world(tmp_path, (("A", text, ("1950",)), ("B", "It rains.", ())))
    rows = SentencesWithSpans(world.snapshot, world.spans)[:]
    chars = world.snapshot.chars(0)
    found = find_numbers(world.snapshot, rows)
    assert [text[chars[s, 0] : chars[e - 1, 1]] for _, _, _, s, e in found.tolist()] == ["1,250.5", "30", "3", "7"]
    assert found[:, 0].tolist() == [0] * 4
    assert found[:3, 1:3].tolist() == rows[:, 1:3].tolist() * 3
    assert found[3, 1] == found[0, 2]
    assert len(find_numbers(world.snapshot, rows[:0])) == 5


def generated(world: World, seed: int = 0, limit: int = 100) -> list[Question]:
    labels = [world.spans.labels[label] for label in world.spans.label_ids.tolist()]
    return cloze_questions(world.snapshot, SentencesWithSpans(world.snapshot, world.spans)[:], labels, seed, limit)


def test_a_small_corpus_has_these_questions_alone(world: World) -> None:
    """The sentence of passages 2 and 3 is asked once and counts in neither; see ``MADE``."""
    row = {world.snapshot.passage_id(p): p for p in range(len(world.snapshot))}
    questions = generated(world)
    words = {(answer, own): text.split() for text, answer, own in MADE}
    assert len(words) == len(MADE)
    for question in questions:
        _, *asked = question.question.removesuffix("?").split()
        own = tuple(row[name] for name in question.not_in)
        assert {*asked} <= {*words[question.answers[0], own]}
    assert len(questions) == len(MADE) == len({q.id for q in questions})
    assert generated(world) == questions, "the seed decides"
    assert generated(world, seed=1) != questions
    assert generated(world, limit=4) == questions[:4]


def test_the_parts_share_no_source_passage(world: World) -> None:
    many = [Question(f"c{n}", "?", ("a",), not_in=(f"p{n // 3}",)) for n in range(300)]
    many.append(Question("both", "?", ("a",), not_in=("p0", "p1", *(f"p{n}" for n in range(2, 100)))))
    parts = split_questions(many, 0)
    assert {name: len(part) for name, part in parts.items()} == {"train": 270, "dev": 15, "test": 15}
    assert all(q.passage_id and not q.not_in and q.is_generated for q in parts["train"])
    assert all(q.passage_id is None and q.not_in for name in ("dev", "test") for q in parts[name])
    seen = [{name for q in part for name in (q.passage_id, *q.not_in) if name} for part in parts.values()]
    assert not any(a & b for n, a in enumerate(seen) for b in seen[:n])
    assert split_questions(many, 0) == parts != split_questions(many, 1)
    assert all(split_questions(generated(world), 0).values()), "each has at least one"
    with pytest.raises(ValueError, match=r"6 questions from 2 passages.*give more documents"):
        split_questions(many[:6], 0)


# ---- evidence


BORN = Question("born", "Where was Anna Berg born?", ("Oslo",))


def not_in(world: World, *passages: int) -> Question:
    return replace(BORN, not_in=tuple(map(world.snapshot.passage_id, passages)))


def test_source_passages_are_removed_from_rankings(world: World) -> None:
    sources = SourcePassages(world.snapshot)
    question = not_in(world, 1, 4)
    found = np.array([[4, 0, 1, 5], [4, 0, 1, -1]])
    assert sources.of(question) == [1, 4]
    assert sources.of(replace(question, not_in=("gone",))) == []
    assert sources.lost([BORN]) == (0, 0)
    assert sources.lost([question, replace(BORN, not_in=(question.not_in[0], "gone"))]) == (1, 3)
    assert sources.among([question, BORN], found).tolist() == [[True, False, True, False], [False] * 4]
    assert sources.left_out([question, BORN], found).tolist() == [[0, 5, -1, -1], [4, 0, 1, -1]]


@pytest.mark.parametrize("given", [False, True])
def test_the_source_passage_is_neither_read_nor_an_example(world: World, given: bool) -> None:
    """Whatever finds passages; the scores of the others stay what they were."""
    model = open_qa(world)
    if given:
        model.passages = None
        model.ranker = lambda question, k: np.arange(12)[:k]
    scores, [ranked] = model.relevance([BORN.question], 12)
    own = ranked[0].item(), ranked[2].item()
    question = not_in(world, *own)
    relevance_BK, id_BK = model.evidence([BORN, question], 4)
    assert id_BK.tolist() == [ranked[:4].tolist(), [p for p in ranked.tolist() if p not in own][:4]]
    kept = [row for row, p in enumerate(ranked.tolist()) if p not in own][:4]
    torch.testing.assert_close(relevance_BK, torch.stack([scores[0, :4], scores[0, kept]]))
    [answer] = model.answer([question], ranked=3, batch_size=1)
    assert not {*answer.passages, *answer.ranked} & {*own}
    assert answer.passages == id_BK[1, :3].tolist()
    relevance_BK, id_BK = model.evidence([question], 12)
    assert id_BK[0, -2:].tolist() == [-1, -1]
    assert relevance_BK[0, -2:].tolist() == [-torch.inf] * 2
    assert torch.isfinite(question_loss(model, [question])[0])
    with_oslo = {p for p in range(12) if "Oslo" in world.snapshot.text(p)}
    [example] = reader_trainer(model).examples([not_in(world, *sorted(with_oslo)[1:])], 12)
    assert example.passage == min(with_oslo)
    assert not {passage for passage, _ in example.negatives} & with_oslo
    assert reader_trainer(model).examples([not_in(world, *with_oslo)], 12) == []


def test_weights_are_fitted_on_questions_of_people_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def fit_mixture(dense: object, words: object, there: torch.Tensor, correct: torch.Tensor) -> None:
        seen.append((tuple(there.shape), int(correct.sum())))

    monkeypatch.setattr("realmops.train.fine_tuning.fit_fusion_weights", fit_mixture)
    model = open_qa(world)
    for made in (not_in(world, 0, 1), replace(BORN, is_generated=True)):
        seen.clear()
        fit_weights_on_questions(model, [BORN, made])
        assert seen == [((1, 12), 4)]
        assert fit_weights_on_questions(model, [made]) == model.retriever.mixture
        assert len(seen) == 1


# ---- the command, and documents alone


FILES = {"questions": {part: f"data/cloze/questions.{part}.jsonl" for part in ("train", "dev", "test")}}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Documents and no question."""
    write_project(tmp_path, pretrain={"steps": 0, "builder": "external"}, **FILES)
    for path in tmp_path.glob("questions.*"):
        path.unlink()
    return tmp_path


def test_documents_without_questions_are_trained_and_evaluated(project: Path) -> None:
    params, root = project / "params.yaml", project / "root"
    for name in ("snapshot", "tag", "cloze"):
        result = cli("run", name, "--params", params, "--root", root)
        assert result.exit_code == 0, result.output
    parts = {part: read_questions([root / name], format="jsonl") for part, name in FILES["questions"].items()}
    assert all(question.is_generated for questions in parts.values() for question in questions)
    counts = {f"questions.{part}.jsonl": len(questions) for part, questions in parts.items()}
    assert result.stderr.splitlines()[-4:] == [
        "cloze: 11 questions generated from 22 salient spans in 12 passages",
        *(f"cloze: {count} written to {root / 'data/cloze' / name}" for name, count in counts.items()),
    ]
    assert read_manifest(root / "data/cloze", "questions")["written"] == counts
    assert "nothing to do" in cli("run", "cloze", "--params", params, "--root", root).stderr
    values = toy_values(pretrain={"steps": 0, "builder": "external"}, **FILES)
    report = Quiet()
    for name in ("ict", "pretrain", "finetune"):
        stage(name, values, project, root, report)
    metrics = stage("evaluate", values, project, root, report)
    assert metrics["questions"] == metrics["generated_questions"] == len(parts["test"])
    assert "em" not in metrics
    own = {q.id: set(q.not_in) for q in parts["test"]}
    assert all(own[p.question_id].isdisjoint(p.passage_ids) for p in read_results(root))
    assert not report.warned
    assert [line for line in ask_commands(root) if "ask 'Your question?' --root" in line]
    for text in (cli("report", "--root", root).stdout, html.unescape((root / "results/report.html").read_text())):
        assert "'realmops questions --label'" in text
        assert all(line in text for line in WHAT_THEY_BRING)
    path = root / FILES["questions"]["test"]
    path.write_text(path.read_text().replace('"not_in": ["', '"not_in": ["of-another-snapshot-'))
    stage("evaluate", values, project, root, report)
    assert [line for line in report.warned if "source passages of generated questions are not in the corpus" in line]


def test_too_few_spans_missing_questions_and_other_folders_are_errors(project: Path) -> None:
    where = ("--params", project / "params.yaml", "--root", project / "root")
    assert "run the stage cloze first" in cli("run", "finetune", *where).stderr
    (project / "root/data/cloze").mkdir(parents=True)
    (project / "root/data/cloze/thesis.txt").write_text("five years of work")
    assert "was not written by this command" in cli("run", "cloze", *where).stderr
    shutil.rmtree(project / "root/data/cloze")
    records = [
        {"title": "", "text": f"The painter {n}{n}a lived there for years.", "spans": [[12, 15, "PER"]]}
        for n in range(9)
    ]
    write_json_lines(project / "documents.jsonl", records)
    for name in ("snapshot", "tag", "cloze"):
        result = cli("run", name, *where)
    assert (result.exit_code, "too few cloze questions: 0 questions from 0 passages" in result.stderr) == (2, True)
    assert not (project / "root/data/cloze").exists()
