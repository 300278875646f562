"""Load a model and its tokenizer from the hub or a directory."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from modules.packing_check import refusal


def load_pretrained(path: str, dtype: str, attn_implementation: str) -> tuple[Any, Any]:
    """Return the tokenizer and the model, which on the meta device has no values.

    Args:
        path: hub id, or a directory as `save_pretrained` writes it.
        dtype: "float32" or "bfloat16" of the weights.
        attn_implementation: "packed", or one of transformers' own.

    Raises:
        ValueError: the dtype is unknown, the directory is missing, it has no model or no tokenizer, or the model does
            not know the attention.
    """
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"policy.dtype must be float32 or bfloat16, got {dtype!r}")
    path = str(Path(path).expanduser()) if path.startswith("~") else path
    _check_directory(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"policy.path: {path} has no usable tokenizer ({error})") from error
    try:
        model = _model(path, dtype=getattr(torch, dtype), attn_implementation=attn_implementation)
    except KeyError as error:  # of architectures that have their own table of attention implementations
        raise ValueError(refusal(path, f"knows no attention implementation {error}")) from error
    return tokenizer, model


def _model(path: str, **options: Any) -> Any:
    if torch.empty(0).device.type != "meta":
        return AutoModelForCausalLM.from_pretrained(path, **options)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), **options)
    with suppress(OSError):  # it has none of its own
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model


def _check_directory(path: str) -> None:
    """Tell a mistyped directory from a hub id.

    Raises:
        ValueError: the path means a directory that is not there or lacks a model or a tokenizer.
    """
    directory = Path(path)
    if not directory.is_dir():
        is_below_a_folder = "/" in path and directory.parent.is_dir()
        if path.startswith((".", "/", "~")) or path.count("/") > 1 or is_below_a_folder:
            raise ValueError(f"policy.path: {path} is not a directory; expected a model directory or a hub id")
        return
    if not (directory / "config.json").is_file():
        raise ValueError(f"policy.path: {path} has no config.json; expected a Hugging Face model directory")
    if not any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise ValueError(
            f"policy.path: {path} has no tokenizer (tokenizer.json); save the model's tokenizer into it, "
            "with a chat template"
        )
