"""Every option of every group composes into a run and builds, from the moment its file exists."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import ConfigCompositionException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from conf.suggestions import _unknown_nested_key, check_choices, check_keys, check_values, unknown_choice

CONF = Path(__file__).parents[1] / "conf"
OPTIONS = sorted(f"{path.parent.name}={path.stem}" for path in CONF.glob("*/[!_]*.yaml"))
GROUPS = {"policy", "objective", "datamodule", "prompts", "engine", "verifier", "callbacks", "logger", "trainer"}
GROUPS |= {"optimizer", "scheduler", "warm_start", "experiment", "curation"}
PARTS = ("curation", "objective", "prompts", "verifier", "callbacks", "logger", "trainer", "optimizer", "scheduler")


def test_the_groups_are_the_axes_that_people_swap() -> None:
    assert {path.name for path in CONF.iterdir() if path.is_dir()} - {"__pycache__", "hydra"} == GROUPS


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_composes_and_builds(
    option: str, compose: Callable[..., DictConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "answer": "3"}\n')
    needs = {"prompts=jsonl": [f"prompts.path={data}"], "policy=hf": [f"policy.path={tmp_path}"]}
    needs["datamodule=offline"] = needs["experiment=quickstart_offline"] = [f"datamodule.path={data}"]
    cfg = compose(option, *needs.get(option, []))
    resolved = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    assert isinstance(resolved, dict)
    if option == "engine=vllm":
        pytest.importorskip("vllm")
    group = option.partition("=")[0]
    if group in PARTS:
        assert _builds(cfg[group])
    if group == "optimizer":
        assert instantiate(cfg.optimizer)([torch.nn.Parameter(torch.zeros(2))]).param_groups
    if group == "scheduler":
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
        assert instantiate(cfg.scheduler)(optimizer=optimizer, num_training_steps=10).get_last_lr()
    if group == "engine":
        assert instantiate(cfg.engine).name.startswith(("vllm", "transformers"))


def _builds(node: DictConfig) -> bool:
    """Whether a node, or each node of a group that is keyed by name, becomes an object."""
    nodes = [node] if "_target_" in node else list(node.values())
    return all(instantiate(n) is not None for n in nodes)


def test_the_first_line_of_every_option_says_when_to_choose_it() -> None:
    without = [str(p) for p in CONF.rglob("*.yaml") if not _first_comment(p).endswith((".", "`."))]
    assert without == []


def _first_comment(path: Path) -> str:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("# @package")]
    return lines[0] if lines[0].startswith("# ") else ""


def test_an_unknown_key_is_refused_by_name(compose: Callable[..., DictConfig]) -> None:
    with pytest.raises(ConfigCompositionException, match=r"datamodule\.lagg"):
        compose("datamodule.lagg=2")


def test_heads_combine_with_their_weights(compose: Callable[..., DictConfig]) -> None:
    cfg = compose("objective=[topr,positives_only]", "objective.positives_only.weight=0.5")
    heads: dict[str, Any] = instantiate(cfg.objective)
    assert {name: head.weight for name, head in heads.items()} == {"topr": 1.0, "positives_only": 0.5}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("objective=tpor", "did you mean 'topr'"),
        ("objective=[topr,asmre]", "did you mean 'asymre'"),
        ("engine=vlm", "did you mean 'vllm'"),
        ("objective=topr,oapl", None),
        ("lag=3", None),
        ("objective.topr.ratio=token", None),
    ],
)
def test_a_mistyped_option_is_answered_with_the_nearest(override: str, expected: str | None) -> None:
    message = unknown_choice(override, CONF)
    assert (message is None) == (expected is None)
    assert expected is None or expected in str(message)


def test_a_mistyped_key_ends_the_program_with_the_nearest() -> None:
    with pytest.raises(SystemExit, match=r"lags is not a key of the configuration; did you mean lag\?"):
        check_choices(["experiment=quickstart", "lags=4"], CONF)
    check_choices(["lag=4", "hydra.run.dir=x", "datamodule.lag=2", "+new=1", "-m"], CONF)


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("optimizer.lrr=1", "optimizer.lr"),
        ("datamodule.group_sizes=4", "datamodule.group_size"),
        ("objective.topr.negative_tapper=[0,1]", "objective.topr.negative_taper"),
        ("policy.lora.rnk=8", "policy.lora.rank"),
        ("trainer.strategy.tensor_parallel=2", "trainer.strategy.tensor_parallel_size"),
        ("callbacks.preemtion.signal_name=USR2", "callbacks.preemption.signal_name"),
    ],
)
def test_a_mistyped_key_below_a_node_ends_the_program_with_the_nearest(override: str, nearest: str) -> None:
    message = f"{override.partition('=')[0]} is not a key of the configuration; did you mean {nearest}?"
    with pytest.raises(SystemExit, match=re.escape(message)):
        check_choices(["experiment=quickstart", override], CONF)


def test_keys_that_an_option_or_an_argument_brings_are_left_to_hydra() -> None:
    brought = ["+callbacks.mine._target_=a.b", "callbacks.mine.colour=red", "+callbacks.mine.colour=blue"]
    nested = ["engine.vllm.cpu_threads=0", "engine.engine.max_sequences=4", "warm_start.rounds=1", "optimizer.lr=1e-4"]
    arguments = [*brought, *nested, "engine/transfer=gloo", "policy/lora=adapters", "~callbacks.histograms"]
    assert {_unknown_nested_key(argument, arguments, CONF) for argument in arguments} == {None}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lag=four", r"lag must be a number such as 10, got 'four'"),
        ("optimizer.lr=1e-3x", r"optimizer\.lr must be a number such as .*, got '1e-3x'"),
        ("objective.topr.weight=heavy", r"objective\.topr\.weight must be a number"),
        ("datamodule.prefetch=maybe", r"datamodule\.prefetch must be true or false, got 'maybe'"),
        ("lag=true", r"lag must be a number"),
        ("lag=[1]", r"lag must be a number"),
        ("rounds=[3]", r"rounds must be a number"),
        ("rounds=0", "rounds must be at least 1, got 0"),
        ("num_threads=0", "num_threads must be at least 1, got 0"),
        ("optimizer.lr=0.0", r"optimizer\.lr must be above 0, got 0\.0"),
    ],
)
def test_a_value_of_another_kind_is_refused_by_its_key(
    override: str, message: str, compose: Callable[..., DictConfig]
) -> None:
    with pytest.raises(ValueError, match=message):
        check_values(OmegaConf.to_container(compose(override), resolve=True), CONF)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "option", [o for o in OPTIONS if o.startswith(("experiment", "optimizer", "scheduler", "engine"))]
)
def test_every_option_has_values_of_the_right_kind(option: str, compose: Callable[..., DictConfig]) -> None:
    needs = ["datamodule.path=x"] if option == "experiment=quickstart_offline" else []
    check_values(OmegaConf.to_container(compose(option, *needs), resolve=True), CONF)  # type: ignore[arg-type]


def test_null_stands_where_a_number_may_be_left_out(compose: Callable[..., DictConfig]) -> None:
    cfg = compose("policy_module.max_grad_norm=null")
    check_values(OmegaConf.to_container(cfg, resolve=True), CONF)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lag=four"], "lag must be a number such as 10, got 'four'"),
        (["--config-dir=more", "experiment=mistyped"], "lagg is not a key of the configuration; did you mean lag?"),
    ],
)
def test_the_program_refuses_them_before_anything_starts(arguments: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "more" / "experiment").mkdir(parents=True)
    (tmp_path / "more" / "experiment" / "mistyped.yaml").write_text("# @package _global_\nlagg: 7\n")
    done = subprocess.run(
        [sys.executable, str(CONF.parent / "train.py"), *arguments], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode
    assert message in done.stderr


def test_low_rank_adapters_are_an_option_of_every_policy(compose: Callable[..., DictConfig]) -> None:
    cfg = compose("policy/lora=adapters", "policy.hidden_size=64", "policy.num_layers=1", "policy.num_heads=2")
    check_values(OmegaConf.to_container(cfg, resolve=True), CONF)  # type: ignore[arg-type]
    assert instantiate(cfg.policy).lora.rank == cfg.policy.lora.rank
    wrong = compose("policy/lora=adapters", "policy.lora.rank=four")
    with pytest.raises(ValueError, match=r"policy\.lora\.rank must be a number such as 16, got 'four'"):
        check_values(OmegaConf.to_container(wrong, resolve=True), CONF)  # type: ignore[arg-type]


def test_a_slurm_sweep_asks_for_what_the_trainer_uses(compose: Callable[..., DictConfig], tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = hydra_compose(
            "train", ["hydra/launcher=slurm", "trainer=fsdp", "trainer.devices=8", "trainer.num_nodes=2"],
            return_hydra_config=True,
        )  # fmt: skip
    launcher = cfg.hydra.launcher
    assert (launcher.nodes, launcher.gpus_per_node, launcher.tasks_per_node) == (2, 8, 1)
    assert launcher._target_.endswith("SlurmLauncher")


def test_a_mistyped_option_ends_the_program_before_anything_starts() -> None:
    with pytest.raises(SystemExit, match="asymre, grpo, oapl"):
        check_choices(["objective=xyz"], CONF)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lagg": 7}, "lagg is not a key of the configuration; did you mean lag?"),
        ({"round": 3}, "did you mean rounds?"),
        ({"tuning": {"asymre": {"deltav": -0.9}}}, "tuning.asymre.deltav .*; did you mean tuning.asymre.delta_v?"),
        ({"tuning": {"topr": {"baseline": 0.1}}}, "tuning.topr.baseline is not a key"),
    ],
)
def test_a_key_of_an_experiment_file_that_nothing_reads_is_refused(
    changes: dict[str, Any], message: str, compose: Callable[..., DictConfig]
) -> None:
    with pytest.raises(ValueError, match=message):
        check_keys({**compose("experiment=quickstart"), **changes}, CONF)


@pytest.mark.parametrize("experiment", sorted(path.stem for path in (CONF / "experiment").glob("[!_]*.yaml")))
def test_every_experiment_has_only_keys_that_are_read(experiment: str, compose: Callable[..., DictConfig]) -> None:
    check_keys(OmegaConf.to_container(compose(f"experiment={experiment}")), CONF)  # type: ignore[arg-type]
