"""Between chat messages and token ids: the chat template is applied here, once."""

import logging
from collections.abc import Sequence
from typing import Any

from datamodules.types import EncodedPrompt, Prompt

log = logging.getLogger(__name__)


class Codec:
    """The policy's tokenizer with what a sampler must know of the model.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        stop_token_ids: every id that ends a completion.
        window: positions that the model has; prompt plus completion must fit.
    """

    def __init__(self, tokenizer: Any, stop_token_ids: tuple[int, ...], window: int) -> None:
        if tokenizer.chat_template is None:
            raise ValueError(
                "the policy's tokenizer has no chat template: set `chat_template` in its tokenizer_config.json "
                "(policy.path must name a chat or instruct model)"
            )
        if not stop_token_ids:
            raise ValueError("the policy's tokenizer has no end token: no completion could ever stop")
        self.tokenizer = tokenizer
        self.stop_token_ids = stop_token_ids
        self.window = window

    def encode_prompts(self, prompts: Sequence[Prompt]) -> list[EncodedPrompt]:
        """Apply the chat template and the tokenizer once; special tokens come from the template alone."""
        if not prompts:
            return []
        texts = self.tokenizer.apply_chat_template(
            [[dict(m) for m in prompt.messages] for prompt in prompts], tokenize=False, add_generation_prompt=True
        )
        ids = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [EncodedPrompt(prompt, tuple(of_prompt)) for prompt, of_prompt in zip(prompts, ids, strict=True)]

    def encode_completion(self, text: str) -> tuple[int, ...]:
        """Token ids of a demonstration, ended by the first stop token."""
        return (*self.tokenizer.encode(text, add_special_tokens=False), self.stop_token_ids[0])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text for verifiers and people; it is never encoded again."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def encode_fitting(self, prompts: Sequence[Prompt], *, max_tokens: int, name: str) -> list[EncodedPrompt]:
        """Encode prompts and leave out, with a warning that counts them, those that do not fit the window.

        Raises:
            ValueError: none is left.
        """
        encoded = self.encode_prompts(prompts)
        room = self.window - max_tokens
        fitting = [e for e in encoded if 0 < len(e.token_ids) <= room]
        if len(fitting) < len(encoded):
            longest = max(encoded, key=lambda e: len(e.token_ids))
            log.warning(
                "left out %d of %d %s prompts that do not fit: window %d minus datamodule.sampling.max_tokens %d "
                "leaves %d tokens; the longest prompt is %s with %d",
                len(encoded) - len(fitting), len(encoded), name, self.window, max_tokens, room,
                longest.prompt.id, len(longest.token_ids),
            )  # fmt: skip
        if not fitting:
            raise ValueError(
                f"no {name} prompt is left of {len(encoded)}: the policy's window of {self.window} tokens minus "
                f"datamodule.sampling.max_tokens={max_tokens} leaves {room} for the prompt; lower max_tokens or "
                "choose prompts that are shorter"
            )
        return fitting
