"""Checkpoints in the published format: imported, they retrieve, score and answer as transformers 4.35.2 does.

benchmarks/peer_fixture.py made tests/fixtures/peer_published: folders as the peer saves them (random weights, both
file forms), the passages as TensorFlow records, and what the peer computes from them.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_project import Quiet, cli, stage, toy_values, write_json_lines, write_project
from torch import Tensor

from realmops.artifacts import read_json, read_manifest
from realmops.commands.published import import_published
from realmops.corpus.snapshot_reader import Snapshot
from realmops.model.packed import PackedBatch
from realmops.model.reader import enumerate_spans
from realmops.model.reader_files import load_models
from realmops.model.sequences import SpecialTokens, join_query, join_reader
from realmops.options import Options
from realmops.search.embeddings import embed_corpus, load_index
from realmops.search.inner_products import search

PEER = Path(__file__).parents[1] / "fixtures" / "peer_published"
ANSWERS: dict[str, str] = json.loads((PEER / "expected.json").read_text())
EXACT = {"rtol": 0.0, "atol": 1e-5}
LONGEST_SPAN, READER_WORDPIECES = 4, 40


def values(**changes: Any) -> Options:
    given = {
        "retriever": {"init": str(PEER / "openqa")},
        "snapshot": {"documents": "data/published/passages.jsonl.gz", "whole_documents": True},
        "finetune": {
            "reader_wordpieces": READER_WORDPIECES, "answer_wordpieces": LONGEST_SPAN, "query_wordpieces": 16,
            "epochs": 1,
        },
    }  # fmt: skip
    return toy_values(**{**given, **changes})


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything imported by the command line, then the snapshot of the passages."""
    folder = tmp_path_factory.mktemp("imported")
    write_project(folder)
    records = [{"id": str(n), "question": q, "answers": [a]} for n, (q, a) in enumerate(ANSWERS.items())]
    write_json_lines(folder / "questions.test.jsonl", records)
    arguments: list[str | Path] = ["import", "--root", folder / "root"]
    for name in ("scorer", "encoder"):
        arguments += ["--pretrained", PEER / name]
    arguments += ["--finetuned", PEER / "openqa"]
    arguments += ["--blocks", PEER / "blocks.tfr", "--titles", PEER / "titles.tfr"]
    assert cli(*arguments).exit_code == 0
    stage("snapshot", values(), folder, folder / "root")
    return folder


@pytest.fixture(scope="module")
def snapshot(project: Path) -> Snapshot:
    return Snapshot.open(project / "root" / "data" / "snapshot" / "corpus")


@pytest.fixture(scope="module")
def peer() -> dict[str, Tensor]:
    return load_file(PEER / "expected.safetensors")


def imported(root: Path, *, pretrained: tuple[str | Path, ...] = (), finetuned: tuple[str, ...] = ()) -> Quiet:
    """Import folders of the peer, or others; its report."""
    report = Quiet()
    given = {"pretrained": [PEER / one for one in pretrained], "finetuned": [PEER / one for one in finetuned]}
    import_published(root, **given, blocks=None, titles=None, report=report)
    return report


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, **EXACT)


def constant_of_spans() -> float:
    """The biases after the peer's score, equal for all spans."""
    state = load_file(PEER / "reader" / "model.safetensors")
    score_1H, norm_H = (state[f"qa_outputs.{name}"] for name in ("dense_output.weight", "layer_normalization.bias"))
    return float(score_1H @ norm_H + state["qa_outputs.dense_output.bias"])


def wordpieces(snapshot: Snapshot, text: str) -> np.ndarray:
    return np.array(snapshot.tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)


def test_every_block_is_one_passage(project: Path, snapshot: Snapshot) -> None:
    assert len(snapshot) == 24
    manifest = read_manifest(project / "root" / "data" / "published", "published")
    assert (manifest["passages"], manifest["corpus_hash"]) == (24, snapshot.corpus_hash)


def test_the_document_tower_computes_the_index_of_the_checkpoint(project: Path, snapshot: Snapshot) -> None:
    """Their embeddings of [CLS] title [SEP] body [SEP], made from the very passages that came as records."""
    root = project / "root"
    retriever, _ = load_models(root / "models" / "pretrain", snapshot.vocabulary_hash)
    assert retriever.shared, "one tower, of which the peer's file stores one copy"
    imported = load_index(root / "models" / "finetune", snapshot)
    assert imported.abs().max() > 1
    close(embed_corpus(retriever, snapshot, torch.float32), imported)


