"""End an engine's process when its driver is gone: without it, it outlives a driver that was killed.

`ProcessEngine` calls it in its child. vLLM loads it in each of its processes as a plugin (entry point group
`vllm.general_plugins`).
"""

import ctypes
import multiprocessing
import signal

PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Ask Linux to terminate this process when its parent ends; does nothing in the driver itself."""
    if multiprocessing.parent_process() is not None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
