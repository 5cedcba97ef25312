"""``realmops report``: the tables of results, and commands to continue with."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from realmops import artifacts
from realmops.evaluate.predictions import read_results, results_file
from realmops.evaluate.run_report import figure_tables, generated_note
from realmops.stages import METRICS, STAGES
from realmops.tracking.client import local_tracking_uri
from realmops.tracking.mlflow_views import view_url
from realmops.tracking.runs import tracking_folder

if TYPE_CHECKING:
    from rich.table import Table


def summary(root: Path) -> Iterator[Table | str]:
    metrics = read_metrics(root)
    if not metrics:
        raise ValueError(f"{root.resolve()} has no results; run 'make run' or 'realmops run all' there first")
    yield from (table.to_rich_table() for table in figure_tables(metrics))
    yield from generated_note(metrics.get("evaluate", {}))
    record = root / STAGES["evaluate"].folder / artifacts.MANIFEST
    if record.is_file() and (presets := artifacts.read_json(record).get("presets")):
        yield f"Presets:  {', '.join(presets)}"
    page = report_path(root)
    if page.is_file():
        yield f"Report (HTML, offline):  {page}"
    if find_spec("mlflow") is not None:
        yield f"Compare runs in the browser:  {browser_command(root)}"
        yield f"and open, with metrics as columns:  {view_url('realmops-runs')}"
    yield from ask_commands(root)


def read_metrics(root: Path) -> dict[str, dict[str, Any]]:
    paths = {stage.name: root / stage.folder / METRICS for stage in STAGES.values()}
    return {name: artifacts.read_json(path) for name, path in paths.items() if path.is_file()}


def report_path(root: Path) -> Path:
    return root / STAGES["evaluate"].folder / "report.html"


def browser_command(root: Path) -> str:
    return f"{_command('mlflow')} ui --backend-store-uri {local_tracking_uri(tracking_folder(root))}"


def ask_commands(root: Path) -> Iterator[str]:
    if results_file(root).is_file() and any(prediction.passage_ids for prediction in read_results(root)):
        option = "" if root.resolve() == Path.cwd() else f" --root {shlex.quote(str(root))}"
        yield f"Ask questions, with sources:  {_command('realmops')} ask 'Your question?'{option}"
        yield f"The same over HTTP:  {_command('realmops')} serve{option}"


def _command(name: str) -> Path:
    command = Path(sys.executable).parent / name
    return command.relative_to(Path.cwd()) if command.is_relative_to(Path.cwd()) else command