@pytest.mark.parametrize("n", range(len(ANSWERS)))
def test_retrieval_and_span_scores(project: Path, snapshot: Snapshot, peer: dict[str, Tensor], n: int) -> None:
    folder = project / "root" / "models" / "finetune"
    retriever, reader = load_models(folder, snapshot.vocabulary_hash)
    retriever.eval()
    reader.eval()
    special = SpecialTokens.of(snapshot.tokenizer)
    question = wordpieces(snapshot, list(ANSWERS)[n])
    with torch.no_grad():
        query_BE = retriever.query(PackedBatch([join_query(question, special, 16)]))
        close(query_BE[0], peer[f"{n}.query"])
        relevance, found = search(query_BE, load_index(folder, snapshot), 5)
        assert found[0].tolist() == peer[f"{n}.retrieved"].tolist()
        close(retriever.scale * relevance[0], peer[f"{n}.relevance"])
        spans = 0
        for rank, passage in enumerate(found[0].tolist()):
            tokens, segments, first = join_reader(question, snapshot.body(passage), special, READER_WORDPIECES)
            assert first == int(peer[f"{n}.first_of_body"][rank])
            start, end = enumerate_spans(first, len(tokens) - 1 - first, LONGEST_SPAN)
            assert reader.spans is not None
            hidden_TD = reader.bert(PackedBatch([tokens], [segments]))
            score_S = reader.spans(hidden_TD, torch.from_numpy(start), torch.from_numpy(end))
            theirs = {
                (s, e): score
                for s, e, score in zip(
                    peer[f"{n}.span_start"].tolist(),
                    peer[f"{n}.span_end"].tolist(),
                    peer[f"{n}.span_score"][rank].tolist(),
                    strict=True,
                )
                if score > -1e30  # the peer's mark for spans that leave the passage
            }
            ours = list(zip(start.tolist(), end.tolist(), strict=True))
            assert sorted(ours) == sorted(theirs)
            close(score_S + constant_of_spans(), torch.tensor([theirs[span] for span in ours]))
            spans += len(ours)
    assert spans > 100


def test_evaluate_answers_as_the_peer_does(
    project: Path, snapshot: Snapshot, peer: dict[str, Tensor], tmp_path: Path
) -> None:
    """The stage, without an ict folder; and again with nothing but the fine-tuned model."""
    metrics = stage("evaluate", values(), project, project / "root")
    assert metrics["em"] == 1.0
    assert "zero_shot_recall_at_5_token_boundary" in metrics
    assert "before_realm_recall_at_5_token_boundary" not in metrics
    rows = pq.read_table(project / "root" / "results" / "predictions.parquet").to_pylist()
    assert {row["question"]: row["prediction"] for row in rows} == ANSWERS
    for n, row in enumerate(rows):
        ids = [snapshot.passage_id(int(p)) for p in peer[f"{n}.retrieved"]]
        assert list(row["passage_ids"]) == ids
        close(torch.tensor(row["p_z"]), peer[f"{n}.relevance"].softmax(-1))
        score_RS = peer[f"{n}.span_score"] + peer[f"{n}.relevance"][:, None]
        assert row["span_score"] + constant_of_spans() == pytest.approx(float(score_RS.max()), abs=2e-5)
    root = tmp_path / "root"
    shutil.copytree(project / "root" / "data", root / "data")
    report = imported(root, finetuned=("openqa",))
    assert "the query tower replaces it" in report.warned[0]
    again = stage("evaluate", values(), project, root)
    assert again["em"] == 1.0
    assert "zero_shot_recall_at_5_token_boundary" not in again


def test_finetune_goes_on_from_what_was_imported(project: Path, tmp_path: Path) -> None:
    """Over the imported index: its document tower embeds nothing again."""
    root = tmp_path / "root"
    shutil.copytree(project / "root" / "data", root / "data")
    imported(root, pretrained=("openqa",))
    stage("finetune", values(), project, root)
    before, after = (load_file(root / "models" / name / "index.safetensors") for name in ("pretrain", "finetune"))
    assert torch.equal(before["embeddings"], after["embeddings"])
    assert torch.equal(before["embeddings"], torch.load(PEER / "openqa" / "pytorch_model.bin")["block_emb"])
    with pytest.raises(ValueError, match=r"finetune\.retriever is 'ict', but that stage was not run"):
        stage("finetune", values(finetune={"retriever": "ict"}), project, root)


