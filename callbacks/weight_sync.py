"""Publish the policy as a numbered snapshot when a round of updates ends."""

import re
import shutil
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from datamodules.ranks import from_main

ROUND_IN_NAME = re.compile(r"(\d{6})\.ckpt$")  # as callbacks.checkpoint_* name their files


class WeightSync(Callback):
    """Publish snapshots and prune those that neither the lag nor a checkpoint needs.

    The end of the epoch is the only safe place: Lightning asks for the next epoch's dataloader, and so samples its
    rollouts, before it calls `on_train_epoch_start`, and it runs checkpoint callbacks last, so a checkpoint never names
    a snapshot that is not yet on disk. The initial weights are published when the DataModule first asks for them.
    """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Check that a checkpoint's name tells its round, so that its snapshots are kept, and who is to load them.

        Raises:
            ValueError: a name does not, or the engine does not load adapters alone.
        """
        engine: Any = trainer.datamodule.engine  # type: ignore[attr-defined]
        if pl_module.policy.syncs_adapter and not engine.loads_adapters:  # type: ignore[union-attr,operator]
            raise ValueError(
                f"policy.lora.sync=adapter: engine {engine.name} loads whole models only as it is set up; take "
                "policy.lora.sync=merged, engine=vllm, or engine=vllm_server with engine/transfer=files"
            )
        for callback in trainer.checkpoint_callbacks:
            name = getattr(callback, "filename", None)
            if name is not None and not name.endswith("{epoch:06d}"):
                raise ValueError(
                    f"callbacks.checkpoint_*.filename must end in '{{epoch:06d}}', which tells whose snapshots to "
                    f"keep, got {name!r}"
                )

    def on_snapshot_missing(self, trainer: L.Trainer, version: int) -> None:
        """Publish the weights as they are before the first update."""
        self._publish(trainer, version)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Publish the weights that the finished round left."""
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if not data.trains:
            return
        version = trainer.current_epoch + 1
        self._publish(trainer, version)
        from_main(lambda: self._prune(trainer, version))

    def _prune(self, trainer: L.Trainer, version: int) -> None:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        _drop_superseded(trainer)
        needed = {v for newest in (version, *self._checkpointed(trainer)) for v in data.needed_snapshots(newest)}
        data.snapshots.prune(needed)

    def _publish(self, trainer: L.Trainer, version: int) -> None:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        policy: Any = trainer.lightning_module.policy
        with data.clock.measure("sync"):
            probe = data.probe
            if policy.syncs_adapter:
                data.snapshots.publish_base(policy.save_base)
            data.snapshots.publish(
                version,
                step=trainer.global_step,
                probe=probe,
                probe_logprobs=policy.probe_logprobs(probe),
                write=policy.save_snapshot,
                adapter_rank=policy.lora.rank if policy.syncs_adapter else 0,
            )

    @staticmethod
    def _checkpointed(trainer: L.Trainer) -> set[int]:
        """Return the newest snapshot that each kept checkpoint resumes from: one after its finished round."""
        directories = {c.dirpath for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint) and c.dirpath}
        names = [ROUND_IN_NAME.search(path.name) for d in directories for path in Path(d).glob("*.ckpt")]
        return {int(match[1]) + 1 for match in names if match}


def _drop_superseded(trainer: L.Trainer) -> None:
    """Delete older rounds' checkpoints: Lightning never deletes the one that it resumed from."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.monitor is None and callback.save_top_k == 1:
            for old in sorted(Path(callback.dirpath or ".").glob("round-*.ckpt"))[:-1]:
                shutil.rmtree(old) if old.is_dir() else old.unlink()
