"""Judging while the rest is sampled: no group waits for another, and none loses its place or its verdicts."""

import logging
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from callbacks.verifier_scoring import VerifierScoring
from callbacks.verifiers.number import Number
from datamodules.clock import Clock
from datamodules.judging import judged_in_order
from datamodules.types import Rollout, Verdict

MakeRollout = Callable[..., Rollout]


def judged(verifier: Any, groups: Any) -> Iterator[list[Rollout]]:
    trainer = SimpleNamespace(callbacks=[VerifierScoring(verifier)])
    return judged_in_order(trainer, (group for group in groups), Clock())


def test_a_group_is_judged_at_once_and_passed_on_when_all_before_it_were(make_rollout: MakeRollout) -> None:
    events = []

    def verifier(completion: str, answer: str) -> Verdict:
        events.append(f"judged {completion}")
        return Verdict("correct", 1.0)

    def groups() -> Iterator[list[Rollout]]:
        for group in (1, 0, 2):
            events.append(f"sampled {group}")
            yield [make_rollout(group, s, text=f"{group}{s}", verdict=None) for s in range(2)]

    for group in judged(verifier, groups()):
        events.append("passed on " + " ".join(r.text for r in group))
    assert events == [
        "sampled 1", "judged 10", "judged 11",
        "sampled 0", "judged 00", "judged 01", "passed on 00 01", "passed on 10 11",
        "sampled 2", "judged 20", "judged 21", "passed on 20 21",
    ]  # fmt: skip


def test_what_got_no_score_is_counted_over_the_whole_round_and_told_once(
    make_rollout: MakeRollout, caplog: pytest.LogCaptureFixture
) -> None:
    def verifier(completion: str, answer: str) -> Verdict:
        if completion != "4":
            raise TimeoutError("judge is down")
        return Verdict("correct", 1.0)

    groups = [[make_rollout(g, s, text=text) for s, text in enumerate(("4", "x"))] for g in range(3)]
    with caplog.at_level(logging.WARNING):
        rounds = list(judged(verifier, groups))
    assert [[r.is_trainable for r in group] for group in rounds] == [[True, False]] * 3
    assert caplog.messages == ["3 of 6 completions got no score: 3 x TimeoutError: judge is down"]


def test_nothing_is_told_when_all_could_be_judged(make_rollout: MakeRollout, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        list(judged(Number(), [[make_rollout(0, 0, text="no idea")], [make_rollout(1, 0, text="4")]]))
    assert caplog.messages == []


def test_a_callback_that_loses_a_rollout_ends_the_run(make_rollout: MakeRollout) -> None:
    class Losing:
        def on_rollouts(self, trainer: Any, rollouts: Sequence[Rollout]) -> list[Rollout]:
            return list(rollouts)[1:]

    group = [make_rollout(0, s) for s in range(3)]
    with pytest.raises(RuntimeError, match=r"3 rollouts were sampled and 2 came back with a verdict"):
        list(judged_in_order(SimpleNamespace(callbacks=[Losing()]), (g for g in [group]), Clock()))
