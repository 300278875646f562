"""Atomic writes: whatever stops the writer, readers see the old content or the new one, whole."""

import contextlib
import errno
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from datamodules.atomic import PREFIX, atomic_directory, atomic_file, remove_unfinished

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]
KINDS = {"file": atomic_file, "directory": atomic_directory}

WRITER = """
import os, shutil, signal, sys
from pathlib import Path
from datamodules.atomic import atomic_directory, atomic_file
kind, moment, path = sys.argv[1], sys.argv[2], Path(sys.argv[3])
die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
replace, renames = os.replace, []
def counted_replace(*paths):
    if moment == f"rename {len(renames)}":
        die()
    renames.append(paths)
    replace(*paths)
os.replace = counted_replace
if moment == "cleanup":
    shutil.rmtree = die
with (atomic_file if kind == "file" else atomic_directory)(path) as temporary:
    target = temporary if kind == "file" else temporary / "weights"
    with target.open("w") as file:
        file.write("new " * 1000)
        file.flush()
        if moment == "block":
            die()
print("finished")
"""

MOUNT = 'mount -t tmpfs -o $0 tmpfs "$1" || exit 77; echo old > "$1/out"; shift; exec "$@"'  # in its own namespace
FULL_DISK = """
import sys
from pathlib import Path
from datamodules.atomic import atomic_file
path = Path(sys.argv[1]) / "out"
path.with_name("filler").touch()  # with it and the root, three inodes are taken
try:
    with atomic_file(path) as temporary:
        temporary.write_text("new" * 100000)
except OSError as error:
    print(error)
print(path.read_text().strip(), [p.name for p in path.parent.iterdir() if p.name != "filler"])
"""


def write_old(kind: str, path: Path) -> None:
    if kind == "directory":
        path.mkdir()
    (path / "weights" if kind == "directory" else path).write_text("old")


def content(kind: str, path: Path) -> str:
    if kind == "file":
        return path.read_text()
    assert [p.name for p in path.iterdir()] == ["weights"]
    return (path / "weights").read_text()


def names(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir() if p.name != "script.py")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_old", [False, True])
def test_a_finished_block_shows_the_new_content_under_the_name_and_nothing_else(
    tmp_path: Path, kind: str, has_old: bool
) -> None:
    path = tmp_path / "deep" / "er" / "out"
    if has_old:
        path.parent.mkdir(parents=True)
        write_old(kind, path)
    with KINDS[kind](path) as temporary:
        (temporary if kind == "file" else temporary / "weights").write_text("new")
        assert path.exists() is has_old
    assert content(kind, path) == "new"
    assert names(path.parent) == ["out"]


@pytest.mark.parametrize("kind", KINDS)
def test_readers_see_the_old_content_while_the_new_one_is_written(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "out"
    write_old(kind, path)
    with KINDS[kind](path) as temporary:
        (temporary if kind == "file" else temporary / "weights").write_text("half")
        assert content(kind, path) == "old"


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_that_raises_keeps_the_old_content_and_leaves_nothing_behind(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "out"
    write_old(kind, path)

    def fail_half_way() -> None:
        with KINDS[kind](path) as temporary:
            (temporary if kind == "file" else temporary / "weights").write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_half_way()
    assert content(kind, path) == "old"
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moment", ["block", "rename 0"])
def test_a_writer_killed_before_it_renames_leaves_the_old_content(
    tmp_path: Path, run_python: RunPython, kind: str, moment: str
) -> None:
    path = tmp_path / "out"
    write_old(kind, path)
    assert run_python(WRITER, kind, moment, path).returncode == -signal.SIGKILL
    assert content(kind, path) == "old"
    assert len(names(tmp_path)) == 2
    remove_unfinished(tmp_path)
    assert names(tmp_path) == ["out"]
    assert content(kind, path) == "old"


def test_a_writer_killed_while_it_swaps_a_directory_leaves_the_old_or_the_new_one(
    tmp_path: Path, run_python: RunPython
) -> None:
    path = tmp_path / "out"
    write_old("directory", path)
    run_python(WRITER, "directory", "rename 1", path)  # killed, or finished where one rename is enough
    remove_unfinished(tmp_path)
    assert names(tmp_path) == ["out"]
    assert content("directory", path) in ("old", "new " * 1000)


@pytest.mark.parametrize("moment", ["rename 0", "rename 1", "cleanup"])
def test_what_a_killed_writer_left_does_not_stop_the_next_ones(
    tmp_path: Path, run_python: RunPython, moment: str
) -> None:
    path = tmp_path / "out"
    write_old("directory", path)
    run_python(WRITER, "directory", moment, path)
    for text in ("second", "third"):  # nobody tidied up in between
        with atomic_directory(path) as temporary:
            (temporary / "weights").write_text(text)
        assert content("directory", path) == text


def test_a_directory_that_is_refused_its_name_once_leaves_the_old_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out"
    write_old("directory", path)
    replace, refused = os.replace, []

    def refuse_once(source: Path, target: Path) -> None:
        if target == path and not refused:
            refused.append(source)
            raise OSError(errno.EIO, "Input/output error")
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse_once)
    with contextlib.suppress(OSError), atomic_directory(path) as temporary:
        (temporary / "weights").write_text("new")
    assert path.exists()
    assert content("directory", path) in ("old", "new")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_explained_with_path_free_space_and_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, error: Exception
) -> None:
    path = tmp_path / "out"
    write_old(kind, path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, 3 * 2**20))
    with pytest.raises(OSError, match=r"^\[Errno 28\] no space left") as caught, KINDS[kind](path):
        raise error
    assert caught.value.errno == errno.ENOSPC
    assert f"while writing {path} (3 MiB free); nothing half-written was kept" in str(caught.value)
    assert "point hydra.run.dir at another disk, then resume from the last checkpoint" in str(caught.value)
    assert caught.value.__cause__ is error
    assert (content(kind, path), names(tmp_path)) == ("old", ["out"])


def test_a_device_that_is_really_full_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with pytest.raises(OSError, match=rf"no space left while writing {path}"), atomic_file(path):
        Path("/dev/full").write_text("new")
    assert names(tmp_path) == []


@pytest.mark.parametrize("limit", ["size=64k", "nr_inodes=3"])
def test_a_file_system_that_is_really_full_keeps_the_old_file_and_explains(
    tmp_path: Path, run_python: RunPython, limit: str
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    done = run_python(FULL_DISK, disk, prefix=("unshare", "-rm", "sh", "-c", MOUNT, limit, str(disk)))
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr}")
    message, left = done.stdout.splitlines()
    assert message.startswith(f"[Errno 28] no space left while writing {disk / 'out'} (")
    assert left == "old ['out']"


@pytest.mark.parametrize("kind", KINDS)
def test_another_fault_of_the_writer_is_not_called_a_full_disk(tmp_path: Path, kind: str) -> None:
    with pytest.raises(PermissionError, match=r"^not yours$"), KINDS[kind](tmp_path / "out"):
        raise PermissionError("not yours")


def test_only_leftovers_of_killed_writers_are_removed(tmp_path: Path) -> None:
    (tmp_path / f"{PREFIX}file").write_text("half")
    (tmp_path / f"{PREFIX}directory" / "inner").mkdir(parents=True)
    (tmp_path / "000001").mkdir()
    (tmp_path / "writing-notes.txt").write_text("mine")
    remove_unfinished(tmp_path)
    assert names(tmp_path) == ["000001", "writing-notes.txt"]
