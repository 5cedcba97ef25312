"""Several processes that train together, as torchrun starts them."""

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

import forked
import pytest
import small_project
import torch
import torch.distributed as dist
from cluster_lab import Output
from safetensors.torch import load_file
from small_world import PAPERS_READER

from realmops import config
from realmops.cluster import tasks
from realmops.stages import common
from realmops.train.parallel import ProcessGroup, join_process_group

MODELS = ("ict", "pretrain", "finetune")
PAPER: dict[str, dict[str, Any]] = {
    "bert": {"dropout": 0.0},
    "reader": PAPERS_READER,
    "ict": {"batch_size": 4, "reader_batch_size": 3},
    "pretrain": {"batch_size": 3, "retriever_learning_rate": 5.0e-5, "exchange": "auto"},
    "finetune": {"batch_size": 2},
}
# The same with all that is not in the paper. Nothing is held out, so that the last models are saved.
EXTENDED: dict[str, dict[str, Any]] = {
    "bert": {"dropout": 0.0},
    "retriever": {"tower": "bag", "head": "cosine", "hybrid": True},
    "reader": {"copies": True, "apart": True},
    "ict": {"crops": 3, "batch_size": 4, "reader_batch_size": 3},
    "pretrain": {
        "steps": 6, "refresh_every": 3, "lag": 1, "batch_size": 3, "masking": "recurring", "crop_weight": 0.5,
        "masked_sentences": 0,
    },
    "finetune": {
        "retriever_training": "passages", "retriever_batch_size": 4, "reader_training": "windows",
        "freeze_words": True, "batch_size": 4,
    },
    "optimiser": {"bias_correction": True},
}  # fmt: skip


def run_together(params: Path, processes: Mapping[Path, int], stage: str = "all") -> None:
    """Run a stage under each root by that many forked processes; once one has failed, all are ended, as by torchrun.

    The output is appended to a log named as the root.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=5))
    ranks = {}
    for root, size in processes.items():
        variables = {
            "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
        }  # fmt: skip
        for rank in range(size):
            environment = {**os.environ, **variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            words = ("run", stage, "--params", params, "--root", root)
            process = forked.realmops(*words, log=root.with_suffix(".log"), env=environment)
            ranks[process.sentinel] = process
    running = dict(ranks)
    while running:
        for sentinel in connection.wait([*running]):
            if running.pop(sentinel).wait():  # type: ignore[arg-type]
                for process in running.values():
                    process.terminate()
    codes = [process.wait() for process in ranks.values()]
    assert not any(codes), (codes, [root.with_suffix(".log").read_text() for root in processes])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project that was run by one process, and by two."""
    folder = tmp_path_factory.mktemp("together")
    run_together(small_project.write_project(folder, **PAPER), {folder / "one": 1, folder / "two": 2})
    return folder


