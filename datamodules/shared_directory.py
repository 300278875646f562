"""A directory that all ranks write into and that readers see whole or not at all."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from datamodules.atomic import atomic_directory
from datamodules.ranks import barrier, from_main


@contextmanager
def shared_directory(path: Path) -> Iterator[Path]:
    """Yield one temporary directory to all ranks; it takes the name `path` when the last has left without error.

    Each rank must come here, on one file system.
    """
    with ExitStack() as stack:
        yield Path(from_main(lambda: str(stack.enter_context(atomic_directory(path)))))
        barrier()
        from_main(stack.close)
