"""Tasks of the pipeline ``ablations``: one variant with every seed, and the table of all."""

from __future__ import annotations

import json
from contextlib import suppress
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
    name: str, options: str, presets: str, settings: str, seeds: int, out: str, limits: str, metrics: Metrics
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
    presets: str,
    settings: str,
    seeds: int,
    out: str,
    rows: Output,
    page: Output,
    metrics: Metrics,
) -> None:
    """Write the table of the reference and the variants trained so far, and their MLflow runs.

    Args:
        variants: names of the variants, without the reference.
        options: params as JSON, the differences from the defaults.
        presets: names of presets for every variant, as a JSON list.
        settings: ``section.key=value`` for every variant, as a JSON list.
        seeds: number of seeds.
        out: folder of the ablation on the shared volume.
        rows: output artifact for the table, in Markdown.
        page: output artifact for the table with its curves, in HTML.
        metrics: output artifact for the metrics of each variant.
    """
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


def _ablation(variants: list[str], options: str, presets: str, settings: str, seeds: int, out: str) -> Ablation:
    from realmops.commands.ablate import Ablation

    if seeds < 1:
        raise ValueError(f"seeds is {seeds}; it must be at least 1")
    values = load_options(options, out)
    preset_names, overrides = _parse_names("presets", presets), _parse_names("overrides", settings)
    artifacts.make_folder(Path(out))
    params = Path(out) / "params.yaml"
    is_new = not params.exists()
    artifacts.write_json(params, values)  # JSON is YAML; all pods of an ablation write the same file
    ablation = Ablation(
        params,
        presets=preset_names,
        settings=overrides,
        variants=list(dict.fromkeys(variants)),
        seeds=range(seeds),
        out=Path(out),
    )
    try:
        _ = ablation.tasks  # validates every variant with its presets
    except ValueError:
        if is_new:
            params.unlink()
            with suppress(OSError):  # other pods have written there
                Path(out).rmdir()
        raise
    return ablation


def _parse_names(key: str, text: str) -> list[str]:
    try:
        names = json.loads(text)
    except ValueError:
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f'{key} is {text[:60]!r}; expected a JSON list of strings, for example ["ablation"]')
    return names
