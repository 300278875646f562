"""The canary: an engine with other weights than the snapshot's is found out, with both values."""

import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from canaries import check_canary

from datamodules.canary import Canary, CanaryError, make_probe
from datamodules.snapshots import Snapshot
from datamodules.types import EncodedPrompt, Probe, Prompt

PROBE = Probe((5, 6, 7, 8), (1, 2, 3), 0.6)
SNAPSHOT = Snapshot(12, 240, Path("nowhere"), PROBE, (-1.0, -2.5, -0.125))


def engine(*logprobs: float, tolerance: float = 0.25) -> Any:
    """Return an engine that answers so, and only to the snapshot's own probe."""
    answers = {PROBE: list(logprobs)}
    return SimpleNamespace(name="fake", canary_tolerance=tolerance, score=answers.__getitem__)


def encoded(*prompts: tuple[int, ...]) -> list[EncodedPrompt]:
    return [EncodedPrompt(Prompt(str(i), (), ""), token_ids) for i, token_ids in enumerate(prompts)]


@pytest.mark.parametrize("logprobs", [(-1.0, -2.5, -0.125), (-1.0, -2.25, -0.125), (-1.0, -2.625, -0.0625)])
def test_an_engine_within_its_tolerance_passes_and_its_answer_is_returned(logprobs: tuple[float, ...]) -> None:
    assert check_canary(engine(*logprobs), SNAPSHOT) == logprobs


def test_an_engine_that_answers_as_before_an_update_is_caught_though_it_is_within_tolerance() -> None:
    stale = (-1.0, -2.5001, -0.125)
    canary = Canary("fake", 0.25)
    before = replace(SNAPSHOT, version=11, probe_logprobs=(-1.0, -2.5002, -0.125))
    assert canary.check(before, stale) == stale
    with pytest.raises(CanaryError, match="exactly as for the one before"):
        canary.check(SNAPSHOT, stale)
    assert canary.check(before, stale) == stale  # loaded again, it may answer the same
    assert canary.check(SNAPSHOT, (-1.0, -2.5, -0.125)) == (-1.0, -2.5, -0.125)


def test_an_engine_with_other_weights_is_named_with_version_both_values_and_the_key() -> None:
    with pytest.raises(CanaryError) as caught:
        check_canary(engine(-1.0, -2.75, -0.15, tolerance=0.2), SNAPSHOT)
    message = str(caught.value)
    assert message.startswith("engine fake does not hold snapshot 12: probe log-probs differ by up to 2.50e-01")
    assert "canary_tolerance=0.2" in message
    assert "position 1: engine -1.000000, trainer -1.000000" in message
    assert "position 2: engine -2.750000, trainer -2.500000" in message
    assert "position 3: engine -0.150000, trainer -0.125000" in message


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("broken", [math.nan, -math.inf, math.inf])
def test_a_log_prob_that_is_no_number_is_never_within_the_tolerance(place: int, broken: float) -> None:
    logprobs = [-1.0, -2.5, -0.125]
    logprobs[place] = broken
    lenient = engine(*logprobs, tolerance=1e9)
    with pytest.raises(CanaryError, match=re.escape(f"engine {broken:.6f}, trainer")):
        check_canary(lenient, SNAPSHOT)


def test_an_engine_that_agrees_with_a_broken_snapshot_on_nan_does_not_pass() -> None:
    broken = Snapshot(3, 0, Path("nowhere"), PROBE, (math.nan, math.inf, -0.125))
    with pytest.raises(CanaryError, match=r"does not hold snapshot 3"):
        check_canary(engine(math.nan, math.inf, -0.125), broken)


def test_the_probe_repeats_the_prompts_to_96_tokens_and_asks_at_five_places() -> None:
    probe = make_probe(encoded((1, 2, 3), (4,)), window=512, temperature=0.6)
    assert probe == Probe((1, 2, 3, 4) * 24, (19, 38, 57, 76, 95), 0.6)


@pytest.mark.parametrize(("window", "positions"), [(97, (19, 38, 57, 76, 95)), (11, (1, 3, 5, 7, 9)), (3, (1,))])
def test_the_probe_leaves_room_in_a_small_window_and_asks_only_where_it_has_tokens(
    window: int, positions: tuple[int, ...]
) -> None:
    probe = make_probe(encoded(tuple(range(200))), window=window, temperature=1.0)
    assert probe == Probe(tuple(range(window - 1)), positions, 1.0)
