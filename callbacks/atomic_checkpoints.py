"""Checkpoints that are whole or not there."""

from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from datamodules.atomic import atomic_file


class AtomicCheckpoints(TorchCheckpointIO):
    """Lightning's checkpoint files, written beside their place, flushed to the disk and renamed."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint.

        Raises:
            OSError: the disk is full, with the path and the space left.
        """
        with atomic_file(Path(path)) as temporary, temporary.open("wb") as file:
            try:
                torch.save(checkpoint, file)
            except RuntimeError as error:  # torch cannot end the file of a writer that a signal interrupted
                if isinstance(error.__context__, SystemExit | KeyboardInterrupt):
                    raise error.__context__ from None
                raise