@pytest.fixture(scope="module")
def extended(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus of the first project with other options, by one process and by two."""
    folder = tmp_path_factory.mktemp("extended")
    params = small_project.write_project(folder, **EXTENDED)
    for name in ("one", "two"):
        shutil.copytree(trained / "one/data", folder / name / "data")
    run_together(params, {folder / "one": 1, folder / "two": 2})
    return folder


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("options", ["trained", "extended"])
def test_two_processes_train_the_weights_of_one(options: str, model: str, request: pytest.FixtureRequest) -> None:
    """Each takes half of every batch, which do not all divide evenly; the losses are those of whole batches."""
    project: Path = request.getfixturevalue(options)
    files = sorted((project / "one/models" / model).rglob("*.safetensors"))
    assert len(files) >= 2
    for name in files:
        one, two = load_file(name), load_file(project / "two" / name.relative_to(project / "one"))
        assert one.keys() == two.keys()
        for key, tensor in one.items():
            torch.testing.assert_close(two[key], tensor, rtol=1e-4, atol=1e-5, msg=f"{name}: {key}")
    journals = [small_project.journal(project / root / "models" / model) for root in ("one", "two")]
    for line, other in zip(*journals, strict=True):
        assert line["step"] == other["step"]
        names = [
            name for name in line if name.endswith("loss") and name not in ("crop_loss", "span_loss", "early_loss")
        ]
        assert names
        assert all(other[name] == pytest.approx(line[name], abs=1e-4) for name in names)
    metrics = [json.loads((project / root / "models" / model / "metrics.json").read_text()) for root in ("one", "two")]
    if model == "pretrain":
        assert metrics[0]["best_step"] == metrics[1]["best_step"] > 0
        assert metrics[0]["refreshes"] == metrics[1]["refreshes"] > 0
        if options == "extended":
            assert sum("crop_loss" in line for line in journals[0]) == 4, "from the end of the delay"
            assert not {"hit_at_5_after", "masked_log_p"} & metrics[1].keys(), "nothing is held out"
    assert small_project.litter(project / "two") == []


def test_a_killed_training_of_two_resumes_to_the_same_weights(trained: Path) -> None:
    """Killed under torchrun, which ends the other process."""
    root = trained / "killed"
    shutil.copytree(trained / "two", root, ignore=shutil.ignore_patterns("pretrain", "finetune"))
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "realmops", "run", "all"]
    command = [sys.executable, *words, "--params", str(trained / "params.yaml"), "--root", str(root)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    small_project.wait_for(lambda: list(root.glob(".realmops/work/*/exchange/checkpoints/v-*")), 100)
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(workers[1]), signal.SIGKILL)
    assert process.wait() != 0
    assert not (root / "models/pretrain").exists()
    run_together(trained / "params.yaml", {root: 2}, "pretrain")
    for path in (trained / "two/models/pretrain").rglob("*.safetensors"):
        assert (root / path.relative_to(trained / "two")).read_bytes() == path.read_bytes(), path.name


def test_a_pod_starts_its_processes(
    trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = config.load_params(trained / "params.yaml").model_dump_json()
    manifest, metrics = Output(trained / "manifest"), Output(trained / "metrics")
    (tmp_path / "tokenizers.py").write_text("raise AssertionError('imported from the working directory')\n")
    monkeypatch.chdir(tmp_path)
    tasks.run_stage("ict", options, str(trained / "two"), manifest, metrics, processes=2)
    assert metrics.shown == json.loads((trained / "metrics").read_text())
    assert "ict: nothing to do" in capfd.readouterr().err
    with pytest.raises(SystemExit) as error:  # a missing input is reported before processes start
        tasks.run_stage("ict", options, str(trained / "nowhere"), manifest, metrics, processes=2)
    assert error.value.code == 2


def test_processes_join_with_one_gpu_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's first process of two: on CPUs no GPU is used, and more processes than GPUs are refused."""
    calls: list[str] = []
    for name, value in (("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: calls.append(f"GPU {gpu}"))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, timeout: calls.append(backend))
    monkeypatch.setattr(atexit, "register", lambda function: None)
    message = r"started 2 processes on this machine, .* torch finds 1 GPUs; .*--nproc-per-node=1, or set run.device=cpu"
    with pytest.raises(ValueError, match=message):
        small_project.stage("ict", small_project.toy_values(run={"device": "cuda"}), tmp_path, tmp_path / "root")
    assert not list(tmp_path.iterdir())
    join_process_group(torch.device("cpu"))
    assert calls == ["gloo"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    join_process_group(torch.device("cuda"))
    assert calls == ["gloo", "GPU 0", "cpu:gloo,cuda:nccl"]


def test_parts_of_a_batch_have_factors_that_give_its_mean() -> None:
    batch, weights = ["a", "b", "c", "d", "e"], [1.0, 2.0, 3.0, 4.0, 5.0]
    assert ProcessGroup().split_batch(batch) == (batch, 1.0)
    assert ProcessGroup(0, 2).split_batch(batch) == (["a", "c", "e"], 2 * 3 / 5)
    assert ProcessGroup(1, 2).split_batch(batch, weights) == (["b", "d"], 2 * 6 / 15)
    assert ProcessGroup(2, 3).split_batch(["a", "b"]) == (["a"], 0.0)


def test_a_batch_smaller_than_the_processes_is_refused(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "process_group", lambda: ProcessGroup(0, 5))
    shutil.copytree(trained / "one/data", trained / "five/data")
    with pytest.raises(ValueError, match=r"too small for 5 processes: ict.batch_size is 4 and the corpus has "):
        small_project.stage("ict", small_project.toy_values(**PAPER), trained, trained / "five")
