"""The whole chain over a folder of each family: run, resume, answer, export; and what is exported is what was run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from sentence_transformers import SentenceTransformer
from small_encoders import FAMILIES, write_encoder
from small_project import QUESTIONS, cli, stage, stopped_at, toy_values, write_params, write_project
from tokenizers import Tokenizer

from realmops.api import Answerer
from realmops.commands.answers import generation_of_run

ASKED = [question for split in QUESTIONS.values() for question, _ in split]
STAGES = ("snapshot", "tag", "ict", "pretrain", "finetune", "evaluate")
READERS: dict[str, dict[str, Any]] = {
    "mpnet": {"matches": True},
    "modernbert": {"copies": True, "apart": True, "matches": False},
}


@pytest.mark.parametrize("family", [*(family for family in FAMILIES if family != "bert"), "albert"])
def test_a_folder_of_each_family_goes_through_all(family: str, tmp_path: Path) -> None:
    folder, root = write_encoder(tmp_path / "encoder", family), tmp_path / "root"
    write_project(tmp_path)
    changes = {
        "bert": {"init": str(folder), "positions": 64},
        "snapshot": {"block_wordpieces": 60},
        "pretrain": {"steps": 6, "query_wordpieces": 40, "reader_wordpieces": 60, "masking": "random_span"},
        "finetune": {"query_wordpieces": 40, "reader_wordpieces": 60, "epochs": 1},
        "reader": READERS.get(family, {}),
    }
    values = toy_values(**changes)
    params = write_params(tmp_path / "params.yaml", values)
    for name in STAGES[:3]:
        stage(name, values, tmp_path, root)
    with stopped_at(5):
        stage("pretrain", values, tmp_path, root)
    result = cli("run", "all", "--params", params, "--root", root)
    assert result.exit_code == 0, result.output
    assert ("which transformers computes" in result.output) == (family == "albert")

    answerer = Answerer(root)
    answer = answerer.ask("Where was the poet Anna Berg born?")
    assert answer["answer"]
    model = generation_of_run(root).model
    assert model.passages is not None
    assert cli("export", tmp_path / "st", "--format", "sentence-transformers", "--root", root).exit_code == 0
    library = SentenceTransformer(str(tmp_path / "st"), device="cpu", local_files_only=True)
    pairs = [(model.snapshot.title(i), model.snapshot.text(i)) for i in range(len(model.snapshot))]
    known_PE = model.passages.vectors(slice(None)).numpy()
    np.testing.assert_allclose(library.encode_document(pairs), known_PE, atol=1e-5)
    assert known_PE.std(0).min() > 1e-4
    if family not in ("mpnet", "modernbert", "roberta"):
        return  # an export takes seconds
    assert cli("export", tmp_path / "onnx", "--format", "onnx", "--root", root).exit_code == 0
    tokenizer = Tokenizer.from_file(str(tmp_path / "onnx/tokenizer.json"))
    tokenizer.enable_truncation(60)
    tokenizer.enable_padding(pad_id=model.special.padding)
    found = tokenizer.encode_batch(pairs)
    inputs = {
        name: np.array([getattr(one, of) for one in found])
        for name, of in (("input_ids", "ids"), ("attention_mask",) * 2)
    }
    session = onnxruntime.InferenceSession(str(tmp_path / "onnx/encoder.onnx"))
    np.testing.assert_allclose(session.run(None, inputs)[0], known_PE, atol=1e-4)
    assert torch.get_num_threads() == 1
