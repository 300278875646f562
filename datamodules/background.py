"""One thread beside the trainer's that does things in the order they were asked for."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Background:
    """Runs functions one after another in a daemon thread, which starts with the first."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def submit(self, function: Callable[[], Any]) -> "Future[Any]":
        """Queue a function; the future gives its result, or raises what it raised."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="background", daemon=True)
            self._thread.start()
        future: Future[Any] = Future()
        self._tasks.put((future, function))
        return future

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, function = task
            if self._is_closed or not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:  # the one who asks for the result gets it
                future.set_exception(error)

    def close(self, seconds: float) -> None:
        """Start nothing more, and wait a bounded time for what is running."""
        self._is_closed = True
        self._tasks.put(None)
        if self._thread is not None:
            self._thread.join(seconds)
