"""All metrics of a run as one CSV file that a resumed run continues without gap or doubled row."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from datamodules.atomic import atomic_file


class MetricsCSV(Logger):
    """Rows are kept until `save` and then appended; a new column has the file written anew.

    Args:
        directory: of the run; the file is `metrics.csv` in it.
        flush_every_n_rows: rows kept at most.
    """

    def __init__(self, directory: str, flush_every_n_rows: int) -> None:
        super().__init__()
        self.path = Path(directory) / "metrics.csv"
        self.flush_every_n_rows = flush_every_n_rows
        self.num_rows = 0  # on disk
        self._columns: list[str] = []
        self._pending: list[dict[str, Any]] = []

    @property
    def name(self) -> str:
        """The file's stem."""
        return "metrics"

    @property
    def version(self) -> str:
        """A run has one."""
        return ""

    @property
    @rank_zero_experiment
    def experiment(self) -> Path:
        """The file."""
        return self.path

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Leave them to `config.yaml`."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Keep a row."""
        self._pending.append({"step": step, **{key: float(value) for key, value in metrics.items()}})
        if len(self._pending) >= self.flush_every_n_rows:
            self.save()

    @rank_zero_only
    def save(self) -> None:
        """Put all rows on the disk."""
        if not self._pending:
            return
        new = sorted({key for row in self._pending for key in row} - set(self._columns) - {"step"})
        if new or not self.num_rows:
            earlier = _first_rows(self.path, self.num_rows)
            self._columns = ["step", *sorted({*self._columns, *new} - {"step"})]
            self._write([*earlier, *self._pending])
        else:
            with self.path.open("a", newline="") as file:
                csv.DictWriter(file, self._columns).writerows(self._pending)
        self.num_rows += len(self._pending)
        self._pending.clear()

    def start_from(self, path: Path, num_rows: int) -> None:
        """Begin with the first rows of a file, this run's own or that of the run which is continued.

        Raises:
            ValueError: it has fewer.
        """
        rows = _first_rows(path, num_rows)
        if len(rows) < num_rows:
            raise ValueError(f"{path} has {len(rows)} rows, and the checkpoint was written after {num_rows}")
        self._columns = [key for key in rows[0] if key is not None] if rows else []
        self.num_rows = num_rows
        self._write(rows)

    def _write(self, rows: list[dict[str, Any]]) -> None:
        with atomic_file(self.path) as temporary, temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(rows)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Put all rows on the disk."""
        self.save()


def _first_rows(path: Path, num_rows: int) -> list[dict[str, Any]]:
    if not num_rows:
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))[:num_rows]
