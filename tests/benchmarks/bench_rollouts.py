"""(e) Our whole rollout path against a bare loop on the same vLLM engine and requests, (f) sync against the disk."""

import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
import rss  # noqa: E402
from model_sizes import make_model  # noqa: E402

from datamodules.snapshots import SnapshotStore  # noqa: E402
from datamodules.types import Probe  # noqa: E402
from modules.policy import Policy  # noqa: E402
from modules.tiny_policy import character_tokenizer  # noqa: E402

ROUNDS = {"0.5M": 21, "8M": 7}  # one of them swings by a tenth from round to round
SIZES = {
    "0.5M": (),
    "8M": ("policy.hidden_size=320", "policy.num_heads=5", "policy.num_layers=6", "policy.intermediate_size=864"),
}
SETTINGS = (
    "engine=vllm", "engine.kv_cache_mb=256", "datamodule.prompts_per_round=160",
    "datamodule.group_size=8", "datamodule.batch_size=128", "datamodule.sampling.max_tokens=24",
)  # fmt: skip


class Hooks:
    """A trainer's callbacks without a trainer."""

    def __init__(self, *callbacks: Any) -> None:
        self.callbacks = callbacks
        self.max_epochs = 0


def rollout_path(directory: Path) -> dict[str, Any]:
    """Return the median seconds of a round by our path and by a bare loop, in turns on one engine, for each size.

    Args:
        directory: of the runs.
    """
    return {size: _rollout_path(directory / size, settings, ROUNDS[size]) for size, settings in SIZES.items()}


def _rollout_path(directory: Path, settings: tuple[str, ...], rounds: int) -> dict[str, float]:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("train", [f"directory={directory}", f"lag={rounds}", *SETTINGS, *settings])
    policy, data = instantiate(cfg.policy), instantiate(cfg.datamodule)
    data.use(policy)
    data.setup("fit")
    data.trainer = Hooks(instantiate(cfg.callbacks.verifier_scoring))
    data.snapshots.publish(
        0, step=0, probe=data.probe, probe_logprobs=policy.probe_logprobs(data.probe), write=policy.save_pretrained
    )
    data.sampler.load(0)
    ours, bare = [], []
    try:
        for round_ in range(rounds):
            start = time.perf_counter()
            rollouts = data._obtain(round_)
            ours.append(time.perf_counter() - start)
            bare.append(_bare(data.engine, rollouts, cfg.datamodule.sampling.max_tokens, data.codec.stop_token_ids))
    finally:
        data.close()
    seconds, loop = statistics.median(ours[1:]), statistics.median(bare[1:])
    quarters = statistics.quantiles([a / b - 1.0 for a, b in zip(ours[1:], bare[1:], strict=True)])
    return {
        "seconds": seconds,
        "bare_seconds": loop,
        "overhead": seconds / loop - 1.0,
        "lower_quartile": quarters[0],
        "upper_quartile": quarters[2],
    }


def _bare(engine: Any, rollouts: list[Any], max_tokens: int, stops: tuple[int, ...]) -> float:
    """Draw the same completions by vLLM's own interface."""
    from vllm import SamplingParams

    requests = [{"prompt_token_ids": list(r.prompt_ids)} for r in rollouts]
    common = {"temperature": 1.0, "max_tokens": max_tokens, "stop_token_ids": list(stops), "logprobs": 0}
    parameters = [SamplingParams(seed=r.seed, detokenize=False, **common) for r in rollouts]
    engine._llm.reset_prefix_cache()
    start = time.perf_counter()
    outputs = engine._llm.generate(requests, parameters, use_tqdm=False)
    seconds = time.perf_counter() - start
    assert [tuple(o.outputs[0].token_ids) for o in outputs] == [r.completion_ids for r in rollouts]
    return seconds


def sync(directory: Path) -> dict[str, Any]:
    """Return bytes a second of publishing a 135M model and of reading it back, with the disk's own and memory's.

    Args:
        directory: where the snapshots go.
    """
    policy = Policy(make_model("135M", 49152), character_tokenizer())
    size = sum(p.numel() * p.element_size() for p in policy.parameters())
    store = SnapshotStore(directory / "snapshots")
    probe = Probe(tuple(range(5, 101)), (20, 70, 95), 1.0)
    rss.reset_peak()
    before = rss.resident()
    logprobs = (0.0, 0.0, 0.0)

    def publish_one(version: int) -> None:
        store.publish(version, step=0, probe=probe, probe_logprobs=logprobs, write=policy.save_pretrained)

    publish = [_seconds(partial(publish_one, version)) for version in range(3)]
    grown = rss.peak() - before
    piece = os.urandom(64 * 2**20)
    raw = [_seconds(lambda: _write(directory / "raw", size, piece)) for _ in range(3)]
    from datamodules.engines.transformers import TransformersEngine

    engine = TransformersEngine(max_sequences=8, device="cpu", dtype="float32", canary_tolerance=1e-3)
    engine.load(store.get(0))
    reload = [_seconds(lambda: engine.load(store.get(1))) for _ in range(3)]
    source, target = (torch.ones(size, dtype=torch.uint8) for _ in range(2))
    copy = [_seconds(lambda: target.copy_(source)) for _ in range(3)]
    rates = {
        "publish": publish,
        "disk_write": raw,
        "reload_transformers": reload,
        "reload_vllm": _vllm_reloads(store),
        "memory_copy": copy,
    }
    return {f"{name}_mb_per_second": size / 2**20 / min(values) for name, values in rates.items()} | {
        "publish_memory_mb": max(0, grown) / 2**20,
        "model_mb": size / 2**20,
    }


def _vllm_reloads(store: SnapshotStore) -> list[float]:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        engine = instantiate(compose("train", ["engine=vllm", "engine.max_model_len=512"]).engine)
    engine.load(store.get(0))
    seconds = [_seconds(lambda: engine.load(store.get(1))) for _ in range(3)]
    engine.close()
    return seconds


def _write(path: Path, size: int, piece: bytes) -> None:
    """Write and flush as many bytes as the model has, piece after piece."""
    with path.open("wb") as file:
        for _ in range(size // len(piece)):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def _seconds(function: Any) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
