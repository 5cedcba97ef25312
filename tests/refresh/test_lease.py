"""Leases: held by one process at a time, taken over from a dead holder, and lost by one that was suspended."""

import json
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
from small_project import wait_for

from realmops.files import Clock
from realmops.refresh import lease
from realmops.refresh.heartbeat import LivenessTracker
from realmops.refresh.lease import acquire_lease, try_acquire_lease

# Adds one to a number in a file, slowly: two at once would lose one of the additions.
ADD = """
import sys, time
from pathlib import Path
from realmops.files import Clock
from realmops.refresh.lease import acquire_lease
with acquire_lease(Path(sys.argv[1]), print):
    file = Path(sys.argv[2])
    number = int(file.read_text())
    time.sleep(float(sys.argv[3]))
    file.write_text(str(number + 1))
"""


def add(folder: Path, seconds: float) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", ADD, str(folder / "claim"), str(folder / "number"), str(seconds)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def never(message: str) -> None:
    raise AssertionError(message)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(lease, "HEARTBEAT_SECONDS", 0.02)
    monkeypatch.setattr(lease, "EXPIRY_SECONDS", 1000.0)


def test_processes_hold_a_lease_one_after_another(tmp_path: Path) -> None:
    (tmp_path / "number").write_text("0")
    processes = [add(tmp_path, 0.3) for _ in range(4)]
    told = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, told
    assert (tmp_path / "number").read_text() == "4"
    assert sorted(path.name for path in (tmp_path / "claim").iterdir()) == ["000001", "000002", "000003", "000004"]


def test_a_killed_holder_of_this_machine_is_followed_at_once(tmp_path: Path) -> None:
    (tmp_path / "number").write_text("0")
    holder = add(tmp_path, 1000)
    wait_for((tmp_path / "claim/000001/sign.json").is_file, 60)
    said: list[str] = []
    threading.Timer(0.2, holder.kill).start()
    with acquire_lease(tmp_path / "claim", said.append):
        assert holder.wait() < 0
    assert len(said) == 1
    assert f"which {lease.socket.gethostname()}, process {holder.pid} holds" in said[0]


def test_a_term_is_never_visible_without_lock_and_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed between the commit of its term and its first own heartbeat delays no other."""
    (tmp_path / "claim").mkdir()
    term = lease._start_term(tmp_path / "claim", LivenessTracker(Clock()))
    assert term is not None
    assert lease._start_term(tmp_path / "claim", LivenessTracker(Clock())) is None
    term[1].close()  # as by a kill
    with acquire_lease(tmp_path / "claim", never):
        assert sorted(path.name for path in (tmp_path / "claim").iterdir()) == ["000001", "000002"]


def elsewhere(claim: Path, beat: int, done: bool = False) -> None:
    """What a holder on another machine has signed in the first life; nobody here can see its lock."""
    (claim / "000001").mkdir(parents=True, exist_ok=True)
    sign = {"host": "pod-of-another-node", "pid": 1, "beat": beat, "done": done}
    (claim / "000001/sign.json").write_text(json.dumps(sign))


def test_a_holder_elsewhere_is_waited_for_while_its_sign_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "EXPIRY_SECONDS", 2.0)
    claim = tmp_path / "claim"
    elsewhere(claim, 0)
    taken = threading.Event()

    def take() -> None:
        with acquire_lease(claim, lambda message: None):
            taken.set()

    waiting = threading.Thread(target=take)
    waiting.start()
    for beat in range(1, 30):
        assert not taken.wait(0.1), "longer than a dead one is waited for"
        elsewhere(claim, beat)
    waiting.join(60)
    assert taken.is_set(), "its sign stays the same: it is dead"


def test_a_holder_elsewhere_that_has_ended_is_followed_at_once(tmp_path: Path) -> None:
    elsewhere(tmp_path / "claim", -1, done=True)
    with acquire_lease(tmp_path / "claim", never):
        assert json.loads((tmp_path / "claim/000002/sign.json").read_text())["done"] is False
    assert json.loads((tmp_path / "claim/000002/sign.json").read_text())["done"] is True


def test_a_holder_that_slept_too_long_finds_its_lease_lost(tmp_path: Path) -> None:
    with acquire_lease(tmp_path / "claim", never) as claim:
        sign = tmp_path / "claim/000001/sign.json"
        wait_for(lambda: json.loads(sign.read_text())["beat"] >= 4, 60)
        assert not claim.lost, "it has looked and found itself"
        (tmp_path / "claim/000002").mkdir()  # somebody found its sign unchanged for too long
        wait_for(lambda: claim.lost, 10)


def test_of_many_leases_those_that_are_free_are_taken_without_a_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "EXPIRY_SECONDS", 0.5)
    liveness = LivenessTracker(Clock())
    elsewhere(tmp_path / "held", 0)
    elsewhere(tmp_path / "ended", 0, done=True)
    acquire = partial(try_acquire_lease, liveness=liveness)
    with acquire(tmp_path / "free") as free, acquire(tmp_path / "ended") as ended:
        assert free is not None
        assert ended is not None
        with acquire(tmp_path / "held") as held, acquire(tmp_path / "free") as again:
            assert held is None
            assert again is None
    assert sorted(path.name for path in (tmp_path / "held").iterdir()) == ["000001"]
    with acquire(tmp_path / "free") as free:
        assert free is not None

    def dead() -> bool:
        with acquire(tmp_path / "held") as held:
            return held is not None

    wait_for(dead, 60)
    with pytest.raises(FileNotFoundError), acquire(tmp_path / "gone" / "1"):
        pass


def test_a_wait_can_be_stopped(tmp_path: Path) -> None:
    elsewhere(tmp_path / "claim", 0)
    stop = threading.Event()
    stop.set()
    with (
        pytest.raises(InterruptedError, match="stopped while waiting for"),
        acquire_lease(tmp_path / "claim", lambda message: None, stop),
    ):
        pass
    assert [path.name for path in (tmp_path / "claim").iterdir()] == ["000001"]
