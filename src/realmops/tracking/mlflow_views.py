"""What MLflow's UI shows: of an experiment saved views with columns and charts, of a run tables."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from realmops.artifacts import canonical_json

TABLE_ENDING = ".table.json"  # of an artifact that is shown as a table
_CHARTS = "realmops"
# What runs are compared by, with the width of its column; and curves, with the percentage by which they are smoothed.
_FIGURES = {"em": 100, "recall_at_5": 110, "zero_shot_recall_at_5": 160, "f1": 100}
_FIGURES |= {"index_staleness_steps": 165, "retrieval_utility": 120, "p_null": 100}
_CURVES = {"pretrain/retrieval_utility": 80, "pretrain/p_null": 0, "pretrain/staleness_steps": 0}


def view_address(view: str) -> str:
    """Where ``mlflow ui`` shows a view of :func:`experiment_tags`; 1 is the first experiment of a new database."""
    return f"http://127.0.0.1:5000/#/experiments/1/runs?viewStateShareKey={view}"


def experiment_tags() -> dict[str, str]:
    """What MLflow's UI reads from an experiment: its kind, and the entries of the menu "Views" above the runs.

    The columns of the list cannot be chosen in any other way: without a view it shows no figures.
    """
    # Any order but that of time shows runs that have a parent without it.
    variants = {"searchFilter": "tags.`realmops.kind` = 'variant'", "orderByKey": "metrics.`em`", "orderByAsc": False}
    group = {"aggregateFunction": "average", "groupByKeys": [{"mode": "tag", "groupByData": "realmops.variant"}]}
    return {
        "mlflow.experimentKind": "custom_model_development",  # the page that compares training runs
        **_view("realmops-runs", "Runs", {}),
        **_view("realmops-variants", "Ablation: means over seeds", {**variants, "groupBy": group}),
        **_view("realmops-seeds", "Ablation: every run", variants),
    }


def _view(key: str, name: str, rows: Mapping[str, Any]) -> dict[str, str]:
    """A view of the runs with our columns and charts, as MLflow's UI saves one; ``rows`` says which runs it shows."""
    widths = {"attributes.`Run Name`": 240} | {f"metrics.`{figure}`": width for figure, width in _FIGURES.items()}
    widths |= {"tags.`realmops.variant`": 130, "tags.`realmops.seed`": 120}
    parallel = {"selectedParams": ["ablation.variant"], "selectedMetrics": list(_FIGURES)[:3], "showAllRuns": True}
    state = {
        "selectedColumns": list(widths),
        "columnOrder": list(widths),
        "columnWidths": widths,
        "runsHiddenMode": "SHOW_ALL",
        "compareRunSections": [{"uuid": _CHARTS, "name": "REALM", "display": True, "isReordered": False}],
        "compareRunCharts": [
            _chart("PARALLEL", "all", **parallel),
            *(_chart("BAR", figure, metricKey=figure) for figure in list(_FIGURES)[:3]),
            *(
                _chart("LINE", name, metricKey=name, lineSmoothness=smoothness, useGlobalLineSmoothing=False)
                for name, smoothness in _CURVES.items()
            ),
        ],
        "isAccordionReordered": True,  # ours stay above the sections that the UI makes of all metrics
        **rows,
    }
    now = int(time.time() * 1000)
    saved = {"name": name, "createdAt": now, "updatedAt": now, "state": json.dumps(state)}
    return {f"mlflow.sharedViewState.{key}": json.dumps(saved)}


def _chart(kind: str, name: str, **options: Any) -> dict[str, Any]:
    shown = {"type": kind, "uuid": f"{kind}-{name}", "metricSectionId": _CHARTS, "runsCountToCompare": 100}
    return {**shown, "deleted": False, "isGenerated": False, **options}


def table_json(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Rows, at least one, as an artifact that MLflow shows as a table when its name has ``TABLE_ENDING``."""
    return canonical_json({"columns": list(rows[0]), "data": [list(row.values()) for row in rows]})
