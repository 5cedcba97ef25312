"""The table that ``make run`` ends with."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from realmops import artifacts
from realmops.evaluate.predictions import read_results, results_file
from realmops.evaluate.run_report import FigureTable, figure_tables
from realmops.stages import METRICS, STAGES
from realmops.tracking.client import default_uri
from realmops.tracking.mlflow_views import view_address
from realmops.tracking.runs import tracking_folder

if TYPE_CHECKING:
    from rich.table import Table


def summary(root: Path) -> Iterator[Table | str]:
    """The results under ``root``, and the commands that people want next; ValueError when there are none."""
    metrics = metrics_under(root)
    if not metrics:
        raise ValueError(f"{root.resolve()} holds no results; run 'make run' or 'realmops run all' there first")
    yield from (table.for_console() for table in figure_tables(metrics))
    if presets := presets_of(root):
        yield f"Presets:  {', '.join(presets)}"
    page = page_under(root)
    if page.is_file():
        yield f"The report, which opens without a network:  {page}"
    if find_spec("mlflow") is not None:
        yield f"Compare runs in the browser:  {browser_command(root)}"
        yield f"and there, with their figures:  {view_address('realmops-runs')}"
    yield from how_to_ask(root)


def metrics_under(root: Path) -> dict[str, dict[str, Any]]:
    """What each stage under ``root`` has measured."""
    paths = {stage.name: root / stage.folder / METRICS for stage in STAGES.values()}
    return {name: artifacts.read_json(path) for name, path in paths.items() if path.is_file()}


def seconds_table(names: Iterable[str], root: Path) -> Table:
    """Return a table of the seconds that each stage under ``root`` took when it last ran, and of their sum."""
    metrics = metrics_under(root)
    seconds = {name: metrics[name]["seconds"] for name in names}
    rows = [(name, f"{value:,.1f}") for name, value in seconds.items()]
    total = ("sum", f"{sum(seconds.values()):,.1f}")
    return FigureTable("Stages, when they last ran", ("stage", "seconds"), (rows, (total,))).for_console()


def presets_of(root: Path) -> list[str]:
    """The presets that the results come from, by name."""
    record = root / STAGES["evaluate"].folder / artifacts.MANIFEST
    found: list[str] = artifacts.read_json(record).get("presets", []) if record.is_file() else []
    return found


def page_under(root: Path) -> Path:
    return root / STAGES["evaluate"].folder / "report.html"


def browser_command(root: Path) -> str:
    """What shows the MLflow runs under ``root``, with the mlflow of this environment, which need not be on the PATH."""
    return f"{_command('mlflow')} ui --backend-store-uri {default_uri(tracking_folder(root))}"


def how_to_ask(root: Path) -> Iterator[str]:
    """The commands that answer questions; none for a model that reads nothing.

    The first has one of the test questions, unless these were made from the corpus, which nobody would ask.
    """
    if not results_file(root).is_file():
        return
    first = next((one.question for one in read_results(root) if one.passage_ids), None)
    if first is None:
        return
    if metrics_under(root)["evaluate"].get("cloze_questions"):
        first = "A question of your own?"
    where = "" if root.resolve() == Path.cwd() else f" --root {shlex.quote(str(root))}"
    yield f"Ask, every answer with its source:  {_command('realmops')} ask {shlex.quote(first)}{where}"
    yield f"The same over HTTP:  {_command('realmops')} serve{where}"


def _command(name: str) -> Path:
    """A program of this environment."""
    command = Path(sys.executable).parent / name
    return command.relative_to(Path.cwd()) if command.is_relative_to(Path.cwd()) else command
