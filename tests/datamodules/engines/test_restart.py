"""An engine that dies in the middle of a round costs time and nothing else."""

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from runs import command_line

from datamodules.clock import Clock
from datamodules.codec import Codec
from datamodules.engines.engine import Engine, EngineDied
from datamodules.sampler import Sampler
from datamodules.snapshots import Snapshot, SnapshotStore
from datamodules.types import EncodedPrompt, Prompt, Rollout, Sampling
from modules.policy import Policy

PROMPTS = [EncodedPrompt(Prompt(f"p{i}", ({"role": "user", "content": "x"},), "4"), (3, 10 + i, 4)) for i in range(12)]


@pytest.fixture
def make_sampler(
    tmp_path: Path, make_policy: Callable[..., Policy], publish: Callable[..., Snapshot], codec: Codec
) -> Callable[..., Sampler]:
    for version in (0, 1):
        publish(make_policy(version), tmp_path, version)

    def make(engine: Engine, max_restarts: int = 2) -> Sampler:
        return Sampler(engine, SnapshotStore(tmp_path), codec, Sampling(max_tokens=12), 0, Clock(), max_restarts)

    return make


@pytest.fixture(params=["transformers_process", "vllm"])
def mortal(request: pytest.FixtureRequest, make_engine: Callable[..., Engine]) -> Iterator[Engine]:
    engine: Any = make_engine(request.param)
    if request.param == "vllm":
        engine.arguments["max_num_seqs"] = 4  # so that completions come in several waves
    yield engine
    engine.close()


def draw(sampler: Sampler) -> list[Rollout]:
    groups = list(sampler.sample(PROMPTS, group_size=2, version=1, round_=3, label="round 3"))
    assert [r.sibling for group in groups for r in group] == [0, 1] * len(PROMPTS)
    return [rollout for group in sorted(groups, key=lambda g: g[0].group_id) for rollout in group]


def kill_processes() -> None:
    for child in psutil.Process().children(recursive=True):
        if "resource_tracker" not in command_line(child):
            child.kill()


def die_after(engine: Engine, monkeypatch: pytest.MonkeyPatch, times: int) -> list[int]:
    """Have the engine's process killed when its first completion came; return the sizes of what was asked for."""
    original, asked = engine.generate, []

    def generate(prompts: Any, *arguments: Any) -> Any:
        asked.append(len(prompts))
        for number, item in enumerate(original(prompts, *arguments)):
            yield item
            if number == 0 and len(asked) <= times:
                kill_processes()

    monkeypatch.setattr(engine, "generate", generate)
    return asked


def test_finished_completions_are_kept_and_the_rest_is_drawn_again_the_same(
    mortal: Engine,
    make_sampler: Callable[..., Sampler],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    undisturbed = draw(make_sampler(mortal))
    asked = die_after(mortal, monkeypatch, times=2)
    with caplog.at_level(logging.WARNING):
        disturbed = draw(make_sampler(mortal))
    assert [r.completion_ids for r in disturbed] == [r.completion_ids for r in undisturbed]
    assert [(r.seed, r.snapshot, r.failure) for r in disturbed] == [(r.seed, 1, "") for r in undisturbed]
    for a, b in zip(disturbed, undisturbed, strict=True):
        assert a.sampling_logprobs == pytest.approx(b.sampling_logprobs, abs=1e-5)
    assert asked[0] == 24
    assert asked[1] < 24
    restarts = [message for message in caplog.messages if "of at most 2" in message]
    assert ["start 1" in restarts[0], "start 2" in restarts[1]] == [True, True]


def test_an_engine_that_died_while_it_was_idle_is_started_again(
    mortal: Engine, make_sampler: Callable[..., Sampler], caplog: pytest.LogCaptureFixture
) -> None:
    sampler = make_sampler(mortal)
    sampler.load(0)
    kill_processes()
    with caplog.at_level(logging.WARNING):
        assert len(draw(sampler)) == 24
    assert len([message for message in caplog.messages if "start 1 of at most 2" in message]) == 1


def test_an_abandoned_round_leaves_nothing_in_the_engine(engine: Engine, make_sampler: Callable[..., Sampler]) -> None:
    sampler = make_sampler(engine)
    undisturbed = draw(sampler)

    longer = make_sampler(engine)
    longer.sampling = Sampling(max_tokens=100)  # so that others are still sampled when the first is finished

    def abandon() -> None:
        for _ in longer.sample(PROMPTS, group_size=2, version=1, round_=4, label="round 4"):  # of other seeds
            raise RuntimeError("a callback failed")

    with pytest.raises(RuntimeError, match=r"a callback failed") as kept:  # with it, the frames of the generators
        abandon()
    sampler.load(0)  # a request that went on would keep the caches of the weights before
    again = draw(sampler)
    assert [r.completion_ids for r in again] == [r.completion_ids for r in undisturbed]
    assert kept.value is not None


def test_a_group_comes_while_others_are_still_sampled(
    make_engine: Callable[..., Engine], make_sampler: Callable[..., Sampler]
) -> None:
    engine: Any = make_engine("transformers")
    engine.max_sequences = 4
    events: list[str] = []
    original = engine.generate

    def generate(*arguments: Any) -> Any:
        for item in original(*arguments):
            events.append("completion")
            yield item

    engine.generate = generate
    for group in make_sampler(engine).sample(PROMPTS, group_size=2, version=1, round_=3, label="round 3"):
        assert [r.prompt_id for r in group] == [PROMPTS[group[0].group_id].prompt.id] * 2
        events.append("group")
    assert events.count("completion") == 24
    assert events.count("group") == 12
    assert "completion" in events[events.index("group") :]


def test_an_engine_that_leaves_something_out_ends_the_run(
    make_engine: Callable[..., Engine], make_sampler: Callable[..., Sampler]
) -> None:
    engine: Any = make_engine("transformers")
    original = engine.generate
    engine.generate = lambda *arguments: (item for i, item in enumerate(original(*arguments)) if i)
    with pytest.raises(RuntimeError, match=r"engine transformers ended with 1 completions missing"):
        draw(make_sampler(engine))


def test_an_engine_that_keeps_dying_ends_the_run_within_seconds(
    make_engine: Callable[..., Engine], make_sampler: Callable[..., Sampler], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine("transformers_process")
    sampler = make_sampler(engine, max_restarts=1)
    sampler.load(1)
    die_after(engine, monkeypatch, times=100)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"died 2 times in one go, datamodule\.max_engine_restarts is 1") as caught:
        draw(sampler)
    assert isinstance(caught.value.__cause__, EngineDied)
    assert time.monotonic() - start < 60
    engine.close()


def test_an_error_in_the_process_comes_back_with_its_traceback(
    make_engine: Callable[..., Engine], make_sampler: Callable[..., Sampler]
) -> None:
    engine = make_engine("transformers_process")
    make_sampler(engine).load(0)
    with pytest.raises(RuntimeError, match=r"(?s)raised:.*Traceback.*transformers\.py"):
        list(engine.generate([[10**6]], Sampling(max_tokens=2), [0], [2]))
    ((_, completion),) = engine.generate([[3, 10, 4]], Sampling(max_tokens=2), [0], [2])  # it is still there
    assert len(completion.token_ids) in (1, 2)
    engine.close()
    engine.close()
