"""Our trainer on the recording: the whole of a run that `datamodule=offline` makes; prints one line of JSON."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hydra import compose, initialize_config_dir

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
import rss  # noqa: E402
from model_sizes import matmul_rate, step_flops  # noqa: E402

from train import train  # noqa: E402

MARKS: list[float] = []
SEEN: dict[str, Any] = {"forward_tokens": 0, "flops": 0.0}


class Marks(L.Callback):
    """Note when each optimizer step ends, and count the tokens that pass the model."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        SEEN["model"] = pl_module.policy.model
        SEEN["model"].get_input_embeddings().register_forward_hook(self._count)

    @staticmethod
    def _count(_: Any, inputs: tuple[torch.Tensor], __: Any) -> None:
        SEEN["forward_tokens"] += inputs[0].numel() * torch.is_grad_enabled()

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        MARKS.append(time.perf_counter())
        if len(MARKS) == 1:
            rss.reset_peak()
        else:
            SEEN["flops"] += step_flops(SEEN["model"], batch.micro_batches)


def main() -> None:
    """Train and report."""
    spec = json.loads(sys.argv[1])
    before = rss.resident()
    overrides = [
        f"directory={spec['directory']}",
        "objective=grpo",
        "datamodule=offline",
        f"datamodule.path={spec['recording']}",
        f"datamodule.batch_size={spec['batch_size']}",
        f"datamodule.max_tokens_per_micro_batch={spec['max_tokens']}",
        "policy=hf",
        f"policy.path={spec['model']}",
        f"policy.dtype={spec['dtype']}",
        f"policy.attn_implementation={spec.get('attention', 'packed')}",
        "engine=transformers",
        "rounds=1",
        f"num_threads={spec['threads']}",
        "logger=csv",
        "~callbacks.held_out_evaluation",
        "~callbacks.checkpoint_best",
        "~callbacks.checkpoint_last",
    ]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("train", [*overrides, "+callbacks.marks._target_=__main__.Marks"])
    train(cfg)
    parameters = sum(p.numel() for p in SEEN["model"].parameters())
    state = parameters * (16 if spec["dtype"] == "float32" else 8)
    print(json.dumps({
        "seconds_per_step": (MARKS[-1] - MARKS[0]) / (len(MARKS) - 1),
        "activation_bytes": rss.peak() - before - state,
        "forward_tokens": SEEN["forward_tokens"],
        "mfu": SEEN["flops"] / (MARKS[-1] - MARKS[0]) / matmul_rate(getattr(torch, spec["dtype"])),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
