"""Snapshots: the right version for a lag, whole on disk, kept while someone needs it."""

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from datamodules.atomic import remove_unfinished
from datamodules.snapshots import Snapshot, SnapshotStore, lagged_version
from datamodules.types import Probe

PROBE = Probe((5, 6, 7), (1, 2), 0.6)
LOGPROBS = (-0.1, -1.0 / 3.0)  # no short decimals: they must come back bit for bit

KILLED_PUBLISH = """
import os, signal, sys
from datamodules.snapshots import SnapshotStore
from datamodules.types import Probe
def write(directory):
    (directory / "weights").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
SnapshotStore(sys.argv[1]).publish(
    int(sys.argv[2]), step=1, probe=Probe((5,), (1,), 1.0), probe_logprobs=(-1.0,), write=write
)
"""


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "snapshots")


def publish(store: SnapshotStore, *versions: int, weights: str = "weights of {}") -> None:
    for version in versions:
        text = weights.format(version)
        store.publish(
            version, step=20 * version, probe=PROBE, probe_logprobs=LOGPROBS,
            write=lambda directory, text=text: (directory / "weights").write_text(text),
        )  # fmt: skip


def weights(store: SnapshotStore) -> dict[int, str]:
    return {version: (store.get(version).path / "weights").read_text() for version in store.versions()}


def files(store: SnapshotStore) -> list[str]:
    return sorted(p.name for p in store.directory.iterdir())


@pytest.mark.parametrize("lag", [0, 1, 2, 7, 30])
def test_round_r_samples_from_the_snapshot_lag_rounds_back_or_the_initial_one(lag: int) -> None:
    versions = [lagged_version(round_, lag) for round_ in range(20)]
    assert versions == [0] * min(lag, 20) + list(range(20 - lag))


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_pruning_to_the_lag_after_each_round_keeps_every_version_that_is_still_to_sample(
    store: SnapshotStore, lag: int
) -> None:
    publish(store, 0)
    for round_ in range(8):
        assert (store.get(lagged_version(round_, lag)).path / "weights").is_file()
        publish(store, round_ + 1)
        store.prune(range(lagged_version(round_ + 1, lag), round_ + 2))
    assert store.versions() == list(range(8 - lag, 9))


def test_a_published_snapshot_comes_back_exactly(store: SnapshotStore) -> None:
    publish(store, 12)
    assert store.get(12) == Snapshot(12, 240, store.directory / "000012", PROBE, LOGPROBS)
    assert weights(store) == {12: "weights of 12"}


def test_another_process_that_opens_the_directory_finds_the_same(store: SnapshotStore) -> None:
    publish(store, 0, 3)
    again = SnapshotStore(str(store.directory))
    assert (again.versions(), again.get(3)) == ([0, 3], store.get(3))
    assert [version in again for version in range(4)] == [True, False, False, True]


def test_versions_are_in_order_of_number(store: SnapshotStore) -> None:
    publish(store, 10, 9, 1000000, 999999, 2)
    assert store.versions() == [2, 9, 10, 999999, 1000000]


def test_publishing_a_number_again_replaces_it_whole(store: SnapshotStore) -> None:
    publish(store, 1)
    (store.path(1) / "left over").write_text("from the first time")
    publish(store, 1, weights="new")
    assert weights(store) == {1: "new"}
    assert sorted(p.name for p in store.path(1).iterdir()) == ["snapshot.json", "weights"]
    assert files(store) == ["000001"]


def test_a_writer_that_fails_leaves_the_earlier_version_of_that_number(store: SnapshotStore) -> None:
    publish(store, 1)

    def fail(directory: Path) -> None:
        (directory / "weights").write_text("half")
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match=r"out of memory"):
        store.publish(1, step=0, probe=PROBE, probe_logprobs=LOGPROBS, write=fail)
    assert weights(store) == {1: "weights of 1"}
    assert files(store) == ["000001"]


@pytest.mark.parametrize("version", [1, 2])  # replacing a version, and adding one
def test_kill_9_during_publish_leaves_the_earlier_versions_and_lists_no_partial_one(
    store: SnapshotStore, run_python: Callable[..., "subprocess.CompletedProcess[str]"], version: int
) -> None:
    publish(store, 0, 1)
    assert run_python(KILLED_PUBLISH, store.directory, str(version)).returncode == -signal.SIGKILL
    assert len(files(store)) == 3  # with what the dead writer left
    assert weights(store) == {0: "weights of 0", 1: "weights of 1"}
    assert 2 not in store
    remove_unfinished(store.directory)
    again = SnapshotStore(store.directory)
    assert weights(again) == {0: "weights of 0", 1: "weights of 1"}
    assert files(again) == ["000000", "000001"]


def test_a_version_that_is_not_there_is_named_with_those_that_are(store: SnapshotStore) -> None:
    publish(store, 1, 2)
    with pytest.raises(FileNotFoundError, match=rf"^snapshot 7 is not in {store.directory}; there are \[1, 2\]$"):
        store.get(7)


def test_pruning_deletes_all_but_the_needed_and_ignores_needed_ones_that_are_not_there(store: SnapshotStore) -> None:
    publish(store, 0, 1, 2, 3, 4)
    store.prune({1, 4, 9})
    assert files(store) == ["000001", "000004"]
    with pytest.raises(FileNotFoundError, match=r"snapshot 2 is not in"):
        store.get(2)


def test_a_resumed_run_adopts_the_versions_its_lag_needs_from_the_earlier_run(
    store: SnapshotStore, tmp_path: Path
) -> None:
    earlier = SnapshotStore(tmp_path / "earlier")
    publish(earlier, 1, 2, 3)
    publish(store, 3, weights="of a run that started anew")
    store.adopt(str(earlier.directory), range(2, 4))
    assert weights(store) == {2: "weights of 2", 3: "weights of 3"}
    assert store.get(2).probe_logprobs == LOGPROBS
    assert weights(earlier) == {1: "weights of 1", 2: "weights of 2", 3: "weights of 3"}


def test_a_run_resumed_in_its_own_directory_keeps_what_it_has(store: SnapshotStore) -> None:
    publish(store, 2)
    store.adopt(str(store.directory), range(1, 3))
    assert weights(store) == {2: "weights of 2"}


def test_a_version_that_the_earlier_run_lost_is_named(store: SnapshotStore, tmp_path: Path) -> None:
    earlier = SnapshotStore(tmp_path / "earlier")
    publish(earlier, 3)
    with pytest.raises(FileNotFoundError, match=rf"needs snapshot 2 of {earlier.directory}, which is gone"):
        store.adopt(str(earlier.directory), range(2, 4))
