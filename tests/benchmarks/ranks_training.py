"""One of several processes that train a 135M model on the recording; rank 0 prints one line of JSON."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import psutil
from hydra import compose, initialize_config_dir

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
import rss  # noqa: E402

from datamodules import ranks  # noqa: E402
from datamodules.snapshots import SnapshotStore  # noqa: E402
from train import train  # noqa: E402

SYNCS: list[dict[str, float]] = []
PEAKS: list[int] = []


class Start(L.Callback):
    """Note the memory that having the policy in its shards, or whole, has taken at most."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        PEAKS.append(rss.peak())


def measured(publish: Any) -> Any:
    """Return `publish`, with the seconds and bytes of each call noted."""

    def publish_(*args: Any, **settings: Any) -> Any:
        ranks.barrier()
        before, start = _moved(), time.perf_counter()
        snapshot = publish(*args, **settings)
        ranks.barrier()
        moved = [now - then for now, then in zip(_moved(), before, strict=True)]
        SYNCS.append({"seconds": time.perf_counter() - start, "network_bytes": moved[0], "written_bytes": moved[1]})
        return snapshot

    return publish_


def _moved() -> tuple[int, int]:
    """Return the bytes that went through the loopback device, and those that this process wrote."""
    written = next(line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("write_bytes"))
    return psutil.net_io_counters(pernic=True)["lo"].bytes_sent, int(written.split()[1])


def main() -> None:
    """Train and report."""
    spec = json.loads(sys.argv[1])
    ranks.join()
    before = rss.resident()
    rss.reset_peak()
    SnapshotStore.publish = measured(SnapshotStore.publish)  # type: ignore[method-assign]
    overrides = [
        f"directory={spec['directory']}", f"trainer={spec['trainer']}", "objective=grpo", "datamodule=offline",
        f"datamodule.path={spec['recording']}", "datamodule.batch_size=8", "datamodule.max_tokens_per_micro_batch=1024",
        "policy=hf", f"policy.path={spec['model']}", "engine=transformers", "rounds=1", "logger=csv", "num_threads=1",
        "~callbacks.held_out_evaluation", "~callbacks.checkpoint_best", "~callbacks.checkpoint_last",
        "+callbacks.start._target_=__main__.Start",
    ]  # fmt: skip
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("train", overrides)
    train(cfg)
    mine = {"start": PEAKS[0] - before, "peak": rss.peak() - before, **SYNCS[-1]}
    all_ = ranks.gather(mine)
    if ranks.rank() == 0:
        print(json.dumps({
            "mb_a_rank_at_start": max(r["start"] for r in all_) / 2**20,
            "peak_mb_a_rank": max(r["peak"] for r in all_) / 2**20,
            "sync_seconds": SYNCS[-1]["seconds"],
            "sync_network_mb": SYNCS[-1]["network_bytes"] / 2**20,
            "sync_written_mb_a_rank": max(r["written_bytes"] for r in all_) / 2**20,
        }))  # fmt: skip
    ranks.leave()


if __name__ == "__main__":
    main()
