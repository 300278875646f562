"""(c) Log-probs in chunks against the plain softmax, (d) packing against padding, (g) growth with tokens and size."""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
import rss  # noqa: E402
from fixed_rollouts import make_recording  # noqa: E402
from model_sizes import make_model, step_flops  # noqa: E402

from datamodules.micro_batches import packed_micro_batches  # noqa: E402
from datamodules.packing import pack_round  # noqa: E402
from datamodules.store import read_rollouts  # noqa: E402
from datamodules.types import OptimizerStep  # noqa: E402
from modules.policy import Policy  # noqa: E402
from modules.tiny_policy import character_tokenizer  # noqa: E402
from modules.token_logprobs import LogitScale, token_logprobs  # noqa: E402


def timed(function: Callable[[], Any], repeats: int = 2) -> dict[str, float]:
    """Return the least seconds of some calls after a first one, and the memory that they took at their peak."""
    function()
    rss.reset_peak()
    before = rss.resident()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return {"seconds": min(seconds), "peak_mb": max(0, rss.peak() - before) / 2**20}


def logprobs() -> Iterator[dict[str, Any]]:
    """Yield forward and backward of the head alone, chunked and plain."""
    for vocabulary, width in ((101, 128), (49152, 576), (151936, 256)):
        for tokens in (512, 2048):
            head = nn.Linear(width, vocabulary, bias=False)
            hidden = torch.randn(tokens, width, requires_grad=True)
            targets = torch.randint(vocabulary, (tokens,))

            def chunked(h: Tensor = hidden, t: Tensor = targets, head: nn.Linear = head) -> None:
                scale = LogitScale()
                token_logprobs(h, t, head, vocabulary=head.out_features, scale=scale).sum().backward()

            def plain(h: Tensor = hidden, t: Tensor = targets, head: nn.Linear = head) -> None:
                head(h).float().log_softmax(-1).gather(1, t[:, None]).sum().backward()

            ours, naive = timed(chunked), timed(plain)
            yield {
                "vocabulary": vocabulary,
                "tokens": tokens,
                "seconds": ours["seconds"],
                "plain_seconds": naive["seconds"],
                "peak_mb": ours["peak_mb"],
                "plain_peak_mb": naive["peak_mb"],
            }


def packing(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield a training step of a 135M model, padded, packed and compiled, with the log-probs' largest difference.

    Between padded and packed stands packed without sharing: each sibling has a prompt of its own.
    """
    policy = Policy(make_model("135M", 49152), character_tokenizer())
    step = _step(directory, num_prompts=3, vocabulary=49152, max_tokens=1024)
    expected = None
    for attention in ("sdpa", "packed"):
        policy.model.set_attn_implementation(attention)
        if attention == "packed":
            alone = _step(directory, num_prompts=3, vocabulary=49152, max_tokens=1024, are_prompts_shared=False)
            measured = timed(lambda step=alone: _train(policy, step), repeats=1)
            yield {"attention": "packed, no prompt shared", "difference": None, **measured}
        found = torch.cat([policy.logprobs(batch).detach().flatten() for batch in step.micro_batches])
        expected = found if expected is None else expected
        yield {
            "attention": attention,
            "difference": float((found - expected).abs().max()),
            **timed(lambda: _train(policy, step), repeats=1),
        }
    policy.compile_layers()
    _train(policy, step)
    found = torch.cat([policy.logprobs(batch).detach().flatten() for batch in step.micro_batches])
    yield {
        "attention": "packed, layers compiled",
        "difference": float((found - expected).abs().max()),
        **timed(lambda: _train(policy, step), repeats=1),
    }


def growth(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield step time and memory from 1k to 64k tokens at half a million parameters, and by size at 1k."""
    for size, vocabulary, tokens in (
        *(("0.5M", 101, n) for n in (1024, 4096, 16384, 65536)),
        ("8M", 101, 1024),
        *(("135M", 49152, n) for n in (1024, 4096)),
    ):
        policy = Policy(make_model(size, vocabulary), character_tokenizer())
        policy.model.set_attn_implementation("packed")
        step = _step(directory / f"{size}-{tokens}", num_prompts=-(-tokens // 540), vocabulary=101, max_tokens=4096)
        measured = timed(lambda policy=policy, step=step: _train(policy, step), repeats=1)
        yield {
            "parameters": size,
            "tokens": sum(batch.input_ids.numel() for batch in step.micro_batches),
            "gflops_per_second": step_flops(policy.model, step.micro_batches) / measured["seconds"] / 1e9,
            **measured,
        }


def _step(
    directory: Path, *, num_prompts: int, vocabulary: int, max_tokens: int, are_prompts_shared: bool = True
) -> OptimizerStep:
    rollouts = read_rollouts(make_recording(directory, num_prompts=num_prompts, vocabulary=vocabulary))
    if not are_prompts_shared:
        rollouts = [replace(r, prompt_ids=(3 + r.sibling, *r.prompt_ids[1:])) for r in rollouts]
    (step,) = pack_round(
        rollouts,
        batch_size=len(rollouts),
        passes=1,
        max_tokens=max_tokens,
        cut=packed_micro_batches,
        seed=0,
        round_=0,
    )
    return step


def _train(policy: Policy, step: OptimizerStep) -> None:
    for batch in step.micro_batches:
        policy.logprobs(batch).sum().backward()
    policy.zero_grad(set_to_none=True)
