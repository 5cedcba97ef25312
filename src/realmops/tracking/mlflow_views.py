"""Saved views of an experiment in MLflow's UI, with columns and charts."""

import json
import time
from collections.abc import Mapping
from typing import Any

_CHARTS = "realmops"
# Metrics that runs are compared by, with column widths in pixels; and curves, with their smoothing in per cent.
_FIGURES = {"em": 100, "recall_at_5": 110, "ndcg_at_10": 110, "zero_shot_recall_at_5": 160, "f1": 100}
_FIGURES |= {"index_staleness_steps": 165, "retrieval_utility": 120, "p_null": 100}
_CURVES = {"pretrain/retrieval_utility": 80, "pretrain/p_null": 0, "pretrain/staleness_steps": 0}


def view_url(view: str) -> str:
    """Return the URL of a view of :func:`experiment_tags` in ``mlflow ui``; a new database's first experiment is 1."""
    return f"http://127.0.0.1:5000/#/experiments/1/runs?viewStateShareKey={view}"


def experiment_tags() -> dict[str, str]:
    """Return the experiment tags that MLflow's UI reads: its kind, and the saved views above the list of runs.

    Only a view can set the columns of the list, which shows no metrics by default.
    """
    # Any order but the default, by time, lists child runs without their parent.
    variants = {"searchFilter": "tags.`realmops.kind` = 'variant'", "orderByKey": "metrics.`em`", "orderByAsc": False}
    group = {"aggregateFunction": "average", "groupByKeys": [{"mode": "tag", "groupByData": "realmops.variant"}]}
    return {
        "mlflow.experimentKind": "custom_model_development",  # selects the page that compares training runs
        **_view("realmops-runs", "Runs", {}),
        **_view("realmops-variants", "Ablation: means over seeds", {**variants, "groupBy": group}),
        **_view("realmops-seeds", "Ablation: every run", variants),
    }


def _view(key: str, name: str, rows: Mapping[str, Any]) -> dict[str, str]:
    """Return the tag of one saved view with our columns and charts; ``rows`` selects and groups its runs."""
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
        "isAccordionReordered": True,  # else the UI's automatic sections come first
        **rows,
    }
    now = int(time.time() * 1000)
    saved = {"name": name, "createdAt": now, "updatedAt": now, "state": json.dumps(state)}
    return {f"mlflow.sharedViewState.{key}": json.dumps(saved)}


def _chart(kind: str, name: str, **options: Any) -> dict[str, Any]:
    chart = {"type": kind, "uuid": f"{kind}-{name}", "metricSectionId": _CHARTS, "runsCountToCompare": 100}
    return {**chart, "deleted": False, "isGenerated": False, **options}
