"""A tiny policy made from nothing: Llama architecture, one token a character, nothing downloaded."""

import string

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from modules.lora import LoRA
from modules.packed_attention import NAME as PACKED
from modules.policy import Policy

PAD, UNKNOWN, END, USER, ASSISTANT = "<pad>", "<unk>", "<end>", "<user>", "<assistant>"
CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '" + USER + "' if message['role'] != 'assistant' else '" + ASSISTANT + "' }}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '" + END + "' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '" + ASSISTANT + "' }}{% endif %}"
)


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each printable ASCII character and a chat template."""
    specials = [PAD, UNKNOWN, END, USER, ASSISTANT]
    vocabulary = {token: i for i, token in enumerate([*specials, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def tiny_policy(
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    intermediate_size: int,
    window: int,
    tie_word_embeddings: bool,
    lora: LoRA | None = None,
) -> Policy:
    """Return a randomly initialised policy; its weights follow torch's global seed.

    Args:
        hidden_size: width; each head gets hidden_size / num_heads, which vLLM wants to be 32, 48, 64, ...
        num_layers: decoder layers.
        num_heads: attention heads.
        intermediate_size: width of the MLP.
        window: positions.
        tie_word_embeddings: share the embedding with the output head.
        lora: low-rank adapters that train in place of the model's own weights.
    """
    if hidden_size % num_heads or (hidden_size // num_heads) % 16 or hidden_size // num_heads < 32:
        raise ValueError(
            "policy.hidden_size / policy.num_heads must be 32, 48, 64, ... (vLLM's attention), "
            f"got {hidden_size} / {num_heads}"
        )
    tokenizer = character_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        max_position_embeddings=window,
        tie_word_embeddings=tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation=PACKED,
    )
    return Policy(LlamaForCausalLM(config), tokenizer, lora=lora)
