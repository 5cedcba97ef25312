"""A folder of each family goes through the stages and is served; exports compute the run's embeddings."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from serving import client_of
from small_encoders import DECODERS, FAMILIES, write_encoder
from small_project import QUESTIONS, Quiet, builder_beside, cli, stage, toy_values, write_project

from realmops.opening import open_run
from realmops.search.embed import embed, query_sequences, text_queries

ASKED = [question for split in QUESTIONS.values() for question, _ in split]
READERS: dict[str, dict[str, Any]] = {
    "mpnet": {"matches": True},
    "modernbert": {"copies": True, "apart": True, "matches": False},
}
PROMPTS = {"roberta": {"query": "Query: ", "passage": "Passage: "}}  # a BPE of bytes, where blanks belong to words
ONNX = ("roberta", "mpnet", "modernbert")  # an export takes seconds


@pytest.mark.parametrize("family", [*(family for family in FAMILIES if family != "bert"), "albert", *DECODERS])
def test_a_folder_of_each_family_is_trained_served_and_exported(family: str, tmp_path: Path) -> None:
    folder, root = write_encoder(tmp_path / "encoder", family, max_position_embeddings=130), tmp_path / "root"
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": PROMPTS.get(family, {})}))
    write_project(tmp_path)
    refreshes = family == "modernbert"
    values = toy_values(
        bert={"positions": 128},
        retriever={"init": str(folder), "pooling": "last" if family in DECODERS else "auto"},
        pretrain={
            "steps": 4 * refreshes, "refresh_every": 2, "lag": 0, "builder": "external",
            "exchange": str(root / "exchange"),
        },
        reader=READERS.get(family, {}),
        **({"ict": {"reader_steps": 0}} if family in DECODERS else {}),
    )  # fmt: skip
    for name in ("snapshot", "tag", "ict", "pretrain", "finetune"):
        if name == "pretrain" and refreshes:
            with builder_beside(root / "exchange", root / "data/snapshot/corpus"):
                stage(name, values, tmp_path, root)
        else:
            stage(name, values, tmp_path, root)
    with client_of(root) as client:
        reply = client.post("/v1/answer", json={"question": "Where was the poet Anna Berg born?"})
    assert reply.status_code == 200
    assert len(reply.json()["passages"]) > 1

    model = open_run(root).model
    assert cli("export", tmp_path / "st", "--format", "sentence-transformers", "--root", root).exit_code == 0
    library = SentenceTransformer(str(tmp_path / "st"), device="cpu", local_files_only=True)
    pairs = [(model.snapshot.title(i), model.snapshot.text(i)) for i in range(len(model.snapshot))]
    indexed_PE = model.passages.vectors(slice(None)).numpy()
    query_QE = embed(model.retriever.query, query_sequences(text_queries(model.snapshot, ASKED, 64)), torch.float32)
    np.testing.assert_allclose(library.encode_document(pairs), indexed_PE, atol=1e-5)
    np.testing.assert_allclose(library.encode_query(ASKED), query_QE, atol=1e-5)
    assert indexed_PE.std(0).min() > 1e-4
    if family not in ONNX:
        return
    assert cli("export", tmp_path / "onnx", "--format", "onnx", "--root", root).exit_code == 0
    card = (tmp_path / "onnx/README.md").read_text()
    blank = " " if family in PROMPTS else ""
    assert ("The leading blank" in card) == bool(blank)
    example: dict[str, Any] = {}
    code = re.findall(r"```python\n(.*?)```", card, re.DOTALL)[0]
    exec(code.replace("FOLDER", str(tmp_path / "onnx")), example)
    (of_query, query_limit), (of_document, limit) = re.findall(r'embed\("(\w+\.onnx)", (\d+), \[', card)
    pairs = [(blank + title, text) for title, text in pairs]
    np.testing.assert_allclose(example["embed"](of_document, int(limit), pairs), indexed_PE, atol=1e-4)
    asked = [blank + question for question in ASKED]
    np.testing.assert_allclose(example["embed"](of_query, int(query_limit), asked), query_QE, atol=1e-4)


def test_a_stage_runs_again_with_other_weights_of_the_same_name(tmp_path: Path) -> None:
    write_project(tmp_path)
    folder = write_encoder(tmp_path / "encoder", "bert", max_position_embeddings=130)
    values = toy_values(bert={"positions": 128}, retriever={"init": str(folder)})

    def has_run(name: str) -> bool:
        report = Quiet()
        stage(name, values, tmp_path, tmp_path / "root", report)
        return not any("nothing to do" in line for line in report.said)

    assert [has_run(name) for name in ("snapshot", "tag", "ict")] == [True, True, True]
    assert [has_run(name) for name in ("snapshot", "tag", "ict")] == [False, False, False]
    weights = load_file(folder / "model.safetensors")
    weights["bert.embeddings.word_embeddings.weight"] += 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert has_run("ict")
