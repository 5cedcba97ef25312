"""A whole project, so small that a stage takes seconds: the documents of ``small_world`` with questions."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from click.testing import CliRunner, Result
from forked import Forked, forked_builders, realmops
from safetensors.torch import load_file
from small_world import DOCUMENTS, write_documents
from torch import Tensor

from realmops import artifacts, config
from realmops.cli import main
from realmops.commands.run import run_stages
from realmops.config import parse_options
from realmops.evaluate.predictions import read_predictions, write_predictions
from realmops.model.retriever_files import DESCRIPTION
from realmops.options import Options
from realmops.stages import planned_steps
from realmops.stages.runner import run_stage
from realmops.train.index_source import ExchangeSource

QUESTIONS = {
    "train": (
        ("Where was the poet Anna Berg born?", "Oslo"), ("Who wrote The Cold Sea?", "Anna Berg"),
        ("When did Maria Holm die?", "1972"), ("Until when did Karl Lund live in Bergen?", "1950"),
        ("In which country is Fjell?", "Norway"), ("Who sang in The Red Door?", "Maria Holm"),
    ),
    "dev": (("Who built The Star?", "Jon Vik"), ("What is the capital of Norway?", "Oslo")),
    "test": (("Where did Jon Vik build ships?", "Bergen"), ("Who wrote a novel?", "Anna Berg")),
}  # fmt: skip
TAGGED = """Anna B-PER
Berg I-PER
was O
born O
in O
Oslo B-LOC

Karl B-PER
Lund I-PER
lived O
in O
Bergen B-LOC
"""
# The laptop profile made small; a fixed precision, so that every processor takes the same way.
SMALL: dict[str, dict[str, Any]] = {
    "run": {"precision": "fp32", "threads": 1, "checkpoint_every": 2},
    "bert": {"vocabulary": 150, "width": 16, "layers": 1, "heads": 2},
    "sample": {"subjects": 60},
    "snapshot": {"documents": "documents.jsonl", "warmup": ""},
    "questions": {split: f"questions.{split}.jsonl" for split in QUESTIONS},
    "tag": {"method": "given", "train": "tagged.conll", "dev": "tagged.conll", "steps": 4},
    "retriever": {"embedding_width": 8},
    "ict": {"steps": 4, "batch_size": 4, "reader_steps": 4, "reader_batch_size": 4},
    "pretrain": {
        "steps": 12, "batch_size": 2, "candidates": 3, "retriever_delay": 2, "refresh_every": 4, "lag": 2,
        "shard_rows": 5, "builder_timeout": 120, "masked_sentences": 6,
    },
    "finetune": {"epochs": 2, "batch_size": 2, "retriever_candidates": 8},
    "tracking": {"enabled": False},
}  # fmt: skip
# Lengths for an encoder of 64 positions.
SHORT: dict[str, dict[str, Any]] = {
    "bert": {"positions": 64},
    "pretrain": {"reader_wordpieces": 64},
    "finetune": {"query_wordpieces": 32, "reader_wordpieces": 64},
}


def toy_values(**changes: Mapping[str, Any]) -> Options:
    """All options, made small, with changes."""
    return parse_options(("small_project.py", SMALL), ("the test", changes))


def write_params(path: Path, options: Options) -> Path:
    path.write_text(yaml.safe_dump(options.model_dump(), sort_keys=False))
    return path


def write_json_lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def question_records(split: str) -> list[dict[str, Any]]:
    """The questions of a split as in its file; those of dev ten times, as many as a calibration needs."""
    pairs = QUESTIONS[split] * (10 if split == "dev" else 1)
    return [{"id": f"{split}-{n}", "question": q, "answers": [a]} for n, (q, a) in enumerate(pairs)]


def write_project(folder: Path, **changes: Mapping[str, Any]) -> Path:
    """Documents, questions, tagged sentences and params in a folder; returns the params file."""
    write_documents(folder / "documents.jsonl")
    for split in QUESTIONS:
        write_json_lines(folder / f"questions.{split}.jsonl", question_records(split))
    (folder / "tagged.conll").write_text(TAGGED)
    return write_params(folder / "params.yaml", toy_values(**changes))


def contents(folder: Path) -> dict[str, bytes]:
    """The files below a folder, hidden ones included."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write_text(project: Path, text: str) -> None:
    """Give Anna Berg this text; the file is replaced whole."""
    others = [{"title": title, "text": text} for title, text, _ in DOCUMENTS[1:]]
    new = write_json_lines(project / ".documents", [{"title": "Anna Berg", "text": text}, *others])
    new.rename(project / "documents.jsonl")


