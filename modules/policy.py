"""The policy: a Hugging Face causal LM with its tokenizer, asked only for log-probs of sampled tokens."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.utils.logging import disable_progress_bar

from datamodules.types import PackedGroup, Probe, RolloutBatch
from modules.decoder_layers import decoder_layers
from modules.lora import LoRA
from modules.packed_attention import NAME as PACKED
from modules.packed_states import packed_states
from modules.packing_check import check_packing
from modules.padded_states import padded_states
from modules.pretrained import load_pretrained
from modules.saved_weights import is_sharded, save_adapter, save_weights
from modules.token_logprobs import LogitScale, token_entropy, token_logprobs


class Policy(nn.Module):
    """Wraps a causal LM; its log-probs are those that the engine reports: after temperature, dropout off.

    Args:
        model: a Hugging Face causal LM.
        tokenizer: its tokenizer, with a chat template.
        gradient_checkpointing: recompute activations in the backward pass; for models that do not fit otherwise.
        lora: low-rank adapters that train in place of the model's own weights.
    """

    def __init__(
        self, model: Any, tokenizer: Any, *, gradient_checkpointing: bool = False, lora: LoRA | None = None
    ) -> None:
        super().__init__()
        if lora is not None:
            lora.add_to(model)
            self.register_buffer("lora_scaling", torch.tensor(lora.scaling, dtype=torch.float64))  # for an export
        self.lora = lora
        self.model = model
        self.tokenizer = tokenizer
        config = model.config.get_text_config()
        _check_architecture(config)
        self.window: int = config.max_position_embeddings
        self.vocabulary: int = config.vocab_size
        self.stop_token_ids = _stop_token_ids(model, tokenizer)
        multiplier, divisor = getattr(config, "logit_scale", None), getattr(config, "logits_scaling", None)
        self._logit_scale = LogitScale(
            multiplier=float((multiplier or 1.0) / (divisor or 1.0)),
            cap=getattr(config, "final_logit_softcapping", None),
        )
        _disable_dropout(model)
        model.train()
        if gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})

    @classmethod
    def from_pretrained(
        cls, path: str, dtype: str, gradient_checkpointing: bool, attn_implementation: str, lora: LoRA | None = None
    ) -> "Policy":
        """Load a policy from the hub or from a directory.

        Args:
            path: hub id, or a directory as `save_pretrained` writes it.
            dtype: "float32" or "bfloat16" of the trained weights.
            gradient_checkpointing: recompute activations in the backward pass.
            attn_implementation: "packed", or one of transformers' own ("sdpa", "eager", ...), which pad.
            lora: low-rank adapters that train in place of the model's own weights.

        Raises:
            ValueError: the dtype is unknown, the directory is missing, it has no model or no tokenizer, or the model
                cannot be packed.
        """
        tokenizer, model = load_pretrained(path, dtype, attn_implementation)
        policy = cls(model, tokenizer, gradient_checkpointing=gradient_checkpointing, lora=lora)
        if policy.is_packed and not policy.is_skeleton:
            check_packing(model)
        return policy

    def compile_layers(self) -> None:
        """Compile each decoder layer in place, for any number of tokens; names of weights stay."""
        for layer in decoder_layers(self.model):
            layer.compile(dynamic=True)

    @property
    def is_skeleton(self) -> bool:
        """Whether it was made on the meta device, with shapes and no values."""
        return any(parameter.is_meta for parameter in self.parameters())

    @property
    def is_packed(self) -> bool:
        """Whether the model runs on packed tokens; else each sequence becomes a padded row."""
        return bool(self.model.config.get_text_config()._attn_implementation == PACKED)

    def logprobs(self, batch: RolloutBatch) -> Tensor:
        """Return the log-prob of each completion token at the batch's temperature, zero off the mask, [B, C]."""
        return self._logprobs(self._predicting_states(batch), batch)

    def logprobs_and_entropy(self, batch: RolloutBatch) -> tuple[Tensor, Tensor]:
        """Return the log-probs, and without gradient the entropy of what each token was drawn from, [B, C] each."""
        states = self._predicting_states(batch)
        scale = replace(self._logit_scale, temperature=batch.temperature)
        head = self.model.get_output_embeddings()
        entropy = token_entropy(states.detach(), head, vocabulary=self.vocabulary, scale=scale)
        return self._logprobs(states, batch), _at_completions(entropy, batch.completion_mask)

    def _predicting_states(self, batch: RolloutBatch) -> Tensor:
        """Return the state that predicts each completion token, [tokens, D]."""
        hidden = self._hidden_states(batch.input_ids, batch.position_ids, batch.groups)  # [N, D]
        return hidden.index_select(0, batch.predictors[batch.completion_mask])

    def _logprobs(self, states: Tensor, batch: RolloutBatch) -> Tensor:
        mask = batch.completion_mask
        return _at_completions(self._token_logprobs(states, batch.completion_ids[mask], batch.temperature), mask)

    @torch.no_grad()
    def probe_logprobs(self, probe: Probe) -> tuple[float, ...]:
        """Return the log-probs of a probe's tokens, for the sync canary."""
        device = self.model.get_input_embeddings().weight.device
        ids = torch.tensor(probe.token_ids, device=device)
        positions = torch.tensor(probe.positions, device=device)
        hidden = self._hidden_states(ids, torch.arange(len(ids), device=device), (PackedGroup(len(ids), ()),))
        return tuple(self._token_logprobs(hidden[positions - 1], ids[positions], probe.temperature).tolist())

    def _hidden_states(self, input_ids: Tensor, position_ids: Tensor, groups: tuple[PackedGroup, ...]) -> Tensor:
        """Return the last state of each packed token, [N, D]."""
        if self.is_packed:
            return packed_states(self.model.base_model, input_ids, position_ids, groups)
        return padded_states(self.model.base_model, input_ids, groups)

    def _token_logprobs(self, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
        return token_logprobs(
            hidden,
            targets,
            self.model.get_output_embeddings(),
            vocabulary=self.vocabulary,
            scale=replace(self._logit_scale, temperature=temperature),
        )

    def save_pretrained(self, directory: Path) -> None:
        """Write model and tokenizer as a directory that `AutoModelForCausalLM.from_pretrained` loads, adapters merged.

        All ranks of a run call this together; where weights are sharded, each writes a share.
        """
        self._save(directory, None if self.lora is None else self.lora.scaling)

    def save_base(self, directory: Path) -> None:
        """Write the model as it is without its adapters, and the tokenizer; all ranks of a run call this together."""
        self._save(directory, None)

    def save_snapshot(self, directory: Path) -> None:
        """Write what an engine loads after each sync; all ranks of a run call this together."""
        if self.syncs_adapter:
            assert self.lora is not None
            save_adapter(self.model, directory, self.lora.scaling)
        else:
            self.save_pretrained(directory)

    @property
    def syncs_adapter(self) -> bool:
        """Whether snapshots hold adapters alone."""
        return self.lora is not None and self.lora.sync == "adapter"

    def _save(self, directory: Path, scaling: float | None) -> None:
        disable_progress_bar()  # each snapshot would draw its own
        is_main = not dist.is_initialized() or dist.get_rank() == 0
        if is_sharded(self.model) or (self.lora is not None and is_main):
            save_weights(self.model, directory, scaling)
        elif is_main:
            self.model.save_pretrained(directory)
        if is_main:
            self.tokenizer.save_pretrained(directory)


def _at_completions(values: Tensor, mask: Tensor) -> Tensor:
    """Put one value a completion token in its place, zero off the mask, [B, C]."""
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)


