"""Two nodes with addresses of their own, in network namespaces, and a vLLM server on the second."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
import torch
from omegaconf import DictConfig
from runs import ROOT, losses, small, weights

from datamodules.store import read_rollouts
from modules.policy import Policy
from train import train

SmallRun = Callable[..., DictConfig]
NODES = {"offbeat-0": "10.77.3.1", "offbeat-1": "10.77.3.2"}
SERVER = f"http://{NODES['offbeat-1']}:8000"
ROUNDS = 4


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def network() -> Iterator[None]:
    """Connect two network namespaces by a cable of their own."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces want root and iproute2")
    names = list(NODES)
    try:
        for name in names:
            ip("netns", "add", name)
        ip("-n", names[0], "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address in NODES.items():
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode()}")
    yield
    for name in names:
        subprocess.run(["ip", "netns", "delete", name], check=False)


class Nodes:
    """Start programs on the nodes, each a process tree of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, node: int, command: Sequence[str]) -> "subprocess.Popen[bytes]":
        """Start a command; what it prints goes to a file in the directory."""
        environment = {
            **os.environ, "GLOO_SOCKET_IFNAME": "cable", "OMP_NUM_THREADS": "1", "VLLM_API_KEY": "two-nodes-key",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        }  # fmt: skip
        with (self.directory / f"node-{node}.log").open("ab") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", list(NODES)[node], *command],
                cwd=self.directory, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.started.append(process)
        return process

    def serve(self, model: Path, hidden: Path | None = None) -> "subprocess.Popen[bytes]":
        """Start the vLLM server on the second node, where another directory may be hidden from it."""
        words = ["--host", NODES["offbeat-1"], "--port", "8000", "--kv-cache-memory-bytes", str(2**26)]
        command = [sys.executable, "-m", "datamodules.engines.serve", str(model), *words]
        if hidden is None:
            return self.start(1, command)
        hidden.mkdir(exist_ok=True)  # `ip netns exec` gives a process its own mounts
        return self.start(1, ["sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(hidden), *command])

    def train(self, arguments: Sequence[str]) -> "list[subprocess.Popen[bytes]]":
        """Start the run with one process on each node."""
        meeting = ["--nnodes=2", "--nproc-per-node=1", f"--master-addr={NODES['offbeat-0']}", "--master-port=29500"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", *meeting]
        return [self.start(n, [*torchrun, f"--node-rank={n}", str(ROOT / "train.py"), *arguments]) for n in range(2)]

    def printed(self) -> str:
        return "".join(file.read_text(errors="replace")[-4000:] for file in sorted(self.directory.glob("node-*.log")))


@pytest.fixture
def nodes(network: None, tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    yield made
    for process in made.started:
        kill(process)


def kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and what it started."""
    if process.poll() is None:
        for victim in [*psutil.Process(process.pid).children(recursive=True), process]:
            victim.kill()
    process.wait()


def wait_for(path: Path, nodes: Nodes, running: "Sequence[subprocess.Popen[bytes]]") -> None:
    deadline = time.monotonic() + 180
    while not path.exists():
        assert all(process.poll() is None for process in running), nodes.printed()
        assert time.monotonic() < deadline, nodes.printed()
        time.sleep(0.1)


@pytest.fixture
def model(make_policy: Callable[..., Policy], tmp_path: Path) -> Path:
    make_policy().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def settings(model: Path, tmp_path: Path) -> list[str]:
    wanted = [
        "policy=hf", f"policy.path={model}", "engine=vllm_server", f"engine.endpoints=[{SERVER}]", f"rounds={ROUNDS}",
        "lag=1", "datamodule.sampling.max_tokens=16", "trainer=ddp", f"hydra.run.dir={tmp_path}/run",
    ]  # fmt: skip
    return [word for word in small(*wanted) if word != "engine=transformers"]


@pytest.mark.slow
@pytest.mark.parametrize("transfer", ["files", "gloo"])
def test_two_nodes_train_through_a_killed_server_and_a_cut_cable(
    transfer: str, nodes: Nodes, model: Path, small_run: SmallRun, tmp_path: Path
) -> None:
    pytest.importorskip("vllm")
    run = tmp_path / "run"
    hidden = None if transfer == "files" else run
    server = nodes.serve(model, hidden)
    tasks = nodes.train([*settings(model, tmp_path), f"engine/transfer={transfer}"])
    wait_for(run / "rollouts" / "round-000000.parquet", nodes, tasks)
    kill(server)
    time.sleep(2)
    nodes.serve(model, hidden)
    wait_for(run / "rollouts" / "round-000002.parquet", nodes, tasks)
    ip("-n", "offbeat-1", "link", "set", "cable", "down")
    time.sleep(5)
    ip("-n", "offbeat-1", "link", "set", "cable", "up")
    assert [task.wait(180) for task in tasks] == [0, 0], nodes.printed()

    rollouts = [read_rollouts(file) for file in sorted((run / "rollouts").iterdir())]
    assert [{r.snapshot for r in round_} for round_ in rollouts] == [{0}, {0}, {1}, {2}]
    assert [len(round_) for round_ in rollouts] == [32] * ROUNDS
    assert not [r for round_ in rollouts for r in round_ if r.failure]
    again = ["policy=hf", f"policy.path={model}", "datamodule=offline", f"datamodule.path='{run}/rollouts/*.parquet'"]
    train(small_run(*again, f"rounds={ROUNDS}", directory=tmp_path / "alone"))
    assert losses(run) == pytest.approx(losses(tmp_path / "alone"), abs=1e-5)
    torch.testing.assert_close(weights(run), weights(tmp_path / "alone"), rtol=0.0, atol=1e-4)


@pytest.mark.slow
def test_a_node_that_is_gone_ends_the_run_within_seconds_and_it_goes_on_from_its_last_round(
    nodes: Nodes, model: Path, tmp_path: Path
) -> None:
    pytest.importorskip("vllm")
    nodes.serve(model)
    run = tmp_path / "run"
    tasks = nodes.train(settings(model, tmp_path))
    wait_for(run / "checkpoints" / "round-000000.ckpt", nodes, tasks)
    kill(tasks[1])
    assert tasks[0].wait(60) != 0
    assert re.search(r"Connection (closed|reset) by peer", nodes.printed())
    assert not (run / "summary.json").exists()
    tasks = nodes.train([*settings(model, tmp_path), "resume=true"])
    assert [task.wait(180) for task in tasks] == [0, 0], nodes.printed()
    assert len(list((run / "rollouts").iterdir())) == ROUNDS
