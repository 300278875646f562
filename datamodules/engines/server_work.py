"""The requests of one call to a pool of servers."""

import time
from collections import deque
from collections.abc import Sequence
from itertools import groupby

from datamodules.engines.server_member import Member


class Work:
    """What waits, what is with whom, what is answered.

    Args:
        prompts: one for each request; equal ones in a row go to one server.
    """

    def __init__(self, prompts: Sequence[Sequence[int]]) -> None:
        by_prompt = groupby(range(len(prompts)), key=lambda i: tuple(prompts[i]))
        self.waiting = deque(list(group) for _, group in by_prompt)  # siblings go together: one server has their prompt
        self.missing = set(range(len(prompts)))
        self.started: dict[int, tuple[Member, float]] = {}  # who has it first, since when
        self.doubled: set[int] = set()

    def take(self, member: Member) -> list[int]:
        """Return requests for a member: siblings that wait, else one that another has had for too long."""
        now = time.monotonic()
        while self.waiting:
            group = [i for i in self.waiting.popleft() if i in self.missing]
            self.started.update((i, (member, now)) for i in group)
            if group:
                return group
        patience = max(1.0, 2.0 * member.slowest)
        late = [
            i
            for i in self.missing - self.doubled
            if i in self.started and self.started[i][0] is not member and now - self.started[i][1] > patience
        ]
        oldest = min(late, key=lambda i: self.started[i][1], default=None)
        self.doubled.update([] if oldest is None else [oldest])
        return [] if oldest is None else [oldest]

    def give_back(self, indices: Sequence[int]) -> None:
        """Have others do what a member failed to do."""
        again = [i for i in indices if i in self.missing]
        self.doubled.difference_update(again)
        for i in again:
            self.started.pop(i, None)
        if again:
            self.waiting.appendleft(sorted(again))
