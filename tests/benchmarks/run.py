"""`make bench`: measure everything in one run, each part in a process of its own, and write docs/performance.*."""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]
from report import write_report  # noqa: E402

THREADS = os.cpu_count() or 1
TRAININGS = {
    "135M, vocabulary 49 152, float32": {"size": "135M", "vocabulary": 49152, "dtype": "float32", "prompts": 12},
    "135M, vocabulary 49 152, bfloat16": {"size": "135M", "vocabulary": 49152, "dtype": "bfloat16", "prompts": 12},
    "0.5M, vocabulary 151 936, float32": {"size": "0.5M", "vocabulary": 151936, "dtype": "float32", "prompts": 12},
}


def child(python: str, code: list[str]) -> Any:
    """Run a program and return its last line as JSON.

    Raises:
        RuntimeError: it failed; with the end of its messages.
    """
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": f"{ROOT}:{HERE}",
    }
    done = subprocess.run([python, *code], cwd=HERE, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(code)[:200]} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def call(function: str, directory: Path | None = None) -> Any:
    """Run a function of one of the benchmark files in a process of its own and return what it returns or yields."""
    module, name = function.split(".")
    argument = "" if directory is None else f"Path({str(directory)!r})"
    called = f"{module}.{name}({argument})"
    code = (
        f"import json\nfrom pathlib import Path\nimport {module}\n"
        f"if __name__ == '__main__':\n    found = {called}\n"
        "    print(json.dumps(found if isinstance(found, dict) else list(found)))\n"
    )
    program = Path(tempfile.mkdtemp()) / "program.py"  # a file, since the engine's process imports it again
    program.write_text(code)
    return child(sys.executable, [str(program)])


def training(name: str, trl: str, directory: Path) -> dict[str, Any]:
    """Train on one recording by both and return their figures."""
    from fixed_rollouts import make_recording
    from model_sizes import save_model

    from datamodules.store import read_rollouts

    case = TRAININGS[name]
    folder = directory / name.replace(" ", "").replace(",", "-")
    recording = make_recording(folder / "recording", num_prompts=case["prompts"], vocabulary=case["vocabulary"])
    spec = {
        "recording": str(recording),
        "model": str(save_model(folder / "model", case["size"], case["vocabulary"])),
        "dtype": case["dtype"],
        "threads": THREADS,
        "batch_size": 4 * case["prompts"] // 3,  # three optimizer steps
        "max_tokens": 1024,
        "sequences_per_micro_batch": 4,
    }
    rollouts = read_rollouts(recording)
    prompts = {r.group_id: len(r.prompt_ids) for r in rollouts}
    return {
        "trained_tokens": sum(prompts.values()) + sum(len(r.completion_ids) for r in rollouts),
        "ours": child(sys.executable, ["our_training.py", json.dumps({**spec, "directory": str(folder / "ours")})]),
        "trl": child(trl, ["trl_training.py", json.dumps({**spec, "directory": str(folder / "trl")})]),
    }


def loop(trl: str, directory: Path) -> dict[str, Any]:
    """Run the quickstart's loop by both."""
    warm_start = ROOT / ".cache" / "warm-start" / "arithmetic"
    spec = {"threads": 1, "warm_start": str(warm_start), "model": str(warm_start / "model")}
    return {
        "ours": child(sys.executable, ["our_loop.py", json.dumps({**spec, "directory": str(directory / "loop")})]),
        "trl": child(trl, ["trl_loop.py", json.dumps({**spec, "directory": str(directory / "trl-loop")})]),
    }


def ranks(directory: Path) -> list[dict[str, Any]]:
    """Train a 135M model in 1, 2 and 4 processes and return the memory and traffic of each way."""
    from fixed_rollouts import make_recording
    from model_sizes import save_model

    spec = {
        "recording": str(make_recording(directory / "recording", num_prompts=4, vocabulary=49152, scale=0.5)),
        "model": str(save_model(directory / "model", "135M", 49152)),
    }
    rows = []
    for trainer, count in (("default", 1), ("ddp", 2), ("fsdp", 2), ("fsdp", 4)):
        spec |= {"trainer": trainer, "directory": str(directory / f"{trainer}-{count}")}
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        figures = child(sys.executable, [*torchrun, "ranks_training.py", json.dumps(spec)])
        rows.append({"trainer": trainer, "processes": count, **figures})
    return rows


def main() -> None:
    """Run the parts that were asked for; keep the figures of the others."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trl", default=str(ROOT / ".venv-trl" / "bin" / "python"), help="Python of TRL's environment")
    parser.add_argument("--only", nargs="*", help="parts to run; the others keep their last figures")
    arguments = parser.parse_args()
    arguments.trl = str(Path(arguments.trl).absolute())  # the parts run in another directory
    child(arguments.trl, ["-c", "import json, trl; print(json.dumps(trl.__version__))"])
    directory = Path(tempfile.mkdtemp(prefix="offbeat-bench-"))
    parts: dict[str, Callable[[], Any]] = {
        "overhead": lambda: call("bench_overhead.overhead", directory / "overhead"),
        "startup": lambda: call("bench_overhead.startup", directory / "startup"),
        "logprobs": lambda: call("bench_compute.logprobs"),
        "packing": lambda: call("bench_compute.packing", directory / "packing"),
        "growth": lambda: call("bench_compute.growth", directory / "growth"),
        "sync": lambda: call("bench_rollouts.sync", directory / "sync"),
        "rollouts": lambda: call("bench_rollouts.rollout_path", directory / "rollouts"),
        "ranks": lambda: ranks(directory / "ranks"),
        "loop": lambda: loop(arguments.trl, directory),
        **{name: lambda name=name: training(name, arguments.trl, directory) for name in TRAININGS},
    }
    raw_path = ROOT / "docs" / "performance.json"
    kept: dict[str, Any] = json.loads(raw_path.read_text()) if raw_path.is_file() and arguments.only else {}
    raw, measured = kept.get("raw", {}), kept.get("measured", {})
    try:
        for name in tqdm([n for n in parts if not arguments.only or n in arguments.only], unit="part"):
            start = time.perf_counter()
            raw[name] = parts[name]()
            seconds = round(time.perf_counter() - start)
            measured[name] = {"date": time.strftime("%Y-%m-%d %H:%M"), "commit": _commit(), "seconds": seconds}
            tqdm.write(f"{name}: {seconds} s")
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    machine = f"{platform.machine()}, {THREADS} cores, {_cpu()}, Python {platform.python_version()}"
    write_report(raw, measured, machine, ROOT / "docs")


def _commit() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return names[0] if names else "unknown processor"


if __name__ == "__main__":
    main()
