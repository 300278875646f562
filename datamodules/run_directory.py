"""A run's directory belongs to one run at a time."""

import shutil
from pathlib import Path

from filelock import FileLock, Timeout

from datamodules.atomic import atomic_file, remove_unfinished


class RunDirectory:
    """Holds a lock that ends with the process, whatever ends it.

    Args:
        path: of the directory; made when it is claimed.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._lock = FileLock(self.path / ".lock")

    def claim(self, *, is_resumed: bool, from_start: bool = False) -> None:
        """Take the directory for this run alone, and clear what a killed writer left in it.

        Args:
            is_resumed: the run continues what is there.
            from_start: it had no checkpoint yet: weights are published and metrics logged anew.

        Raises:
            ValueError: another run is at work there, or has left its snapshots, which would pass for this run's.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise ValueError(f"directory: another run is at work in {self.path}; choose another") from error
        if not is_resumed and any((self.path / "snapshots").glob("[0-9]*")):
            raise ValueError(
                f"directory: {self.path} already holds a run; choose another (hydra.run.dir), delete it, "
                "or continue it with resume=true"
            )
        if from_start:
            for name in ("snapshots", "tensorboard"):
                shutil.rmtree(self.path / name, ignore_errors=True)
        for directory in (self.path, *(p for p in self.path.iterdir() if p.is_dir())):
            remove_unfinished(directory)

    def write(self, name: str, text: str) -> None:
        """Write a text file, whole or not at all."""
        with atomic_file(self.path / name) as temporary:
            temporary.write_text(text)

    def release(self) -> None:
        """Let others have it."""
        self._lock.release()
