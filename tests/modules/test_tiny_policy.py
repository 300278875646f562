"""The tiny policy's tokenizer loses nothing, and its model is reproducible and what the config says."""

import string
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from modules.tiny_policy import ASSISTANT, CHARACTERS, END, PAD, UNKNOWN, USER, character_tokenizer, tiny_policy

TEXTS = [
    "12+34=46",
    "  two  spaces ",
    "line\nbreak\n\n",
    "#### 1,234.5!",
    "Don't , stop . it 's",
    string.printable[:95],
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_from_its_tokens(text: str) -> None:
    tokenizer = character_tokenizer()
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text)


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_after_saving(text: str, tmp_path: Path) -> None:
    character_tokenizer().save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert loaded(text)["input_ids"] == character_tokenizer()(text)["input_ids"]


def test_each_character_has_its_own_token() -> None:
    tokenizer = character_tokenizer()
    ids = [tokenizer(character)["input_ids"] for character in CHARACTERS]
    assert ids == [[5 + index] for index in range(len(CHARACTERS))]
    assert len(tokenizer) == 5 + len(CHARACTERS)


@pytest.mark.parametrize("character", ["é", "中", "\t", "😀"])
def test_a_character_without_a_token_becomes_one_unknown(character: str) -> None:
    tokenizer = character_tokenizer()
    assert tokenizer(f"a{character}b")["input_ids"] == [
        *tokenizer("a")["input_ids"],
        tokenizer.unk_token_id,
        *tokenizer("b")["input_ids"],
    ]
    assert tokenizer.decode(tokenizer(character)["input_ids"]) == UNKNOWN
    assert tokenizer.decode(tokenizer(character)["input_ids"], skip_special_tokens=True) == ""


def test_encoding_adds_no_special_tokens() -> None:
    tokenizer = character_tokenizer()
    assert tokenizer("1+1")["input_ids"] == tokenizer("1+1", add_special_tokens=False)["input_ids"]
    assert not set(tokenizer("1+1")["input_ids"]) & set(tokenizer.all_special_ids)


def test_a_question_has_each_special_token_once() -> None:
    tokenizer = character_tokenizer()
    messages = [{"role": "user", "content": "1+1="}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.convert_ids_to_tokens(ids) == [USER, *"1+1=", ASSISTANT]


def test_an_answer_ends_with_the_end_token_that_stops_generation() -> None:
    tokenizer = character_tokenizer()
    messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    ids = tokenizer.apply_chat_template(messages, return_dict=False)
    assert tokenizer.convert_ids_to_tokens(ids) == [USER, *"1+1=", ASSISTANT, "2", END]
    assert ids[-1] == tokenizer.eos_token_id


def test_padding_is_not_the_end_token() -> None:
    tokenizer = character_tokenizer()
    assert (tokenizer.pad_token, tokenizer.eos_token) == (PAD, END)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_weights_follow_the_global_seed() -> None:
    def weights(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return torch.cat([p.flatten() for p in tiny_policy(32, 1, 1, 32, 16, True).parameters()])

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_output_head_is_the_embedding_only_when_tied(is_tied: bool) -> None:
    model = tiny_policy(32, 1, 1, 32, 16, is_tied).model
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is is_tied
    assert len({p.data_ptr() for p in (model.lm_head.weight, model.model.embed_tokens.weight)}) == 2 - is_tied


def test_the_policy_stops_at_the_end_token_and_fills_its_window() -> None:
    policy = tiny_policy(64, 2, 2, 48, 24, False)
    config = policy.model.config
    assert policy.stop_token_ids == (policy.tokenizer.eos_token_id,)
    assert (policy.window, policy.vocabulary) == (24, len(policy.tokenizer))
    assert (config.num_hidden_layers, config.num_attention_heads, config.intermediate_size) == (2, 2, 48)
    assert policy.model.lm_head.weight.shape == (len(policy.tokenizer), 64)


@pytest.mark.parametrize(("hidden_size", "num_heads"), [(100, 3), (64, 4), (40, 1)])
def test_a_head_size_that_vllm_cannot_serve_is_refused(hidden_size: int, num_heads: int) -> None:
    with pytest.raises(ValueError, match=f"policy.hidden_size / policy.num_heads .* got {hidden_size} / {num_heads}"):
        tiny_policy(hidden_size, 1, num_heads, 32, 16, True)
