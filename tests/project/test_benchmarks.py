"""The benchmarks' arithmetic and tables; nothing is measured here."""

import argparse
import json
import runpy
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import encode
import pytest
import real_text
import torch
import whole_run
from against import BENCHMARKS, Goal, Row, Spread, table
from generated import vocabulary
from small_project import cli, write_project
from transformers import BertConfig, BertModel

from realmops.corpus.vocabulary import vocabulary_bytes

FOLDER = Path(__file__).parents[2] / "benchmarks"
ROW = Row("embedding", "another", "docs/s", (10.0, 20.0, 60.0), (5.0, 5.0, 10.0), Goal(4))  # ratios 2, 4 and 6


def test_the_ratio_is_the_median_over_pairs_and_a_goal_is_met_at_its_limit() -> None:
    assert ROW.ratio == Spread(4.0, 2.0, 6.0)
    assert Row("a", "b", "s", (8.0, 10.0, 30.0), (2.0, 10.0, 10.0)).ratio == Spread(3.0, 1.0, 4.0)
    goals = {Goal(4): "met", Goal(4.1): "missed", Goal(4, at_most=True): "met", Goal(3.9, at_most=True): "missed"}
    assert {goal: replace(ROW, goal=goal).verdict for goal in goals} == goals
    assert table([("encode", ROW)]).splitlines()[2] == (
        "| encode | embedding | 20 (10 to 60) docs/s | another | 5 (5 to 10) docs/s | 4 (2 to 6) | at least 4 | met |"
    )
    assert Row.from_json(json.loads(json.dumps(ROW.to_json()))) == ROW


def test_peers_have_equal_embeddings_and_a_missing_peer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tiny encoder with random weights, by sentence-transformers and by ONNX Runtime."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    BertModel(BertConfig(vocab_size=len(vocabulary()), **shape)).save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_bytes(vocabulary_bytes(vocabulary()))
    monkeypatch.setitem(sys.modules, "openvino", None)
    texts = encode.texts(32)
    arguments = argparse.Namespace(precision="fp32", peers=list(encode.PEERS), documents=32, repeats=1)
    arguments.precisions = ["fp32", "bf16"]
    rows = encode.compare("tiny", tmp_path, texts, [(texts[3], 3)], None, arguments)
    assert rows[1].verdict == "met"  # the cosine of ours and encode()
    against = {
        row.against.split(",")[0].split()[0] + row.against.split(",")[-1] for row in rows if "tiny, " in row.what
    }
    assert {"sentence-transformers fp32", "sentence-transformers bf16", "ONNX fp32"} <= against
    by_onnx = next(row for row in rows if row.against.startswith("ONNX") and row.against.endswith("fp32"))
    assert by_onnx.note.endswith("theirs neighbours 1.000, recall@5 1.0000")
    [missing] = [row for row in rows if row.verdict == "not run"]
    assert (missing.against, missing.note.split(" is")[0]) == ("openvino", "not run: openvino")


def test_real_text_trains_once_what_variants_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every stage in this process but one, of a hybrid at toy size; a second call trains nothing."""
    params = write_project(tmp_path, retriever={"hybrid": True}, sample={"subjects": 60})
    trained: list[str] = []

    def here(stage: str, root: Path, log: Path, options: Sequence[str]) -> dict[str, float]:
        trained.append(stage)
        if stage == "sample":
            return whole_run.measure(stage, root, log, options)
        result = cli("run", stage, "--root", root, *options)
        assert result.exit_code == 0, result.output
        return {"wall": 2.0 * len(trained), "cpu": 1.0, "mib": 100.0}

    out = tmp_path / "out"
    words = ["real_text.py", "--params", str(params), "--seeds", "1", "--out", str(out), "--set", "pretrain.steps=4"]
    monkeypatch.setattr(real_text, "measure", here)
    monkeypatch.setattr(sys, "argv", words)
    real_text.main()
    shared = {"sample": 1, "snapshot": 1, "tag": 1, "ict": 3, "pretrain": 4, "finetune": 5, "evaluate": 5}
    assert {stage: trained.count(stage) for stage in trained} == shared
    table = (out / "real_text.md").read_text()
    lines = table.splitlines()
    assert "Zero-shot recall@5, realm minus control: " in table
    found = json.loads((out / "real_text.json").read_text())
    assert found["control_ict_steps"] == 4 + 4
    metrics = json.loads((out / "orqa/seed-0/results/metrics.json").read_text())
    orqa = found["rows"]["orqa"][0]
    assert orqa["zero-shot recall@5"] == metrics["before_realm_recall_at_5_token_boundary"]
    assert orqa["with words @5"] == metrics["before_realm_hybrid_recall_at_5_token_boundary"]
    assert (orqa["EM"], orqa["F1"]) == (metrics["em"], metrics["f1"])
    before = len(trained)
    real_text.main()
    assert len(trained) == before
    shutil.rmtree((out / "orqa/seed-0/results").resolve().parent)
    real_text.main()
    assert trained[before:] == ["evaluate"]
    assert len((out / "real_text.md").read_text().splitlines()) == len(lines)
    assert capsys.readouterr().out.count(table) == 2


@pytest.mark.parametrize("name", ["against", *BENCHMARKS, "quality", "real_text", "seeds", "whole_run", "first_second"])
def test_help_answers(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: {name}.py")
    assert ("--repeats" if name in ("against", *BENCHMARKS) else "--out") in shown