def cli(*arguments: str | Path) -> Result:
    """The command line in this process; an error that it does not explain itself is raised here."""
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def run_all_here(params: Path, root: Path, *settings: str, report: Quiet | None = None) -> list[str]:
    """The names of the stages that ``realmops run all`` runs, all in this process."""
    values = config.load_params(params, presets=[], settings=settings)
    places: dict[str, Any] = {"project": params.parent, "root": root, "report": report or Quiet()}
    with forked_builders():
        return [name for name, _ in run_stages(planned_steps(values), values, force=False, **places)]


def command(*arguments: str | Path) -> list[str]:
    """The command line as a process."""
    return [sys.executable, "-m", "realmops", *map(str, arguments)]


def run_command(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, env={**os.environ, **variables})


def group_exists(group: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, 0)
        return True
    return False


class Quiet:
    """A report that keeps its messages."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.warned: list[str] = []

    def log(self, message: str) -> None:
        self.said.append(message)

    def warn(self, message: str) -> None:
        self.warned.append(message)

    def progress(self, label: str, total: int, unit: str = "") -> Callable[[int], None]:
        return lambda units: None


def stage(name: str, options: Options, project: Path, root: Path, report: Quiet | None = None) -> dict[str, Any]:
    """Run one stage in this process."""
    with forked_builders():
        return run_stage(name, options, project=project, root=root, report=report or Quiet())


@contextlib.contextmanager
def builder_beside(exchange: Path, corpus: Path) -> Iterator[None]:
    """An index builder in a forked process, until the trainer has finished."""
    builder = realmops("index-builder", "--exchange", exchange, "--snapshot", corpus)
    try:
        yield
        assert builder.wait(60) == 0
    finally:
        builder.kill()
        print(builder.communicate()[1])  # shown where a test fails


@contextlib.contextmanager
def stopped_at(step: int, look: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Let pretrain call ``look`` and then end at a step, as if it were killed there."""

    class Stopped(BaseException):
        pass

    usual = ExchangeSource.at_step

    def at_step(self: ExchangeSource, at: int, retriever: Any) -> Any:
        if at == step:
            look()
            raise Stopped
        return usual(self, at, retriever)

    with mock.patch.object(ExchangeSource, "at_step", at_step), contextlib.suppress(Stopped):
        yield
        raise AssertionError("it went on")


def trained_project(folder: Path, **changes: Mapping[str, Any]) -> Path:
    """A project whose stages are done up to pretrain, which took no step."""
    params = write_project(folder, pretrain={"steps": 0, "builder": "external"}, **changes)
    values = config.load_params(params)
    for name in ("snapshot", "tag", "ict", "pretrain"):
        stage(name, values, folder, folder / "root")
    return folder


def answered(results: Path, right: int) -> None:
    """Make these results as if the run had answered so many questions, the first ones."""
    manifest, metrics = (artifacts.read_json(results / file) for file in ("manifest.json", "metrics.json"))
    rows = read_predictions(results / "predictions.parquet")
    rows = [replace(row, em=n < right) for n, row in enumerate(rows)]
    write_predictions(results / "predictions.parquet", rows)
    artifacts.write_json(results / "metrics.json", {**metrics, "em": min(right / len(rows), 1.0)})
    artifacts.write_manifest(results, "evaluate", **{key: manifest[key] for key in ("fingerprint", "sections")})


def model_files(folder: Path) -> dict[str, bytes]:
    """The bytes of descriptions, weights and embeddings in a folder of models and below it, by their paths."""
    files = [path for path in sorted(folder.rglob("*")) if path.name == DESCRIPTION or path.suffix == ".safetensors"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def model_tensors(folder: Path, part: str) -> dict[str, Tensor]:
    """The parameters of a folder's retriever or reader, each after the name of its file's folder."""
    return {
        (path.relative_to(folder).parent / name).as_posix(): tensor
        for path in sorted((folder / part).rglob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def journal(folder: Path) -> list[dict[str, Any]]:
    """The lines of a finished stage's journal."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def without_clock(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k != "time" and not k.endswith("seconds")} for line in lines]


def litter(root: Path) -> list[Path]:
    """Hidden files and folders under a root, other than the folder of unfinished work."""
    return [p for p in root.rglob(".*") if p != root / ".realmops" and root / ".realmops" not in p.parents]


def wait_for(what: Callable[[], Any], seconds: float, process: subprocess.Popen[str] | Forked | None = None) -> Any:
    """Return the result of ``what`` once it is true; a busy machine has ten times the ``seconds``."""
    seconds *= 10
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, f"nothing came within {seconds} s"
        assert process is None or process.poll() is None, process.communicate() if process else None
        time.sleep(0.005)
    return found
