"""Catch a mistyped option before Hydra does, and say which was meant."""

import difflib
import sys
from collections.abc import Sequence
from pathlib import Path


def unknown_choice(override: str, conf: Path) -> str | None:
    """Return what is wrong with an override such as `objective=tpor`, or None when it names options that exist.

    Args:
        override: one command-line argument.
        conf: the configuration directory, whose folders are the groups.
    """
    group, separator, value = override.partition("=")
    folder = conf / group
    if not separator or not group or not folder.is_dir():
        return None
    options = sorted(path.stem for path in folder.glob("*.yaml"))
    for choice in value.strip("[]").split(","):
        name = choice.strip()
        if name and name not in options and name != "null" and "(" not in value and "*" not in value:
            close = difflib.get_close_matches(name, options, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            return f"{group}={name} is not an option{hint} There are: {', '.join(options)}"
    return None


def check_choices(arguments: Sequence[str], conf: Path) -> None:
    """End the program with a message when an argument names an option that does not exist.

    Options from elsewhere (`--config-dir`, a search path) are left to Hydra.
    """
    if any(a.startswith(("--config-dir", "-cd", "hydra.searchpath")) for a in arguments):
        return
    for message in filter(None, (unknown_choice(argument, conf) for argument in arguments)):
        sys.exit(f"error: {message}")
