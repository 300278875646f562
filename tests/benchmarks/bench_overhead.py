"""What the framework adds to a step of a model of a million parameters, against a bare loop of the same maths."""

import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import psutil
import torch
from hydra import compose, initialize_config_dir

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
from datamodules.types import OptimizerStep  # noqa: E402
from train import train  # noqa: E402

SIZES = (
    "policy.hidden_size=192", "policy.num_heads=6", "policy.intermediate_size=384", "datamodule.prompts_per_round=320",
    "datamodule.group_size=8", "datamodule.batch_size=128", "datamodule.sampling.max_tokens=24", "num_threads=1",
    "rounds=2", "engine=transformers", "prompts.num_held_out=16",
)  # fmt: skip


class Times(L.Callback):
    """Keep the batches, the module, and the seconds between the ends of a round's optimizer steps."""

    steps: ClassVar[list[OptimizerStep]] = []
    seconds: ClassVar[list[float]] = []
    module: ClassVar[Any] = None
    _last: float | None = None

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        Times.module = pl_module
        self._last = None

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        now = time.perf_counter()
        if self._last is not None:
            self.seconds.append(now - self._last)
        self._last = now
        self.steps.append(batch)


def overhead(directory: Path) -> dict[str, float]:
    """Return the median seconds of a step in the framework and in the loop, and what the framework adds.

    Args:
        directory: of the run.
    """
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("train", [*SIZES, f"directory={directory}", "+callbacks.times._target_=bench_overhead.Times"])
    sys.modules["bench_overhead"] = sys.modules[__name__]  # the class that Hydra builds is the one that is read here
    train(cfg)
    framework, bare = statistics.median(Times.seconds), statistics.median(_bare_loop(Times.module))
    return {"framework_seconds": framework, "bare_seconds": bare, "overhead": framework / bare - 1.0}


def startup(directory: Path) -> dict[str, float]:
    """Return the seconds from the start of this process to the first optimizer step of the default run.

    Args:
        directory: of the run.
    """
    imported = since_start()
    overrides = [f"directory={directory}", "rounds=1", "engine=transformers"]
    left_out = ["~callbacks.held_out_evaluation", "~callbacks.checkpoint_best"]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("train", [*overrides, *left_out, "+callbacks.first._target_=bench_overhead.First"])
    sys.modules["bench_overhead"] = sys.modules[__name__]
    train(cfg)
    libraries = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import hydra, lightning, torch, transformers"], check=True)
    return {
        "libraries_alone_seconds": time.perf_counter() - libraries,
        "imports_seconds": imported,
        "until_sampling_seconds": First.times["round"],
        "until_first_step_seconds": First.times["step"],
    }


def since_start() -> float:
    """Return the seconds since this process began."""
    began = psutil.Process().create_time() - psutil.boot_time()  # seconds after the machine's start
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began


class First(L.Callback):
    """Note when the first round is about to be sampled, and when the first optimizer step has ended."""

    times: ClassVar[dict[str, float]] = {}

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.times["round"] = since_start()

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.times.setdefault("step", since_start())


def _bare_loop(module: Any) -> list[float]:
    """Train on the same batches with nothing but PyTorch, the log-probs and the loss."""
    parameters = list(module.policy.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-6, weight_decay=0.0, fused=True)
    head = module.objectives["topr"]
    seconds = []
    for step in Times.steps:
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        for batch in step.micro_batches:
            loss = head(module.policy.logprobs(batch), batch).loss.sum() / batch.num_sequences
            loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return seconds
