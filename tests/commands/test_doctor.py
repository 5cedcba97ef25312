"""``realmops doctor``: on an empty folder, while a stage runs, after it, on damage."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from exchange_lab import IDENTITY, exchange_with_everything
from small_project import cli, stage, stopped_at

from realmops.artifacts import write_json
from realmops.config import load_params
from realmops.refresh.exchange import Exchange, inspect_exchange
from realmops.refresh.trainer import TrainerSide
from realmops.refresh.versions import version_name
from realmops.stages import METRICS, STAGES


def doctor(root: Path, *more: str | Path) -> list[str]:
    result = cli("doctor", "--root", root, *more)
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


def state(lines: list[str], name: str) -> str:
    [line] = [line for line in lines if line.startswith(f"  {name}: ")]
    return line.removeprefix(f"  {name}: ")


@pytest.fixture
def root(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained / "root", tmp_path / "root"))


def test_doctor_on_an_empty_folder(tmp_path: Path) -> None:
    lines = doctor(tmp_path)
    assert any(line.startswith("  torch: 2.") for line in lines)
    assert any(line.startswith("device: cpu") for line in lines)
    for name in STAGES:
        assert state(lines, name) == "not run yet"
    assert lines[-1] == "exchange: none; tag, pretrain, finetune and evaluate have one while they run"
    Exchange.open(tmp_path / "exchange" / "0123456789abcdef", {"corpus": "one"})  # of a pipeline's builders
    (tmp_path / STAGES["snapshot"].folder).mkdir(parents=True)
    write_json(tmp_path / STAGES["snapshot"].folder / METRICS, {"scans_waiting": 5})
    lines = doctor(tmp_path)
    assert any(line.startswith("documents: 5 scanned files and pages wait for OCR; install") for line in lines)
    assert f"exchange {tmp_path / 'exchange' / '0123456789abcdef'}:" in lines
    assert lines[-1] == "  no builder has ever been seen"


def test_doctor_names_the_damaged_file(root: Path) -> None:
    path = root / "models/ict/reader/model.safetensors"
    path.write_bytes(b"?" + path.read_bytes()[1:])
    lines = doctor(root)
    assert state(lines, "ict").startswith("DAMAGED: ")
    assert "models/ict/reader/model.safetensors has sha256" in state(lines, "ict")
    assert state(lines, "tag").startswith("done in ")
    assert state(lines, "tag").endswith(f" s, {root / STAGES['tag'].folder}")


def test_doctor_while_pre_training_runs_and_after_it_was_killed(trained: Path, root: Path) -> None:
    values = load_params(trained / "params.yaml").replace({"pretrain.steps": 12, "pretrain.builder": "child"})
    shutil.rmtree(root / "models/pretrain")
    seen: list[list[str]] = []
    with stopped_at(5, lambda: seen.append(doctor(root))):
        stage("pretrain", values, trained, root)
    during, after = seen[0], doctor(root)
    [work] = (root / ".realmops/work").iterdir()
    for lines, advice in ((during, "the stage is running"), (after, "run the stage again to resume")):
        assert state(lines, "pretrain") == f"not run yet; unfinished work in {work}: {advice}"
        assert f"exchange {work / 'exchange'}:" in lines
        assert "  checkpoints: newest is v-000001-00000004" in lines
        assert any(line.startswith("  trainer: training, running for ") for line in lines)
        assert any(line.startswith("  builder-child: ") for line in lines)
    assert any(line.startswith("  indexes: newest is v-000001-0000000") for line in during)
    newest = work / "exchange/checkpoints/v-000001-00000004"
    for path in newest.iterdir():
        path.chmod(0o600)
        path.write_bytes(b"")
    lines = doctor(root)
    assert "  checkpoints: newest is not there yet" in lines
    assert any(line.startswith("  checkpoints: ") and "v-000001-00000004" in line for line in lines)


def test_each_condition_of_an_exchange_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = exchange_with_everything(tmp_path / "e").root
    sign = root / "alive" / "builder" / "builder-0.json"
    whole = json.loads(sign.read_bytes())
    minutes_ago = {path: path.stat().st_mtime - 300 for path in (root / "alive").rglob("*.json")}
    conditions: dict[str, Callable[[], object]] = {
        "builder-0 has been silent for 30": lambda: [os.utime(path, (at, at)) for path, at in minutes_ago.items()],
        "run its stage again: it resumes from the newest checkpoint": lambda: os.utime(
            root / "alive/trainer/trainer.json", (minutes_ago[sign],) * 2
        ),
        "trainer 1 is seen here, but 2 has taken over": lambda: TrainerSide(Exchange.open(root, IDENTITY, grace=0.0)),
        "finished: failed: a test": lambda: TrainerSide(Exchange.open(root, IDENTITY, grace=0.0)).finish(
            "failed", "a test"
        ),
        "builder-0 is realmops 0.0.9, this is": lambda: rewrite(sign, realmops="0.0.9"),
        "builder-0: its heartbeat cannot be read": lambda: sign.write_bytes(b"{"),
        "written by another version of realmops": lambda: monkeypatch.setattr("realmops.artifacts.SCHEMA", 0),
        "was quarantined as damaged or superseded": lambda: Exchange(root, IDENTITY, "trainer").indexes.quarantine(
            version_name(1, 0), "a test"
        ),
        "awaited: the index of v-000001-00000000": lambda: shutil.rmtree(root / "indexes" / version_name(1, 0)),
        "no trainer has started here, or it was removed": lambda: shutil.rmtree(root),
    }

    def rewrite(path: Path, **fields: Any) -> None:
        written = path.stat().st_mtime
        path.write_bytes(json.dumps({**whole, "unix": written, "since_unix": 0.0, **fields}).encode())
        os.utime(path, (written, written))  # a busy machine writes a second later

    for path in minutes_ago:
        path.write_bytes(json.dumps({**json.loads(path.read_bytes()), "unix": path.stat().st_mtime}).encode())
    shutil.copytree(root, tmp_path / "kept")
    for words, cause in conditions.items():
        assert not [line for line in inspect_exchange(root) if words in line], words
        cause()
        found = inspect_exchange(root)
        assert [line for line in found if words in line], (words, found)
        monkeypatch.undo()
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(tmp_path / "kept", root)
