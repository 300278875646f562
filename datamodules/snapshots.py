"""Numbered weights on disk: published atomically, looked up by lag, pruned when no one needs them."""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from datamodules.atomic import PREFIX, atomic_directory
from datamodules.ranks import from_main, rank
from datamodules.shared_directory import shared_directory
from datamodules.types import Probe

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A published version of the policy: a Hugging Face model, or an adapter of one, plus what proves a load of it."""

    version: int  # rounds of training that these weights have seen
    step: int  # optimizer steps that these weights have seen
    path: Path
    probe: Probe
    probe_logprobs: tuple[float, ...]  # the trainer's, one for each probe position
    base: Path | None = None  # the model that an adapter belongs to
    adapter_rank: int = 0  # 0 for a whole model


def lagged_version(round_: int, lag: int) -> int:
    """Return the version that samples a round: `lag` rounds back, and the initial weights before that."""
    return max(0, round_ - lag)


class SnapshotStore:
    """Keeps the snapshots of one run in numbered directories on a file system that every engine sees."""

    MANIFEST = "snapshot.json"
    BASE = "base"

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory).absolute()

    def path(self, version: int) -> Path:
        """Return where a version is, whether or not it is there yet."""
        return self.directory / f"{version:06d}"

    def versions(self) -> list[int]:
        """Return the published versions in order."""
        return sorted(int(m.parent.name) for m in self.directory.glob(f"*/{self.MANIFEST}") if m.parent.name.isdigit())

    def publish(
        self,
        version: int,
        *,
        step: int,
        probe: Probe,
        probe_logprobs: tuple[float, ...],
        write: Callable[[Path], None],
        adapter_rank: int = 0,
    ) -> Snapshot:
        """Write a version and make it visible in one rename; a version of that number is replaced.

        All ranks of a run call this together.

        Args:
            version: rounds of training seen.
            step: optimizer steps seen.
            probe: what an engine is asked after it loaded the version.
            probe_logprobs: the trainer's answer.
            write: saves the model and its tokenizer into the directory it is given, each rank its share.
            adapter_rank: of low-rank factors, which are all that is written; 0 for whole models.
        """
        with shared_directory(self.path(version)) as directory:
            write(directory)
            if rank() == 0:
                manifest = {"step": step, "probe": asdict(probe), "probe_logprobs": probe_logprobs}
                manifest["adapter_rank"] = adapter_rank
                (directory / self.MANIFEST).write_text(json.dumps(manifest))
        log.info("published snapshot %d (step %d)", version, step)
        return self.get(version)

    def publish_base(self, write: Callable[[Path], None]) -> None:
        """Write the model that adapters belong to, unless it is there; all ranks of a run call this together."""
        if not from_main((self.directory / self.BASE).is_dir):
            with shared_directory(self.directory / self.BASE) as directory:
                write(directory)

    def get(self, version: int) -> Snapshot:
        """Return a published version.

        Raises:
            FileNotFoundError: it was never published, or was pruned.
        """
        path = self.path(version)
        if not (path / self.MANIFEST).is_file():
            raise FileNotFoundError(f"snapshot {version} is not in {self.directory}; there are {self.versions()}")
        manifest = json.loads((path / self.MANIFEST).read_text())
        probe = manifest["probe"]
        return Snapshot(
            version,
            manifest["step"],
            path,
            Probe(tuple(probe["token_ids"]), tuple(probe["positions"]), probe["temperature"]),
            tuple(manifest["probe_logprobs"]),
            self.directory / self.BASE if manifest["adapter_rank"] else None,
            manifest["adapter_rank"],
        )

    def __contains__(self, version: int) -> bool:
        return (self.path(version) / self.MANIFEST).is_file()

    def prune(self, needed: Iterable[int]) -> None:
        """Delete every version that is not in `needed`."""
        for version in set(self.versions()) - set(needed):
            doomed = self.path(version).with_name(f"{PREFIX}pruned-{version:06d}")
            os.replace(self.path(version), doomed)  # readers see the whole directory or none of it
            shutil.rmtree(doomed, ignore_errors=True)

    def adopt(self, source: Path | str, versions: Iterable[int]) -> None:
        """Take over versions that another run published, so that a resumed run has its lagged weights.

        Raises:
            FileNotFoundError: the other run no longer has one of them.
        """
        origin = Path(source)
        if origin == self.directory:
            return
        for version in versions:
            other = origin / f"{version:06d}"
            if not (other / self.MANIFEST).is_file():
                raise FileNotFoundError(
                    f"the checkpoint needs snapshot {version} of {origin}, which is gone: keep a run's snapshots "
                    "directory beside its checkpoints"
                )
            _copy(other, self.path(version))
        if (origin / self.BASE).is_dir():
            _copy(origin / self.BASE, self.directory / self.BASE)


def _copy(source: Path, destination: Path) -> None:
    with atomic_directory(destination) as directory:
        shutil.copytree(source, directory, dirs_exist_ok=True)
