"""The values that travel from prompts to objectives, one frozen dataclass for each stage.

Shape legend for every tensor in the project: B sequences of one micro-batch, N packed tokens of them, T tokens of
prompt plus completion, C tokens of the longest completion, G siblings of one prompt, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

POSITIVE_SCORE = 0.5  # a score above this is a positive: R > 0 once scores are mapped to [-1, 1]

FinishReason = Literal["stop", "length", "error"]
VerdictStatus = Literal["correct", "incorrect", "unparseable", "error"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question with what is needed to judge an answer to it."""

    id: str  # unique in its source: "gsm8k/train/17"
    messages: tuple[Mapping[str, str], ...]  # chat turns: ({"role": "user", "content": "2+2="},)
    answer: str  # what the verifier compares with: "4"
    demonstration: str | None = None  # a worked solution to learn from: "2 and 2 make 4. #### 4"
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt after the chat template; from here on token ids are the truth."""

    prompt: Prompt
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the engine draws completions.

    Args:
        max_tokens: longest completion, end token included; at least 1.
        temperature: above 0; the trainer divides its logits by the same number.
        top_p: in (0, 1]; below 1 the engine renormalises and its log-probs no longer match the trainer's.
        top_k: 0 keeps every token; above 0 it renormalises as `top_p` does.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"datamodule.sampling.max_tokens must be at least 1, got {self.max_tokens}")
        if not self.temperature > 0.0:
            raise ValueError(
                "datamodule.sampling.temperature must be above 0: a greedy completion has no log-prob to learn "
                f"from, got {self.temperature}"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"datamodule.sampling.top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"datamodule.sampling.top_k must be 0 (keep all) or positive, got {self.top_k}")

    @property
    def is_renormalised(self) -> bool:
        """Whether the engine samples from fewer tokens than the trainer's softmax covers."""
        return self.top_p < 1.0 or self.top_k > 0


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine returns for one request."""

    token_ids: tuple[int, ...]  # the end token included when it was sampled
    logprobs: tuple[float, ...]  # of each sampled token, after temperature
    finish_reason: FinishReason
    seed: int  # the request's own seed
    failure: str = ""  # why finish_reason is "error"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verifier's judgement; an `error` has no score and is never counted as a reward of 0."""

    status: VerdictStatus
    score: float | None  # in [0, 1]
    seconds: float = 0.0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Rollout:
    """A completion with its provenance and, once judged, its verdict."""

    prompt_id: str
    group_id: int  # index of the prompt within the round
    sibling: int  # index within the group
    prompt_text: str
    answer: str
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    sampling_logprobs: tuple[float, ...] | None  # None where nothing sampled it (a demonstration)
    text: str
    finish_reason: FinishReason
    temperature: float
    seed: int
    round: int
    snapshot: int  # version of the weights that sampled it
    snapshot_step: int  # optimizer steps those weights had seen
    failure: str = ""
    verdict: Verdict | None = None
    is_left_out: bool = False  # by curation: not trained on, but in its siblings' baselines

    @property
    def reward(self) -> float | None:
        """The verifier's score in [0, 1], or None while there is none."""
        return None if self.verdict is None else self.verdict.score

    @property
    def has_score(self) -> bool:
        """Whether the sample was drawn and judged without a failure."""
        return self.finish_reason != "error" and self.reward is not None

    @property
    def is_positive(self) -> bool:
        """Whether its score is above one half."""
        return self.has_score and (self.reward or 0.0) > POSITIVE_SCORE

    @property
    def is_trainable(self) -> bool:
        """Whether the sample has a score and curation kept it."""
        return self.has_score and not self.is_left_out

    def judged(self, verdict: Verdict) -> "Rollout":
        """Return the same rollout with a verdict."""
        return replace(self, verdict=verdict)


@dataclass(frozen=True, slots=True)
class PackedGroup:
    """Tokens of one prompt in a micro-batch, and behind them the completions that share it."""

    prompt_length: int
    completion_lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """One micro-batch. The model's inputs are packed; all that an objective sees is completion-aligned, right-padded.

    Each row carries its whole group's rewards and lengths, so that a baseline comes from the row alone and
    any split into micro-batches gives the same loss. The three counts are those of the whole optimizer step
    and the only denominators.
    """

    input_ids: Tensor  # [N] group after group, without padding
    position_ids: Tensor  # [N] of each token in its own sequence
    predictors: Tensor  # [B, C] which packed token's state predicts each completion token, 0 off the mask
    groups: tuple[PackedGroup, ...]  # how the N tokens are cut; their completions in order are the B rows
    completion_ids: Tensor  # [B, C]
    completion_mask: Tensor  # [B, C] True on sampled tokens
    rewards: Tensor  # [B] verifier scores in [0, 1]
    group_id: Tensor  # [B]
    group_rewards: Tensor  # [B, G] NaN where a sibling has no score
    group_lengths: Tensor  # [B, G] NaN where a sibling has no score
    snapshot_step: Tensor  # [B] optimizer steps seen by the snapshot that sampled the row
    is_truncated: Tensor  # [B] bool
    temperature: float
    num_sequences: int
    num_tokens: int
    num_positives: int  # sequences with a score above one half
    sampling_logprobs: Tensor | None = None  # [B, C] as the engine recorded them
    old_logprobs: Tensor | None = None  # [B, C] the trainer's own at the start of the round
    ref_logprobs: Tensor | None = None  # [B, C] of the frozen reference

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "RolloutBatch":
        """Move every tensor; Lightning calls this for each batch."""
        moved: dict[str, Any] = {
            f.name: value.to(device, non_blocking=non_blocking)
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        return replace(self, **moved)


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """The micro-batches whose gradients are summed before one `optimizer.step()`; none where every sample failed."""

    micro_batches: tuple[RolloutBatch, ...]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "OptimizerStep":
        """Move every micro-batch."""
        return OptimizerStep(tuple(batch.to(device, non_blocking=non_blocking) for batch in self.micro_batches))


@dataclass(frozen=True, slots=True)
class Probe:
    """Fixed tokens whose log-probs the trainer and the engine must agree on."""

    token_ids: tuple[int, ...]
    positions: tuple[int, ...]  # each at least 1: the token there is predicted from those before it
    temperature: float
