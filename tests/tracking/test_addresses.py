"""The address of a tracking server is shown without its secrets."""

import shutil
from pathlib import Path

from small_project import run_command


def test_a_server_that_is_away_leaves_no_password_in_the_output(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    words = ["--params", tmp_path / "params.yaml", "--root", tmp_path / "root", "--set", "tracking.enabled=true"]
    address = "http://somebody:s3cret@127.0.0.1:9"  # nobody listens at the port "discard"
    done = run_command("run", "ict", "--force", *words, MLFLOW_TRACKING_URI=address)
    assert done.returncode == 0, done.stderr
    assert "MLflow tracking" in done.stderr
    sync = run_command("sync", "--root", tmp_path / "root", MLFLOW_TRACKING_URI=address)
    for text in (done.stderr, sync.stdout, sync.stderr):
        assert "s3cret" not in text
        assert "somebody" not in text
    for path in (tmp_path / "root").rglob("*"):
        assert not path.is_file() or b"s3cret" not in path.read_bytes(), path
