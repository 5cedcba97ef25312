"""Tasks of the pipeline ``ablations``: one variant with every seed, and the table of all."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from realmops import artifacts
from realmops.cluster.task_context import Metrics, Output, load_options, task, write_metrics
from realmops.console import Console

if TYPE_CHECKING:
    from realmops.commands.ablate import Ablation


@task()
def variant(
    name: str,
    options: str,
    presets: list[str],
    settings: list[str],
    seeds: int,
    out: str,
    limits: str,
    metrics: Metrics,
) -> None:
    """Train and evaluate one variant of an ablation with every seed; :func:`table` writes table and MLflow runs."""
    from realmops.commands.ablate import mean_metrics, train

    report = Console()
    report.log(f"limits of this pod: {limits}")
    ablation = _ablation([name], options, presets, settings, seeds, out)
    if failures := train(ablation, jobs=1, report=report):
        raise ValueError("\n".join(failures.values()))
    metrics.metadata["variant"] = name  # the UI shows the same task name for all variants
    write_metrics(mean_metrics(ablation), metrics)


@task()
def table(
    variants: list[str],
    options: str,
    presets: list[str],
    settings: list[str],
    seeds: int,
    out: str,
    rows: Output,
    page: Output,
    metrics: Metrics,
) -> None:
    """Write the table of the reference and the variants trained so far, and their MLflow runs."""
    from realmops.commands.ablate import ablate
    from realmops.evaluate.ablation import REFERENCE, figure_table

    ablation = _ablation([REFERENCE, *variants], options, presets, settings, seeds, out)
    results, missing = ablate(ablation, jobs=1, report=Console(), existing_only=True)
    text = figure_table(results).to_markdown() if results else f"no table: the reference {REFERENCE} did not complete\n"
    text += "".join(f"\n{line}\n" for line in missing)
    artifacts.write_bytes(Path(rows.path), text.encode())
    html = (ablation.out / "report.html").read_bytes() if results else escape(text).encode()
    artifacts.write_bytes(Path(page.path), html)
    columns = {"em": "em", "zero_shot_recall_at_5": "recall_at_5", "em_difference": "em_difference"}
    figures = {f"{row['variant']}_{name}": row[column] for row in results for name, column in columns.items()}
    write_metrics(figures, metrics)


def _ablation(
    variants: list[str], options: str, presets: list[str], settings: list[str], seeds: int, out: str
) -> Ablation:
    from realmops.commands.ablate import Ablation

    if seeds < 1:
        raise ValueError(f"seeds is {seeds}; it must be at least 1")
    artifacts.make_folder(Path(out))
    params = Path(out) / "params.yaml"
    artifacts.write_json(params, load_options(options, out).model_dump())  # JSON is YAML; all pods write the same file
    return Ablation(params, presets, settings, [*dict.fromkeys(variants)], range(seeds), Path(out))
