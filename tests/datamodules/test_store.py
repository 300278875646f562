"""The rollout store: what is read equals what was written, to the last bit, and pandas reads it too."""

import errno
import json
import math
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from datamodules.clock import Clock
from datamodules.store import ROWS_AT_ONCE, RolloutStore, read_rollouts
from datamodules.types import Rollout, Verdict

MakeRollout = Callable[..., Rollout]
LOGPROBS = st.floats(allow_nan=False, allow_infinity=True)
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=4).map(tuple)
SMALL = st.integers(0, 2**31 - 1)
SCORED = st.builds(
    Verdict,
    st.sampled_from(["correct", "incorrect", "unparseable"]),
    st.floats(0.0, 1.0),
    st.floats(0.0, allow_infinity=False),
    st.text(),
)
ROLLOUTS = st.builds(
    Rollout,
    prompt_id=st.text(),
    group_id=SMALL,
    sibling=SMALL,
    prompt_text=st.text(),
    answer=st.text(),
    prompt_ids=TOKENS,
    completion_ids=TOKENS,
    sampling_logprobs=st.none() | st.lists(LOGPROBS, max_size=4).map(tuple),
    text=st.text(),
    finish_reason=st.sampled_from(["stop", "length", "error"]),
    temperature=st.floats(0.0, 10.0, exclude_min=True),
    seed=st.integers(0, 2**63 - 1),
    round=SMALL,
    snapshot=SMALL,
    snapshot_step=st.integers(0, 2**63 - 1),
    failure=st.text(),
    verdict=st.none() | SCORED | st.builds(Verdict, st.just("error"), st.none(), detail=st.text()),
)

ORIGIN = {"seed": 3, "snapshot": [1, 10, -0.1, -1 / 3]}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> RolloutStore:
    return RolloutStore(tmp_path_factory.mktemp("run") / "rollouts")


def stored(store: RolloutStore, round_: int, rollouts: list[Rollout]) -> Path:
    with store.writing(round_, ORIGIN, Clock()) as write:
        write(rollouts)
    return store.path(round_)


def bits(rollout: Rollout) -> list[bytes]:
    """Return every float of a rollout as its eight bytes: 0.0 and -0.0 are equal, but not the same."""
    numbers = [rollout.temperature, *(rollout.sampling_logprobs or ())]
    if rollout.verdict is not None:
        numbers += [rollout.verdict.seconds, *([] if rollout.verdict.score is None else [rollout.verdict.score])]
    return [struct.pack("<d", number) for number in numbers]


@settings(
    max_examples=60,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],  # to shrink an example takes minutes: each try is a file
    suppress_health_check=[HealthCheck.too_slow],
)
@given(rollouts=st.lists(ROLLOUTS, max_size=4))
def test_any_round_comes_back_equal_and_bit_for_bit(store: RolloutStore, rollouts: list[Rollout]) -> None:
    read = read_rollouts(stored(store, 12, rollouts))
    assert read == rollouts
    assert [bits(r) for r in read] == [bits(r) for r in rollouts]


def test_a_seed_of_63_bits_keeps_its_last_bit(store: RolloutStore, make_rollout: MakeRollout) -> None:
    seeds = [0, 2**53 + 1, 2**63 - 1]
    assert [r.seed for r in read_rollouts(stored(store, 8, [make_rollout(seed=seed) for seed in seeds]))] == seeds


def test_a_log_prob_that_is_nan_stays_nan_and_is_not_lost(store: RolloutStore, make_rollout: MakeRollout) -> None:
    (read,) = read_rollouts(stored(store, 1, [make_rollout(sampling_logprobs=(-0.5, math.nan))]))
    assert [str(x) for x in read.sampling_logprobs or ()] == ["-0.5", "nan"]


def test_no_log_probs_and_no_tokens_stay_apart(store: RolloutStore, make_rollout: MakeRollout) -> None:
    written = [make_rollout(sampling_logprobs=None), make_rollout(sampling_logprobs=(), completion_ids=())]
    assert [(r.sampling_logprobs, r.completion_ids) for r in read_rollouts(stored(store, 2, written))] == [
        (None, (4, 2)),
        ((), ()),
    ]


def test_a_round_has_one_file_whose_name_and_metadata_say_which(store: RolloutStore, make_rollout: MakeRollout) -> None:
    path = stored(store, 34, [make_rollout(round=34)])
    assert path == store.path(34) == store.directory / "round-000034.parquet"
    metadata = pq.read_schema(path).metadata[b"offbeat"]
    assert json.loads(metadata) == {"format": 1, "round": 34, "origin": ORIGIN}


