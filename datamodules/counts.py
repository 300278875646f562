"""The counts that a DataModule is given, refused where they cannot be."""


def check_at_least(least: int, **counts: int) -> None:
    """Refuse a count that is too small.

    Raises:
        ValueError: naming the key.
    """
    for key, value in counts.items():
        if value < least:
            raise ValueError(f"datamodule.{key} must be at least {least}, got {value}")


def check_batch_size(batch_size: int, round_size: int) -> None:
    """Refuse a batch size that does not cut a round into equal optimizer steps.

    Raises:
        ValueError: with the nearest sizes that do.
    """
    if 1 <= batch_size <= round_size and round_size % batch_size == 0:
        return
    valid = [n for n in range(1, round_size + 1) if round_size % n == 0]
    below = [n for n in valid if n < batch_size][-1:]
    above = [n for n in valid if n > batch_size][:1]
    raise ValueError(
        f"datamodule.batch_size must divide prompts_per_round x group_size = {round_size}, got {batch_size}; "
        f"the nearest valid sizes are {' and '.join(map(str, below + above))}"
    )
