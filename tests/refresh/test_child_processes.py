"""Child processes: started again, ended, killed where they do not end; builders have theirs in test_builder.py."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_project import wait_for

from realmops.refresh import child_processes
from realmops.refresh.child_processes import SupervisedProcess
from realmops.refresh.follower import builder_command

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(99)"
)


def test_a_child_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_processes, "END_SECONDS", 0.1)
    with SupervisedProcess([sys.executable, "-c", STUBBORN], pause=0.0, log=tmp_path / "log") as child:
        wait_for(lambda: child.last_lines() == "ready", 60)
        assert child.is_running
        assert child.poll() is None
    assert not child.is_running


def test_each_exit_is_reported_once_and_followed_by_a_start(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "print('line'); raise SystemExit(3)"]
    codes = []
    with SupervisedProcess(words, pause=0.0, log=tmp_path / "log") as child:
        while child.starts < 3:
            codes += [code] if (code := child.poll()) is not None else []
            time.sleep(0.01)
    assert codes == [3, 3]
    assert set(child.last_lines().splitlines()) <= {"line"}


def test_the_last_lines_of_a_log_are_few(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("".join(f"{number}\n" for number in range(9)))
    assert SupervisedProcess(["true"], pause=0.0, log=tmp_path / "log").last_lines() == "4\n5\n6\n7\n8"


def test_an_index_builder_imports_nothing_from_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise SystemExit(9)")
    command = builder_command(tmp_path, tmp_path, "--help")
    assert subprocess.run(command, cwd=tmp_path, stdout=subprocess.DEVNULL, timeout=60).returncode == 0
