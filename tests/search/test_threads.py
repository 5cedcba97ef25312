"""What threads share: searches at once give what one after another gives, and the process lives on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import small_project

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A snapshot of 40,000 short passages: its texts fill forty batches of the file."""
    folder = tmp_path_factory.mktemp("threads")
    small_project.write_project(folder)
    words = [f"word{number}" for number in range(400)]
    rng = np.random.default_rng(0)
    with open(folder / "documents.jsonl", "w") as file:
        for number, row in enumerate(rng.integers(0, len(words), (40_000, 8)).tolist()):
            text = f"Item{number} {' '.join(words[word] for word in row)}."
            file.write(json.dumps({"id": f"d{number}", "title": f"t{number % 97}", "text": text}) + "\n")
    result = small_project.cli("run", "snapshot", "--params", folder / "params.yaml", "--root", folder)
    assert result.exit_code == 0, result.output
    return folder


def test_threads_that_search_at_once_find_what_one_thread_finds(root: Path) -> None:
    program = [sys.executable, str(TESTS / "concurrent_searches.py"), str(root), "40"]
    result = subprocess.run(program, capture_output=True, text=True, check=False)
    assert result.returncode == 0, (result.returncode, result.stderr[-2000:])
