"""Child processes: started again, ended, killed where they do not end; builders have theirs in test_builder.py."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from small_project import wait_for

from realmops.refresh import child_processes
from realmops.refresh.child_processes import SupervisedProcess, run_in_process
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


def test_each_end_is_told_once_and_followed_by_a_start(tmp_path: Path) -> None:
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


# ---- work in a process of its own

RUN = "realmops.commands.run"  # what is imported for all of them, in this process of pytest too
ASKER = """
import signal
import sys
from functools import partial
from realmops.refresh.child_processes import run_in_process
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what is started in the background ignores it
    work = "import os, pathlib, time; pathlib.Path(told).write_text(str(os.getpid())); time.sleep(99)"
    sys.exit(run_in_process("the work", "json", partial(exec, work, {"told": sys.argv[1]})))
"""


IMPORTING = """
import os
import sys
from functools import partial
from realmops.refresh.child_processes import run_in_process
if __name__ == "__main__":
    os.environ["OF"] = "another process"
    run_in_process("the server's first", "colorsys", partial(int, "1"))
    os.environ["OF"] = "7"
    of = "8 if 'PYTHONSAFEPATH' in os.environ else int(os.environ['OF'])"
    work = f"import colorsys, tabnanny, os, sys; sys.exit({of})"
    sys.exit(run_in_process("the work", "colorsys", partial(exec, work, {})))
"""


@pytest.mark.parametrize(
    ("work", "code"),
    [(partial(int, "1"), 0), (partial(sys.exit, 3), 3), (partial(int, "none"), 1)],
    ids=["returns", "exits", "raises"],
)
def test_work_apart_ends_as_it_says(work: Callable[[], None], code: int) -> None:
    assert run_in_process("the work", RUN, work) == code


def test_work_apart_of_several_threads_ends_each_as_it_says() -> None:
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda code: run_in_process("the work", RUN, partial(sys.exit, code)), range(8))) == [
            *range(8)
        ]


def test_a_folder_for_temporary_files_that_takes_no_socket_is_named(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    script = "from realmops.refresh.child_processes import run_in_process; run_in_process('the work', 'json', print)"
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "TMPDIR": str(folder)}, capture_output=True, text=True
    )
    assert f"ValueError: {folder}: no socket can be created in a folder there (AF_UNIX path too long)" in done.stderr
    assert "set TMPDIR to a folder of this machine with a short name" in done.stderr


def test_work_apart_that_is_killed_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_in_process("the stage ict", RUN, partial(signal.raise_signal, signal.SIGKILL)) == 137
    assert capsys.readouterr().err.startswith("realmops: the stage ict was killed, ")


def test_work_apart_is_named_where_the_process_that_it_was_forked_from_is_killed() -> None:
    """Nobody knows then how it ends; it ends with the process that asked."""
    work = "import os, signal, time; print(os.getpid()); os.kill(os.getppid(), signal.SIGKILL); time.sleep(99)"
    script = (
        "import sys; from functools import partial; from realmops.refresh.child_processes import run_in_process; "
        f"sys.exit(run_in_process('the work', 'json', partial(exec, {work!r}, {{}})))"
    )
    done = subprocess.run([sys.executable, "-uc", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 255
    assert "realmops: the work was lost, as the process that it was forked from was killed: run" in done.stderr
    wait_for(lambda: not _runs(int(done.stdout)), 60)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_work_apart_ends_with_the_process_that_asked(number: signal.Signals, tmp_path: Path) -> None:
    script, told = tmp_path / "script.py", tmp_path / "told"
    script.write_text(ASKER)
    asking = subprocess.Popen([sys.executable, script, told], start_new_session=True)
    wait_for(lambda: told.is_file() and told.read_text(), 60)
    working = int(told.read_text())
    if number == signal.SIGINT:
        os.killpg(asking.pid, number)  # as a terminal does
    else:
        asking.send_signal(number)
    asking.wait(60)
    wait_for(lambda: not _runs(working), 60)


def test_work_apart_imports_nothing_from_the_folder_that_it_runs_in(tmp_path: Path) -> None:
    """A project may have a file that is named as a library is; the environment is that of whoever asks."""
    for name in ("colorsys.py", "tabnanny.py"):
        (tmp_path / name).write_text("raise SystemExit(9)")
    script = tmp_path / "elsewhere" / "script.py"
    script.parent.mkdir()
    script.write_text(IMPORTING)
    assert subprocess.run([sys.executable, script], cwd=tmp_path, timeout=60).returncode == 7


def test_an_index_builder_imports_nothing_from_the_folder_either(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise SystemExit(9)")
    command = builder_command(tmp_path, tmp_path, "--help")
    assert subprocess.run(command, cwd=tmp_path, stdout=subprocess.DEVNULL, timeout=60).returncode == 0


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
