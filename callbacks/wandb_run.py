"""One W&B run for one directory, however often it is resumed."""

import uuid
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import WandbLogger

from datamodules.atomic import atomic_file


def wandb_logger(directory: str, **settings: Any) -> WandbLogger:
    """Return a logger whose W&B run id stands in the run's directory.

    Args:
        directory: of the run; the id is kept in `wandb_run_id.txt`.
        settings: what `WandbLogger` takes.
    """
    file = Path(directory) / "wandb_run_id.txt"
    if not file.is_file():
        with atomic_file(file) as temporary:
            temporary.write_text(uuid.uuid4().hex[:8])
    return WandbLogger(id=file.read_text(), resume="allow", save_dir=directory, **settings)
