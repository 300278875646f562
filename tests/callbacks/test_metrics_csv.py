"""One file of metrics: nothing lost when a column comes late, nothing twice when a run is resumed."""

from pathlib import Path

import pandas as pd
import pytest

from callbacks.metrics_csv import MetricsCSV


def rows(directory: Path) -> list[tuple[float, ...]]:
    table = pd.read_csv(directory / "metrics.csv")
    return [tuple(row) for row in table[sorted(table.columns)].fillna(-1.0).itertuples(index=False)]


@pytest.mark.parametrize("flush", [1, 2, 100])
def test_a_column_that_comes_late_is_added_to_the_rows_before(tmp_path: Path, flush: int) -> None:
    logger = MetricsCSV(str(tmp_path), flush)
    logger.log_metrics({"a": 1.5}, step=1)
    logger.log_metrics({"a": 2.5}, step=2)
    logger.log_metrics({"b": 3.5}, step=2)
    logger.save()
    assert rows(tmp_path) == [(1.5, -1.0, 1), (2.5, -1.0, 2), (-1.0, 3.5, 2)]  # a, b, step


def test_a_resumed_run_keeps_the_rows_before_its_checkpoint_and_no_other(tmp_path: Path) -> None:
    first = MetricsCSV(str(tmp_path), 1)
    for step in range(4):
        first.log_metrics({"a": float(step)}, step=step)
    with first.path.open("a") as file:
        file.write("4,4.")  # the writer was killed in the middle of a row
    second = MetricsCSV(str(tmp_path), 1)
    second.start_from(first.path, 2)
    second.log_metrics({"a": 9.0}, step=2)
    assert rows(tmp_path) == [(0.0, 0), (1.0, 1), (9.0, 2)]


def test_a_run_elsewhere_begins_with_the_rows_of_the_one_it_continues(tmp_path: Path) -> None:
    first = MetricsCSV(str(tmp_path / "first"), 1)
    first.log_metrics({"a": 1 / 3}, step=0)
    second = MetricsCSV(str(tmp_path / "second"), 1)
    second.start_from(first.path, 1)
    second.log_metrics({"a": 2.0, "b": 1.0}, step=1)
    assert rows(tmp_path / "second") == [(1 / 3, -1.0, 0), (2.0, 1.0, 1)]
    assert rows(tmp_path / "first") == [(1 / 3, 0)]


def test_a_run_that_starts_over_drops_what_an_earlier_one_left(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        logger = MetricsCSV(str(tmp_path), 100)
        logger.log_metrics({"a": value}, step=0)
        logger.finalize("success")
    assert rows(tmp_path) == [(2.0, 0)]


def test_a_file_that_lost_rows_is_not_continued(tmp_path: Path) -> None:
    first = MetricsCSV(str(tmp_path), 1)
    first.log_metrics({"a": 1.0}, step=0)
    with pytest.raises(ValueError, match="has 1 rows, and the checkpoint was written after 3"):
        MetricsCSV(str(tmp_path), 1).start_from(first.path, 3)
