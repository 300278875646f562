"""Randomness as a function of names, never of timing or order."""

import hashlib


def derive_seed(*names: int | str) -> int:
    """Return a 63-bit seed for a tuple such as (run seed, round, prompt id, sibling).

    The same names give the same seed in every process; different names give unrelated seeds.
    """
    digest = hashlib.sha256("\x1f".join(map(str, names)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
