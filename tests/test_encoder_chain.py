"""The whole chain over a folder of each family: run, resume, answer, export; and what is exported is what was run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from sentence_transformers import SentenceTransformer
from small_encoders import FAMILIES, write_encoder
from small_project import QUESTIONS, cli, stage, stopped_at, toy_values, write_project
from tokenizers import Tokenizer

from realmops.api import Answerer
from realmops.commands.answers import generation_of_run

ASKED = [question for split in QUESTIONS.values() for question, _ in split]
STAGES = ("snapshot", "tag", "ict", "pretrain", "finetune")
READERS: dict[str, dict[str, Any]] = {
    "mpnet": {"matches": True},
    "modernbert": {"copies": True, "apart": True, "matches": False},
}


@pytest.mark.parametrize("family", [*(family for family in FAMILIES if family != "bert"), "albert"])
def test_a_folder_of_each_family_goes_through_all(family: str, tmp_path: Path) -> None:
    folder, root = write_encoder(tmp_path / "encoder", family, max_position_embeddings=130), tmp_path / "root"
    write_project(tmp_path)
    steps = 4 if family == "modernbert" else 0  # an index builder is a process more
    changes = {
        "bert": {"init": str(folder), "positions": 128},
        "pretrain": {"steps": steps, "refresh_every": 2, "lag": 0, "builder": "child" if steps else "external"},
        "finetune": {"epochs": 1},
        "reader": READERS.get(family, {}),
    }
    values = toy_values(**changes)
    for name in STAGES[:3]:
        stage(name, values, tmp_path, root)
    if steps:
        with stopped_at(3):
            stage("pretrain", values, tmp_path, root)
    for name in STAGES[3:]:
        stage(name, values, tmp_path, root)

    record = Answerer.open(root).answer("Where was the poet Anna Berg born?")
    assert len(record.passages) > 1
    model = generation_of_run(root).model
    assert model.passages is not None
    assert cli("export", tmp_path / "st", "--format", "sentence-transformers", "--root", root).exit_code == 0
    library = SentenceTransformer(str(tmp_path / "st"), device="cpu", local_files_only=True)
    pairs = [(model.snapshot.title(i), model.snapshot.text(i)) for i in range(len(model.snapshot))]
    known_PE = model.passages.vectors(slice(None)).numpy()
    np.testing.assert_allclose(library.encode_document(pairs), known_PE, atol=1e-5)
    assert known_PE.std(0).min() > 1e-4
    if family not in ("mpnet", "modernbert"):
        return  # an export takes seconds
    assert cli("export", tmp_path / "onnx", "--format", "onnx", "--root", root).exit_code == 0
    tokenizer = Tokenizer.from_file(str(tmp_path / "onnx/tokenizer.json"))
    tokenizer.enable_truncation(model.snapshot.block_wordpieces)
    tokenizer.enable_padding(pad_id=model.special.padding)
    found = tokenizer.encode_batch(pairs)
    inputs = {"input_ids": [one.ids for one in found], "attention_mask": [one.attention_mask for one in found]}
    session = onnxruntime.InferenceSession(str(tmp_path / "onnx/document.onnx"))
    made_PE = session.run(None, {name: np.array(rows) for name, rows in inputs.items()})[0]
    np.testing.assert_allclose(made_PE, known_PE, atol=1e-4)
