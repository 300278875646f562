"""Start a vLLM server on this machine, for this run alone."""

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from datamodules.engines.serve import ENDS_WITH_PARENT
from datamodules.engines.vllm_front import KEY

log = logging.getLogger(__name__)

SECONDS_TO_END = 10.0  # then the process is killed
HOST = "127.0.0.1"


class ServerProcess:
    """A process of `datamodules.engines.serve` on loopback; it ends with this one, whatever ends this one.

    Args:
        words: of its command line, but for model, host and port.
        devices: what it alone may use: "0,1" of the GPUs, or where there are none "0-3" of the CPU cores; null: all.
        key: that it asks for.
        log_file: takes what it prints.
    """

    def __init__(self, words: Sequence[str], devices: str | None, key: str, log_file: Path) -> None:
        self._words = list(words)
        self._devices = devices
        self._key = key
        self.log_file = log_file
        self.failed_starts = 0  # in a row
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self, model: Path, words: Sequence[str], has_gpus: bool) -> str:
        """Start it on a model directory, with more words, and return its address; it answers some seconds later."""
        self.kill()
        port = _free_port()
        command = [sys.executable, "-m", "datamodules.engines.serve", str(model), "--host", HOST, "--port", str(port)]
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        with self.log_file.open("ab") as output:
            self._process = subprocess.Popen(
                [*command, *self._words, *words],
                env={**os.environ, **self._environment(has_gpus)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a group of its own, to be ended as one; Ctrl-C is left to the driver
            )
        log.info("started vLLM server %s:%d (process %d, log %s)", HOST, port, self._process.pid, self.log_file)
        return f"http://{HOST}:{port}"

    def _environment(self, has_gpus: bool) -> Mapping[str, str]:
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        variables = {KEY: self._key, ENDS_WITH_PARENT: str(os.getpid()), "PYTHONPATH": path}
        if self._devices is not None:
            variables["CUDA_VISIBLE_DEVICES" if has_gpus else "VLLM_CPU_OMP_THREADS_BIND"] = self._devices
        return variables

    def end(self) -> None:
        """End it with all its children, and wait."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            log.warning("vLLM server process %d does not end; it is killed", process.pid)
        _kill_group(process)

    def kill(self) -> None:
        """End it at once with all its children."""
        process, self._process = self._process, None
        if process is not None:
            _kill_group(process)

    def last_words(self) -> str:
        """Return the last line that it printed."""
        lines = self.log_file.read_text(errors="replace").split("\n") if self.log_file.is_file() else []
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


def check_devices(devices: Sequence[str] | None, num_servers: int) -> None:
    """Refuse servers that would share devices unasked.

    Raises:
        ValueError: with an example.
    """
    is_shared = devices is None and num_servers > 1  # each would take all of them
    if is_shared or isinstance(devices, str) or (devices is not None and len(devices) != num_servers):
        raise ValueError(
            f"engine.devices must have one entry for each of {num_servers} servers, such as "
            f"{[str(i) for i in range(num_servers)]}, got {devices}"
        )


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):  # all of them have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        return int(taken.getsockname()[1])
