"""Saved views of an experiment in MLflow's UI, with columns and charts."""

import json
import time
from pathlib import Path

from realmops.config_yaml import parse_yaml


def view_url(view: str) -> str:
    """Return the URL of a view of :func:`experiment_tags` in ``mlflow ui``; a new database's first experiment is 1."""
    return f"http://127.0.0.1:5000/#/experiments/1/runs?viewStateShareKey={view}"


def experiment_tags() -> dict[str, str]:
    """Return the experiment tags that MLflow's UI reads: its kind, and the saved views above the list of runs."""
    path, now = Path(__file__).with_suffix(".yaml"), int(time.time() * 1000)
    content = parse_yaml(path.read_bytes(), path)
    columns, charts = content["columns"], [{**content["chart"], **chart} for chart in content["charts"]]
    state = {"selectedColumns": [*columns], "columnOrder": [*columns], "columnWidths": columns} | content["state"]
    tags = {"mlflow.experimentKind": "custom_model_development"}  # selects the page that compares training runs
    for key, view in content["views"].items():
        saved = {"name": view["name"], "createdAt": now, "updatedAt": now}
        saved["state"] = json.dumps({**state, "compareRunCharts": charts, **view["rows"]})
        tags[f"mlflow.sharedViewState.{key}"] = json.dumps(saved)
    return tags
