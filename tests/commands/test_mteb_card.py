"""An export scored as MTEB does it, with the code of its card: nDCG@10 of the run.

MTEB itself is not needed: what it does with a corpus, with prompts and with scores is written from its source (2.26).
``benchmarks/mteb_task.py`` compares with MTEB.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import ir_measures
import numpy as np
import pytest
import small_project
import torch
from ir_measures import nDCG
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from small_encoders import write_encoder
from small_world import DOCUMENTS

from realmops.commands.open_model import open_run
from realmops.search.embed import document_sequences

JUDGED = {
    "Where was the poet born?": {"d0": 2, "d1": 1},
    "Who wrote The Cold Sea?": {"d4": 1, "d0": 1},
    "In which country is Fjell?": {"d6": 1},
    "Who built The Star?": {"d2": 1, "d7": 1, "d9": 2},
}


class PromptType(StrEnum):
    """MTEB's kinds of text."""

    query = "query"
    document = "document"


class SentenceTransformerEncoderWrapper:
    """MTEB's wrapper: the text of each batch, with the prompt of the model for this kind of text."""

    def __init__(self, model: str) -> None:
        self.model = SentenceTransformer(model, device="cpu", local_files_only=True)

    def encode(
        self, inputs: Any, *, task_metadata: Any, hf_split: str, hf_subset: str, prompt_type: PromptType, **options: Any
    ) -> Any:
        encode = self.model.encode_query if prompt_type == PromptType.query else self.model.encode_document
        prompt = self.model.prompts.get(prompt_type.value)
        return encode([text for batch in inputs for text in batch["text"]], prompt=prompt, **options)


def batches(rows: list[dict[str, str]], size: int = 5) -> Iterator[dict[str, list[str]]]:
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        yield {name: [row[name] for row in part] for name in part[0]}


def standardised(row: dict[str, str]) -> dict[str, str]:
    """MTEB's ``_corpus_to_dict``."""
    text = (row["title"] + " " + row["text"]).strip() if row["title"] else row["text"].strip()
    return {"id": row["_id"], "text": text, "body": row["text"], "title": row["title"]}


def corpus() -> list[dict[str, str]]:
    return [{"_id": f"d{n}", "title": title, "text": text} for n, (title, text, _) in enumerate(DOCUMENTS)]


def evaluate(model: SentenceTransformerEncoderWrapper) -> tuple[np.ndarray, float]:
    """MTEB's retrieval: embeddings of the documents, and nDCG@10 of their similarities to the queries."""
    about = {"task_metadata": None, "hf_split": "test", "hf_subset": "default", "batch_size": 4}
    rows = [standardised(row) for row in corpus()]
    document_PE = model.encode(batches(rows), prompt_type=PromptType.document, **about)
    queries = [{"id": text, "text": text} for text in JUDGED]
    query_QE = model.encode(batches(queries), prompt_type=PromptType.query, **about)
    score_QP = np.asarray(model.model.similarity(query_QE, document_PE))
    run = {
        query: {row["id"]: float(score) for row, score in zip(rows, score_P, strict=True)}
        for query, score_P in zip(JUDGED, score_QP, strict=True)
    }
    return np.asarray(document_PE), ir_measures.calc_aggregate([nDCG @ 10], JUDGED, run)[nDCG @ 10]


@pytest.fixture
def mteb(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules with the names that the card imports."""
    for name in ("mteb", "mteb.models", "mteb.models.sentence_transformer_wrapper"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["mteb.models.sentence_transformer_wrapper"].__dict__["SentenceTransformerEncoderWrapper"] = (
        SentenceTransformerEncoderWrapper
    )
    sys.modules["mteb"].__dict__.update(evaluate=lambda model, tasks: evaluate(model), get_tasks=lambda tasks: tasks)


@pytest.mark.parametrize(
    ("prompts", "limit"), [({}, 18), ({"query": "Query: ", "passage": "Passage: "}, 26)], ids=["plain", "E5"]
)
@pytest.mark.usefixtures("mteb")
def test_the_code_of_the_card_gives_the_figure_of_the_run(prompts: dict[str, str], limit: int, tmp_path: Path) -> None:
    torch.manual_seed(3)
    write_encoder(tmp_path / "encoder", "bert", head=False, max_position_embeddings=128)
    modules = [Transformer(str(tmp_path / "encoder")), Pooling(32, "mean")]
    encoder = SentenceTransformer(modules=[*modules, Normalize()], device="cpu", prompts=prompts)
    encoder.save(str(tmp_path / "encoder"), create_model_card=False)
    retriever = {"init": str(tmp_path / "encoder"), "projection": "identity", "embedding_width": 0, "head": "cosine"}
    params = small_project.write_project(
        tmp_path,
        bert={"positions": 128},
        retriever=retriever,
        snapshot={"documents": "corpus.jsonl", "block_wordpieces": limit, "whole_documents": True},
        reader={"init": "none"},
        ict={"steps": 0, "reader_steps": 0},
        pretrain={"steps": 0},
        finetune={"retriever_epochs": 0, "epochs": 0},
    )
    small_project.write_json_lines(tmp_path / "corpus.jsonl", [{**row, "id": row["_id"]} for row in corpus()])
    for split in ("train", "dev", "test"):
        records = [{"id": f"{split} {q}", "question": q, "relevant": grades} for q, grades in JUDGED.items()]
        small_project.write_json_lines(tmp_path / f"questions.{split}.jsonl", records)
    root = tmp_path / "root"
    small_project.run_all_here(params, root)
    result = small_project.cli("export", tmp_path / "out", "--root", root)
    assert result.exit_code == 0, result.output

    _, code = re.findall(r"```python\n(.*?)```", (tmp_path / "out/README.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code.replace("FOLDER", str(tmp_path / "out")), names)
    document_PE, ndcg = names["result"]
    metrics = json.loads((root / "results/metrics.json").read_text())
    assert ndcg == pytest.approx(metrics["ndcg_at_10"], abs=0.002)
    opened = open_run(root)
    assert opened.model.passages is not None
    assert opened.model.snapshot.column("document_id") == [row["_id"] for row in corpus()]
    lengths = [len(ids) for ids, _ in document_sequences(opened.model.snapshot, range(len(DOCUMENTS)))]
    assert lengths.count(limit) > 1, "documents are truncated"
    np.testing.assert_allclose(document_PE, opened.model.passages.vectors(slice(None)), atol=1e-5)
    joined_PE, _ = evaluate(SentenceTransformerEncoderWrapper(str(tmp_path / "out")))
    assert np.abs(joined_PE - document_PE).max() > 0.01, "joined by a blank it is another text, so the card is needed"
