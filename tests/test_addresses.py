"""What is shown of an address."""

from pathlib import Path

import pytest
from small_project import run_command, write_project

from realmops.tracking.client import redacted


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:s3cret@host:5000/api", "http://host:5000/api"),
        ("postgresql://me:s3@cret@db/mlflow?password=s3cret", "postgresql://db/mlflow"),
        ("request to https://token@host/a?key=s3cret failed", "request to https://host/a failed"),
        ("retries exceeded with url: /api/2.0?token=s3cret (for", "retries exceeded with url: /api/2.0 (for"),
        ("Who wrote to a@b? I did.", "Who wrote to a@b? I did."),
    ],
)
def test_an_address_is_shown_without_its_secrets(text: str, shown: str) -> None:
    assert redacted(text) == shown


@pytest.mark.parametrize(
    "text", ["/" * (1 << 21), "a:'" * (1 << 20), "x//y?" * (1 << 19), "@" * (1 << 21), "?" * (1 << 21)]
)
def test_a_long_run_costs_no_more_than_its_length(text: str) -> None:
    """What looks at each mark again for each other one would take hours."""
    assert len(redacted(text)) <= len(text)


def test_a_server_that_is_away_leaves_no_password_in_the_output(tmp_path: Path) -> None:
    write_project(tmp_path)
    words = ["--params", tmp_path / "params.yaml", "--root", tmp_path / "root"]
    address = "http://somebody:s3cret@127.0.0.1:9"  # nobody listens at the port "discard"
    for name in ("snapshot", "tag", "ict"):
        done = run_command("run", name, *words, "--set", "tracking.enabled=true", MLFLOW_TRACKING_URI=address)
        assert done.returncode == 0, done.stderr
    assert "MLflow tracking" in done.stderr
    sync = run_command("sync", "--root", tmp_path / "root", MLFLOW_TRACKING_URI=address)
    for text in (done.stderr, sync.stdout, sync.stderr):
        assert "s3cret" not in text
        assert "somebody" not in text
    for path in (tmp_path / "root").rglob("*"):
        assert not path.is_file() or b"s3cret" not in path.read_bytes(), path
