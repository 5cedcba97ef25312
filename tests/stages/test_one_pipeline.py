"""One pipeline: the stages as data, dvc.yaml, params.yaml, the presets and the command line say the same."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import yaml
from small_encoders import write_encoder
from small_project import cli, stage, toy_values, write_project
from torch import nn

from realmops import config, process
from realmops.devices import device_and_dtype
from realmops.options import Options, RunOptions
from realmops.search import approximate
from realmops.stages import STAGES, Job, Stage, files_in_use, runner, stage_options, stages_to_run
from realmops.stages.common import index_options
from realmops.train import parallel

ROOT = Path(__file__).parents[2]
PARAMS = ROOT / "params.yaml"
PIPELINE: dict[str, Any] = yaml.safe_load((ROOT / "dvc.yaml").read_text())
ALL_STAGES = ("tracking",)  # sections of the runner, which change no output


# dvc.yaml


def test_dvc_yaml_has_the_stages_and_nothing_else() -> None:
    values = config.load_params(PARAMS)
    wanted = {
        name: {
            "cmd": f"realmops run {name}",
            "deps": [
                *(STAGES[need].folder for need in one.needs),
                # DVC refuses an empty path, and snapshot.warmup may be empty
                *(f"${{{key}}}" for key in files_in_use(one, values) if key != "snapshot.warmup"),
            ],
            "params": ["presets", *one.sections, *one.options],
            "outs": [{one.folder: {"persist": True}}],  # or DVC removes what realmops run has made
        }
        for name, one in STAGES.items()
    }
    assert {name: {"deps": [], **entry} for name, entry in PIPELINE["stages"].items()} == wanted
    assert list(PIPELINE["stages"]) == list(STAGES)


def test_dvc_goes_on_with_what_realmops_run_has_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a stage whose options changed replaces its folder; of the retriever's, the snapshot's is the encoder."""
    params = write_project(tmp_path)
    params.write_text(f"presets: []\n{params.read_text()}")
    (tmp_path / "dvc.yaml").write_bytes((ROOT / "dvc.yaml").read_bytes())
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)

    def dvc(*words: str) -> str:
        told = subprocess.run(["dvc", *words], capture_output=True, text=True)
        assert told.returncode == 0, told.stdout + told.stderr
        return told.stdout

    manifest = tmp_path / "data/snapshot/corpus/manifest.json"
    dvc("init", "--no-scm")
    for name in ("sample", "snapshot"):
        assert cli("run", name).exit_code == 0
    made = manifest.stat().st_ino, manifest.read_bytes()
    dvc("repro", "snapshot")
    assert (manifest.stat().st_ino, manifest.read_bytes()) == made
    assert cli("params", "--set", "snapshot.block_wordpieces=60", "--write").exit_code == 0
    dvc("repro", "snapshot")
    assert manifest.read_bytes() != made[1]
    for change, told in (("pooling=mean", "up to date"), ("init=some/encoder", "retriever.init")):
        assert cli("params", "--set", f"retriever.{change}", "--write").exit_code == 0
        assert told in dvc("status", "snapshot")


def test_metrics_and_plots_of_dvc_yaml_lie_in_outputs_of_stages() -> None:
    folders = {Path(one.folder) for one in STAGES.values()}
    plots = [path for plot in PIPELINE["plots"] for entry in plot.values() for path in entry["y"]]
    assert plots
    for path in (*PIPELINE["metrics"], *plots):
        assert folders & set(Path(path).parents), path


# The stages among themselves and the command line


def test_the_tagger_is_left_out_where_nothing_reads_spans() -> None:
    """The reader's warm start, REALM and made questions read them."""
    idle = {"ict": {"reader_steps": 0}, "pretrain": {"steps": 0}}
    made = {"questions": {"train": "data/cloze/questions.train.jsonl"}}
    assert stages_to_run(toy_values(**idle)) == ("snapshot", "ict", "pretrain", "finetune", "evaluate")
    for changes in ({}, idle | {"pretrain": {"steps": 1}}, idle | {"ict": {"reader_steps": 1}}, idle | made):
        assert "tag" in stages_to_run(toy_values(**changes)), changes


# params.yaml and the presets


def test_params_yaml_has_the_sections_of_the_stages_each_key_with_a_comment() -> None:
    text = PARAMS.read_text()
    sections = {s for one in STAGES.values() for s in (*one.sections, *(key.partition(".")[0] for key in one.options))}
    assert yaml.safe_load(text).keys() == sections | {"presets", *ALL_STAGES}
    assert [line for line in text.splitlines() if re.match(r"  \w+:", line) and "  # " not in line] == []


# A stage reads the sections that it declares, all of them and no other