def _check_architecture(config: Any) -> None:
    """Refuse a model whose log-probs could not be computed as it does itself.

    Raises:
        ValueError: it has no fixed window, or scales its logits in a way that is not known here.
    """
    if not isinstance(getattr(config, "max_position_embeddings", None), int):
        raise ValueError(
            f"policy.path: a {config.model_type} model states no max_position_embeddings, so no window that prompts "
            "must fit; choose another model"
        )
    for name in ("lm_head_multiplier", "output_multiplier"):
        if getattr(config, name, 1.0) not in (None, 1.0):
            raise ValueError(
                f"policy.path: a {config.model_type} model scales its logits by {name}, which is not supported; "
                "choose another model"
            )


def _stop_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Return every id that ends a completion, the tokenizer's own first."""
    ids: list[int] = []
    for source in (tokenizer.eos_token_id, model.generation_config.eos_token_id, model.config.eos_token_id):
        for token_id in source if isinstance(source, list | tuple) else [source]:
            if token_id is not None and token_id not in ids:
                ids.append(token_id)
    return tuple(ids)


def _disable_dropout(model: nn.Module) -> None:
    """Set every dropout to 0: with it, log-probs of the same weights would differ from the engine's."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or "pdrop" in name):
                setattr(module, name, 0.0)
