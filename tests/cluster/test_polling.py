"""Waiting for what others do, by a clock that only sleeping moves."""

import pytest

from realmops.cluster import polling
from realmops.cluster.polling import poll_until


class Clock:
    """Stands in for the module ``time``."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(polling, "time", found)
    return found


@pytest.mark.parametrize(("there", "found"), [(0, "it"), (20, "it"), (30, "it"), (41, None)])
def test_a_last_look_is_taken_when_the_time_is_over(there: float, found: str | None, clock: Clock) -> None:
    assert poll_until(lambda: "it" if clock.now >= there else None, 20, 30) == found
    assert clock.now == (40 if there > 20 else there)


def test_what_is_waited_for_is_told_at_once_and_then_now_and_again(clock: Clock) -> None:
    told: list[float] = []
    poll_until(lambda: None, 10, 100, told.append)
    assert told == [0, 40, 80]
