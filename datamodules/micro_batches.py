"""Cut an optimizer step into micro-batches: packed ones of equal load, or padded ones of like lengths."""

from collections.abc import Callable, Iterator, Sequence

from datamodules.types import Rollout

Family = list[Rollout]  # rollouts of one prompt
KEYS_PER_TOKEN = 8  # a layer keeps 2 to 1/2 width of a key and its value, and some 15 to 20 of a token
Cut = Callable[[Sequence[Rollout], int, int], list[list[Rollout]]]


def packed_micro_batches(rollouts: Sequence[Rollout], max_tokens: int, num_ranks: int = 1) -> list[list[Rollout]]:
    """Return micro-batches of nearly equal load by longest-first packing, rollouts of one prompt in a row.

    There are as many as each rank takes one of, again and again; the last may be empty.

    Args:
        rollouts: of one optimizer step.
        max_tokens: largest load of one micro-batch (see `load`); a single sequence may be longer, and is then alone.
        num_ranks: ranks that share the step.
    """
    families: dict[tuple[int, ...], Family] = {}
    for rollout in rollouts:
        families.setdefault(rollout.prompt_ids, []).append(rollout)
    share = -(-sum(map(load, families.values())) // num_ranks)  # a large family must not leave ranks idle
    limit = min(max_tokens, max(1, share))
    parts = sorted((p for family in families.values() for p in _cut(family, limit)), key=load, reverse=True)
    long = [part for part in parts if load(part) >= max_tokens]
    place = {part[0].prompt_ids: number for number, part in enumerate(parts)}
    packed = [*long, *_pack(parts[len(long) :], max_tokens, taken=len(long), num_ranks=num_ranks)]
    return [sorted(batch, key=lambda r: place[r.prompt_ids]) for batch in packed]


def _pack(parts: list[Family], max_tokens: int, *, taken: int, num_ranks: int) -> list[list[Rollout]]:
    """Put parts, longest first, into the lightest of as few micro-batches as this rule can do with."""
    fewest = -(-sum(map(load, parts)) // max_tokens)
    fewest += -(taken + fewest) % num_ranks
    for count in range(fewest, len(parts) + num_ranks, num_ranks):
        batches: list[list[Rollout]] = [[] for _ in range(count)]
        loads = [0] * count
        for part in parts:
            lightest = loads.index(min(loads))
            batches[lightest].extend(part)
            loads[lightest] += load(part)
        if max(loads, default=0) <= max_tokens:
            return batches
    raise AssertionError("each part fits a micro-batch of its own")


def load(family: Family) -> int:
    """Return what rollouts of one prompt cost, in tokens: the prompt once, the completions, and copies of its keys.

    Attention copies a shared prompt's keys and values for each sibling. `KEYS_PER_TOKEN` of them take about the memory
    of a token.
    """
    prompt = len(family[0].prompt_ids)
    copies = len(family) * prompt if len(family) > 1 else 0
    return prompt + sum(len(r.completion_ids) for r in family) + copies // KEYS_PER_TOKEN


def _cut(family: Family, max_tokens: int) -> Iterator[Family]:
    """Yield a family in parts that fit, longest completions first."""
    part: Family = []
    for rollout in sorted(family, key=lambda r: len(r.completion_ids), reverse=True):
        if part and load([*part, rollout]) > max_tokens:
            yield part
            part = []
        part.append(rollout)
    yield part


def padded_micro_batches(rollouts: Sequence[Rollout], max_tokens: int, num_ranks: int = 1) -> list[list[Rollout]]:
    """Return the rollouts longest first, as many together as fit with their padding, and empty ones for idle ranks.

    Args:
        rollouts: of one optimizer step.
        max_tokens: largest padded size of one micro-batch; a single sequence may be longer.
        num_ranks: ranks that share the step.
    """
    ordered = sorted(rollouts, key=lambda r: len(r.prompt_ids) + len(r.completion_ids), reverse=True)
    share = -(-len(rollouts) // num_ranks)
    batches: list[list[Rollout]] = []
    while ordered:
        longest = len(ordered[0].prompt_ids) + len(ordered[0].completion_ids)
        count = min(share, max(1, max_tokens // max(1, longest)))
        batches.append(ordered[:count])
        ordered = ordered[count:]
    return [*batches, *([] for _ in range(-len(batches) % num_ranks))]
