"""Sample with vLLM in its own engine process; on a machine without CUDA, with vLLM's CPU build."""

import atexit
import gc
import logging
import math
import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from datamodules.engines.cores import listed_cores, machine_cores
from datamodules.engines.engine import EngineDied
from datamodules.engines.vllm_arguments import (
    QUIET,
    adapter_arguments,
    check_installed,
    probe_requests,
    vllm_arguments,
)
from datamodules.engines.vllm_watch import DeathWatch
from datamodules.snapshots import Snapshot
from datamodules.types import Completion, Probe, Sampling

log = logging.getLogger(__name__)


class VLLMEngine:
    """vLLM's `LLM` with its engine in a process of its own, so that the trainer's threads and groups stay ours.

    Args:
        dtype: "float32" or "bfloat16".
        kv_cache_mb: memory for keys and values; vLLM's own default claims nearly all there is.
        max_model_len: longest prompt plus completion; null takes the model's window.
        tensor_parallel_size: devices that share one copy of the model.
        enforce_eager: skip compilation; starts faster, samples large models slower.
        cpu_threads: cores of the engine on the CPU build, such as "0-1"; null: vLLM chooses, and
            keeps at least one for its scheduler.
        canary_tolerance: largest probe difference to the trainer's log-probs.
    """

    name = "vllm"
    is_in_process = False
    loads_adapters = True

    def __init__(
        self,
        dtype: str,
        kv_cache_mb: int,
        max_model_len: int | None,
        tensor_parallel_size: int,
        enforce_eager: bool,
        cpu_threads: str | None,
        canary_tolerance: float,
    ) -> None:
        check_installed()
        self.canary_tolerance = canary_tolerance
        self.window = max_model_len
        self.cpu_threads = cpu_threads
        self.cpu_cores = None if torch.cuda.is_available() else _cores(cpu_threads)
        self.arguments = vllm_arguments(dtype, kv_cache_mb, max_model_len, tensor_parallel_size, enforce_eager)
        self._llm: Any = None
        self._adapter: Any = None  # vLLM's request for the one that samples
        self._num_adapters = 0  # taken so far
        self._watch: DeathWatch | None = None

    def load(self, snapshot: Snapshot) -> None:
        """Start the engine process on the first snapshot; later ones are read into it."""
        is_new = self._llm is None
        if is_new:
            self._start(snapshot)
        if snapshot.base is not None:
            self._take_adapter(snapshot)
        elif not is_new:
            self._read(snapshot)

    def _read(self, snapshot: Snapshot) -> None:
        with _noticing_death():
            self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(snapshot.path)})
            self._llm.collective_rpc("repack_tied_head")
            if not self._llm.reset_prefix_cache():
                raise RuntimeError(f"vLLM kept its prefix cache while loading snapshot {snapshot.version}")

    def _take_adapter(self, snapshot: Snapshot) -> None:
        """Load an adapter under a number of its own: under one that is there, vLLM would keep the old one, silently."""
        from vllm.lora.request import LoRARequest

        old = self._adapter
        self._num_adapters += 1
        self._adapter = LoRARequest(f"adapter-{self._num_adapters}", self._num_adapters, str(snapshot.path))
        with _noticing_death():
            if old is not None:
                self._llm.llm_engine.remove_lora(old.lora_int_id)
            if not self._llm.llm_engine.add_lora(self._adapter):
                raise RuntimeError(f"vLLM did not take the adapter of snapshot {snapshot.version}")

    def _start(self, snapshot: Snapshot) -> None:
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        if self.cpu_threads is not None:
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(self.cpu_threads)
        log.info("starting vLLM on %s", snapshot.path)
        from vllm import LLM  # takes seconds to import, and only this engine needs it
        from vllm.v1.engine.exceptions import EngineDeadError

        arguments = self.arguments | adapter_arguments(snapshot.adapter_rank)
        self._llm = LLM(model=str(snapshot.base or snapshot.path), seed=0, **arguments)
        self._watch = DeathWatch(self._llm.llm_engine.engine_core, EngineDeadError())
        atexit.register(self.close)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        stop_token_ids: Sequence[int],
    ) -> Generator[tuple[int, Completion], None, None]:
        """Yield one completion for each (prompt, seed) from one continuous stream of requests.

        All of them are queued before the first is scheduled: what is computed together, and so rounding, never depends
        on timing.
        """
        core = self._llm.llm_engine
        waiting = set(range(len(prompts)))
        with _noticing_death():
            try:
                self._queue(prompts, sampling, seeds, stop_token_ids)
                while core.has_unfinished_requests():
                    for output in core.step():
                        index = int(output.request_id)
                        waiting.remove(index)
                        yield index, _completion(output.outputs[0], seeds[index])
            finally:
                if waiting and not core.engine_core.resources.engine_dead:  # the caller went away
                    core.abort_request([str(i) for i in waiting])  # a later call must not get these

    def _queue(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        stop_token_ids: Sequence[int],
    ) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        core = self._llm.llm_engine
        distinct = list(dict.fromkeys(map(tuple, prompts)))  # siblings share theirs
        rendered = core.renderer.render_cmpl([{"prompt_token_ids": list(prompt)} for prompt in distinct])
        inputs = dict(zip(distinct, rendered, strict=True))
        self._llm.sleep(level=0)
        try:
            for i, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
                parameters = SamplingParams(
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    top_k=sampling.top_k,
                    max_tokens=sampling.max_tokens,
                    seed=seed,
                    stop_token_ids=list(stop_token_ids),
                    logprobs=0,
                    detokenize=False,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                    skip_clone=True,  # nobody else holds it
                )
                core.add_request(str(i), inputs[tuple(prompt)], parameters, lora_request=self._adapter)
        finally:
            if not core.engine_core.resources.engine_dead:
                self._llm.wake_up(tags=["scheduling"])  # an interrupt must not leave it asleep

    def score(self, probe: Probe) -> list[float]:
        """Return the log-prob of each probe token as vLLM would have sampled it, prefix cache included."""
        requests, parameters, targets = probe_requests(probe)
        with _noticing_death():
            outputs = self._llm.generate(requests, parameters, use_tqdm=False, lora_request=self._adapter)
        return [output.outputs[0].logprobs[0][target].logprob for output, target in zip(outputs, targets, strict=True)]

    def close(self) -> None:
        """End the engine process and wait for it."""
        if self._llm is None:
            return
        llm, self._llm, self._adapter = self._llm, None, None
        atexit.unregister(self.close)
        llm.llm_engine.engine_core.shutdown()
        if self._watch is not None:
            self._watch.stop()
            self._watch.wake()  # another thread may be in the middle of sampling
        del llm
        gc.collect()


def _cores(cpu_threads: str | None) -> int:
    """Return how many cores vLLM's CPU build binds its threads to, at most."""
    return max(1, len(machine_cores()) - 1) if cpu_threads is None else len(listed_cores(cpu_threads))


@contextmanager
def _noticing_death() -> Iterator[None]:
    """Say in our terms that the engine's process has ended."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError as error:
        raise EngineDied("vLLM's engine process ended (its own messages are above)") from error


def _completion(output: Any, seed: int) -> Completion:
    """Turn vLLM's output into ours; a log-prob that is no finite number fails the sample."""
    token_ids = tuple(output.token_ids)
    logprobs = tuple(step[token].logprob for step, token in zip(output.logprobs or (), token_ids, strict=False))
    if output.finish_reason not in ("stop", "length"):
        return Completion((), (), "error", seed, failure=f"vLLM finished with {output.finish_reason!r}")
    if len(logprobs) != len(token_ids) or not all(math.isfinite(p) for p in logprobs):
        return Completion((), (), "error", seed, failure="missing or non-finite log-prob")
    return Completion(token_ids, logprobs, output.finish_reason, seed)
