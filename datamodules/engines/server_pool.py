"""Share requests out over servers: each takes what it can do, and what one fails to do another does."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from itertools import count

from datamodules.canary import CanaryError
from datamodules.engines.server_faults import ServerFault
from datamodules.engines.server_member import Member
from datamodules.engines.server_work import Work
from datamodules.snapshots import Snapshot
from datamodules.types import Completion

TICK = 0.2  # seconds between looks at what stalls
LONGEST_PAUSE = 30.0  # seconds before a server that failed is tried again
GRACE = 5.0  # seconds, or thrice the first server's time: what a round waits for the others to load
MAX_SILENCE = 3.0  # patiences without any answer, though a server says that it is ready
Ask = Callable[[Member, int], Awaitable[Completion]]


class NoServerLeft(RuntimeError):
    """No server answers; starting the pool again would not change that, it has tried."""


class ServerPool:
    """Members that answer together.

    Args:
        members: at least one.
        max_in_flight: requests that one of them has at a time, siblings of one prompt always together.
        patience_seconds: longest time without any answer from a member that has requests.
        start_seconds: what a member may take besides to come up again.
    """

    def __init__(
        self, members: Sequence[Member], max_in_flight: int, patience_seconds: float, start_seconds: float
    ) -> None:
        self.members = list(members)
        self.max_in_flight = max_in_flight
        self.patience = patience_seconds
        self.longest_absence = patience_seconds + start_seconds
        self._rising: dict[Member, asyncio.Task[None]] = {}

    async def load(self, snapshot: Snapshot) -> None:
        """Return when a member holds the snapshot and the others do too, or are late; they may join later.

        Raises:
            NoServerLeft: none came up in time, or none ever will.
            CanaryError: none holds the right weights.
        """
        start = time.monotonic()
        for task in self._rising.values():
            task.cancel()  # of the snapshot before
        await asyncio.gather(*self._rising.values(), return_exceptions=True)
        for member in self.members:
            member.fault = None if member.is_lost else member.fault
            self._rise(member, snapshot)
        while not any(member.holds == snapshot for member in self.members):
            await self._wait_for_any()
            self._check_alive(start)
        end = time.monotonic() + max(GRACE, 3.0 * (time.monotonic() - start))
        while any(m.holds != snapshot and m.fault is None for m in self.members):
            if time.monotonic() > end:
                break
            await self._wait_for_any()

    def _rise(self, member: Member, snapshot: Snapshot) -> asyncio.Task[None]:
        """Return the task that brings a member up, the one that is at it if there is."""
        task = self._rising.get(member)
        if task is None or task.done():
            task = self._rising[member] = asyncio.create_task(self._bring_up(member, snapshot))
        return task

    async def _bring_up(self, member: Member, snapshot: Snapshot) -> None:
        """Try until it holds the snapshot or never will."""
        for attempt in count():
            try:
                await member.bring_up(snapshot)
                return
            except (ServerFault, CanaryError):
                if member.is_lost:
                    return
            await asyncio.sleep(min(LONGEST_PAUSE, 0.5 * 2**attempt))

    async def _wait_for_any(self) -> None:
        rising = [task for task in self._rising.values() if not task.done()]
        if rising:
            done, _ = await asyncio.wait(rising, timeout=TICK, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # what is no server's fault is raised here
        else:
            await asyncio.sleep(TICK)

    def _check_alive(self, since: float) -> None:
        """Give up when nobody will answer, or nobody did since then.

        Raises:
            NoServerLeft: it has been too long, or nobody will.
            CanaryError: all that still answer hold other weights.
        """
        reasons = "; ".join(f"{m.name}: {m.fault or 'no answer yet'}" for m in self.members)
        if all(member.is_lost for member in self.members):
            wrong = [m.fault for m in self.members if isinstance(m.fault, CanaryError)]
            raise wrong[0] if wrong else NoServerLeft(f"no server can be used: {reasons}")
        if time.monotonic() - since > self.longest_absence:
            raise NoServerLeft(
                f"no server answered for {self.longest_absence:.0f} s (engine.patience_seconds, and "
                f"engine.start_seconds for servers of our own): {reasons}"
            )

    async def complete(
        self, prompts: Sequence[Sequence[int]], snapshot: Snapshot, ask: Ask
    ) -> AsyncGenerator[tuple[int, Completion], None]:
        """Yield a completion for each prompt as they come; who gives it does not matter.

        Args:
            prompts: equal ones in a row go to one member.
            snapshot: that all sample from.
            ask: gets the completion of a prompt, by its index, from a member.

        Raises:
            NoServerLeft: no member answers any more.
        """
        work = Work(prompts)
        answers: asyncio.Queue[tuple[int, Completion]] = asyncio.Queue()
        for member in self.members:
            member.slowest = 0.0
        tasks = [asyncio.create_task(self._serve(member, snapshot, work, ask, answers)) for member in self.members]
        seen = heard = time.monotonic()  # a member that holds the snapshot; an answer
        try:
            while work.missing or not answers.empty():
                try:
                    yield await asyncio.wait_for(answers.get(), TICK)
                    heard = time.monotonic()
                except TimeoutError:
                    for task in tasks:
                        if task.done():
                            task.result()  # a bug of ours, not a server's fault: it is raised here
                is_silent = time.monotonic() - heard > MAX_SILENCE * self.longest_absence
                if any(member.holds == snapshot for member in self.members) and not is_silent:
                    seen = time.monotonic()
                else:
                    self._check_alive(seen)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(
        self,
        member: Member,
        snapshot: Snapshot,
        work: Work,
        ask: Ask,
        answers: asyncio.Queue[tuple[int, Completion]],
    ) -> None:
        """Have a member do its share, and come back after each fault."""
        while work.missing and not member.is_lost:
            if member.holds != snapshot:
                await asyncio.shield(self._rise(member, snapshot))
                continue
            running: dict[asyncio.Task[Completion], int] = {}
            try:
                await self._share(member, work, ask, answers, running)
            except ServerFault as fault:
                member.fail(fault)
            finally:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)
                work.give_back(list(running.values()))

    async def _share(
        self,
        member: Member,
        work: Work,
        ask: Ask,
        answers: asyncio.Queue[tuple[int, Completion]],
        running: dict[asyncio.Task[Completion], int],
    ) -> None:
        """Keep a member busy until nothing is missing.

        Raises:
            ServerFault: it failed, or has not answered for too long.
        """
        starts: dict[int, float] = {}
        heard = time.monotonic()
        while work.missing:
            while len(running) < self.max_in_flight and (taken := work.take(member)):
                starts.update((i, time.monotonic()) for i in taken)
                running.update({asyncio.ensure_future(ask(member, i)): i for i in taken})
            if not running:
                await asyncio.sleep(TICK)
                heard = time.monotonic()
                continue
            done, _ = await asyncio.wait(running, timeout=TICK, return_when=asyncio.FIRST_COMPLETED)
            heard = time.monotonic() if done else heard
            if time.monotonic() - heard > self.patience:
                raise ServerFault(f"it has not answered for {self.patience:.0f} s (engine.patience_seconds)")
            for task in done:
                completion = task.result()
                index = running.pop(task)
                member.slowest = max(member.slowest, time.monotonic() - starts[index])
                if index in work.missing:
                    work.missing.remove(index)
                    answers.put_nowait((index, completion))
