"""A round in the loggers: finite metrics at the right step, and samples that a person can open."""

import csv
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from callbacks.rollout_logging import COLUMNS, RolloutLogging
from callbacks.rollout_metrics import rollout_metrics
from datamodules.types import Rollout

MakeRollout = Callable[..., Rollout]


class Recorder:
    """A logger that notes metrics only."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, float], int]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.logged.append((metrics, step))


class Wandb(WandbLogger):
    """A W&B logger that keeps tables instead of sending them."""

    def __init__(self) -> None:
        self.tables: list[tuple[str, list[str], list[list[Any]], int]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None: ...

    def log_table(
        self, key: str, columns: Any = None, data: Any = None, dataframe: Any = None, step: Any = None
    ) -> None:
        self.tables.append((key, columns, [list(row) for row in data], step))


def trainer(*loggers: Any, step: int = 40, is_global_zero: bool = True) -> Any:
    return SimpleNamespace(loggers=loggers, global_step=step, is_global_zero=is_global_zero)


def rows(directory: Path, round_: int) -> list[list[str]]:
    with (directory / "samples" / f"round-{round_:06d}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def test_metrics_go_to_every_logger_at_the_optimizer_step_without_those_that_are_no_number(
    make_rollout: MakeRollout, tmp_path: Path
) -> None:
    rollouts = [make_rollout(0, s, score=x, round=12) for s, x in enumerate((1.0, 1.0, None))]
    recorders = [Recorder(), Recorder()]
    RolloutLogging(str(tmp_path), 0).on_round_collected(trainer(*recorders), rollouts)
    expected = rollout_metrics(rollouts) | {"rollout/round": 12.0}
    del expected["rollout/length_mean_incorrect"]  # no sample was wrong: NaN
    assert [r.logged for r in recorders] == [[(expected, 40)]] * 2
    assert list(tmp_path.iterdir()) == []  # no samples were asked for


def test_a_samples_row_tells_all_about_one_completion(make_rollout: MakeRollout, tmp_path: Path) -> None:
    text = 'two, "three"\nfour | \u00e9\u4e2d'
    rollout = make_rollout(text=text, completion_ids=(1, 2, 3), finish_reason="length", round=7, snapshot=5, score=0.0)
    RolloutLogging(str(tmp_path), 4).on_round_collected(trainer(), [rollout])
    assert rows(tmp_path, 7) == [
        list(COLUMNS),
        ["7", "5", "2+2=", text, "4", "incorrect", "0.0", "3", "length"],
    ]


def test_a_sample_without_a_score_has_an_empty_reward_rather_than_0(make_rollout: MakeRollout, tmp_path: Path) -> None:
    RolloutLogging(str(tmp_path), 4).on_round_collected(trainer(), [make_rollout(score=None)])
    assert rows(tmp_path, 3)[1][5:7] == ["error", ""]


@pytest.mark.parametrize(
    ("groups", "siblings", "num_samples"), [(8, 4, 8), (4, 8, 4), (16, 8, 16), (4, 6, 16), (3, 5, 8), (2, 2, 100)]
)
def test_samples_are_of_the_asked_number_and_spread_over_all_groups(
    make_rollout: MakeRollout, tmp_path: Path, groups: int, siblings: int, num_samples: int
) -> None:
    rollouts = [make_rollout(g, s, text=f"{g} {s}") for g in range(groups) for s in range(siblings)]
    RolloutLogging(str(tmp_path), num_samples).on_round_collected(trainer(), rollouts)
    shown = [row[3] for row in rows(tmp_path, 3)[1:]]
    assert len(set(shown)) == len(shown) == min(num_samples, groups * siblings)
    assert {text.split()[0] for text in shown} == {str(g) for g in range(groups)}


def test_every_round_has_its_own_file_and_the_wandb_table_holds_all_rounds(
    make_rollout: MakeRollout, tmp_path: Path
) -> None:
    logging, wandb = RolloutLogging(str(tmp_path), 1), Wandb()
    for round_ in (0, 1):
        logging.on_round_collected(
            trainer(wandb, step=40 * round_), [make_rollout(round=round_, text=f"text {round_}")]
        )
    assert [rows(tmp_path, round_)[1][3] for round_ in (0, 1)] == ["text 0", "text 1"]
    assert [(key, columns, step) for key, columns, _, step in wandb.tables] == [
        ("rollout/samples", list(COLUMNS), 0),
        ("rollout/samples", list(COLUMNS), 40),
    ]
    assert [[row[3] for row in data] for _, _, data, _ in wandb.tables] == [["text 0"], ["text 0", "text 1"]]


def test_a_resumed_run_shows_the_samples_from_before_the_checkpoint(make_rollout: MakeRollout, tmp_path: Path) -> None:
    before, resumed, wandb = RolloutLogging(str(tmp_path), 1), RolloutLogging(str(tmp_path), 1), Wandb()
    before.on_round_collected(trainer(), [make_rollout(text="before")])
    resumed.load_state_dict(before.state_dict())
    resumed.on_round_collected(trainer(wandb), [make_rollout(text="after")])
    assert [row[3] for row in wandb.tables[0][2]] == ["before", "after"]


def test_tensorboard_shows_a_markdown_table_that_no_completion_can_break(
    make_rollout: MakeRollout, tmp_path: Path
) -> None:
    logger = TensorBoardLogger(str(tmp_path), name="tb", version="")
    rollout = make_rollout(text="a|b\nc")
    RolloutLogging(str(tmp_path), 1).on_round_collected(trainer(logger), [rollout])
    logger.experiment.flush()
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    (event,) = events.Tensors("rollout/samples/text_summary")
    header, rule, row = event.tensor_proto.string_val[0].decode().split("\n")
    assert (header, rule) == ("|" + "|".join(COLUMNS) + "|", "|" + "---|" * len(COLUMNS))
    assert row == "|3|1|2+2=|a\\|b c|4|correct|1.0|2|stop|"
    assert event.step == 40


def test_only_the_first_process_writes_samples(make_rollout: MakeRollout, tmp_path: Path) -> None:
    second, wandb = RolloutLogging(str(tmp_path), 1), Wandb()
    second.on_round_collected(trainer(wandb, is_global_zero=False), [make_rollout(text="mine")])
    assert (list(tmp_path.iterdir()), wandb.tables) == ([], [])
    assert [row[3] for row in second.state_dict()["shown"]] == ["mine"]  # the state is the same on every rank


def test_a_negative_number_of_samples_is_refused_at_construction(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^callbacks\.rollout_logging\.num_samples must be at least 0, got -1$"):
        RolloutLogging(str(tmp_path), -1)
