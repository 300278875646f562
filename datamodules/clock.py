"""Seconds by phase of a run."""

import threading
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")


class Clock:
    """Adds up wall seconds under a phase's name, for the summary at the end of a run; threads may share it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._lock = threading.Lock()
        self._thread = threading.local()

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Add the seconds spent in the block to `phase`; within another phase of the thread they are that one's."""
        if getattr(self._thread, "is_running", False):
            yield
            return
        start = time.perf_counter()
        self._thread.is_running = True
        try:
            yield
        finally:
            self._thread.is_running = False
            self.add(phase, time.perf_counter() - start)

    def measure_each(self, phase: str, items: Iterable[Item]) -> Generator[Item, None, None]:
        """Yield the items; the seconds that each takes to come are `phase`'s, what is done with it is not."""
        iterator = iter(items)
        while True:
            with self.measure(phase):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    def add(self, phase: str, seconds: float) -> None:
        """Add seconds measured elsewhere."""
        with self._lock:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
