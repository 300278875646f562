"""A sharded model's snapshot is the Hugging Face directory that a whole one's is, written by all ranks."""

import gc
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from modules.policy import Policy
from modules.saved_weights import is_sharded
from modules.tiny_policy import character_tokenizer

SMALL = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}


def make_policy(architecture: str, tied: bool) -> Policy:
    torch.manual_seed(0)
    config = getattr(transformers, f"{architecture}Config")(**SMALL | MOE, tie_word_embeddings=tied)
    return Policy(getattr(transformers, f"{architecture}ForCausalLM")(config), character_tokenizer())


def save_in_rank(rank: int, architecture: str, tied: bool, directory: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{directory}/meet", rank=rank, world_size=2)
    policy = make_policy(architecture, tied)
    fully_shard(policy, mesh=dist.init_device_mesh("cpu", (2,)))
    assert is_sharded(policy.model)
    try:
        policy.save_pretrained(directory / "model")
    except ValueError as error:
        (directory / f"error-{rank}").write_text(str(error))
    del policy
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("architecture", ["Llama", "Qwen3"])
def test_it_loads_as_the_model_that_was_sharded_and_each_rank_wrote_a_half(
    architecture: str, tied: bool, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    mp.spawn(save_in_rank, (architecture, tied, tmp_path), nprocs=2)
    expected = make_policy(architecture, tied).model
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    torch.testing.assert_close(loaded.state_dict(), expected.state_dict(), rtol=0.0, atol=0.0)
    files = [load_file(path) for path in sorted((tmp_path / "model").glob("*.safetensors"))]
    sizes = [sum(weight.numel() for weight in file.values()) for file in files]
    assert len(sizes) == 2
    assert max(sizes) < 0.75 * sum(sizes)
    assert ("lm_head.weight" in {name for file in files for name in file}) == (not tied)


def test_a_model_that_is_stored_otherwise_than_it_computes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    mp.spawn(save_in_rank, ("Qwen2Moe", False, tmp_path), nprocs=2)
    for rank in range(2):
        assert "a qwen2_moe model is stored otherwise than it computes" in (tmp_path / f"error-{rank}").read_text()
