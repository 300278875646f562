"""Requests that servers take: siblings together, what one left or is late with by another."""

import time
from typing import Any

import pytest

from datamodules.engines.server_member import Member
from datamodules.engines.server_work import Work


def member(name: str) -> Member:
    unused: Any = None
    return Member(name, unused, unused)


def test_siblings_go_to_one_server_and_what_it_failed_to_do_goes_first() -> None:
    one, other = member("one"), member("other")
    work = Work([(1,), (1,), (2,), (2,), (1,)])
    assert [work.take(one), work.take(other)] == [[0, 1], [2, 3]]
    work.missing.remove(2)
    work.give_back([3, 2])
    assert [work.take(one), work.take(one), work.take(one)] == [[3], [4], []]


def test_what_a_server_is_late_with_is_asked_of_another_once(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other, third = member("one"), member("other"), member("third")
    work = Work([(1,), (1,)])
    now = time.monotonic()
    assert work.take(one) == [0, 1]
    other.slowest = 2.0
    monkeypatch.setattr(time, "monotonic", lambda: now + 3.0)  # not twice what the other's slowest took
    assert work.take(other) == []
    monkeypatch.setattr(time, "monotonic", lambda: now + 4.5)
    assert [work.take(one), work.take(other), work.take(other), work.take(third)] == [[], [0], [1], []]
