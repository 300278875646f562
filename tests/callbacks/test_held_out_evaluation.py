"""Held-out accuracy: of the scored completions, at the asked rounds, from the newest weights."""

import logging
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from callbacks.held_out_evaluation import HeldOutEvaluation
from datamodules.types import Rollout


class Data:
    """Serves the given scores as held-out rollouts and notes what it was asked."""

    def __init__(self, make_rollout: Callable[..., Rollout], scores: Sequence[float | None]) -> None:
        self.make_rollout = make_rollout
        self.scores = scores
        self.trains = True
        self.snapshots: set[int] = set()
        self.calls: list[tuple[Any, ...]] = []

    def ensure_snapshot(self, version: int) -> None:
        if version not in self.snapshots:
            self.calls.append(("published", version))
            self.snapshots.add(version)

    def evaluate(self, version: int, *, samples_per_prompt: int) -> list[Rollout]:
        assert version in self.snapshots
        self.calls.append(("evaluate", version, samples_per_prompt))
        return [self.make_rollout(0, s, score=score) for s, score in enumerate(self.scores)]


class Recorder:
    """A logger and a LightningModule in one: notes what is logged."""

    def __init__(self) -> None:
        self.logged: list[tuple[Any, ...]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.logged.append((metrics, step))

    def log(self, name: str, value: float, **_: Any) -> None:
        self.logged.append((name, value))


@pytest.fixture
def make_trainer(make_rollout: Callable[..., Rollout]) -> Callable[..., Any]:
    def make(*scores: float | None, epoch: int = 0, max_epochs: int = 10, published: int = 0) -> Any:
        data = Data(make_rollout, scores)
        data.snapshots = set(range(published))
        return SimpleNamespace(
            current_epoch=epoch, max_epochs=max_epochs, datamodule=data, loggers=[Recorder()], global_step=10 * epoch
        )

    return make


def test_the_initial_weights_are_published_measured_and_logged_at_step_0(make_trainer: Callable[..., Any]) -> None:
    trainer, evaluation = make_trainer(1.0, 0.0, 0.0, 0.0), HeldOutEvaluation(5, 2)
    evaluation.on_train_start(trainer, None)
    assert trainer.datamodule.calls == [("published", 0), ("evaluate", 0, 2)]
    assert trainer.loggers[0].logged == [({"eval/accuracy": 0.25}, 0)]
    assert evaluation.accuracies == {0: 0.25}


def test_a_resumed_run_does_not_measure_the_initial_weights_again(make_trainer: Callable[..., Any]) -> None:
    before = HeldOutEvaluation(1, 1)
    before.accuracies = {0: 0.5, 1: 0.75}
    resumed = HeldOutEvaluation(1, 1)
    resumed.load_state_dict(before.state_dict())
    for trainer in (make_trainer(1.0, epoch=0, published=1), make_trainer(1.0, epoch=1, published=2)):
        resumed.on_train_start(trainer, None)
        assert (trainer.datamodule.calls, trainer.loggers[0].logged) == ([], [])
    assert resumed.accuracies == {0: 0.5, 1: 0.75}


@pytest.mark.parametrize(
    ("every_n_rounds", "measured"), [(1, [1, 2, 3, 4, 5, 6, 7]), (3, [3, 6, 7]), (7, [7]), (100, [7])]
)
def test_every_nth_and_the_last_round_is_measured_from_the_weights_it_left(
    make_trainer: Callable[..., Any], every_n_rounds: int, measured: list[int]
) -> None:
    evaluation, module = HeldOutEvaluation(every_n_rounds, 1), Recorder()
    for epoch in range(7):
        trainer = make_trainer(1.0, 0.0, epoch=epoch, max_epochs=7, published=epoch + 2)
        evaluation.on_train_epoch_end(trainer, module)  # type: ignore[arg-type]
        assert trainer.datamodule.calls == [("evaluate", epoch + 1, 1)] * (epoch + 1 in measured)
        assert trainer.loggers[0].logged == [({"eval/accuracy": 0.5}, 10 * epoch)] * (epoch + 1 in measured)
    assert evaluation.accuracies == dict.fromkeys(measured, 0.5)
    assert module.logged == [("eval/accuracy", 0.5)] * len(measured)


def test_completions_without_a_score_are_left_out_of_the_share_and_counted(
    make_trainer: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    trainer, evaluation = make_trainer(1.0, None, 1.0, 0.0, None), HeldOutEvaluation(1, 1)
    with caplog.at_level(logging.WARNING):
        evaluation.on_train_start(trainer, None)
    assert evaluation.accuracies == {0: pytest.approx(2 / 3)}
    assert caplog.messages == ["2 of 5 held-out completions got no score"]


def test_an_evaluation_without_any_score_ends_the_run_instead_of_reporting_0(make_trainer: Callable[..., Any]) -> None:
    trainer, evaluation = make_trainer(None, None), HeldOutEvaluation(1, 1)
    with pytest.raises(RuntimeError, match=r"^none of the 2 held-out completions got a score"):
        evaluation.on_train_start(trainer, None)
    assert evaluation.accuracies == {}


def test_the_state_is_a_copy_that_later_rounds_do_not_change(make_trainer: Callable[..., Any]) -> None:
    evaluation = HeldOutEvaluation(1, 1)
    evaluation.on_train_start(make_trainer(1.0), None)
    state = evaluation.state_dict()
    evaluation.on_train_epoch_end(make_trainer(0.0, published=2), Recorder())  # type: ignore[arg-type]
    assert (state, evaluation.state_dict()) == ({"accuracies": {0: 1.0}}, {"accuracies": {0: 1.0, 1: 0.0}})


@pytest.mark.parametrize(("every_n_rounds", "samples_per_prompt"), [(0, 1), (1, 0), (-1, 2)])
def test_counts_below_1_are_refused_at_construction(every_n_rounds: int, samples_per_prompt: int) -> None:
    message = rf"held_out_evaluation\.every_n_rounds .*at least 1, got {every_n_rounds} and {samples_per_prompt}$"
    with pytest.raises(ValueError, match=message):
        HeldOutEvaluation(every_n_rounds, samples_per_prompt)
