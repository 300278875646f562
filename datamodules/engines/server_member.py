"""One server of a pool: what it holds, why it is left out, how it comes back."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from datamodules.canary import CanaryError
from datamodules.engines.server_faults import ServerFault, ServerLost
from datamodules.snapshots import Snapshot

log = logging.getLogger(__name__)


class Member:
    """A server of the pool, whoever started it.

    Args:
        name: in messages.
        bring_up: starts it if that is ours to do, has it load a snapshot and proves that; raises `ServerFault`.
        tear_down: after a fault.
    """

    def __init__(
        self, name: str, bring_up: Callable[[Snapshot], Awaitable[None]], tear_down: Callable[[], None]
    ) -> None:
        self.name = name
        self.holds: Snapshot | None = None
        self.fault: Exception | None = None
        self._told = ""  # of the last fault
        self.slowest = 0.0  # seconds of a request, in this round
        self._bring_up = bring_up
        self._tear_down = tear_down
        self._one_at_a_time = asyncio.Lock()

    @property
    def is_lost(self) -> bool:
        """Whether trying again is of no use."""
        return isinstance(self.fault, ServerLost | CanaryError)

    async def bring_up(self, snapshot: Snapshot) -> None:
        """Have it hold a snapshot, unless it does.

        Raises:
            ServerFault: it does not.
            CanaryError: it samples from other weights.
        """
        async with self._one_at_a_time:
            if self.holds == snapshot:
                return
            self.holds = None
            try:
                await self._bring_up(snapshot)
            except (ServerFault, CanaryError) as fault:
                self.fail(fault)
                raise
            self.holds, self.fault = snapshot, None

    def fail(self, fault: Exception) -> None:
        """Leave it out until it was brought up again, and say why, once."""
        self.holds = None
        self._tear_down()
        if str(fault) != self._told:
            log.warning("server %s is left out: %s", self.name, fault)
        self.fault, self._told = fault, str(fault)
