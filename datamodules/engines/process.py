"""Run any engine in a process of its own, so that the trainer goes on while it samples."""

import multiprocessing
import traceback
from collections.abc import Callable, Generator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from datamodules.engines.cores import machine_cores
from datamodules.engines.end_with_parent import end_with_parent
from datamodules.engines.engine import Engine, EngineDied
from datamodules.snapshots import Snapshot
from datamodules.types import Completion, Probe, Sampling

SECONDS_TO_END = 5.0  # then the process is killed


class ProcessEngine:
    """The same engine behind a pipe.

    Args:
        engine: makes the engine; called here to check its arguments and in the child to run it.
        num_threads: CPU threads of the child; null takes all.
    """

    is_in_process = False

    def __init__(self, engine: Callable[[], Engine], num_threads: int | None) -> None:
        local = engine()
        self.name = f"{local.name} in a process"
        self.window = local.window
        self.loads_adapters = local.loads_adapters
        self.canary_tolerance = local.canary_tolerance
        self.num_threads = num_threads
        device: torch.device | None = getattr(local, "device", None)
        is_on_cpu = device is None or device.type == "cpu"
        self.cpu_cores = (num_threads or len(machine_cores())) if is_on_cpu else None
        self._make = engine
        self._process: Any = None
        self._pipe: Connection | None = None
        self._calls = 0

    def load(self, snapshot: Snapshot) -> None:
        """Start the process on the first snapshot; have it load this one."""
        if self._process is None:
            self._start()
        self._call("load", snapshot)

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (self._make, theirs, self.num_threads)
        process = context.Process(target=_serve, args=arguments, name="engine", daemon=True)
        process.start()
        self._process = process  # from here on there is something to end
        theirs.close()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        stop_token_ids: Sequence[int],
    ) -> Generator[tuple[int, Completion], None, None]:
        """Yield what the child's engine yields."""
        number = self._send("generate", prompts, sampling, seeds, stop_token_ids)
        for _ in prompts:
            yield self._receive(number)

    def score(self, probe: Probe) -> list[float]:
        """Return the child's answer to a probe."""
        return self._call("score", probe)

    def _call(self, name: str, *arguments: Any) -> Any:
        return self._receive(self._send(name, *arguments))

    def _send(self, name: str, *arguments: Any) -> int:
        assert self._pipe is not None, "load a snapshot first"
        self._calls += 1
        try:
            self._pipe.send((self._calls, name, arguments))
        except OSError as error:
            raise self._died() from error
        return self._calls

    def _receive(self, number: int) -> Any:
        """Return the next answer to a call; answers to a call that was given up are passed over.

        Raises:
            EngineDied: the process ended.
            RuntimeError: the child's engine raised, with its traceback.
        """
        assert self._pipe is not None
        while True:
            if self._pipe not in wait([self._pipe, self._process.sentinel]):
                raise self._died()
            try:
                answered, is_error, value = self._pipe.recv()
            except (EOFError, OSError) as error:
                raise self._died() from error
            if answered == number:
                if is_error:
                    raise RuntimeError(f"engine {self.name} raised:\n{value}")
                return value

    def _died(self) -> EngineDied:
        return EngineDied(f"the process of engine {self.name} ended with exit code {self._process.exitcode}")

    def close(self) -> None:
        """End the process and wait for it."""
        if self._process is None:
            return
        process, pipe = self._process, self._pipe
        self._process = self._pipe = None
        process.terminate()
        process.join(SECONDS_TO_END)
        if process.is_alive():
            process.kill()
            process.join()
        assert pipe is not None
        pipe.close()


def _serve(make: Callable[[], Engine], pipe: Connection, num_threads: int | None) -> None:
    """Answer calls until the pipe closes."""
    end_with_parent()
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    engine = make()
    while True:
        try:
            number, name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            result = getattr(engine, name)(*arguments)
            for item in result if name == "generate" else [result]:
                pipe.send((number, False, item))
        except Exception:  # whatever the engine raises is the caller's to see
            pipe.send((number, True, traceback.format_exc()))
