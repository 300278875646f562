"""What every objective must satisfy at set-up: it refuses runs without what it needs, and reads nothing else."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from datamodules.types import Sampling
from modules.objectives.objective import Objective
from modules.policy_module import PolicyModule

OPTIONAL = frozenset({"sampling_logprobs", "old_logprobs", "ref_logprobs"})
PLAIN = Sampling(max_tokens=16)


def refusal(
    case: str,
    head: Objective,
    *,
    lacking: str = "",
    group_size: int = 2,
    sampling: Sampling = PLAIN,
    precision: str = "32-true",
    mixes_snapshots: bool = False,
    drops_equal_groups: bool = False,
) -> str:
    """Return why a run with this one head does not start, or nothing if it does."""
    module = PolicyModule(
        policy=nn.Linear(1, 1),
        objectives={case.partition("-")[0]: head},
        optimizer=None,
        scheduler=None,
        max_grad_norm=1.0,
        log_entropy=False,
        compile_layers=False,
    )  # type: ignore[arg-type]
    data = SimpleNamespace(
        provides=OPTIONAL - {lacking},
        group_size=group_size,
        is_renormalised=sampling.is_renormalised,
        mixes_snapshots=mixes_snapshots,
        drops_equal_groups=drops_equal_groups,
    )
    module._trainer = SimpleNamespace(datamodule=data, precision=precision)
    try:
        module.setup("fit")
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("tensor", sorted(OPTIONAL))
def test_a_missing_tensor_is_named_at_set_up_with_the_objective(case: str, head: Objective, tensor: str) -> None:
    message = refusal(case, head, lacking=tensor)
    expected = f"objective '{case.partition('-')[0]}' needs {tensor}, which SimpleNamespace does not provide"
    assert message.startswith(expected) if tensor in head.requires else message == ""


def test_a_head_reads_no_optional_tensor_that_it_does_not_require(
    head: Objective, make_batch: Callable[..., Any], gradient: Callable[..., Any]
) -> None:
    logprobs, batch = make_batch([[1.0, 0.0], [0.25, 1.0]], [[3, 2], [1, 4]], drift=None)
    without = replace(batch, **dict.fromkeys(OPTIONAL - head.requires))
    assert_close(gradient(head, logprobs, without), gradient(head, logprobs, batch))


def test_only_heads_that_need_siblings_look_at_them(
    head: Objective, make_batch: Callable[..., Any], gradient: Callable[..., Any]
) -> None:
    logprobs, batch = make_batch([[1.0, 0.0], [0.25, 1.0]], [[3, 2], [1, 4]], drift=None)
    others = replace(batch, group_rewards=torch.tensor([[0.1, 0.3]], dtype=torch.float64).expand(4, 2))
    is_same = torch.equal(gradient(head, logprobs, others), gradient(head, logprobs, batch))
    assert is_same is not head.needs_siblings


def test_a_group_of_one_is_refused_by_heads_that_compare_siblings(case: str, head: Objective) -> None:
    message = refusal(case, head, group_size=1)
    expected = f"datamodule.group_size must be at least 2 for objective '{case.partition('-')[0]}'"
    assert message.startswith(expected) if head.needs_siblings else message == ""


@pytest.mark.parametrize("sampling", [Sampling(16, top_p=0.9), Sampling(16, top_k=5)])
def test_renormalised_sampling_is_refused_by_heads_that_use_its_logprobs(
    case: str, head: Objective, sampling: Sampling
) -> None:
    message = refusal(case, head, sampling=sampling)
    assert ("biases every ratio" in message) is ("sampling_logprobs" in head.requires)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true"])
def test_a_precision_that_the_canary_does_not_see_is_refused(case: str, head: Objective, precision: str) -> None:
    assert "use policy.dtype=bfloat16 instead" in refusal(case, head, precision=precision)


def test_a_head_that_needs_one_snapshot_a_step_refuses_replay(case: str, head: Objective) -> None:
    assert head.needs_one_snapshot == case.startswith("oapl")
    assert (
        "datamodule.replay.rounds must be 1" in refusal(case, head, mixes_snapshots=True)
    ) == head.needs_one_snapshot


def test_dropping_equal_groups_warns_where_they_have_a_gradient(
    case: str,
    head: Objective,
    make_batch: Callable[..., Any],
    gradient: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    equal = make_batch([[1.0, 1.0], [0.0, 0.0]], [[3, 2], [1, 4]], drift=None)
    assert (torch.count_nonzero(gradient(head, *equal)) == 0) == head.ignores_equal_groups
    refusal(case, head, drops_equal_groups=True)
    assert ("changes objective" in caplog.text) != head.ignores_equal_groups


def test_heads_weigh_in_by_their_weight(
    head: Objective, make_batch: Callable[..., Any], gradient: Callable[..., Any]
) -> None:
    logprobs, batch = make_batch([[1.0, 0.0], [0.25, 1.0]], [[3, 2], [1, 4]], drift=None)
    single = gradient(head, logprobs, batch)
    head.weight = 2.5
    assert_close(gradient(head, logprobs, batch), 2.5 * single)
    assert torch.count_nonzero(single) > 0
    assert_close(PolicyModule.pull(head, head(logprobs, batch), batch), -2.5 * single)
