"""The table that ``make run`` ends with."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from realmops import artifacts
from realmops.evaluate.report import compared_table, summary_table
from realmops.stages import METRICS, STAGES
from realmops.stages.runner import tracking_folder
from realmops.tracking import default_uri


def print_summary(root: Path) -> None:
    """Print the results under ``root`` and the two commands that people want next."""
    metrics = {}
    for stage in STAGES.values():
        path = root / stage.folder / METRICS
        if path.is_file():
            metrics[stage.name] = artifacts.read_json(path)
    if not metrics:
        raise ValueError(f"{root.resolve()} holds no results; run 'make run' or 'realmops run all' there first")
    console = Console(width=None if Console().is_terminal else 100)
    console.print(summary_table(metrics))
    if (compared := compared_table(metrics)) is not None:
        console.print(compared)
    page = root / STAGES["evaluate"].folder / "report.html"
    if page.is_file():
        print(f"The report, which opens without a network:  {page}")
    print(f"Compare runs in the browser:  {browser_command(root)}")


def browser_command(root: Path) -> str:
    """What shows the MLflow runs under ``root``, with the mlflow of this environment, which need not be on the PATH."""
    command = Path(sys.executable).parent / "mlflow"
    shown = command.relative_to(Path.cwd()) if command.is_relative_to(Path.cwd()) else command
    return f"{shown} ui --backend-store-uri {default_uri(tracking_folder(root))}"
