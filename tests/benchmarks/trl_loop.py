"""The quickstart's loop in TRL: the same model, task, sizes and steps a round, sampled by transformers; prints JSON."""

import json
import random
import re
import sys
import time
from typing import Any

import torch


def correct(prompts: list[Any], completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Score 1 where the last number is the sum."""
    texts = [completion[0]["content"] for completion in completions]
    return [float((re.findall(r"\d+", text) or [""])[-1] == a) for text, a in zip(texts, answer, strict=True)]


def main() -> None:
    """Train three rounds of ten steps and report the last two."""
    spec = json.loads(sys.argv[1])
    torch.set_num_threads(spec["threads"])
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    ends: list[float] = []

    class Ends(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    draw = random.Random(0)
    sums = [(draw.randint(100, 999), draw.randint(100, 999)) for _ in range(1000)]
    rows = [{"prompt": [{"role": "user", "content": f"{a}+{b}="}], "answer": str(a + b)} for a, b in sums]
    config = GRPOConfig(
        output_dir=spec["directory"],
        use_cpu=True,
        bf16=False,
        beta=0.0,
        num_generations=8,
        per_device_train_batch_size=128,
        gradient_accumulation_steps=1,
        steps_per_generation=10,
        max_completion_length=24,
        max_steps=30,
        learning_rate=1e-4,
        optim="adamw_torch_fused",
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="steps",
        logging_steps=10,
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32),
        reward_funcs=correct,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(spec["model"], padding_side="left"),
        callbacks=[Ends()],
    )
    trainer.train()
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    print(json.dumps({"seconds_per_step": (ends[29] - ends[9]) / 20, "mean_reward": sum(rewards) / len(rewards)}))


if __name__ == "__main__":
    main()
