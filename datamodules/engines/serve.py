"""Serve a model with vLLM as `engine=vllm_server` wants it: `python -m datamodules.engines.serve MODEL --port 8000`.

What it does not know itself, vLLM's own command line takes. It listens on loopback unless `--host` says otherwise, and
then asks for a key, which stands in the environment variable VLLM_API_KEY.
"""

import asyncio
import ipaddress
import json
import os
import sys
from pathlib import Path

import yaml

from datamodules.engines.end_with_parent import terminate_with_parent
from datamodules.engines.vllm_arguments import QUIET, TRANSFER, vllm_arguments
from datamodules.engines.vllm_front import KEY

ENDS_WITH_PARENT = "OFFBEAT_ENDS_WITH_PARENT"  # process id of a driver that starts this, which it never outlives
SETTINGS = Path(__file__).parents[2] / "conf" / "engine" / "vllm_server.yaml"
ARGUMENTS = ("dtype", "kv_cache_mb", "max_model_len", "tensor_parallel_size", "enforce_eager")


def flags(arguments: dict[str, object]) -> list[str]:
    """Return engine arguments as vLLM's command line takes them."""
    words: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            words += [f"--{flag}", str(value)]
    return words


def check_host(host: str, key: str | None) -> None:
    """Refuse to let others in without a key.

    Raises:
        ValueError: naming the remedy.
    """
    is_loopback = host == "localhost" or (host.replace(".", "").isdigit() and ipaddress.ip_address(host).is_loopback)
    if not is_loopback and not key:
        raise ValueError(
            f"--host {host} lets everyone who reaches this machine sample and replace weights: set {KEY} here and in "
            "the run's environment, or listen on 127.0.0.1"
        )


def main(words: list[str]) -> None:
    """Serve until terminated."""
    if parent := os.environ.pop(ENDS_WITH_PARENT, ""):
        terminate_with_parent()
        if os.getppid() != int(parent):
            sys.exit(f"the process {parent} that started this server has ended")
    os.environ.pop("VLLM_SERVER_DEV_MODE", None)  # opens paths that replace weights
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    defaults = yaml.safe_load(SETTINGS.read_text())
    ours = vllm_arguments(*(defaults[name] for name in ARGUMENTS))
    settings = ["--host", "127.0.0.1", *flags(ours), "--middleware", "datamodules.engines.vllm_front.Front"]
    settings += ["--weight-transfer-config", json.dumps({"backend": TRANSFER})]
    settings += ["--enable-scale-out", "--disable-uvicorn-access-log"]
    arguments = make_arg_parser(FlexibleArgumentParser(prog="serve")).parse_args([*settings, *words])
    check_host(arguments.host, os.environ.get(KEY))
    if arguments.model_tag is not None:
        arguments.model = arguments.model_tag
    validate_parsed_serve_args(arguments)
    asyncio.run(run_server(arguments))


if __name__ == "__main__":
    main(sys.argv[1:])
