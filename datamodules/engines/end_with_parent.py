"""End an engine's process when its driver is gone: without it, it outlives a driver that was killed.

`ProcessEngine` calls it in its child. vLLM loads it in each of its processes as a plugin (entry point group
`vllm.general_plugins`).
"""

import ctypes
import multiprocessing
import signal
import threading

PR_SET_PDEATHSIG = 1


def terminate_with_parent() -> None:
    """Ask Linux to send this process SIGTERM when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def end_with_parent() -> None:
    """Ask Linux to terminate this process when its parent ends; does nothing in the driver itself.

    Ctrl-C, which reaches the whole group, is left to the driver: it ends its engines itself, and without their alarm.
    """
    if multiprocessing.parent_process() is None:
        return
    terminate_with_parent()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
