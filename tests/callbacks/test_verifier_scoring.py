"""Scoring: every rollout gets a verdict, and what could not be judged is never a reward of 0."""

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from callbacks.verifier_scoring import VerifierScoring
from callbacks.verifiers.exact import Exact
from callbacks.verifiers.number import Number
from datamodules.types import Prompt, Rollout, Verdict

MakeRollout = Callable[..., Rollout]
TRAINER: Any = None  # the callback does not look at it


def verdicts(rollouts: list[Rollout]) -> list[tuple[str, float | None]]:
    assert all(r.verdict is not None for r in rollouts)
    return [(r.verdict.status, r.verdict.score) for r in rollouts if r.verdict]


def scored(verifier: Any, *rollouts: Rollout) -> list[Rollout]:
    return VerifierScoring(verifier).on_rollouts(TRAINER, rollouts)


def test_every_rollout_is_judged_against_its_own_answer_in_order(make_rollout: MakeRollout) -> None:
    rollouts = [
        make_rollout(0, s, verdict=None, text=text, answer=answer)
        for s, (text, answer) in enumerate([("4", "4"), ("5", "4"), ("", "4"), ("5", "5")])
    ]
    judged = scored(Exact(), *rollouts)
    assert verdicts(judged) == [("correct", 1.0), ("incorrect", 0.0), ("unparseable", 0.0), ("correct", 1.0)]
    assert [r.sibling for r in judged] == [0, 1, 2, 3]
    assert [r.verdict for r in rollouts] == [None] * 4  # a stage makes new values


def test_a_verifier_that_raises_does_not_score_0(make_rollout: MakeRollout) -> None:
    def verifier(completion: str, answer: str) -> Verdict:
        if completion != "4":
            raise TimeoutError("judge is down")
        return Verdict("correct", 1.0)

    judged = scored(verifier, *(make_rollout(0, s, text=text) for s, text in enumerate(("4", "x", "y"))))
    assert verdicts(judged) == [("correct", 1.0), ("error", None), ("error", None)]
    assert [(r.reward, r.is_trainable) for r in judged] == [(1.0, True), (None, False), (None, False)]


def test_a_reference_answer_without_a_number_is_an_error_without_a_score(make_rollout: MakeRollout) -> None:
    (judged,) = scored(Number(), make_rollout(text="4", answer="four"))
    assert (judged.reward, judged.is_trainable) == (None, False)
    assert judged.verdict is not None
    assert judged.verdict.status == "error"
    assert judged.verdict.detail == "ValueError: the reference answer 'four' holds no number"


def test_a_sample_that_was_never_drawn_is_an_error_and_not_shown_to_the_verifier(make_rollout: MakeRollout) -> None:
    shown = []

    def verifier(completion: str, answer: str) -> Verdict:
        shown.append(completion)
        return Verdict("incorrect", 0.0)

    failed = make_rollout(0, 1, text="", finish_reason="error", failure="log-prob is NaN", verdict=None)
    judged = scored(verifier, make_rollout(0, 0, text="5"), failed)
    assert verdicts(judged) == [("incorrect", 0.0), ("error", None)]
    assert judged[1].verdict == Verdict("error", None, detail="sampling failed: log-prob is NaN")
    assert shown == ["5"]


@pytest.mark.parametrize(
    "returned",
    [
        Verdict("correct", float("nan")),
        Verdict("correct", float("inf")),
        Verdict("incorrect", -1.0),
        Verdict("correct", 2.0),
        Verdict("error", 0.0),
        None,
    ],
    ids=["nan", "inf", "below 0", "above 1", "error with a score", "no verdict"],
)
def test_what_is_no_score_in_0_to_1_becomes_an_error_and_no_reward(
    make_rollout: MakeRollout, returned: Verdict | None
) -> None:
    assert verdicts(scored(lambda completion, answer: returned, make_rollout())) == [("error", None)]


def test_each_verdict_has_the_seconds_that_its_verifier_took(
    make_rollout: MakeRollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    elapsed = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: sum(elapsed))

    def verifier(completion: str, answer: str) -> Verdict:
        elapsed.append(float(completion))
        if completion == "8":
            raise ValueError("late")
        return Verdict("correct", 1.0, detail="mine")

    judged = scored(verifier, *(make_rollout(text=text) for text in ("2", "4", "8")))
    assert [(r.verdict.seconds, r.verdict.detail) for r in judged if r.verdict] == [
        (2.0, "mine"),
        (4.0, "mine"),
        (8.0, "ValueError: late"),
    ]


def test_scores_in_a_thread_are_those_of_the_main_thread(make_rollout: MakeRollout) -> None:
    rollouts = [make_rollout(text=text) for text in ("4", "5", "none")]
    found: list[Rollout] = []
    thread = threading.Thread(target=lambda: found.extend(scored(Number(), *rollouts)))
    thread.start()
    thread.join()
    assert verdicts(found) == [("correct", 1.0), ("incorrect", 0.0), ("unparseable", 0.0)]


def test_ctrl_c_in_a_verifier_ends_the_run(make_rollout: MakeRollout) -> None:
    def verifier(completion: str, answer: str) -> Verdict:
        raise KeyboardInterrupt

    rollout = make_rollout()
    with pytest.raises(KeyboardInterrupt):
        scored(verifier, rollout)


def setup_with(verifier: Any, *answers: str) -> None:
    prompts = [SimpleNamespace(prompt=Prompt(f"p{i}", (), answer)) for i, answer in enumerate(answers)]
    data = SimpleNamespace(train_prompts=prompts[:1], held_out_prompts=prompts[1:])
    VerifierScoring(verifier).setup(SimpleNamespace(datamodule=data), None, "fit")  # type: ignore[arg-type]


def test_references_that_cannot_be_compared_are_named_before_anything_is_sampled() -> None:
    with pytest.raises(ValueError, match=r"Number cannot judge 2 of the prompts: p0: .*'yes' holds no number; p2: "):
        setup_with(Number(), "yes", "4", "no", "1/2")
    with pytest.raises(ValueError, match=r"Exact cannot judge 1 of the prompts: p1: the reference answer is empty"):
        setup_with(Exact(), "yes", " ")


def test_each_reference_is_checked_once_and_each_prompt_with_it_is_counted() -> None:
    asked = []

    class Silent(Exact):
        def check_answer(self, answer: str) -> None:
            asked.append(answer)
            if answer == "no":
                raise ValueError

    with pytest.raises(ValueError, match=r"Silent cannot judge 2 of the prompts: p1: ; p2: "):
        setup_with(Silent(), "yes", "no", "no", "yes")
    assert sorted(asked) == ["no", "yes"]


def test_references_that_can_be_compared_pass() -> None:
    setup_with(Number(), "4", "#### 1,000 apples")
    setup_with(Exact(), "yes", "no")
