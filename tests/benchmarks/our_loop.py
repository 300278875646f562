"""The whole loop of the quickstart with the transformers engine, without evaluation; prints one line of JSON."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
from hydra import compose, initialize_config_dir

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]
from train import train  # noqa: E402

ENDS: list[float] = []


class Ends(L.Callback):
    """Note when each round ends."""

    def on_train_epoch_end(self, *_: Any) -> None:
        ENDS.append(time.perf_counter())


def main() -> None:
    """Train three rounds and report the last two."""
    spec = json.loads(sys.argv[1])
    overrides = [
        "experiment=quickstart", "engine=transformers", "objective=grpo", "rounds=3", f"directory={spec['directory']}",
        f"warm_start.directory={spec['warm_start']}", f"num_threads={spec['threads']}", "logger=csv",
        "~callbacks.held_out_evaluation", "~callbacks.checkpoint_best", "+callbacks.ends._target_=__main__.Ends",
    ]  # fmt: skip
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        train(compose("train", overrides))
    print(json.dumps({"seconds_per_step": (ENDS[-1] - ENDS[0]) / 20}))


if __name__ == "__main__":
    main()
