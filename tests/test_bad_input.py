"""What cannot be is refused before the first sample, by its key, and leaves no trace."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from runs import sampled

from train import train

SmallRun = Callable[..., DictConfig]
OBJECTIVES = ["topr", "asymre", "oapl", "grpo", "positives_only", "reinforce", "[topr,positives_only]"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["datamodule.group_size=1", "datamodule.batch_size=8", "objective=asymre"], "datamodule.group_size must be"),
        (["datamodule.batch_size=12"], "nearest valid sizes are 8 and 16"),
        (["lag=-1"], "datamodule.lag"),
        (["datamodule.sampling.top_p=0.9"], "datamodule.sampling.top_p"),
        (
            ["datamodule=demonstrations", "datamodule.batch_size=8"],
            "topr.*sampling_logprobs",
        ),
        (["datamodule.prompts_per_round=64"], "only 40 training prompts"),
        (["datamodule.sampling.max_tokens=300"], "max_tokens=300"),
        (["policy_module.max_grad_norm=0"], "policy_module.max_grad_norm"),
        (["objective.topr.weight=0"], "objective.topr.weight"),
    ],
)
def test_bad_input_is_refused_before_the_first_sample(
    overrides: list[str], message: str, small_run: SmallRun, tmp_path: Path
) -> None:
    with pytest.raises(Exception, match=message):
        train(small_run(*overrides))
    assert not list((tmp_path / "run").glob("rollouts/*.parquet"))


def test_a_directory_that_holds_a_run_is_not_started_over(small_run: SmallRun, tmp_path: Path) -> None:
    train(small_run("seed=0", "rounds=1"))
    before = sampled(tmp_path / "run")
    with pytest.raises(ValueError, match=r"already holds a run; .*resume=true"):
        train(small_run("seed=1", "rounds=1"))
    assert sampled(tmp_path / "run") == before


def test_a_live_run_keeps_its_directory_to_itself(small_run: SmallRun, tmp_path: Path) -> None:
    data = instantiate(small_run().datamodule)
    data.run_directory.claim(is_resumed=False)
    (tmp_path / "run" / "rollouts").mkdir(exist_ok=True)
    half_written = tmp_path / "run" / "rollouts" / ".writing-x"
    half_written.touch()
    with pytest.raises(ValueError, match="another run is at work"):
        train(small_run())
    assert half_written.exists()
    data.close()
    train(small_run("rounds=1"))
    assert not half_written.exists()


def test_the_stored_configuration_is_that_of_the_run_and_not_of_a_refused_one(
    small_run: SmallRun, tmp_path: Path
) -> None:
    with pytest.raises(InstantiationException):
        train(small_run("lag=-1"))
    assert not (tmp_path / "run" / "config.yaml").exists()
    train(small_run("lag=2", "rounds=1"))
    with pytest.raises(ValueError, match="already holds a run"):
        train(small_run("lag=3", "rounds=1"))
    assert OmegaConf.load(tmp_path / "run" / "config.yaml").lag == 2


def test_a_policy_that_is_not_there_is_refused_by_its_key(compose: Callable[..., DictConfig]) -> None:
    with pytest.raises(Exception, match=r"policy\.path: \./nowhere is not a directory"):
        train(compose("engine=transformers", "policy=hf", "policy.path=./nowhere"))


def test_a_finished_run_is_not_resumed_without_further_rounds(small_run: SmallRun, tmp_path: Path) -> None:
    train(small_run("rounds=2"))
    checkpoint = tmp_path / "run" / "checkpoints" / "last.ckpt"
    with pytest.raises(ValueError, match="rounds is 2, and 2 are already trained"):
        train(small_run("rounds=2", f"ckpt_path={checkpoint}"))
    assert not (tmp_path / "run" / "rollouts" / "round-000002.parquet").exists()


def test_a_run_without_a_verifier_says_which_callback_is_missing(small_run: SmallRun) -> None:
    with pytest.raises(RuntimeError, match=r"callbacks\.verifier_scoring"):
        train(small_run("~callbacks.verifier_scoring", "~callbacks.held_out_evaluation", "~callbacks.checkpoint_best"))


def test_a_run_without_weight_sync_says_which_callback_is_missing(small_run: SmallRun) -> None:
    with pytest.raises(RuntimeError, match=r"snapshot 0 is missing .*callbacks\.weight_sync"):
        train(small_run("~callbacks.weight_sync"))


def test_a_checkpoint_name_that_hides_its_round_is_refused(small_run: SmallRun) -> None:
    with pytest.raises(ValueError, match=r"callbacks\.checkpoint_\*\.filename must end in"):
        train(small_run("callbacks.checkpoint_best.filename=best"))


def test_answers_that_the_verifier_cannot_read_are_refused_before_the_first_sample(
    small_run: SmallRun, tmp_path: Path
) -> None:
    (tmp_path / "data.jsonl").write_text("".join(f'{{"prompt": "{i}", "answer": "yes"}}\n' for i in range(20)))
    cfg = small_run()
    source = {"_target_": "datamodules.prompts.jsonl.JsonLines", "path": str(tmp_path / "data.jsonl")}
    cfg.prompts = {
        **source,
        "prompt_field": "prompt",
        "answer_field": "answer",
        "id_field": None,
        "held_out_fraction": 0.2,
    }
    with pytest.raises(ValueError, match="Number cannot judge 20 of the prompts"):
        train(cfg)
    assert not list((tmp_path / "run").glob("rollouts/*.parquet"))


def test_demonstrations_that_do_not_fit_the_window_are_left_out_and_counted(
    small_run: SmallRun, caplog: pytest.LogCaptureFixture
) -> None:
    demonstrations = ["datamodule=demonstrations", "objective=supervised"]
    sizes = ["prompts.num_train=90", "policy.window=11", "datamodule.batch_size=8", "rounds=1"]
    train(small_run(*demonstrations, *sizes))  # a prompt has 6 tokens, "8 08" 5 and "10 10" 6
    assert any("of 90 demonstrations that do not fit the window" in message for message in caplog.messages)
