"""Heartbeats: written not too often, judged by their change."""

import json
from pathlib import Path

from exchange_lab import MemoryFiles, StillClock

from realmops.refresh.heartbeat import Heartbeat, LivenessTracker


def test_age_counts_from_when_a_change_was_seen_by_ones_own_clock() -> None:
    clock = StillClock()
    liveness = LivenessTracker(clock)
    assert liveness.seconds_unchanged("a", 1) == 0
    clock.now = 5.0
    assert liveness.seconds_unchanged("a", 1) == 5
    assert liveness.seconds_unchanged("b", 1) == 0
    assert liveness.seconds_unchanged("a", 2) == 0
    clock.now = 7.0
    assert liveness.seconds_unchanged("a", 2) == 2


def test_a_heartbeat_is_replaced_when_it_is_old_or_its_activity_changes() -> None:
    files, clock = MemoryFiles(), StillClock()
    path = Path("/sign.json")
    heartbeat = Heartbeat(path, 2.0, files, clock)

    def given(doing: str, step: int) -> tuple[str, int, int]:
        heartbeat.beat(doing, step=step)
        said = json.loads(files.read(path, 1 << 20))
        return said["doing"], said["step"], said["beat"]

    assert given("training", 1) == ("training", 1, 1)
    clock.now += 1.9
    assert given("training", 2) == ("training", 1, 1), "not old enough"
    assert given("waiting", 2) == ("waiting", 2, 2)
    clock.now += 2.0
    assert given("waiting", 3) == ("waiting", 3, 3)


def test_no_two_signs_are_alike(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path / "sign.json", 0.0)
    said = set()
    for _ in range(5):
        heartbeat.beat()
        said.add(heartbeat.path.read_bytes())
    assert len(said) == 5
