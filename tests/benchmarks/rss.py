"""Peak resident memory of this process, from Linux's own counters."""

import ctypes
from pathlib import Path


def resident() -> int:
    """Return the bytes in memory now."""
    return _field("VmRSS")


def peak() -> int:
    """Return the most bytes in memory since `reset_peak`."""
    return _field("VmHWM")


def reset_peak() -> None:
    """Let the peak start from what is in memory now; what was freed goes back to the system first."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def _field(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")