def test_both_formats_and_separate_folders_give_the_same_models(tmp_path: Path) -> None:
    """The embedder as .bin equals the scorer as safetensors; the separate reader that of the openqa folder."""
    for name, pretrained, finetuned in (
        ("one", ("scorer", "encoder"), ("openqa",)),
        ("two", ("embedder", "encoder"), ("reader", "openqa")),
    ):
        imported(tmp_path / name, pretrained=pretrained, finetuned=finetuned)
    first, second = tmp_path / "one/models", tmp_path / "two/models"
    files = [path.relative_to(first) for path in first.rglob("*.safetensors")]
    assert {path.parts[0] for path in files} == {"pretrain", "finetune"}
    for file in files:
        assert (first / file).read_bytes() == (second / file).read_bytes(), file
    assert read_json(first / "finetune/retriever/realmops.json")["head"] == "release"
    assert read_json(first / "finetune/reader/realmops.json")["span_layer_norm_eps"] == 1e-3
    assert read_json(first / "finetune/reader/config.json")["hidden_act"] == "gelu_new"
    assert read_json(first / "pretrain/reader/realmops.json")["span_width"] is None


def test_a_scorer_with_two_embedders_has_two_towers(tmp_path: Path, snapshot: Snapshot) -> None:
    """transformers' scorer: embedder for candidates, query_embedder for queries."""
    folder = tmp_path / "scorer"
    shutil.copytree(PEER / "scorer", folder)
    document = load_file(folder / "model.safetensors")
    query = torch.load(PEER / "openqa" / "pytorch_model.bin")
    second = {f"query_{name}": tensor.clone() for name, tensor in query.items() if name.startswith("embedder.")}
    save_file(document | second, folder / "model.safetensors")
    imported(tmp_path, pretrained=(folder, "encoder"))
    retriever, _ = load_models(tmp_path / "models" / "pretrain", snapshot.vocabulary_hash)
    assert not retriever.shared
    for tower, theirs in ((retriever.query, query), (retriever.document, document)):
        assert torch.equal(tower.projection.weight, theirs["embedder.cls.dense.weight"])
        assert torch.equal(tower.bert.word_vectors, theirs["embedder.realm.embeddings.word_embeddings.weight"])


@pytest.mark.parametrize(
    ("pretrained", "finetuned", "message"),
    [
        (("encoder",), (), r"encoder: a retriever \(an embedder, a scorer or an openqa folder\) is missing"),
        ((), ("embedder", "encoder"), r"the reader has no span head \(qa_outputs\)"),
        ((), ("embedder", "reader"), r"no passage embeddings \(block_emb\)"),
        ((), (), "nothing to import; give folders with --pretrained or --finetuned"),
        (("gone",), (), r"gone is not a folder"),
    ],
)
def test_folders_without_a_whole_model_are_refused(
    tmp_path: Path, pretrained: tuple[str, ...], finetuned: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        imported(tmp_path, pretrained=pretrained, finetuned=finetuned)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_folders_that_do_not_match_are_refused(tmp_path: Path) -> None:
    def output(*arguments: str | Path) -> str:
        result = cli("import", "--root", tmp_path, *arguments)
        assert result.exit_code == 2
        return " ".join(result.output.split())

    copy = tmp_path / "embedder"
    shutil.copytree(PEER / "embedder", copy)
    (copy / "vocab.txt").write_text((copy / "vocab.txt").read_text().replace("king", "queen"))
    assert "has another vocabulary than" in output("--pretrained", copy, "--pretrained", PEER / "encoder")
    weights = torch.load(PEER / "embedder" / "pytorch_model.bin")
    del weights["cls.dense.bias"]
    torch.save(weights, copy / "pytorch_model.bin")
    assert "embedder: the parameter cls.dense.bias is missing; download the folder again" in output(
        "--pretrained", copy
    )
    config = read_json(copy / "config.json")
    (copy / "config.json").write_text(json.dumps({**config, "model_type": "bert"}))
    assert "config.json: model_type is 'bert', expected 'realm'" in output("--pretrained", copy)
    shutil.copytree(PEER / "openqa", tmp_path / "openqa")
    weights = torch.load(PEER / "openqa" / "pytorch_model.bin")
    torch.save({**weights, "block_emb": torch.zeros(24, 5)}, tmp_path / "openqa" / "pytorch_model.bin")
    message = "shape [24, 5], the embedder width 6"
    assert message in output("--finetuned", tmp_path / "openqa")
    assert not (tmp_path / "models").exists()


def test_an_imported_index_is_bound_to_its_passages(project: Path, tmp_path: Path) -> None:
    """By their hash, or by their number where they were not imported."""
    root, alone = tmp_path / "root", tmp_path / "alone"
    shutil.copytree(project / "root" / "models", root / "models")
    imported(alone, pretrained=("embedder", "encoder"), finetuned=("openqa",))
    for place, message in (
        (root, r"index\.safetensors has the embeddings of corpus .* on the passages imported with it"),
        (alone, r"index\.safetensors has 24 embeddings, .* 12 passages; an imported index"),
    ):
        stage("snapshot", values(snapshot={"documents": "documents.jsonl"}), project, place)
        with pytest.raises(ValueError, match=message):
            stage("evaluate", values(), project, place)
