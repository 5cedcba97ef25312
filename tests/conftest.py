from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tiny import World

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported first
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tests run beside each other: one thread each, whatever the test before chose."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Twelve documents, their snapshot and spans."""
    from tiny import build_world

    folder: Path = tmp_path_factory.mktemp("tiny")
    return build_world(folder)


@pytest.fixture(scope="session")
def mlflow_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty MLflow database to copy: making one takes seconds."""
    from realmops.tracking import _mlflow_client

    database = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    _mlflow_client(f"sqlite:///{database}").search_experiments()
    return database
