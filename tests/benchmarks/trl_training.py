"""TRL's GRPOTrainer on the recording, in TRL's own environment; prints one line of JSON.

Settings that suit it: no KL, one generation a step, so that no second forward pass is needed.
"""

import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

sys.path.insert(0, str(Path(__file__).parent))
import rss


def main() -> None:
    """Train and report."""
    spec = json.loads(sys.argv[1])
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    torch.set_num_threads(spec["threads"])
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    before = rss.resident()
    rows = pq.read_table(spec["recording"]).to_pylist()
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["prompt"]].append(row)
    steps = len(rows) // spec["batch_size"]
    marks: list[float] = []

    class Marks(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            marks.append(time.perf_counter())
            if len(marks) == 1:
                rss.reset_peak()

    def recorded(prompts: list[str], trainer: Any) -> dict[str, Any]:
        taken: dict[str, int] = defaultdict(int)
        chosen = []
        for prompt in prompts:
            chosen.append(groups[prompt][taken[prompt]])
            taken[prompt] += 1
        return {
            "prompt_ids": [row["prompt_ids"] for row in chosen],
            "completion_ids": [row["completion_ids"] for row in chosen],
            "logprobs": [row["sampling_logprobs"] for row in chosen],
            "recorded_reward": [row["reward"] for row in chosen],
        }

    def reward(recorded_reward: list[float], **_: Any) -> list[float]:
        return recorded_reward

    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=getattr(torch, spec["dtype"]))
    micro = spec["sequences_per_micro_batch"]
    config = GRPOConfig(
        output_dir=spec["directory"],
        use_cpu=True,
        bf16=False,
        beta=0.0,
        num_generations=4,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=spec["batch_size"] // micro,
        steps_per_generation=spec["batch_size"] // micro,
        max_completion_length=4096,
        max_steps=steps,
        learning_rate=1e-6,
        optim="adamw_torch_fused",
        gradient_checkpointing=False,
        shuffle_dataset=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in groups]),
        processing_class=AutoTokenizer.from_pretrained(spec["model"], padding_side="left"),
        rollout_func=recorded,
        callbacks=[Marks()],
    )
    forwards = [0]
    model.get_input_embeddings().register_forward_hook(
        lambda _, inputs, __: forwards.__setitem__(0, forwards[0] + inputs[0].numel())
    )
    trainer.train()
    parameters = sum(p.numel() for p in model.parameters())
    state = parameters * (16 if spec["dtype"] == "float32" else 8)
    print(json.dumps({
        "seconds_per_step": (marks[-1] - marks[0]) / (len(marks) - 1),
        "activation_bytes": rss.peak() - before - state,
        "forward_tokens": forwards[0],
    }))  # fmt: skip


if __name__ == "__main__":
    main()
