"""Wake those who wait for a vLLM engine that has died.

vLLM's synchronous client marks a dead engine, so that later calls fail, but leaves a call that is waiting for an answer
waiting for ever.
"""

import threading
from typing import Any

SECONDS_BETWEEN_LOOKS = 0.5


class DeathWatch:
    """A daemon thread that looks at a client of vLLM until it is stopped.

    Args:
        client: the synchronous client of an engine process.
        error: what the waiting calls raise.
    """

    def __init__(self, client: Any, error: Exception) -> None:
        self._client = client
        self._error = error
        self._is_stopped = threading.Event()
        threading.Thread(target=self._look, name="vllm-death-watch", daemon=True).start()

    def stop(self) -> None:
        """Look no more."""
        self._is_stopped.set()

    def _look(self) -> None:
        while not self._is_stopped.wait(SECONDS_BETWEEN_LOOKS):
            if self._client.resources.engine_dead:
                self.wake()
                return

    def wake(self) -> None:
        """Have every call that waits for an answer raise."""
        self._client.outputs_queue.put_nowait(self._error)
        for future in list(self._client.utility_results.values()):
            if not future.done():
                future.set_exception(self._error)
