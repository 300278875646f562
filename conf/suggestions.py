"""Catch a mistyped option before Hydra does, and say which was meant."""

import difflib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml


def unknown_choice(override: str, conf: Path) -> str | None:
    """Return what is wrong with an override such as `objective=tpor`, or None when it names options that exist.

    Args:
        override: one command-line argument.
        conf: the configuration directory, whose folders are the groups.
    """
    group, separator, value = override.partition("=")
    folder = conf / group
    if not separator or not group or group.startswith("hydra") or not folder.is_dir():
        return None
    options = sorted(path.stem for path in folder.glob("[!_]*.yaml"))
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
    known = _root_keys(conf)
    for argument in arguments:
        message = unknown_choice(argument, conf) or _unknown_root_key(argument, known)
        message = message or _unknown_nested_key(argument, arguments, conf)
        if message:
            sys.exit(f"error: {message}")


def _root_keys(conf: Path) -> set[str]:
    lines = (conf / "train.yaml").read_text().splitlines()
    keys = {line.partition(":")[0] for line in lines if ":" in line}
    return {key for key in keys if key.isidentifier()} | {path.name for path in conf.iterdir() if path.is_dir()}


def _unknown_root_key(override: str, known: set[str]) -> str | None:
    """Return what is wrong with `lags=4`; keys below a node are Hydra's to check."""
    key, separator, _ = override.partition("=")
    if not separator or not key.isidentifier() or key in known:
        return None
    close = difflib.get_close_matches(key, sorted(known), n=1)
    return f"{key} is not a key of the configuration" + (f"; did you mean {close[0]}?" if close else "")


def _unknown_nested_key(override: str, arguments: Sequence[str], conf: Path) -> str | None:
    """Return what is wrong with `optimizer.lrr=1`, a part of which is no name in any option; Hydra checks the rest."""
    key, separator, _ = override.partition("=")
    parts = key.split(".")
    if not separator or len(parts) < 2 or not all(part.isidentifier() for part in parts) or parts[0] == "hydra":
        return None
    keys = _settings(conf).keys()
    added = [argument.partition("=")[0] for argument in arguments if argument.startswith("+")]
    names = {part for known in (*keys, *added) for part in known.lstrip("+").split(".")} | _root_keys(conf)
    if all(part in names for part in parts):
        return None
    close = difflib.get_close_matches(key, [known for known in keys if known.startswith(f"{parts[0]}.")], n=1)
    return f"{key} is not a key of the configuration" + (f"; did you mean {close[0]}?" if close else "")


def check_keys(cfg: Mapping[str, Any], conf: Path) -> None:
    """Refuse keys that nothing reads: Hydra checks those of the command line, but not those of an experiment file.

    Args:
        cfg: the composed configuration as plain containers.
        conf: the configuration directory.

    Raises:
        ValueError: naming the key and the nearest one that exists.
    """
    _check_known("", set(cfg), _root_keys(conf))
    read = "".join(path.read_text() for path in sorted((conf / "objective").glob("*.yaml")))
    tuned = {f"{head}.{key}" for head, values in cfg.get("tuning", {}).items() for key in values}
    _check_known("tuning.", tuned, set(re.findall(r"oc\.select:tuning\.([\w.]+)", read)))


def check_values(cfg: Mapping[str, Any], conf: Path) -> None:
    """Refuse `lag=four`: text where every option of the configuration has a number, or true or false.

    Args:
        cfg: the composed configuration as plain containers.
        conf: the configuration directory.

    Raises:
        ValueError: naming the key, what stands there by default, and what was given.
    """
    given = dict(leaves(cfg))
    for key, default in _plain_defaults(conf):
        value = given.get(key)
        wanted = "true or false" if isinstance(default, bool) else f"a number such as {default:g}"
        is_right = isinstance(value, bool) == isinstance(default, bool) and isinstance(value, int | float)
        if key in given and value is not None and not is_right:
            raise ValueError(f"{key} must be {wanted}, got {value!r}")
    for key in ("rounds", "num_threads"):
        if (value := given.get(key)) is not None and value < 1:
            raise ValueError(f"{key} must be at least 1, got {value}")
    if (rate := given.get("optimizer.lr")) is not None and rate <= 0:
        raise ValueError(f"optimizer.lr must be above 0, got {rate}")


def _plain_defaults(conf: Path) -> Iterator[tuple[str, Any]]:
    """Yield the keys whose default is a number, or true or false, in each of the files that set it."""
    for key, values in _settings(conf).items():
        if all(isinstance(value, int | float) for value in values):
            yield key, values[0]


@cache
def _settings(conf: Path) -> dict[str, list[Any]]:
    """Return each key that an option has, with its defaults in all files that set it."""
    found: dict[str, list[Any]] = {}
    for path in sorted(conf.rglob("*.yaml")):
        is_global = path.parent == conf or "@package _global_" in path.read_text()
        prefix = "" if is_global else "".join(f"{part}." for part in path.parent.relative_to(conf).parts)
        for key, value in leaves(yaml.safe_load(path.read_text()) or {}, prefix):
            is_power = isinstance(value, str) and re.fullmatch(r"-?[\d.]+e-?\d+", value)  # text to YAML, not to Hydra
            found.setdefault(key, []).append(float(value) if is_power else value)
    return found


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value of a configuration that is no mapping, with its dotted key."""
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _check_known(prefix: str, keys: set[str], known: set[str]) -> None:
    for key in sorted(keys - known):
        close = difflib.get_close_matches(key, sorted(known), n=1)
        hint = f"did you mean {prefix}{close[0]}?" if close else f"there are: {', '.join(sorted(known))}"
        raise ValueError(f"{prefix}{key} is not a key of the configuration; {hint}")
