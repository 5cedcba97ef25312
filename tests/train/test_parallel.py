"""Several processes that train together, as torchrun starts them."""

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import small_project
import torch
import torch.distributed as dist
from cluster_lab import Output
from ranks import run_together
from safetensors.torch import load_file
from small_world import PAPERS_READER, World, tiny_models
from torch import Tensor

from realmops import config
from realmops.cluster import tasks
from realmops.journal import Journal
from realmops.model.retriever import Retriever
from realmops.search.exact import ExactIndex
from realmops.stages import JOURNAL, STAGES, Job, common, finetune_retriever, parse_sections
from realmops.stages import finetune as stages_finetune
from realmops.stages.runner import stage_inputs
from realmops.train import parallel
from realmops.train.index_source import IndexGeneration
from realmops.train.parallel import ProcessGroup, join_process_group
from realmops.train.training_exchange import SharedIndexSource

TOGETHER: dict[str, dict[str, Any]] = {
    "bert": {"dropout": 0.0},
    "reader": PAPERS_READER,
    "ict": {"batch_size": 4, "reader_batch_size": 3},
    "pretrain": {"batch_size": 3, "retriever_learning_rate": 5.0e-5, "exchange": "auto"},
    "finetune": {"batch_size": 2},
}
# The same with all that is not in the paper. Nothing is held out: what is handed on is what was learned, not the start.
OTHERWISE: dict[str, dict[str, Any]] = {
    "bert": {"dropout": 0.0},
    "retriever": {"tower": "bag", "head": "cosine", "hybrid": True},
    "reader": {"copies": True, "apart": True},
    "ict": {"task": "crop", "batch_size": 4, "reader_batch_size": 3},
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
# What holds torch and oneDNN to less than the processor has. The options of small_project.py hold the precision:
# run.precision=auto asks the processor, whatever these say.
LESSER = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}


def torchrun(processes: int, *arguments: str | Path) -> list[str]:
    started = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m", "realmops"]
    return [sys.executable, *started, *map(str, arguments)]


def same_models(project: Path, model: str) -> None:
    """Those that one process trained and two."""
    files = sorted((project / "one/models" / model).rglob("*.safetensors"))
    assert len(files) >= 2
    for name in files:
        one, two = load_file(name), load_file(project / "two" / name.relative_to(project / "one"))
        assert one.keys() == two.keys()
        for key, tensor in one.items():
            torch.testing.assert_close(two[key], tensor, rtol=1e-4, atol=1e-5, msg=f"{name}: {key}")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project that was run by one process, and by two."""
    folder = tmp_path_factory.mktemp("together")
    run_together(small_project.write_project(folder, **TOGETHER), {folder / "one": 1, folder / "two": 2})
    return folder


@pytest.mark.parametrize("model", ["ict", "pretrain", "finetune"])
def test_two_processes_learn_what_one_learns(trained: Path, model: str) -> None:
    """Each took half of every batch; the batches of three and of two questions do not divide evenly over all steps."""
    same_models(trained, model)


@pytest.fixture(scope="module")
def otherwise(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus of the first project with other options, by one process and by two."""
    folder = tmp_path_factory.mktemp("otherwise")
    params = small_project.write_project(folder, **OTHERWISE)
    for name in ("one", "two"):
        shutil.copytree(trained / "one/data", folder / name / "data")
    run_together(params, {folder / "one": 1, folder / "two": 2})
    return folder


@pytest.mark.parametrize("model", ["ict", "pretrain", "finetune"])
def test_two_processes_learn_what_one_learns_otherwise(otherwise: Path, model: str) -> None:
    """Crops, a reader apart, words beside embeddings, batches of passages, windows; no batch divides evenly."""
    same_models(otherwise, model)
    one, two = (small_project.journal(otherwise / root / "models" / model) for root in ("one", "two"))
    for line, other in zip(one, two, strict=True):
        names = [name for name in line if name.endswith("loss") and name not in ("crop_loss", "span_loss")]
        assert names
        assert all(other[name] == pytest.approx(line[name], abs=1e-4) for name in names)
    if model == "pretrain":
        assert sum("crop_loss" in line for line in one) == 4, "from the step on at which the retriever learns"
        metrics = json.loads((otherwise / "two/models/pretrain/metrics.json").read_text())
        assert metrics["best_step"] == 6
        assert not {"hit_at_5_after", "masked_log_p"} & metrics.keys(), "nothing is held out"


def test_frozen_words_stay(otherwise: Path) -> None:
    models = otherwise / "one/models"
    before, after = (small_project.model_tensors(models / name, "reader") for name in ("pretrain", "finetune"))
    same = {name.partition("embeddings.")[2] for name in before if torch.equal(before[name], after[name])}
    assert "word_embeddings.weight" in same
    assert "position_embeddings.weight" not in same


