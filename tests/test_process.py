"""Child processes: started again, ended, killed where they do not end; builders have theirs in test_builder.py."""

import sys
import time
from pathlib import Path

import pytest
from small_project import wait_for

from realmops.index import process
from realmops.index.process import Child

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(99)"
)


def test_a_child_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "END_SECONDS", 0.1)
    with Child([sys.executable, "-c", STUBBORN], pause=0.0, log=tmp_path / "log") as child:
        wait_for(lambda: child.last_lines() == "ready", 60)
        assert child.runs
        assert child.look() is None
    assert not child.runs


def test_each_end_is_told_once_and_followed_by_a_start(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "print('line'); raise SystemExit(3)"]
    codes = []
    with Child(words, pause=0.0, log=tmp_path / "log") as child:
        while child.starts < 3:
            codes += [code] if (code := child.look()) is not None else []
            time.sleep(0.01)
    assert codes == [3, 3]
    assert set(child.last_lines().splitlines()) <= {"line"}


def test_the_last_lines_of_a_log_are_few(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("".join(f"{number}\n" for number in range(9)))
    assert Child(["true"], pause=0.0, log=tmp_path / "log").last_lines() == "4\n5\n6\n7\n8"