class Recording(dict[str, Any]):
    """A mapping that remembers which keys were read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)


def test_a_stage_is_given_its_sections_and_no_other() -> None:
    for one in STAGES.values():
        assert tuple(stage_options(one, toy_values())) == (*one.sections, *one.options)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    write_project(folder)
    return folder


VALUES = toy_values(tag={"method": "tagger"}, pretrain={"steps": 1})


@pytest.fixture(scope="module")
def read(project: Path) -> dict[str, set[str]]:
    """Return the options that the work of each stage has read, those of its files included; all stages run."""
    read: dict[str, set[str]] = {}
    jobs: list[Recording] = []

    def parse(one: Stage, options: Options) -> Recording:
        jobs.append(Recording(stage_options(one, options)))
        return jobs[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("realmops.stages.runner.stage_options", parse)
        for name in STAGES:
            stage(name, VALUES, project, project / "root")
            read[name] = jobs[-1].read | {key.partition(".")[0] for key in STAGES[name].files}
    return read


def test_a_stage_reads_every_section_and_option_that_it_declares(read: dict[str, set[str]]) -> None:
    """But for the section of a reader that reads no passages, where that is not the reader."""
    assert read == {name: {*one.sections, *one.options} - {"closed_book"} for name, one in STAGES.items()}


class Runs(Exception):
    """A stage is not up to date."""


def refuse(*_: Any) -> Any:
    raise Runs


@pytest.mark.usefixtures("read")
def test_of_the_retriever_snapshot_and_tagger_depend_on_its_encoder_alone(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("realmops.stages.Stage.run", refuse)
    folder = write_encoder(tmp_path, "bert")
    changes = {"pooling": "mean", "head": "cosine", "init": str(folder)}
    started: dict[str, set[str]] = {}
    for key, value in changes.items():
        values = VALUES.replace({f"retriever.{key}": value})
        started[key] = {
            name
            for name in STAGES
            if not finishes(lambda n=name, v=values: stage(n, v, project, project / "root"), Runs)
        }
    assert started == {"pooling": {"ict"}, "head": {"ict"}, "init": {"snapshot", "tag", "ict"}}


@pytest.mark.usefixtures("read")
def test_every_file_that_a_stage_reads_counts_for_what_is_made_from_it(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Change one byte of each external file: the stages that name it run again, no other."""
    monkeypatch.setattr("realmops.stages.Stage.run", refuse)
    keys = {key for one in STAGES.values() for key in one.files if (project / VALUES.get(key)).is_file()}
    assert keys == {"snapshot.documents", "questions.train", "questions.dev", "questions.test", "tag.train", "tag.dev"}
    for key in sorted(keys):
        path = project / VALUES.get(key)
        content = path.read_bytes()
        same = {k for k in keys if VALUES.get(k) == VALUES.get(key)}
        path.write_bytes(content + b"\n")
        started = {
            name for name in STAGES if not finishes(lambda n=name: stage(n, VALUES, project, project / "root"), Runs)
        }
        path.write_bytes(content)
        assert started == {name for name, one in STAGES.items() if same & set(one.files)}, key


def finishes(work: Callable[[], Any], error: type[Exception]) -> bool:
    try:
        work()
    except error:
        return False
    return True


def use_machine(
    monkeypatch: pytest.MonkeyPatch, *, bf16: bool, amx: bool, gpu: bool, threads: int, memory: int
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(approximate, "device_memory", lambda device: memory)
    monkeypatch.setenv("OMP_NUM_THREADS", str(threads))


def test_a_resumed_stage_keeps_what_another_machine_would_decide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, ...]] = []

    def see(self: Stage, job: Job) -> dict[str, Any]:
        run, wide, narrow = job.section(RunOptions), nn.Linear(256, 256), nn.Linear(8, 8)
        dtypes = [device_and_dtype(run, model)[1] for model in (wide, narrow)]
        seen.append((run.device, *dtypes, index_options(job, 10_000, 128, torch.device("cpu")).type))
        return {}

    def decide(name: str) -> tuple[Any, ...]:
        work = tmp_path / name
        work.mkdir(exist_ok=True)
        job = Job(stage_options(STAGES["pretrain"], values), {}, work, work, Mock(), Mock(), work)
        runner._run_tuned(STAGES["pretrain"], values, job)
        return seen[-1], threads[-1]

    values, threads = Options(), list[int]()
    monkeypatch.setattr(Stage, "run", see)
    monkeypatch.setattr(process, "configure_process", threads.append)
    amx = (("cpu", torch.bfloat16, torch.float32, "exact"), 2)
    plain = (("cpu", torch.float32, torch.float32, "pq"), 3)
    use_machine(monkeypatch, bf16=True, amx=True, gpu=False, threads=2, memory=1 << 40)
    assert decide("first") == amx
    use_machine(monkeypatch, bf16=False, amx=False, gpu=False, threads=3, memory=1 << 20)
    assert decide("second") == plain
    assert decide("first") == amx
    use_machine(monkeypatch, bf16=True, amx=False, gpu=True, threads=4, memory=1 << 40)
    assert decide("second") == plain
    assert decide("third") == (("cuda", torch.bfloat16, torch.bfloat16, "exact"), 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"machine.json: the stage began on a GPU, and torch finds none here: run it"):
        decide("third")
    posted: list[list[float]] = []

    class OneAfterTheOther(parallel.ProcessGroup):
        def broadcast_numbers(self, numbers: Sequence[float], device: torch.device) -> list[float]:
            posted.append([*numbers])
            return posted[0]

    monkeypatch.setattr(parallel, "process_group", lambda: OneAfterTheOther(0, 2))
    assert [decide(name) for name in ("first", "fourth")] == [amx, amx], "all processes decide as the first one"
    runner._remove_empty(tmp_path / "first")
    assert not (tmp_path / "first").exists(), "a stage that has nothing to resume begins again"
