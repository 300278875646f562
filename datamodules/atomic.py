"""Write a file or a directory so that readers see all of it or nothing, whatever kills the writer."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = ".writing-"


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it takes that name, on failure it vanishes.

    Raises:
        OSError: the disk is full or not writable, with the path and the free space.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=PREFIX)
    os.close(handle)
    temporary = Path(name)
    try:
        with _explained(path):
            yield temporary
            _fsync(temporary)
            temporary.chmod(0o644)
            os.replace(temporary, path)
            _fsync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory beside `path`; on success it replaces `path`, on failure it vanishes.

    Raises:
        OSError: the disk is full or not writable, with the path and the free space.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=PREFIX))
    replaced = temporary.with_name(temporary.name + "-replaced")
    try:
        with _explained(path):
            yield temporary
            for file in temporary.rglob("*"):
                _fsync(file)
            _fsync(temporary)
            temporary.chmod(0o755)
            if path.exists():
                os.replace(path, replaced)
            os.replace(temporary, path)
            _fsync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


def remove_unfinished(directory: Path) -> None:
    """Delete what a killed writer left in `directory`."""
    for path in directory.glob(PREFIX + "*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Say what could not be written and how much space is left when the disk is full."""
    try:
        yield
    except Exception as error:
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space left on device" in str(error)
        if not full:
            raise
        free = shutil.disk_usage(path.parent).free / 2**20
        raise OSError(
            errno.ENOSPC,
            f"no space left while writing {path} ({free:.0f} MiB free); nothing half-written was kept. Free some "
            "space or point hydra.run.dir at another disk, then resume from the last checkpoint",
        ) from error
