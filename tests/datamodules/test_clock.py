"""Seconds by phase: added up once, also when phases nest or fail."""

import time
from collections.abc import Iterator

import pytest

from datamodules.clock import Clock


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Set the watch by hand: its time is the sum of the list."""
    elapsed: list[float] = []
    monkeypatch.setattr(time, "perf_counter", lambda: sum(elapsed))
    return elapsed


def test_blocks_of_one_phase_add_up(ticks: list[float]) -> None:
    clock = Clock()
    for seconds in (2.0, 3.0):
        with clock.measure("sampling"):
            ticks.append(seconds)
        ticks.append(100.0)  # between phases: nobody's
    clock.add("sampling", 0.5)
    clock.add("training", 4.0)
    assert clock.seconds == {"sampling": 5.5, "training": 4.0}


def test_seconds_within_another_phase_are_counted_once_as_the_outer_one(ticks: list[float]) -> None:
    clock = Clock()
    with clock.measure("evaluation"):
        ticks.append(1.0)
        with clock.measure("sampling"):
            ticks.append(2.0)
        ticks.append(4.0)
    assert clock.seconds == {"evaluation": 7.0}


def test_the_seconds_that_items_take_to_come_are_told_apart_from_what_is_done_with_them(ticks: list[float]) -> None:
    clock = Clock()

    def items() -> Iterator[int]:
        ticks.append(1.0)
        yield 1
        ticks.append(2.0)
        yield 2
        ticks.append(4.0)  # until it says that there are no more

    for item in clock.measure_each("sampling", items()):
        with clock.measure("scoring"):
            ticks.append(16.0 * item)
    assert clock.seconds == {"sampling": 7.0, "scoring": 48.0}


def test_a_phase_that_fails_is_measured_and_the_next_one_too(ticks: list[float]) -> None:
    clock = Clock()

    def fail() -> None:
        with clock.measure("sampling"):
            ticks.append(2.0)
            raise RuntimeError("the engine died")

    with pytest.raises(RuntimeError, match=r"the engine died"):
        fail()
    with clock.measure("storing"):
        ticks.append(1.0)
    assert clock.seconds == {"sampling": 2.0, "storing": 1.0}
