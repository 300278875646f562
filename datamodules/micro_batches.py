"""Cut an optimizer step into micro-batches of equal token load, siblings together so that they share their prompt."""

from collections.abc import Iterator, Sequence

from datamodules.types import Rollout

Family = list[Rollout]  # rollouts of one prompt


def micro_batches(rollouts: Sequence[Rollout], max_tokens: int) -> list[list[Rollout]]:
    """Return the fewest micro-batches that longest-first packing finds, each with rollouts of one prompt in a row.

    Args:
        rollouts: of one optimizer step.
        max_tokens: most packed tokens of one micro-batch, a shared prompt counted once; a single sequence may be
            longer.
    """
    families: dict[tuple[int, ...], Family] = {}
    for rollout in rollouts:
        families.setdefault(rollout.prompt_ids, []).append(rollout)
    parts = [part for family in families.values() for part in _cut(family, max_tokens)]
    parts.sort(key=num_tokens, reverse=True)
    count = max(1, -(-sum(map(num_tokens, parts)) // max_tokens))
    while True:
        bins: list[list[Rollout]] = [[] for _ in range(min(count, len(parts)))]
        loads = [0] * len(bins)
        for part in parts:
            lightest = loads.index(min(loads))
            bins[lightest].extend(part)
            loads[lightest] += num_tokens(part)
        if len(bins) == len(parts) or max(loads) <= max_tokens:
            return bins
        count += 1


def num_tokens(family: Family) -> int:
    """Return the packed tokens of rollouts that share a prompt."""
    return len(family[0].prompt_ids) + sum(len(r.completion_ids) for r in family)


def _cut(family: Family, max_tokens: int) -> Iterator[Family]:
    """Yield a family in parts that fit, longest completions first."""
    part: Family = []
    for rollout in sorted(family, key=lambda r: len(r.completion_ids), reverse=True):
        if part and num_tokens([*part, rollout]) > max_tokens:
            yield part
            part = []
        part.append(rollout)
    yield part