def test_two_processes_learn_what_one_learns_on_a_lesser_processor(trained: Path, tmp_path: Path) -> None:
    """Whose sums are rounded elsewhere: what nothing but rounding decides comes out differently on one of them."""
    if (here := torch.backends.cpu.get_cpu_capability()) not in ("AVX2", "AVX512"):
        pytest.skip(f"not run: torch has no more than {here} here")
    for name in ("one", "two"):
        shutil.copytree(trained / "one/data", tmp_path / name / "data")
    run_together(trained / "params.yaml", {tmp_path / "one": 1, tmp_path / "two": 2}, **LESSER)
    for model in ("ict", "pretrain", "finetune"):
        same_models(tmp_path, model)
    held, free = (folder / "one/models/finetune/reader/model.safetensors" for folder in (tmp_path, trained))
    assert held.read_bytes() != free.read_bytes(), "the variables change nothing"


def test_one_journal_is_written_and_its_loss_is_that_of_the_whole_batch(trained: Path) -> None:
    for model in ("ict", "pretrain", "finetune"):
        one, two = (small_project.journal(trained / root / "models" / model) for root in ("one", "two"))
        for line, other in zip(one, two, strict=True):
            assert line["step"] == other["step"]
            names = [name for name in line if name in ("loss", "reader_loss")]
            assert names
            assert all(other[name] == pytest.approx(line[name], abs=1e-4) for name in names)
    one, two = (json.loads((trained / root / "models/pretrain/metrics.json").read_text()) for root in ("one", "two"))
    assert two["refreshes"] == one["refreshes"] > 0
    assert two["best_step"] == one["best_step"] > 0, "what is handed on was trained"


def test_nothing_is_left_of_those_that_helped(trained: Path) -> None:
    assert small_project.litter(trained / "two") == []
    assert not list((trained / "two/.realmops").rglob("*.safetensors"))


def test_a_killed_training_of_two_goes_on_to_the_same_weights(trained: Path) -> None:
    """Killed under torchrun, which ends what one of its processes left."""
    root = trained / "killed"
    shutil.copytree(trained / "two", root, ignore=shutil.ignore_patterns("pretrain", "finetune"))
    arguments = ["run", "all", "--params", trained / "params.yaml", "--root", root]
    process = subprocess.Popen(torchrun(2, *arguments), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    small_project.wait_for(lambda: list(root.glob(".realmops/work/*/exchange/checkpoints/v-*")), 100)
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(workers[1]), signal.SIGKILL)
    assert process.wait() != 0
    assert not (root / "models/pretrain").exists()
    run_together(trained / "params.yaml", {root: 2}, stage="pretrain")
    said = root.with_suffix(".log").read_text()
    assert said.count("pre-training: 12 of 12") == 1, said
    for path in (trained / "two/models/pretrain").rglob("*.safetensors"):
        assert (root / path.relative_to(trained / "two")).read_bytes() == path.read_bytes(), path.name


def test_a_pod_starts_the_processes_that_it_is_told_to(
    trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = json.dumps(config.load_params(trained / "params.yaml"))
    manifest, metrics = Output(trained / "manifest"), Output(trained / "metrics")
    (tmp_path / "tokenizers.py").write_text("raise AssertionError('imported from the folder that the pod starts in')\n")
    monkeypatch.chdir(tmp_path)
    tasks.run_stage("ict", options, str(trained / "two"), manifest, metrics, processes=2)
    assert metrics.shown == json.loads((trained / "metrics").read_text())
    assert "ict: nothing to do" in capfd.readouterr().err
    for code in (2, 1):  # what is missing is found before processes start; torchrun's own code where one of them fails
        with pytest.raises(SystemExit) as error:
            tasks.run_stage("ict", options, str(trained / "nowhere"), manifest, metrics, processes=2)
        assert error.value.code == code
        monkeypatch.setattr(tasks, "_reuse_output", lambda *_: None)


class Helper(ProcessGroup):
    """One that helped, alone: waits for nobody, and all that it is sent is 0, its parameters apart."""

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if not tensor.requires_grad:
                tensor.zero_()

    def broadcast_numbers(self, numbers: Sequence[float], device: torch.device) -> list[float]:
        return list(numbers)


@pytest.mark.parametrize(
    "changes",
    [
        {"finetune": {"retriever": "ict"}},
        {"finetune": {"retriever": "path", "reader": "ict"}},
        {"finetune": {"reader": "t5"}, "closed_book": {"steps": 1, "epochs": 1}},
        {"tag": {"method": "tagger"}},
        {"tag": {"method": "dates"}},
    ],
    ids=["dense", "path", "t5", "tagger", "dates"],
)
def test_those_that_helped_write_and_answer_nothing(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, dict[str, Any]]
) -> None:
    name = next(iter(changes))
    helper = Helper(1, 1)
    for module in (common, parallel, stages_finetune, finetune_retriever):
        monkeypatch.setattr(module, "process_group", lambda: helper)
    values = small_project.toy_values(**changes)
    inputs = stage_inputs(STAGES[name], values, trained, trained / "one")
    out, work = tmp_path / "out", tmp_path / "work"
    out.mkdir()
    work.mkdir()
    with Journal(work / JOURNAL, name) as journal:
        sections = parse_sections(STAGES[name], values)
        assert STAGES[name].run(Job(sections, inputs, out, work, journal, small_project.Quiet(), work / "offer")) == {}
    assert not list(out.iterdir())
    assert [file.name for file in work.iterdir()] == [JOURNAL]


