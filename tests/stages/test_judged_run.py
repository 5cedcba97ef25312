"""A run over judged questions without answers: the retriever learns from them, and documents are what is measured."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ir_measures
import pytest
import small_project
import torch
from ir_measures import AP, RR, R, nDCG
from small_world import DOCUMENTS

from realmops.commands.promote import read_run
from realmops.commands.report import summary
from realmops.corpus.snapshot_reader import Snapshot
from realmops.evaluate.compare import compare_runs, deciding_metric
from realmops.model.retriever_files import load_retriever
from realmops.questions.question_sets import read_questions
from realmops.questions.relevance import RelevantPassages
from realmops.search.embeddings import embed_corpus, load_index

OPTIONS: dict[str, dict[str, Any]] = {
    "snapshot": {"documents": "beir", "block_wordpieces": 48},
    "retriever": {"hybrid": True},
    "reader": {"init": "none"},
    "ict": {"reader_steps": 0},
    "pretrain": {"steps": 0},
    "finetune": {"retriever_training": "passages", "retriever_batch_size": 2, "retriever_epochs": 2, "epochs": 0},
}
JUDGED: Mapping[str, Mapping[str, Mapping[str, int]]] = {
    "train": {"Where was the poet born?": {"d0": 2, "d1": 1, "d2": 0}, "Who wrote The Cold Sea?": {"d0": 1}},
    "dev": {"Who built The Star?": {"d1": 1}},
    "test": {"Who wrote a novel?": {"d0": 2, "d3": 1}, "Where did he build ships?": {"d1": 1, "gone": 1}},
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judged")
    params = small_project.write_project(folder, **OPTIONS)
    (folder / "beir").mkdir()
    documents = [{"_id": f"d{n}", "title": title, "text": text} for n, (title, text, _) in enumerate(DOCUMENTS)]
    documents[0]["text"] = " ".join([documents[0]["text"]] * 6)
    small_project.write_json_lines(folder / "beir" / "corpus.jsonl", documents)
    small_project.write_json_lines(folder / "beir" / "queries.jsonl", [{"_id": "1", "text": "Which?"}])
    for split, judged in JUDGED.items():
        records = [
            {"id": f"{split} {n}", "question": q, "relevant": dict(g)} for n, (q, g) in enumerate(judged.items())
        ]
        small_project.write_json_lines(folder / f"questions.{split}.jsonl", records)
    report = small_project.Quiet()
    assert small_project.run_all_here(params, folder / "root", report=report) == [
        "snapshot", "ict", "pretrain", "finetune", "evaluate"
    ]  # fmt: skip
    assert [line for line in report.warned if line.startswith("1 relevant documents of questions.test are not in")]
    return folder


def test_figures_are_those_of_the_files_of_trec(project: Path) -> None:
    metrics = json.loads((project / "root/results/metrics.json").read_text())
    snapshot = Snapshot.open(project / "root/data/snapshot/corpus")
    assert len(snapshot) > len(DOCUMENTS), "a document has several passages"
    folder = project / "root/results/trec"
    qrels = [*ir_measures.read_trec_qrels(f"{folder}/qrels.txt")]
    assert {(q.query_id, q.doc_id, q.relevance) for q in qrels} >= {("test%200", "d0", 2), ("test%201", "gone", 1)}
    names = {"ndcg_at_10": nDCG @ 10, "mrr_at_10": RR @ 10, "map_at_100": AP @ 100, "recall_at_5_judged": R @ 5}
    for prefix in ("", "bm25_", "dense_", "before_realm_"):
        run = [*ir_measures.read_trec_run(f"{folder}/{prefix}run.txt")]
        assert len(run) == len({(row.query_id, row.doc_id) for row in run}), "a document is ranked once"
        figures = ir_measures.calc_aggregate(names.values(), qrels, run)
        assert {name: metrics[prefix + name] for name in names} == pytest.approx(
            {name: figures[measure] for name, measure in names.items()}
        )
    assert metrics["recall_at_5"] == metrics["recall_at_5_judged"] <= metrics["recall_at_100_judged"]
    assert metrics["recall_at_100_judged"] == 0.75, "of each question all documents that the corpus has"
    assert metrics["ceiling_in_corpus"] == 1
    assert "em" not in metrics
    headline = json.loads((project / "root/results/headline.json").read_text())
    assert headline["ndcg_at_10"] == metrics["ndcg_at_10"]


def test_the_retriever_learns_from_a_passage_of_each_relevant_document(project: Path) -> None:
    """d0 is relevant to both questions, d1 to one; d2 has the grade 0."""
    metrics = json.loads((project / "root/models/finetune/metrics.json").read_text())
    assert metrics["passages_with_questions"] in (2, 3), "the best passage of d0 may differ by question"
    snapshot = Snapshot.open(project / "root/data/snapshot/corpus")
    relevant = RelevantPassages(snapshot)
    question = read_questions([project / "questions.train.jsonl"], format="auto")[0]
    first, second = relevant.passages_of_documents(question)
    assert {snapshot.document_id(p) for p in first} == {"d0"}
    assert [p for p in range(len(snapshot)) if relevant.is_relevant(question, p)] == sorted([*first, *second])


def test_without_a_reader_the_query_tower_is_trained_over_the_frozen_index(project: Path, tmp_path: Path) -> None:
    shutil.copytree(project, tmp_path / "mine")
    options = {**OPTIONS, "finetune": {**OPTIONS["finetune"], "retriever_training": "queries"}}
    small_project.stage("finetune", small_project.toy_values(**options), tmp_path / "mine", tmp_path / "mine/root")
    folder = tmp_path / "mine/root/models/finetune"
    assert len([line for line in small_project.journal(folder) if "query_early_loss" in line]) == 2, "steps of 2 epochs"
    snapshot = Snapshot.open(tmp_path / "mine/root/data/snapshot/corpus")
    retriever = load_retriever(folder, snapshot.vocabulary_hash)
    pairs = zip(retriever.query.parameters(), retriever.document.parameters(), strict=True)
    assert any(not torch.equal(query, document) for query, document in pairs)
    assert torch.equal(embed_corpus(retriever, snapshot, torch.float32), load_index(folder, snapshot))


def test_tables_and_comparisons_show_ndcg(project: Path) -> None:
    tables = [text for text in summary(project / "root") if not isinstance(text, str)]
    assert [column.header for column in tables[-1].columns] == [
        "test questions", "nDCG@10", "recall@5", "recall@100", "MRR@10", "MAP@100"
    ]  # fmt: skip
    page = (project / "root/results/report.html").read_text()
    assert "nDCG@10 of documents, by relevance judgements" in page
    compared = compare_runs(project / "root", project / "root", seed=0)
    assert [(row.measure, row.difference.mean) for row in compared] == [("nDCG@10", 0), ("recall@5", 0)]


def test_search_ranks_documents_for_a_file_and_measures_them(project: Path, tmp_path: Path) -> None:
    def search(*words: str | Path) -> str:
        result = small_project.cli("search", "--root", project / "root", *words)
        assert result.exit_code == 0, result.stderr
        return result.stdout

    out = search("--from", project / "questions.test.jsonl", "--run", tmp_path / "run")
    metrics = json.loads((project / "root/results/metrics.json").read_text())
    assert f"  nDCG@10: {metrics['ndcg_at_10']:.3f} (" in out
    trec = project / "root/results/trec"
    for name in ("queries.tsv", "qrels.txt", "run.txt"):
        assert (tmp_path / "run" / name).read_text() == (trec / name).read_text()
    assert (trec / "queries.tsv").read_text().startswith("test%200\tWho wrote a novel?\n")
    search("--from", project / "questions.test.jsonl", "--run", tmp_path / "words", "--by", "words")
    by_words, bm25 = ((f / name).read_text() for f, name in ((tmp_path / "words", "run.txt"), (trec, "bm25_run.txt")))
    assert by_words != (trec / "run.txt").read_text()
    assert {*by_words.splitlines()} < {*bm25.splitlines()}, "evaluate also ranks documents without a word in common"
    out = search("--from", project / "beir" / "queries.jsonl", "--run", tmp_path / "run")
    assert out == f"1 questions: up to 100 documents of each in {tmp_path / 'run' / 'run.txt'}\n"
    assert not (tmp_path / "run/qrels.txt").exists()


def test_answers_of_people_judge_the_document_of_their_passage(project: Path, tmp_path: Path) -> None:
    snapshot = Snapshot.open(project / "root/data/snapshot/corpus")
    passage = snapshot.passage_id(len(snapshot) - 1)
    labels = [
        {"id": "own", "question": "Where does it rain?", "answers": ["Bergen"], "passage_id": passage},
        {"id": "lost", "question": "Where was she born?", "answers": ["Oslo"], "passage_id": "of another corpus"},
        {"id": "open", "question": "Who?", "answers": ["Anna Berg"]},
    ]
    file = small_project.write_json_lines(tmp_path / "own.jsonl", labels)
    result = small_project.cli("search", "--root", project / "root", "--from", file, "--run", tmp_path / "run")
    assert "1 of them have relevance judgements" in result.stdout
    assert (tmp_path / "run/qrels.txt").read_text() == f"own 0 d{len(DOCUMENTS) - 1} 1\n"
    assert {line.split()[0] for line in (tmp_path / "run/run.txt").read_text().splitlines()} == {"own", "lost", "open"}


def test_a_beir_folder_is_converted_by_split(project: Path, tmp_path: Path) -> None:
    beir = tmp_path / "beir"
    (beir / "qrels").mkdir(parents=True)
    for name in ("corpus.jsonl", "queries.jsonl"):
        (beir / name).write_bytes((project / "beir" / name).read_bytes())
    for split in ("dev", "test"):
        (beir / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n1\td3\t2\n")
    result = small_project.cli("questions", beir, "--out", tmp_path / "out")
    assert result.stdout == "".join(
        f"1 written to {tmp_path}/out/questions.{split}.jsonl\n" for split in ("dev", "test")
    )
    converted = (tmp_path / "out/questions.test.jsonl").read_text()
    assert json.loads(converted) == {"id": "1", "question": "Which?", "relevant": {"d3": 2}}
    refused = small_project.cli("ceilings", tmp_path / "out/questions.test.jsonl", "--root", project / "root")
    assert "questions with relevance judgements alone have no ceilings" in refused.stderr


def test_ndcg_decides_on_judgements_alone(project: Path) -> None:
    metrics = json.loads((project / "root/results/metrics.json").read_text())
    assert deciding_metric(metrics) == "ndcg_at_10"
    assert deciding_metric({**metrics, "recall_at_5_token_boundary": 0.5}) == "recall_at_5"
    assert deciding_metric({**metrics, "em": 0.5}) == "em"
    assert str(read_run(project, project / "root")).startswith(f"nDCG@10 {metrics['ndcg_at_10']:.3f} on 2 questions (")
