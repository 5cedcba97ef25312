"""Processes of the exchange: heartbeats, leases, child processes, the follower, a builder as a program."""

import json
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import exchange_lab
import pytest
from exchange_lab import IDENTITY, PARAMS, MemoryFiles, StillClock, check_index
from small_project import wait_for

from realmops.refresh import child_processes, lease
from realmops.refresh.child_processes import SupervisedProcess
from realmops.refresh.exchange import IDENTITY_VERSION, Exchange
from realmops.refresh.follower import Follower, assign_exchange, builder_command
from realmops.refresh.heartbeat import Heartbeat, LivenessTracker
from realmops.refresh.lease import acquire_lease
from realmops.refresh.trainer import RefreshPolicy, TrainerSide

# Heartbeats


def test_liveness_counts_from_the_observed_change_by_the_observers_clock() -> None:
    clock = StillClock()
    liveness, ages = LivenessTracker(clock), []
    for now, key, content in ((0, "a", 1), (5, "a", 1), (5, "b", 1), (5, "a", 2), (7, "a", 2)):
        clock.now = now
        ages.append(liveness.seconds_unchanged(key, content))
    assert ages == [0, 5, 0, 0, 2]


def test_a_heartbeat_is_replaced_when_it_is_old_or_its_activity_changes() -> None:
    files, clock, path = MemoryFiles(), StillClock(), Path("/sign.json")
    heartbeat, written = Heartbeat(path, 2.0, files, clock), []
    for seconds, doing, step in ((0.0, "training", 1), (1.9, "training", 2), (0.0, "waiting", 2), (2.0, "waiting", 3)):
        clock.now += seconds
        heartbeat.beat(doing, step=step)
        content = json.loads(files.read(path, 1 << 20))
        written.append((content["doing"], content["step"], content["beat"]))
    assert written == [("training", 1, 1), ("training", 1, 1), ("waiting", 2, 2), ("waiting", 3, 3)]


# Leases

HOLD = """
import sys, time
from pathlib import Path
from realmops.refresh.lease import acquire_lease
with acquire_lease(Path(sys.argv[1]), print):
    time.sleep(1000)
"""


def test_a_wait_names_the_holder_and_ends_when_the_holder_is_killed(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "claim")])
    wait_for(lambda: (tmp_path / "claim").is_file() and (tmp_path / "claim").read_text(), 60)
    messages: list[str] = []
    threading.Timer(0.2, holder.kill).start()
    with acquire_lease(tmp_path / "claim", messages.append):
        assert holder.wait() < 0
    assert len(messages) == 1
    assert f"which {lease.socket.gethostname()}, process {holder.pid} holds" in messages[0]


def test_a_wait_can_be_stopped(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    with (
        acquire_lease(tmp_path / "claim", print),
        pytest.raises(InterruptedError, match="stopped while waiting for"),
        acquire_lease(tmp_path / "claim", lambda message: None, stop),
    ):
        pass


# Child processes


def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_processes, "END_SECONDS", 0.1)
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True)"
    command = [sys.executable, "-c", f"{program}; time.sleep(99)"]
    with SupervisedProcess(command, pause=0.0, log=tmp_path / "log") as child:
        wait_for(lambda: child.last_lines() == "ready", 60)
        assert child.is_running
        assert child.poll() is None
    assert not child.is_running


def test_each_exit_is_reported_once_and_followed_by_a_restart(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "for n in range(9): print(n)\nraise SystemExit(3)"]
    codes: list[int] = []
    with SupervisedProcess(command, pause=0.0, log=tmp_path / "log") as child:
        wait_for(lambda: codes.append(code) if (code := child.poll()) is not None else child.starts == 3, 60)
    assert codes == [3, 3]


def test_an_index_builder_imports_nothing_from_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise SystemExit(9)")
    command = builder_command(tmp_path, tmp_path, "name", "--help")
    assert subprocess.run(command, cwd=tmp_path, stdout=subprocess.DEVNULL, timeout=60).returncode == 0


# The follower


class FakeProcesses:
    """Instead of builder processes."""

    def __init__(self) -> None:
        self.DEVNULL, self.starts, self.ended = subprocess.DEVNULL, 0, 0

    def Popen(self, command: list[str], **options: Any) -> Any:
        self.starts += 1
        return SimpleNamespace(poll=lambda: None, terminate=self.end, wait=lambda seconds: 0)

    def end(self) -> None:
        self.ended += 1


def test_a_builder_ends_when_its_exchange_is_removed_with_the_assignment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage removes both at its end; an assignment alone that cannot be read for a moment changes nothing."""
    monkeypatch.setattr(child_processes, "subprocess", processes := FakeProcesses())
    file, exchange = tmp_path / "tag.shards.json", tmp_path / "exchange"
    (exchange / "run" / IDENTITY_VERSION).mkdir(parents=True)
    assign_exchange(file, exchange, tmp_path / "corpus", "run")
    follower = Follower(file, None)
    follower.poll_once()
    content = file.read_bytes()
    file.unlink()
    follower.poll_once()
    assert (processes.ended, follower._builder is None) == (0, False)
    shutil.rmtree(exchange)
    follower.poll_once()
    assert (processes.ended, processes.starts, follower._builder) == (1, 1, None)
    file.write_bytes(content)  # the same work again
    follower.poll_once()
    assert processes.starts == 2


@pytest.mark.parametrize(
    "content",
    [b"[" * 100_000, b"[]", b'{"exchange": 1, "snapshot": "s"}', b'{"exchange": "a\\u0000", "snapshot": "s"}',
     b"\x80\x04.", None],
)  # fmt: skip
def test_a_foreign_assignment_is_ignored(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "assignment.json"
    file.symlink_to("/dev/zero") if content is None else file.write_bytes(content)
    follower = Follower(file, None)
    follower.poll_once()
    assert follower._builder is None


# A builder as a program


def read_until(process: subprocess.Popen[str], words: str) -> None:
    assert process.stdout is not None
    assert any(words in line for line in process.stdout), f"{words!r} was not printed"


def test_a_builder_builds_and_ends_with_0_on_sigterm(tmp_path: Path) -> None:
    root = tmp_path / "exchange"
    trainer = TrainerSide(Exchange.open(root, IDENTITY, grace=0.0), RefreshPolicy(builder_timeout=600))
    command = [sys.executable, exchange_lab.__file__, str(root)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    trainer.publish_weights(0, PARAMS, {})
    check_index(trainer.index_for(0))
    read_until(process, "waiting for weights")
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")


def test_a_builder_ends_when_its_parent_process_is_killed(tmp_path: Path) -> None:
    root = tmp_path / "exchange"
    Exchange.open(root, IDENTITY, grace=0.0)
    program = "import subprocess, sys; subprocess.run(sys.argv[1:])"
    command = [sys.executable, "-c", program, sys.executable, exchange_lab.__file__, str(root), "watch"]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    read_until(parent, "waiting for weights")
    parent.kill()
    parent.communicate(timeout=60)  # until the child has closed its output, too
