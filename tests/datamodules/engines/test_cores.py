"""Which cores an engine computes on, and that trainer and engine are told when they share them."""

import logging
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from datamodules.engines import vllm
from datamodules.engines.cores import listed_cores, machine_cores, warn_of_shared_cores


@pytest.mark.parametrize(
    ("cpu_threads", "cores"),
    [
        ("0", {0}),
        (3, {3}),
        ("0-1", {0, 1}),
        ("0,2,4-6", {0, 2, 4, 5, 6}),
        ("0-1|4-5", {0, 1, 4, 5}),
        ("0-2,1", {0, 1, 2}),
    ],
)
def test_cores_are_listed_as_vllm_lists_them(cpu_threads: str, cores: set[int]) -> None:
    assert listed_cores(cpu_threads) == cores


@pytest.mark.parametrize("cpu_threads", ["auto", "nobind"])
def test_vllms_own_words_may_take_every_core(cpu_threads: str) -> None:
    assert listed_cores(cpu_threads) == set(machine_cores())


@pytest.mark.parametrize("cpu_threads", ["", "all", "0-", "0;1", "-1", "3-1"])
def test_what_lists_no_cores_is_refused_by_its_key(cpu_threads: str) -> None:
    with pytest.raises(ValueError, match=rf"engine\.cpu_threads must list cores, .*, got '{cpu_threads}'"):
        listed_cores(cpu_threads)


def test_the_cores_of_the_machine_are_those_that_this_process_may_use() -> None:
    mine = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(mine)})
        assert machine_cores() == [min(mine)]
    finally:
        os.sched_setaffinity(0, mine)
    assert machine_cores() == sorted(mine)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the trainer computes on the GPU")
def test_trainer_and_engine_that_want_more_cores_than_there_are_is_told_with_the_split(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8, 16)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    with caplog.at_level(logging.WARNING):
        warn_of_shared_cores(None)
        warn_of_shared_cores(3)
        assert caplog.messages == []
        warn_of_shared_cores(7)
    (message,) = caplog.messages
    assert "5 threads of the trainer and up to 7 of the engine take turns on 8 cores" in message
    assert 'num_threads=4, and engine.cpu_threads="12,13,14,15" (vllm; with engine=auto engine.vllm.cpu_th' in message
    assert "or engine.num_threads=4 (transformers_process)" in message


@pytest.mark.skipif(torch.cuda.is_available(), reason="the trainer computes on the GPU")
def test_a_run_that_makes_rounds_ahead_is_told_and_one_that_does_not_is_not(
    small_run: Callable[..., DictConfig], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    for prefetch in (False, True):
        cfg = small_run("engine=transformers_process", f"datamodule.prefetch={prefetch}", "num_threads=1", "lag=1")
        cfg.engine.num_threads = 2
        data = instantiate(cfg.datamodule)
        data.use(instantiate(cfg.policy))
        torch.set_num_threads(1)
        with caplog.at_level(logging.WARNING):
            data.setup("fit")
        assert len([m for m in caplog.messages if "take turns on 2 cores" in m]) == int(prefetch)


def test_each_engine_says_on_how_many_cores_it_computes(make_engine: Callable[..., Any]) -> None:
    assert make_engine("transformers").cpu_cores is None  # the trainer waits for it
    assert make_engine("transformers_process").cpu_cores == 1  # its num_threads


@pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM computes on the GPU")
@pytest.mark.parametrize(("cpu_threads", "count"), [(None, 7), ("2-4", 3)])
def test_so_does_vllm(
    cpu_threads: str | None, count: int, make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_engine("vllm")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert vllm._cores(cpu_threads) == count
