"""Leave the trained policy as a Hugging Face model directory."""

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from datamodules.shared_directory import shared_directory


class SavedModel(Callback):
    """Save the policy when the run ends; each rank of a sharded one writes its share.

    Args:
        directory: to write; what is there is replaced when the new one is whole.
    """

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)

    def on_fit_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Write the model."""
        with shared_directory(self.directory) as temporary:
            pl_module.policy.save_pretrained(temporary)
