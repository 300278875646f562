"""Write a file or a directory so that readers see all of it or nothing, whatever kills the writer."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = ".writing-"
ASIDE = PREFIX + "aside-"


class DiskFull(OSError):
    """The disk is full, with the path and the free space."""


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it takes that name, on failure it vanishes.

    The block does nothing but write the file: a full disk that it meets is taken for this one.

    Raises:
        OSError: the disk is full or not writable, with the path and the free space.
    """
    with explained(path), replacing_file(path) as temporary:
        yield temporary


@contextmanager
def replacing_file(path: Path) -> Iterator[Path]:
    """Do what `atomic_file` does for a block that does other work too, and explains the errors of its own writing.

    Raises:
        OSError: the disk is full or not writable, with the path and the free space.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with explained(path):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=PREFIX)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with explained(path):
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
    with explained(path):
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=PREFIX))
    try:
        with explained(path):
            yield temporary
            for file in temporary.rglob("*"):
                _fsync(file)
            _fsync(temporary)
            temporary.chmod(0o755)
            if path.exists():
                _swap(temporary, path)
            else:
                os.replace(temporary, path)
            _fsync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _swap(new: Path, old: Path) -> None:
    """Give `new` the name of the directory `old`; a kill in between leaves one of them findable.

    A directory cannot be renamed over a full one. The old one steps aside under a name that `remove_unfinished` knows
    how to put back.
    """
    aside = old.with_name(f"{ASIDE}{old.name}")
    shutil.rmtree(aside, ignore_errors=True)  # of an earlier writer that was killed after the swap
    os.replace(old, aside)
    try:
        os.replace(new, old)
    except OSError:
        os.replace(aside, old)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def remove_unfinished(directory: Path) -> None:
    """Delete what a killed writer left in `directory`, and put back a directory that it was about to replace."""
    for aside in directory.glob(ASIDE + "*"):
        original = aside.with_name(aside.name.removeprefix(ASIDE))
        if not original.exists():
            os.replace(aside, original)
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
def explained(path: Path) -> Iterator[None]:
    """Say what could not be written and how much space is left when the disk is full.

    Raises:
        OSError: instead of the error that says so.
    """
    try:
        yield
    except DiskFull:
        raise
    except Exception as error:
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space left on device" in str(error)
        if not full:
            raise
        free = shutil.disk_usage(path.parent).free / 2**20
        raise DiskFull(
            errno.ENOSPC,
            f"no space left while writing {path} ({free:.0f} MiB free); nothing half-written was kept. Free some "
            "space or point hydra.run.dir at another disk, then resume from the last checkpoint",
        ) from error
