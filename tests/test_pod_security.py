"""The pod security checker against what a real API server answered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pod_security import violations

FIXTURE = yaml.safe_load((Path(__file__).parent / "fixtures" / "pod_security.yaml").read_text(encoding="utf-8"))
CASES: list[dict[str, Any]] = FIXTURE["cases"]


def merged(target: Any, patch: Any) -> Any:
    """A JSON merge patch (RFC 7396)."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


def test_there_are_34_different_cases() -> None:
    assert len({case["case"] for case in CASES}) == len(CASES) == 34


@pytest.mark.parametrize("level", ["restricted", "baseline"])
@pytest.mark.parametrize("case", CASES, ids=[case["case"] for case in CASES])
def test_the_checker_gives_the_api_servers_verdict(case: dict[str, Any], level: str) -> None:
    pod = json.loads(json.dumps(FIXTURE["admitted"]))
    [container] = pod["containers"]
    pod = merged(pod, case.get("pod", {}))
    pod["containers"] = [merged(container, case.get("container", {}))]
    assert violations(pod, level) == set(case[level])
