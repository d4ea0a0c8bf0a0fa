"""The DeepSpeed engine over two gloo ranks against plain PyTorch; the checks run in deepspeed_ranks.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fork_server
import pytest

pytestmark = pytest.mark.slow
FULL_PRECISION = ("zero0", "zero1 packed", "zero2 recompute", "zero3", "zero3 packed recompute")
FP32_SUMS = tuple(f"bf16 zero{stage} fp32 sums" for stage in (1, 2, 3))
HALF_PRECISION = ("bf16 zero0", "bf16 zero2 offload", "bf16 zero3 offload", *FP32_SUMS)


def write_models(folder: Path) -> None:
    import torch
    import transformers as hf

    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 64,
        "max_position_embeddings": 128,
        "initializer_range": 0.1,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    large = sizes | {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "head_dim": 128}
    torch.manual_seed(0)
    hf.LlamaForCausalLM(hf.LlamaConfig(**sizes)).save_pretrained(folder / "llama")
    hf.Qwen2ForCausalLM(hf.Qwen2Config(**sizes, tie_word_embeddings=True)).save_pretrained(folder / "qwen2")
    hf.Qwen3ForCausalLM(hf.Qwen3Config(**sizes)).save_pretrained(folder / "qwen3")
    hf.LlamaForCausalLM(hf.LlamaConfig(**large)).save_pretrained(folder / "large")
    experts = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    }
    mixture = hf.Qwen3MoeConfig(**sizes | {"num_hidden_layers": 4}, **experts)
    hf.Qwen3MoeForCausalLM(mixture).save_pretrained(folder / "qwen3_moe")


def ranks(
    server: str, part: str, folder: Path, program: str = "deepspeed_ranks.py", world: int = 2
) -> dict[str, Any]:
    """All ranks of one part, each a process of its own; what rank 0 found."""
    fork_server.run_ranks(server, program, world, part, str(folder), RANKS=str(world))
    found: dict[str, Any] = json.loads((folder / f"{part}.json").read_text())
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("deepspeed")
    write_models(made)
    return made


@pytest.fixture(scope="module")
def first(fork_server: str, folder: Path) -> dict[str, Any]:
    return ranks(fork_server, "first", folder)


@pytest.fixture(scope="module")
def second(fork_server: str, folder: Path, first: dict[str, Any]) -> dict[str, Any]:
    return ranks(fork_server, "second", folder)


@pytest.mark.parametrize("name", FULL_PRECISION)
def test_training_is_that_of_one_process_whatever_stage_micro_batch_and_packing(
    first: dict[str, Any], name: str
) -> None:
    assert first[name]["weights"] < 2e-6
    assert first[name]["norms"] < 2e-6


def test_loss_of_a_step_does_not_depend_on_how_it_is_split(first: dict[str, Any]) -> None:
    for name in FULL_PRECISION[1:]:
        assert first[name]["losses"] == pytest.approx(first["zero0"]["losses"], abs=1e-6)


def test_learning_rate_warms_up_and_falls(first: dict[str, Any]) -> None:
    assert first["zero0"]["rates"] == pytest.approx([0.005, 0.01, 0.01, 0.0075])


@pytest.mark.parametrize("name", FULL_PRECISION + HALF_PRECISION)
def test_resumed_training_is_bit_identical(first: dict[str, Any], second: dict[str, Any], name: str) -> None:
    assert second[name]["digest"] == first[name]["digest"]


@pytest.fixture(scope="module", params=[1, 4])
def resharded(
    request: pytest.FixtureRequest, fork_server: str, folder: Path, first: dict[str, Any]
) -> dict[str, Any]:
    """What two ranks saved goes on with one and with four."""
    return ranks(fork_server, "resharded", folder, world=request.param)


@pytest.mark.parametrize("name", FULL_PRECISION)
def test_another_number_of_ranks_goes_on_as_one_process_would(resharded: dict[str, Any], name: str) -> None:
    assert resharded[name]["weights"] < 2e-6
    assert resharded[name]["norms"] < 2e-6


@pytest.mark.parametrize("name", FULL_PRECISION + HALF_PRECISION)
def test_offload_to_files_brings_every_bit_back(first: dict[str, Any], name: str) -> None:
    assert first[name]["files"] >= 1
    assert first[name]["kept"]


@pytest.mark.parametrize("name", FULL_PRECISION + HALF_PRECISION)
def test_a_step_without_finite_gradient_is_skipped(first: dict[str, Any], name: str) -> None:
    assert first[name]["skipped"] == 1.0
    assert first[name]["unharmed"]


def test_half_precision_learns_as_full_precision_does(first: dict[str, Any]) -> None:
    for name in HALF_PRECISION:
        assert first[name]["losses"] == pytest.approx(first["zero0"]["losses"], abs=0.05)


def test_64_micro_batches_add_up_in_fp32_and_not_in_bf16(first: dict[str, Any]) -> None:
    for stage in (1, 2, 3):
        assert first[f"fp32 sums {stage}"]["ratio"] == pytest.approx(1, abs=1e-5)
    assert abs(first["bf16 sums"]["ratio"] - 1) > 1e-4


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_tensor_parallel_shards_gather_to_the_checkpoint_and_learn_like_it(
    first: dict[str, Any], zero: int
) -> None:
    found = first[f"tp zero{zero}"]
    assert found["loaded"] == 0.0
    assert found["share"] < 0.75
    assert found["weights"] < 2e-6
    assert found["norms"] < 2e-6


@pytest.mark.parametrize("zero", [2, 3])
def test_lora_merges_on_the_fly_and_its_base_is_the_reference(first: dict[str, Any], zero: int) -> None:
    found = first[f"lora zero{zero}"]
    assert found["moved"] > 1e-3
    assert found["reference"] == 0.0
    assert found["merged"] < 1e-5
    assert (
        found["adapters"] == found["exported"] == 28
    )  # two matrices for each of 7 linear layers in 2 blocks
    assert found["name"] == "model.layers.0.self_attn.q_proj.weight.lora_A"


def test_a_critic_learns_like_one_process(first: dict[str, Any]) -> None:
    assert first["value"]["weights"] < 2e-6


@pytest.mark.parametrize("loss", ["dpo", "policy"])
def test_layers_run_twice_where_they_are_computed_again(first: dict[str, Any], loss: str) -> None:
    assert first[f"recompute {loss}"] == 4  # two micro-batches


def test_sharded_scoring_agrees_with_one_process(first: dict[str, Any]) -> None:
    assert first["scoring"]["loaded"] == 0.0
    assert first["scoring"]["logprobs"] < 1e-5
    assert first["scoring"]["reloaded"] < 1e-5


def test_a_drawn_score_head_is_the_same_in_every_layout(first: dict[str, Any]) -> None:
    assert first["scoring"]["spread"] > 0.01
    assert first["scoring"]["scores"] < 0.02  # bf16


def test_nothing_of_a_closed_engine_stays_in_its_process(first: dict[str, Any]) -> None:
    kept = {f"zero{zero} recompute {how}": False for zero, how in ((1, "none"), (3, "none"), (3, "full"))}
    assert first["closed"] == kept | {"other learns": True}


def test_a_checkpoint_of_another_stage_is_refused(first: dict[str, Any]) -> None:
    assert first["refused"] == "checkpoint-layout"


def test_offload_lowers_the_resident_set_by_more_than_the_model(first: dict[str, Any]) -> None:
    memory = first["memory"]
    assert memory["size"] > 90e6
    assert memory["freed"] > 1.5 * memory["size"]  # with half of the optimizer states and masters


def test_experts_leave_memory_with_their_layer_under_zero_3(fork_server: str, folder: Path) -> None:
    found = ranks(fork_server, "experts", folder)["experts"]
    layer = 4 * 8 * 3 * 32 * 64
    assert found["views"]["bytes"] > 4 * layer, "autograd keeps what DeepSpeed let go"
    assert found["places"]["bytes"] <= found["views"]["bytes"] - 3 * layer
    assert found["places"]["bytes"] <= found["recompute"]["bytes"] + layer
    assert found["places"]["later"] == found["views"]["later"]
    assert found["places"]["norms"] == found["views"]["norms"]
    assert found["apart"] == 0, "also where layers are computed again"