def test_writing_a_round_again_replaces_it(store: RolloutStore, make_rollout: MakeRollout) -> None:
    stored(store, 5, [make_rollout(text="first"), make_rollout(text="second")])
    assert [r.text for r in read_rollouts(stored(store, 5, [make_rollout(text="third")]))] == ["third"]


def test_pandas_reads_a_round_with_an_unscored_sample_as_not_a_number(
    store: RolloutStore, make_rollout: MakeRollout
) -> None:
    rollouts = [make_rollout(0, s, score=score, round=7, snapshot=4) for s, score in enumerate((1.0, 0.0, None))]
    rollouts[2] = replace(rollouts[2], verdict=Verdict("error", None, detail="TimeoutError"))
    frame = pd.read_parquet(stored(store, 7, rollouts))
    assert frame["reward"].isna().tolist() == [False, False, True]
    assert frame["reward"].mean() == 0.5  # over the two that were scored, not 1/3
    assert frame["verdict"].tolist() == ["correct", "incorrect", "error"]
    assert (frame["lag"].tolist(), frame["sibling"].tolist()) == ([3, 3, 3], [0, 1, 2])
    assert frame["verdict_detail"].tolist() == ["", "", "TimeoutError"]
    assert (frame["prompt"][0], frame["completion"][0], frame["answer"][0]) == ("2+2=", "4", "4")
    assert (frame["completion_ids"][0].tolist(), frame["sampling_logprobs"][0].tolist()) == ([4, 2], [-0.5, -0.25])


def test_a_round_is_read_again_only_for_the_origin_that_it_was_stored_with(
    make_rollout: MakeRollout, tmp_path: Path
) -> None:
    store = RolloutStore(tmp_path)
    rollouts = [make_rollout(0, s, score=float(s)) for s in range(2)]
    stored(store, 4, rollouts)
    assert store.read(4, ORIGIN) == rollouts
    assert store.read(4, {**ORIGIN, "snapshot": [1, 10, -0.1, math.nextafter(-1 / 3, 0)]}) is None
    assert store.read(5, ORIGIN) is None


def test_a_resumed_run_adopts_the_rounds_that_replay_draws_from(make_rollout: MakeRollout, tmp_path: Path) -> None:
    store, earlier = RolloutStore(tmp_path / "resumed"), RolloutStore(tmp_path / "earlier")
    for round_ in (1, 2):
        stored(earlier, round_, [make_rollout(round=round_)])
    store.adopt(earlier.directory, [2])
    assert store.read_round(2) == earlier.read_round(2)
    with pytest.raises(FileNotFoundError, match="replay needs round 1"):
        store.read_round(1)
    with pytest.raises(FileNotFoundError, match="replay needs round 3"):
        store.adopt(earlier.directory, [3])


def test_a_file_is_the_same_however_the_rollouts_came(store: RolloutStore, make_rollout: MakeRollout) -> None:
    rollouts = [make_rollout(number // 4, number % 4, text=str(number)) for number in range(2 * ROWS_AT_ONCE + 3)]
    at_once = stored(store, 40, rollouts).read_bytes()
    with store.writing(40, ORIGIN, Clock()) as write:
        for start in range(0, len(rollouts), 7):
            write(rollouts[start : start + 7])
    assert store.path(40).read_bytes() == at_once
    assert read_rollouts(store.path(40)) == rollouts
    assert pq.ParquetFile(store.path(40)).num_row_groups == 3


def test_a_full_last_row_group_is_followed_by_none(store: RolloutStore, make_rollout: MakeRollout) -> None:
    path = stored(store, 42, [make_rollout(number, 0) for number in range(ROWS_AT_ONCE)])
    assert pq.ParquetFile(path).num_row_groups == 1


def test_a_full_disk_that_the_engine_speaks_of_is_not_said_to_be_the_runs(store: RolloutStore) -> None:
    def fail() -> None:
        with store.writing(43, ORIGIN, Clock()):
            raise OSError(errno.ENOSPC, "No space left on device: '/dev/shm/weights'")

    with pytest.raises(OSError, match=r"/dev/shm/weights") as raised:
        fail()
    assert "round-000043" not in str(raised.value)


def test_a_round_that_fails_leaves_no_file(store: RolloutStore, make_rollout: MakeRollout) -> None:
    def fail() -> None:
        with store.writing(41, ORIGIN, Clock()) as write:
            write([make_rollout(0, s) for s in range(ROWS_AT_ONCE)])
            raise RuntimeError("the engine died")

    with pytest.raises(RuntimeError, match=r"the engine died"):
        fail()
    assert not store.path(41).exists()
    assert not list(store.directory.glob(".writing-*"))
