"""Tiny real models and their snapshots, for every test that needs one."""

import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import DictConfig
from runs import RECORDED_ROUNDS, small

from datamodules.clock import Clock
from datamodules.codec import Codec
from datamodules.snapshots import Snapshot, SnapshotStore
from datamodules.store import RolloutStore
from datamodules.types import Probe, Rollout, Verdict
from modules.policy import Policy
from modules.tiny_policy import tiny_policy

ROOT = Path(__file__).parents[1]

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
torch.set_num_threads(1)  # tiny models lose time on more


@pytest.fixture(scope="session")
def make_policy() -> Callable[..., Policy]:
    """Return a maker of tiny policies with weights large enough that tokens differ in probability."""

    def make(seed: int = 0, *, tied: bool = True) -> Policy:
        torch.manual_seed(seed)
        policy = tiny_policy(64, 2, 2, 128, 256, tied)
        with torch.no_grad():
            for parameter in policy.parameters():
                if parameter.dim() == 2:
                    parameter.mul_(4.0)
        return policy

    return make


@pytest.fixture(scope="session")
def codec(make_policy: Callable[..., Policy]) -> Codec:
    """Return the tiny policies' codec."""
    policy = make_policy()
    return Codec(policy.tokenizer, policy.stop_token_ids, policy.window)


@pytest.fixture(scope="session")
def publish() -> Callable[..., Snapshot]:
    """Return a function that publishes a policy into a directory, with a probe longer than two cache blocks."""

    def publish_(policy: Policy, directory: Path, version: int = 0, *, temperature: float = 1.0) -> Snapshot:
        probe = Probe(tuple(5 + i % 90 for i in range(96)), (20, 70, 95), temperature)
        return SnapshotStore(directory).publish(
            version,
            step=10 * version,
            probe=probe,
            probe_logprobs=policy.probe_logprobs(probe),
            write=policy.save_pretrained,
        )

    return publish_


@pytest.fixture
def compose(tmp_path: Path) -> Callable[..., DictConfig]:
    """Return a composer of whole configurations that write below the test's own directory."""

    def compose_(*overrides: str) -> DictConfig:
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            return hydra_compose("train", [f"directory={tmp_path / 'run'}", *overrides])

    return compose_


@pytest.fixture
def small_run(compose: Callable[..., DictConfig], tmp_path: Path) -> Callable[..., DictConfig]:
    """Return a composer of runs that take a second or two: a tiny model, one-digit sums, few samples."""

    def compose_(*overrides: str, directory: Path | None = None) -> DictConfig:
        return compose(f"directory={directory or tmp_path / 'run'}", *small(*overrides))

    return compose_


@pytest.fixture(scope="session")
def make_rollout() -> Callable[..., Rollout]:
    """Return a maker of judged rollouts; `score=None` makes one that failed in judging."""

    def make(group_id: int = 0, sibling: int = 0, *, score: float | None = 1.0, **changes: Any) -> Rollout:
        values: dict[str, Any] = {
            "prompt_id": f"p{group_id}",
            "group_id": group_id,
            "sibling": sibling,
            "prompt_text": "2+2=",
            "answer": "4",
            "prompt_ids": (7, 8, 9),
            "completion_ids": (4, 2),
            "sampling_logprobs": (-0.5, -0.25),
            "text": "4",
            "finish_reason": "stop",
            "temperature": 1.0,
            "seed": 11,
            "round": 3,
            "snapshot": 1,
            "snapshot_step": 20,
            "verdict": Verdict("error" if score is None else "correct" if score > 0.5 else "incorrect", score),
        }
        return Rollout(**values | changes)

    return make


@pytest.fixture(scope="session")
def recording(tmp_path_factory: pytest.TempPathFactory, make_rollout: Callable[..., Rollout]) -> Path:
    """Record five rounds of uneven lengths; in one of them all samples but one failed, so that a rank has none."""
    store = RolloutStore(tmp_path_factory.mktemp("recording"))
    draw = random.Random(0)

    def rollout(round_: int, group: int, sibling: int, prompt: tuple[int, ...]) -> Rollout:
        is_lost = round_ == 2 and (group, sibling) != (3, 1)
        length = draw.randint(1, 14)
        return make_rollout(
            group, sibling, score=None if is_lost else float(draw.random() < 0.5), round=round_, snapshot=round_,
            snapshot_step=2 * round_, prompt_ids=prompt, completion_ids=tuple(_ids(draw, length)),
            sampling_logprobs=tuple(-math.log(101) + draw.uniform(-0.3, 0.3) for _ in range(length)),
        )  # fmt: skip

    for round_ in range(RECORDED_ROUNDS):
        prompts = [tuple(_ids(draw, draw.randint(2, 9))) for _ in range(8)]
        with store.writing(round_, {}, Clock()) as write:
            write([rollout(round_, g, s, prompt) for g, prompt in enumerate(prompts) for s in range(4)])
    return store.directory


def _ids(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(5, 100) for _ in range(count)]
