from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fsspec.implementations.memory import MemoryFileSystem
    from small_world import World

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported first
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # as the Makefile: else each process compiles PyTorch
sys.dont_write_bytecode = False
LONGEST = ("test_pipeline_local", "test_parallel", "test_ablation", "test_pipelines_run")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take minutes, so that no worker is left with one at the end."""
    items.sort(key=lambda item: item.path.stem not in LONGEST)


def pytest_make_parametrize_id(val: object) -> str | None:
    """Leave bytes out of names: a gzip file holds the second of its making, and workers must collect equal names."""
    return "bytes" if isinstance(val, bytes) else None


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tests run beside each other: one thread each, whatever the test before chose."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture
def unlistable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders named "closed" cannot be listed; root may list any, so that no mode of a folder would do."""
    scandir = os.scandir

    def listed(folder: str) -> Iterator[os.DirEntry[str]]:
        if Path(folder).name == "closed":
            raise PermissionError(13, "Permission denied", folder)
        return scandir(folder)

    monkeypatch.setattr("os.scandir", listed)


@pytest.fixture
def memory() -> Iterator[MemoryFileSystem]:
    """The files of fsspec's ``memory://``, none at first."""
    from fsspec.implementations.memory import MemoryFileSystem

    fs = MemoryFileSystem()
    yield fs
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All numbers in double precision, also where they are made fp32."""
    import torch

    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Twelve documents, their snapshot and spans."""
    from small_world import build_world

    folder: Path = tmp_path_factory.mktemp("tiny")
    return build_world(folder)


@pytest.fixture(scope="session")
def mlflow_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty MLflow database to copy: making one takes seconds."""
    from realmops.tracking.client import mlflow_client

    database = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    mlflow_client(f"sqlite:///{database}").search_experiments()
    return database


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small project whose stages are done up to pretrain, which took no step; nobody changes it."""
    from small_project import trained_project

    return trained_project(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="session")
def answering(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fine-tuned model and its results; tests do not change it."""
    from serving import tuned

    return tuned(Path(shutil.copytree(trained, tmp_path_factory.mktemp("answering") / "project")))


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with all its stages over documents that have a field, ``team``, which holds no answer back; as it is."""
    import small_project

    folder = tmp_path_factory.mktemp("finished")
    params = small_project.write_project(folder, finetune={"wanted_precision": 0.0})
    documents = [json.loads(line) for line in (folder / "documents.jsonl").read_text().splitlines()]
    small_project.write_json_lines(
        folder / "documents.jsonl", [{**one, "team": "ab"[n % 2]} for n, one in enumerate(documents)]
    )
    small_project.run_all_here(params, folder)
    return folder


@pytest.fixture(scope="session")
def closed_book(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is fine-tuned as a T5, which reads no passages."""
    from serving import tuned

    project = Path(shutil.copytree(trained, tmp_path_factory.mktemp("closed-book") / "project"))
    return tuned(project, finetune={"reader": "t5"}, closed_book={"steps": 2, "epochs": 1})


@pytest.fixture
def copy(answering: Path, tmp_path: Path) -> Path:
    """A copy of that, to change it."""
    return Path(shutil.copytree(answering, tmp_path / "copy"))