@dataclass(frozen=True)
class Posted(ProcessGroup):
    """One of several processes that run one after the other: what the first one sends waits for the others."""

    post: list[Any] = field(default_factory=list)

    def broadcast_numbers(self, numbers: Sequence[float], device: torch.device) -> list[float]:
        if self.is_main_process:
            self.post.append(list(numbers))
        return self.post[0]

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        if self.is_main_process:
            self.post.append(list(tensors))
        for tensor, sent in zip(tensors, self.post[1], strict=True):
            tensor.detach().copy_(sent.detach())


def test_embeddings_are_sent_through_host_memory(world: World) -> None:
    """``meta`` stands for a GPU: the embeddings of an approximate index would not fit there."""
    embedding_PE = torch.arange(10.0).view(5, 2)
    made_from, learning = tiny_models(world)[0], tiny_models(world, seed=1)[0]
    post: list[Any] = []

    class Source:
        def at_step(self, step: int, retriever: Retriever) -> IndexGeneration:
            return IndexGeneration(step, embedding_PE, made_from, 7.0, True)

    gpu = torch.device("meta")
    build = lambda embedding_PE, _: ExactIndex(embedding_PE)  # noqa: E731
    SharedIndexSource(Posted(0, 2, post), Source(), gpu, build).at_step(3, learning)
    adopted = SharedIndexSource(Posted(1, 2, post), None, gpu, build).at_step(3, learning)
    assert (adopted.step, adopted.published, adopted.new) == (3, 7.0, True)
    assert adopted.passages.embedding_PE.device.type == "cpu"
    assert torch.equal(adopted.passages.embedding_PE, embedding_PE)
    for name, parameter in adopted.retriever.named_parameters():
        assert torch.equal(parameter, made_from.get_parameter(name))


@pytest.fixture
def one_of_two(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """This process is torchrun's first one of two on a machine with one GPU; what it does to join is written down."""
    done: list[str] = []
    for name, value in (("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: done.append(f"GPU {gpu}"))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, timeout: done.append(backend))
    monkeypatch.setattr(atexit, "register", lambda function: None)
    return done


def test_more_processes_than_gpus_are_refused(one_of_two: list[str], tmp_path: Path) -> None:
    values = small_project.toy_values(run={"device": "cuda"})
    wanted = r"started 2 processes on this machine, .* torch finds 1 GPUs; .*--nproc-per-node=1, or set run.device=cpu"
    with pytest.raises(ValueError, match=wanted):
        small_project.stage("ict", values, tmp_path, tmp_path / "root")
    assert one_of_two == []
    assert not list(tmp_path.iterdir())


def test_processes_on_cpus_touch_no_gpu(one_of_two: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    join_process_group(torch.device("cpu"))
    assert one_of_two == ["gloo"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    join_process_group(torch.device("cuda"))
    assert one_of_two == ["gloo", "GPU 0", "cpu:gloo,cuda:nccl"]


def test_shares_of_a_batch_give_its_mean() -> None:
    batch, weights = ["a", "b", "c", "d", "e"], [1.0, 2.0, 3.0, 4.0, 5.0]
    assert ProcessGroup().split_batch(batch) == (batch, 1.0)
    assert ProcessGroup(0, 2).split_batch(batch) == (["a", "c", "e"], 2 * 3 / 5)
    assert ProcessGroup(1, 2).split_batch(batch) == (["b", "d"], 2 * 2 / 5)
    assert ProcessGroup(1, 2).split_batch(batch, weights) == (["b", "d"], 2 * 6 / 15)
    assert ProcessGroup(2, 3).split_batch(["a", "b"]) == (["a"], 0.0)


def test_a_batch_too_small_for_all_is_refused(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "process_group", lambda: ProcessGroup(0, 5))
    shutil.copytree(trained / "one/data", trained / "five/data")
    with pytest.raises(ValueError, match=r"too small for 5 processes: ict.batch_size is 4 and the corpus has "):
        small_project.stage("ict", small_project.toy_values(**TOGETHER), trained, trained / "five")
