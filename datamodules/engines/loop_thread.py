"""An event loop in a thread of its own, for callers that wait."""

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator
from concurrent.futures import CancelledError
from contextlib import aclosing
from typing import Any, TypeVar

from datamodules.engines.engine import EngineDied

Result = TypeVar("Result")
SECONDS_TO_WITHDRAW = 5.0
CLOSED = "the engine was closed meanwhile"


class LoopThread:
    """Runs coroutines until it is closed; whoever waits for one then gets `EngineDied`."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Return what a coroutine returns."""
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
        except CancelledError as error:
            raise EngineDied(CLOSED) from error

    def stream(self, source: AsyncGenerator[Result, None]) -> Generator[Result, None, None]:
        """Yield what an asynchronous generator yields; one that is given up ends before this returns."""
        items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        end = object()
        is_over = threading.Event()

        async def pump() -> None:
            try:
                async with aclosing(source) as opened:
                    async for item in opened:
                        items.put(item)
                items.put(end)
            except asyncio.CancelledError:
                items.put(EngineDied(CLOSED))
            except Exception as error:  # is raised where the items are waited for
                items.put(error)
            finally:
                is_over.set()

        pumping = asyncio.run_coroutine_threadsafe(pump(), self._loop)
        try:
            while (item := items.get()) is not end:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            pumping.cancel()
            is_over.wait(SECONDS_TO_WITHDRAW)

    def close(self) -> None:
        """Cancel everything and end the thread."""
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
