"""One W&B run for one directory, however often it is resumed."""

import uuid
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import WandbLogger

from datamodules.atomic import atomic_file
from datamodules.ranks import from_main


def wandb_logger(directory: str, **settings: Any) -> WandbLogger:
    """Return a logger whose W&B run id stands in the run's directory.

    Args:
        directory: of the run; the id is kept in `wandb_run_id.txt`.
        settings: what `WandbLogger` takes.
    """
    run_id = from_main(lambda: _run_id(Path(directory) / "wandb_run_id.txt"))
    return WandbLogger(id=run_id, resume="allow", save_dir=directory, **settings)


def _run_id(file: Path) -> str:
    if not file.is_file():
        with atomic_file(file) as temporary:
            temporary.write_text(uuid.uuid4().hex[:8])
    return file.read_text()
