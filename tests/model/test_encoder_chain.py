"""The whole chain over a folder of each family: run, killed, resumed, served, exported; the export is what was run."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from serving import client_of
from small_encoders import DECODERS, FAMILIES, write_encoder
from small_project import QUESTIONS, builder_beside, cli, stage, stopped_at, toy_values, write_project

from realmops.commands.open_model import open_run
from realmops.search.embed import embed, query_sequences, text_queries
from realmops.train import loop

ASKED = [question for split in QUESTIONS.values() for question, _ in split]
READERS: dict[str, dict[str, Any]] = {
    "mpnet": {"matches": True},
    "modernbert": {"copies": True, "apart": True, "matches": False},
}
PROMPTS = {"roberta": {"query": "Query: ", "passage": "Passage: "}}  # over a BPE of bytes, where blanks are of words
ONNX = ("roberta", "mpnet", "modernbert")  # an export takes seconds


@contextlib.contextmanager
def killed() -> Iterator[None]:
    """A training ends as if it were killed where it would write its second checkpoint."""

    class Killed(BaseException):
        pass

    usual, saved = loop._save, []

    def save(context: loop.TrainingContext, optimiser: Any, step: int, last: str) -> None:
        saved.append(step)
        if len(saved) == 2:
            raise Killed
        usual(context, optimiser, step, last)

    with mock.patch.object(loop, "_save", save), contextlib.suppress(Killed):
        yield
        raise AssertionError("it went on")


@pytest.mark.parametrize("family", [*(family for family in FAMILIES if family != "bert"), "albert", *DECODERS])
def test_a_folder_of_each_family_goes_through_all(family: str, tmp_path: Path) -> None:
    """Weights after a kill in each training are those of a run that nothing disturbed."""
    folder, root, whole = write_encoder(tmp_path / "encoder", family, max_position_embeddings=130), *roots(tmp_path)
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": PROMPTS.get(family, {})}))
    write_project(tmp_path)
    steps = 4 if family == "modernbert" else 0
    changes = {
        "bert": {"positions": 128},
        "retriever": {"init": str(folder), "pooling": "last" if family in DECODERS else "auto"},
        "pretrain": {"steps": steps, "refresh_every": 2, "lag": 0, "builder": "external"},
        "reader": READERS.get(family, {}),
    }
    if family in DECODERS:
        changes |= {"ict": {"reader_steps": 0}}
    values = toy_values(**changes)
    for name in ("snapshot", "tag"):
        stage(name, values, tmp_path, root)
    shutil.copytree(root, whole)
    for name, place in itertools.product(("ict", "pretrain", "finetune"), (whole, root)):
        if steps:
            values["pretrain"]["exchange"] = str(place / "exchange")
        refreshed = name == "pretrain" and steps > 0
        with contextlib.ExitStack() as stack:
            if refreshed:
                stack.enter_context(builder_beside(place / "exchange", place / "data/snapshot/corpus"))
            if place == root and (name != "pretrain" or refreshed):
                with stopped_at(3) if refreshed else killed():
                    stage(name, values, tmp_path, root)
            stage(name, values, tmp_path, place)
    files = [file.relative_to(whole) for file in whole.rglob("models/**/*.safetensors")]
    assert len(files) >= 6
    for file in files:
        assert (root / file).read_bytes() == (whole / file).read_bytes(), file

    with client_of(root) as client:
        reply = client.post("/v1/answer", json={"question": "Where was the poet Anna Berg born?"})
    assert reply.status_code == 200
    assert len(reply.json()["passages"]) > 1
    model = open_run(root).model
    assert model.passages is not None
    assert cli("export", tmp_path / "st", "--format", "sentence-transformers", "--root", root).exit_code == 0
    library = SentenceTransformer(str(tmp_path / "st"), device="cpu", local_files_only=True)
    pairs = [(model.snapshot.title(i), model.snapshot.text(i)) for i in range(len(model.snapshot))]
    known_PE = model.passages.vectors(slice(None)).numpy()
    query_QE = embed(model.retriever.query, query_sequences(text_queries(model.snapshot, ASKED, 64)), torch.float32)
    np.testing.assert_allclose(library.encode_document(pairs), known_PE, atol=1e-5)
    np.testing.assert_allclose(library.encode_query(ASKED), query_QE, atol=1e-5)
    assert known_PE.std(0).min() > 1e-4
    if family not in ONNX:
        return
    assert cli("export", tmp_path / "onnx", "--format", "onnx", "--root", root).exit_code == 0
    card = (tmp_path / "onnx/README.md").read_text()
    blank = " " if family in PROMPTS else ""
    assert ("The leading blank" in card) == bool(blank)
    found: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", card, re.DOTALL)[0].replace("FOLDER", str(tmp_path / "onnx")), found)
    limits = re.findall(r'embed\("(\w+\.onnx)", (\d+), \[(.*)\]', card)
    assert [text.startswith(start) for (_, _, text), start in zip(limits, (f'"{blank}W', f'("{blank}A'), strict=True)]
    (of_query, query_limit, _), (of_document, limit, _) = limits
    pairs = [(blank + title, text) for title, text in pairs]
    np.testing.assert_allclose(found["embed"](of_document, int(limit), pairs), known_PE, atol=1e-4)
    asked = [blank + question for question in ASKED]
    np.testing.assert_allclose(found["embed"](of_query, int(query_limit), asked), query_QE, atol=1e-4)


def roots(folder: Path) -> tuple[Path, Path]:
    """Of the run that is killed, and of the one that is not."""
    return folder / "root", folder / "whole"
