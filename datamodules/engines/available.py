"""Choose vLLM where it is installed."""

import importlib.util
import logging
from collections.abc import Callable

from datamodules.engines.engine import Engine

log = logging.getLogger(__name__)


def available_engine(vllm: Callable[[], Engine], transformers: Callable[[], Engine]) -> Engine:
    """Return a vLLM engine if vLLM can be imported, else a transformers engine, and log which.

    Args:
        vllm: makes the vLLM engine.
        transformers: makes the transformers engine.
    """
    is_installed = importlib.util.find_spec("vllm") is not None
    log.info("engine=auto took %s", "vllm" if is_installed else "transformers (vLLM is not installed)")
    return vllm() if is_installed else transformers()
