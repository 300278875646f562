"""Sample with the transformers library, in this process: no extra install, bit-for-bit repeatable."""

import math
from collections.abc import Generator, Sequence

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, TopKLogitsWarper, TopPLogitsWarper

from datamodules.snapshots import Snapshot
from datamodules.types import Completion, FinishReason, Probe, Sampling


class TransformersEngine:
    """A second copy of the model that draws each token from its sequence's own random numbers.

    Args:
        max_sequences: completions sampled together; at least 1.
        device: "auto" takes CUDA where there is one, or a torch device string.
        dtype: "float32" or "bfloat16"; the same as the policy's keeps log-prob mismatch at zero.
        canary_tolerance: largest probe difference to the trainer's log-probs.
    """

    name = "transformers"
    window = None
    is_in_process = True
    loads_adapters = False
    cpu_cores = None

    def __init__(self, max_sequences: int, device: str, dtype: str, canary_tolerance: float) -> None:
        if max_sequences < 1:
            raise ValueError(f"engine.max_sequences must be at least 1, got {max_sequences}")
        if dtype not in ("float32", "bfloat16"):
            raise ValueError(f"engine.dtype must be float32 or bfloat16, got {dtype!r}")
        self.max_sequences = max_sequences
        self.device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
        self.dtype = getattr(torch, dtype)
        self.canary_tolerance = canary_tolerance
        self._model: torch.nn.Module | None = None

    def load(self, snapshot: Snapshot) -> None:
        """Read the snapshot's weights into the model, building it at the first call."""
        if self._model is None:
            model = AutoModelForCausalLM.from_pretrained(snapshot.path, dtype=self.dtype)
            self._model = model.to(self.device).eval().requires_grad_(False)
            return
        weights = {k: v for file in sorted(snapshot.path.glob("*.safetensors")) for k, v in load_file(file).items()}
        missing, unexpected = self._model.load_state_dict(weights, strict=False)
        if unexpected or set(missing) - set(getattr(self._model, "all_tied_weights_keys", {})):
            raise RuntimeError(
                f"snapshot {snapshot.version} does not fit the engine's model: missing {missing}, "
                f"unexpected {unexpected}"
            )

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        stop_token_ids: Sequence[int],
    ) -> Generator[tuple[int, Completion], None, None]:
        """Yield one completion for each (prompt, seed); prompts of like length are sampled together."""
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        for start in range(0, len(order), self.max_sequences):
            rows = order[start : start + self.max_sequences]
            sampled = self._generate_together(
                [prompts[i] for i in rows], sampling, [seeds[i] for i in rows], stop_token_ids
            )
            yield from zip(rows, sampled, strict=True)

    @torch.inference_mode()
    def _generate_together(
        self, prompts: list[Sequence[int]], sampling: Sampling, seeds: list[int], stop_token_ids: Sequence[int]
    ) -> list[Completion]:
        input_ids, attention_mask = _left_padded(prompts, self.device)
        positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        draws = torch.stack([_uniforms(seed, sampling.max_tokens) for seed in seeds]).to(self.device)
        stops = torch.tensor(list(stop_token_ids), device=self.device)
        cache = DynamicCache()
        finished = torch.zeros(len(prompts), dtype=torch.bool, device=self.device)
        tokens, logprobs = [], []
        for t in range(sampling.max_tokens):
            logits = self._forward(input_ids, attention_mask, positions, cache)
            token, logprob = _sample(logits, draws[:, t], sampling)
            tokens.append(token)
            logprobs.append(logprob)
            finished |= torch.isin(token, stops)
            if bool(finished.all()):
                break
            input_ids, positions = token[:, None], positions[:, -1:] + 1
            attention_mask = torch.cat([attention_mask, attention_mask.new_ones(len(prompts), 1)], dim=1)
        return _completions(torch.stack(tokens, 1), torch.stack(logprobs, 1), seeds, set(stop_token_ids))

    def _forward(self, input_ids: Tensor, attention_mask: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        assert self._model is not None, "load a snapshot first"
        output = self._model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1].float()

    @torch.inference_mode()
    def score(self, probe: Probe) -> list[float]:
        """Return the log-prob of the token at each probe position."""
        scores = []
        for position in probe.positions:
            ids = torch.tensor([probe.token_ids[:position]], device=self.device)
            every = torch.arange(position, device=self.device)[None]
            logits = self._forward(ids, torch.ones_like(ids), every, DynamicCache())
            scores.append((logits / probe.temperature).log_softmax(-1)[0, probe.token_ids[position]].item())
        return scores

    def close(self) -> None:
        """Drop the model."""
        self._model = None


def _left_padded(prompts: list[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return ids and mask, [B, T]; the mask comes from lengths, never from an id."""
    longest = max(len(p) for p in prompts)
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros(len(prompts), longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    return ids.to(device), mask.to(device)


def _uniforms(seed: int, count: int) -> Tensor:
    """Return the sequence's own random numbers, [count] in [0, 1)."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _sample(logits: Tensor, draw: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Draw one token a row by inverting the cumulative distribution at `draw`; return ids and log-probs, [B]."""
    scores = logits / sampling.temperature
    if sampling.top_k > 0:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1.0:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    logprobs = scores.log_softmax(-1)
    cumulative = logprobs.double().exp().cumsum(-1)
    target = draw[:, None] * cumulative[:, -1:]
    token = torch.searchsorted(cumulative, target, right=True).clamp(max=logits.shape[-1] - 1)
    return token[:, 0], logprobs.gather(1, token)[:, 0]


def _completions(tokens: Tensor, logprobs: Tensor, seeds: list[int], stops: set[int]) -> list[Completion]:
    """Cut each row after its first stop token."""
    completions = []
    for ids, scores, seed in zip(tokens.tolist(), logprobs.tolist(), seeds, strict=True):
        end = next((t + 1 for t, token in enumerate(ids) if token in stops), len(ids))
        reason: FinishReason = "stop" if ids[end - 1] in stops else "length"
        if all(math.isfinite(s) for s in scores[:end]):
            completions.append(Completion(tuple(ids[:end]), tuple(scores[:end]), reason, seed))
        else:
            completions.append(Completion((), (), "error", seed, failure="non-finite log-prob"))
    return completions
