"""Runs inside vLLM's worker: what a reload of weights leaves undone on the CPU build, and where it gets sent ones."""

from typing import Any

from vllm.distributed.weight_transfer import WeightTransferEngineFactory

from datamodules.engines.vllm_arguments import TRANSFER

WeightTransferEngineFactory.register_engine(TRANSFER, "datamodules.engines.weight_receiver", "WeightReceiver")


class ReloadWorker:
    """A vLLM worker extension; vLLM mixes it into its worker class."""

    model_runner: Any

    def repack_tied_head(self) -> None:
        """Pack again each CPU linear layer that kept an unpacked weight.

        The CPU build computes with packed copies of the weights. A reload refreshes them all but that of an
        output head tied to the embeddings, which silently goes on with the old one.
        """
        for module in self.model_runner.model.modules():
            weight = getattr(module, "weight", None)
            if hasattr(module, "cpu_linear") and weight is not None and weight.numel():
                module.quant_method.process_weights_after_loading(module)
