"""What a run would do and cost, before anything is paid for."""

from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

ACCURACIES = (0.1, 0.25, 0.5, 0.75, 0.9)


def informative_share(accuracy: float, group_size: int) -> float:
    """Return the share of groups whose rewards differ when each completion is right with this probability."""
    return 1.0 - accuracy**group_size - (1.0 - accuracy) ** group_size


def lag_range(*, lag: int, steps_per_round: int, replay_rounds: int, rounds: int) -> tuple[int, int]:
    """Return the smallest and largest age of a sample in optimizer steps, once the lag is reached, or at the end."""
    reached = min(lag, rounds - 1)
    oldest = min(lag + replay_rounds - 1, rounds - 1)
    return reached * steps_per_round, oldest * steps_per_round + steps_per_round - 1


def print_schedule(data: Any, cfg: Any, make_policy: Callable[[], Any]) -> None:
    """Print a table of the run's schedule.

    Args:
        data: the run's DataModule, not yet set up.
        cfg: the run's configuration.
        make_policy: loads the policy, to count its parameters.
    """
    table = Table(title="Dry run", show_header=False)
    for name, value in schedule(data, cfg, make_policy):
        table.add_row(name, value)
    Console().print(table)


def schedule(data: Any, cfg: Any, make_policy: Callable[[], Any]) -> Iterator[tuple[str, str]]:
    """Yield what the table says, line by line.

    Args:
        data: the run's DataModule, not yet set up.
        cfg: the run's configuration.
        make_policy: loads the policy, to count its parameters.
    """
    rounds, steps = cfg.rounds, getattr(data, "steps_per_round", None)
    if steps is None or not hasattr(data, "prompts_per_round"):
        yield "rounds", f"{rounds} recorded; the files tell the optimizer steps"
        return
    yield "rounds", str(rounds)
    yield "optimizer steps", f"{steps} a round, {data.num_steps(rounds)} in all"
    samples = data.prompts_per_round * data.group_size
    replay_rounds = data.replay.rounds if hasattr(data, "replay") else 1
    low, high = lag_range(lag=data.lag, steps_per_round=steps, replay_rounds=replay_rounds, rounds=rounds)
    age = f"{data.lag} rounds: samples are {low} to {high} optimizer steps old"
    yield "lag", age if data.trains else "none: every sample is the initial weights'"
    yield "samples", f"{samples} a round, {samples * rounds} in all, of at most {data.sampling.max_tokens} tokens"
    trained = samples * data.passes_per_round * rounds if data.trains else 0
    yield "forward and backward passes", f"{trained} sequences, one each"
    yield from _syncs(data, cfg, rounds)
    if data.group_size > 1:
        shares = (f"{informative_share(p, data.group_size):.0%} at accuracy {p:g}" for p in ACCURACIES)
        yield "groups whose rewards differ", ", ".join(shares)
    has_adapters = (cfg.policy.get("lora") or {}).get("sync") == "adapter"
    yield from _sizes(data, samples * rounds, _num_parameters(make_policy), has_adapters)


def _syncs(data: Any, cfg: Any, rounds: int) -> Iterator[tuple[str, str]]:
    sampled = len({max(0, r - data.lag) for r in range(rounds)}) if data.trains else 1
    node = cfg.callbacks.get("held_out_evaluation")
    evaluations = 0 if node is None else 1 + -(-rounds // node.every_n_rounds)
    published, measured = (rounds + 1, evaluations) if data.trains else (1, min(1, evaluations))
    yield "syncs", f"{published} snapshots published, {sampled} sampled from, {measured} measured on held-out prompts"


def _sizes(
    data: Any, samples: int, parameters: tuple[int, int] | None, has_adapters: bool
) -> Iterator[tuple[str, str]]:
    tokens = samples * data.sampling.max_tokens
    rollouts = f"rollouts at most {tokens * 16 / 2**20:.0f} MiB before compression"
    if parameters is None:
        yield "disk", f"{rollouts}; snapshots: known once the policy is there"
        return
    size, trained = (4 * number / 2**20 for number in parameters)
    yield (
        "memory",
        (
            f"{size + 3 * trained:.0f} MiB for weights, gradients and AdamW in float32, "
            f"{size:.0f} MiB more for the engine's copy; activations come on top"
        ),
    )
    kept = 2 * data.lag + 3  # of the newest checkpoint and of the best
    snapshots = f"{kept} snapshots of {trained if has_adapters else size:.0f} MiB"
    snapshots += f", their base of {size:.0f} MiB" if has_adapters else ""
    yield "disk", f"{snapshots}, 2 checkpoints of {size + 2 * trained:.0f} MiB, {rollouts}"


def _num_parameters(make_policy: Callable[[], Any]) -> tuple[int, int] | None:
    """Return the policy's parameters and how many of them train, or None while its directory is not there."""
    try:
        parameters = list(make_policy().parameters())
    except Exception:  # whatever loading raises (a warm start not made yet, no hub): it only leaves the size open
        return None
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)
