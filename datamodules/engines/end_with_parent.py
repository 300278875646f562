"""A vLLM plugin that ends engine processes whose driver is gone.

vLLM loads it in each of its processes (entry point group `vllm.general_plugins`). Without it an engine outlives a
driver that was killed, and keeps its memory.
"""

import ctypes
import multiprocessing
import signal

PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Ask Linux to terminate this process when its parent ends; does nothing in the driver itself."""
    if multiprocessing.parent_process() is not None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
