"""Low-rank adapters (LoRA, arXiv:2106.09685) through peft: the base stays as it is, small factors beside it train."""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

NAME = "default"  # of the adapter, among those that peft could hold
Factors = tuple[Tensor, Tensor]  # A [rank, in] and B [out, rank]


@dataclass(frozen=True, slots=True)
class LoRA:
    """Trains W + alpha / rank x B A in place of W; B starts at 0, so the policy starts as its base.

    Args:
        rank: of the factors, at least 1.
        alpha: above 0.
        targets: "all-linear" for every linear layer but the output head, or names of layers such as "q_proj".
        sync: "merged" publishes whole models, which any engine loads; "adapter" the factors alone.

    Raises:
        ValueError: an argument is none of these, or peft is missing.
    """

    rank: int
    alpha: float
    targets: str | Sequence[str]
    sync: str

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"policy.lora.rank must be at least 1, got {self.rank}")
        if not self.alpha > 0.0:
            raise ValueError(f"policy.lora.alpha must be above 0, got {self.alpha}")
        if self.sync not in ("merged", "adapter"):
            raise ValueError(f"policy.lora.sync must be merged or adapter, got {self.sync!r}")
        if importlib.util.find_spec("peft") is None:
            raise ValueError("policy.lora needs peft, which is not installed: pip install -e '.[lora]'")

    @property
    def scaling(self) -> float:
        """The product's factor."""
        return self.alpha / self.rank

    def add_to(self, model: Any) -> None:
        """Freeze a Hugging Face model and put trainable float32 factors beside its layers; A follows torch's seed.

        Raises:
            ValueError: the model has no such layer, or one shares its weight with another.
        """
        from peft import LoraConfig, inject_adapter_in_model

        targets = self.targets if isinstance(self.targets, str) else list(self.targets)
        config = LoraConfig(r=self.rank, lora_alpha=self.alpha, target_modules=targets)  # type: ignore[arg-type]
        try:
            inject_adapter_in_model(config, model, adapter_name=NAME)
        except ValueError as error:
            raise ValueError(f"policy.lora.targets: {error}") from error
        embedded = _base(model.get_input_embeddings()).weight
        for name, layer in adapted_layers(model).items():
            if layer.base_layer.weight is embedded:
                raise ValueError(
                    f"policy.lora.targets: {name} shares its weight between embedding and output head, which a merge "
                    "would change in both; leave it out"
                )
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers that have factors, by the names that they have without."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def factors(layer: Any) -> Factors:
    """Return a layer's A and B."""
    return layer.lora_A[NAME].weight, layer.lora_B[NAME].weight


def merged(weight: Tensor, pair: Factors, scaling: float, *, is_transposed: bool = False) -> Tensor:
    """Return a new W + scaling x B A, added in float32, of W's type.

    Args:
        weight: [out, in], or [in, out] where it is transposed.
        pair: A and B.
        scaling: of the product.
        is_transposed: as GPT-2 keeps its layers.
    """
    a, b = pair
    product = scaling * (b.float() @ a.float())
    return (weight.float() + (product.T if is_transposed else product)).to(weight.dtype)


def write_adapter(directory: Path, pairs: Mapping[str, Factors], scaling: float) -> None:
    """Write factors as peft and vLLM load them.

    Args:
        directory: to write into.
        pairs: by the layers' names, at least one.
        scaling: of the products.
    """
    from peft import LoraConfig

    tensors: dict[str, Tensor] = {}
    for name, (a, b) in pairs.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = a.detach().cpu().contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = b.detach().cpu().contiguous()
        rank = a.shape[0]
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    targets = sorted({name.rpartition(".")[2] for name in pairs})
    alpha: Any = scaling * rank  # peft takes any number
    LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM", inference_mode=True
    ).save_pretrained(str(directory))


def _base(layer: Any) -> Any:
    return getattr(layer, "base_layer", layer)
