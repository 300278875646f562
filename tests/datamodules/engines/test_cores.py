"""Which cores an engine computes on, and that trainer and engine are told when they share them."""

import logging
import os

import pytest
import torch

from datamodules.engines.cores import count_cores, machine_cores, warn_of_shared_cores


@pytest.mark.parametrize(("cpu_threads", "count"), [("0", 1), ("0-1", 2), ("0,2,4-7", 6), ("0-3|4-7", 8)])
def test_cores_are_counted_as_vllm_lists_them(cpu_threads: str, count: int) -> None:
    assert count_cores(cpu_threads) == count


@pytest.mark.parametrize("cpu_threads", ["", "all", "0-", "0;1", "-1"])
def test_what_lists_no_cores_is_refused_by_its_key(cpu_threads: str) -> None:
    with pytest.raises(ValueError, match=rf"engine\.cpu_threads must list cores, .*, got '{cpu_threads}'"):
        count_cores(cpu_threads)


def test_the_cores_of_the_machine_are_those_that_this_process_may_use() -> None:
    mine = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(mine)})
        assert machine_cores() == 1
    finally:
        os.sched_setaffinity(0, mine)
    assert machine_cores() == len(mine)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the trainer computes on the GPU")
def test_trainer_and_engine_that_want_more_cores_than_there_are_is_told_with_the_split(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    with caplog.at_level(logging.WARNING):
        warn_of_shared_cores(None)
        warn_of_shared_cores(3)
        assert caplog.messages == []
        warn_of_shared_cores(7)
    (message,) = caplog.messages
    assert "5 threads of the trainer and 7 of the engine take turns on 8 cores" in message
    assert 'num_threads=4, and engine.cpu_threads="4-7" (vllm) or engine.num_threads=4' in message
