"""From chat messages to token ids: one template, one BOS, and prompts that fit the window."""

import logging
import re
from collections.abc import Callable, Sequence

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from datamodules.codec import Codec
from datamodules.types import Prompt

BOS, END, USER = 0, 1, 2
LETTERS = {token: i for i, token in enumerate(["<s>", "</s>", "<u>", *"abcdefgh"])}
TEMPLATE = "<s>{% for m in messages %}<u>{{ m['content'] }}{% endfor %}"
A, B, C = 3, 4, 5
MakePrompt = Callable[..., Prompt]


def tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Return one that adds a BOS of its own whenever it is asked to add special tokens; pad is the end token."""
    core = Tokenizer(models.WordLevel(LETTERS, unk_token="a"))
    core.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    core.decoder = decoders.Fuse()
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="</s>",
        additional_special_tokens=["<u>"], chat_template=template,
    )  # fmt: skip


def codec(window: int = 10, stop_token_ids: tuple[int, ...] = (END,)) -> Codec:
    return Codec(tokenizer(), stop_token_ids, window)


def ids(prompts: Sequence[object]) -> list[str]:
    return [encoded.prompt.id for encoded in prompts]  # type: ignore[attr-defined]


def test_this_tokenizer_would_double_the_bos_of_a_careless_codec() -> None:
    assert tokenizer().encode("<s><u>ab") == [BOS, BOS, USER, A, B]


def test_a_prompt_has_the_templates_bos_once(make_prompt: MakePrompt) -> None:
    (encoded,) = codec().encode_prompts([make_prompt("ab", "p1")])
    assert encoded.token_ids == (BOS, USER, A, B)
    assert encoded.prompt.id == "p1"


def test_every_turn_of_a_chat_is_in_the_prompt() -> None:
    turns = tuple({"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c")))
    (encoded,) = codec().encode_prompts([Prompt("p", turns, "4")])
    assert encoded.token_ids == (BOS, USER, A, USER, B, USER, C)


def test_a_demonstration_has_no_bos_and_one_end_the_first_of_several() -> None:
    assert codec(stop_token_ids=(7, END)).encode_completion("abc") == (A, B, C, 7)


def test_text_for_verifiers_leaves_the_end_token_out() -> None:
    assert codec().decode((A, B, END)) == "ab"


def test_prompts_that_do_not_fit_are_left_out_counted_and_logged(
    make_prompt: MakePrompt, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = [make_prompt("a" * length, f"p{length}") for length in (1, 4, 5, 8, 2)]  # and two tokens of the template
    with caplog.at_level(logging.WARNING):
        fitting = codec(window=10).encode_fitting(prompts, max_tokens=4, name="train")
    assert ids(fitting) == ["p1", "p4", "p2"]  # at most 10 - 4 tokens
    assert caplog.messages == [
        "left out 2 of 5 train prompts that do not fit: window 10 minus datamodule.sampling.max_tokens 4 leaves "
        "6 tokens; the longest prompt is p8 with 10"
    ]


def test_nothing_is_logged_when_all_prompts_fit(make_prompt: MakePrompt, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert ids(codec().encode_fitting([make_prompt("abcd", "p4")], max_tokens=4, name="train")) == ["p4"]
    assert caplog.messages == []


@pytest.mark.parametrize(("max_tokens", "room"), [(8, 2), (10, 0), (12, -2)])
def test_when_no_prompt_is_left_the_key_and_the_room_are_named(
    make_prompt: MakePrompt, max_tokens: int, room: int
) -> None:
    prompts = [make_prompt("a"), make_prompt("ab")]
    message = (
        "no held-out prompt is left of 2: the policy's window of 10 tokens minus "
        f"datamodule.sampling.max_tokens={max_tokens} leaves {room} for the prompt"
    )
    small = codec(window=10)
    with pytest.raises(ValueError, match=re.escape(message)):
        small.encode_fitting(prompts, max_tokens=max_tokens, name="held-out")


def test_a_tokenizer_without_a_chat_template_is_refused_at_construction() -> None:
    plain = tokenizer(template=None)
    with pytest.raises(ValueError, match=r"has no chat template: set `chat_template` .*policy\.path"):
        Codec(plain, (END,), 10)


def test_a_policy_that_can_never_stop_is_refused_at_construction() -> None:
    endless = tokenizer()
    with pytest.raises(ValueError, match=r"has no end token: no completion could ever stop"):
        Codec(endless, (), 10)
