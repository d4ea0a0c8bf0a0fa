"""Hand-computed bytes, limits and monotonicity of states, activations and KV cache."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlhfsim.memory import activations, kv_cache, logits
from rlhfsim.memory import states as memory
from rlhfsim.memory.layer_tensors import RoutedExperts, layer_tensors
from rlhfsim.memory.role_bytes import RoleKind, _stood
from rlhfsim.specs.model.mixers import EXPERTS
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.placement.backends import violation
from rlhfsim.specs.placement.heads import UNFUSED, Head
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.software import Software
from rlhfsim.specs.workload.workload import Lora
from rlhfsim.units import GIB

LLAMA8B = resolve_model("llama-3.1-8b")
LLAMA70B = resolve_model("llama-3.1-70b")
QWEN_MOE = resolve_model("qwen3-30b-a3b")
GPT175B = resolve_model("gpt-175b")


def _states(model, layout, backend, **options):
    part = memory.shard(model, layout, backend, memory.stages(layout.pp)[0])
    return memory.trained_states(part, layout, backend, **options)


def korthikanti_layer(
    s: float,
    b: float,
    h: float,
    a: float,
    *,
    t: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> float:
    """Bytes per layer of a GPT block without flash attention: the published formula.

        none: s b h (34 + 5 a s/h)      TP: s b h (10 + 24/t + 5 a s/(h t))
        TP and SP: (s b h/t)(34 + 5 a s/h)      selective: without the 5 a s/h      full: 2 s b h

    Source: Korthikanti et al., arXiv 2205.05198, equations 1, 2 and 4 and table 2. Layer norms with
    dropout and GELU: the blocks of today are enumerated by `layer_tensors`.
    """
    attention = 0.0 if recompute == "selective" else 5 * a * s / h
    if recompute == "full":
        return 2 * s * b * h / (t if sequence_parallel else 1)
    if sequence_parallel:
        return s * b * h / t * (34 + attention)
    return s * b * h * (10 + 24 / t + attention / t)


def test_korthikanti_formula_gives_the_paper_figure_for_gpt_175b():
    # 2048 x 1 x 12288 x (34 + 5 x 96 x 2048 / 12288) = 2.87 GB a layer without parallelism
    whole = korthikanti_layer(2048, 1, 12288, 96)
    assert whole == pytest.approx(2048 * 12288 * (34 + 80))
    sharded = korthikanti_layer(2048, 1, 12288, 96, t=8, sequence_parallel=True)
    assert sharded == pytest.approx(whole / 8)
    selective = korthikanti_layer(2048, 1, 12288, 96, t=8, sequence_parallel=True, recompute="selective")
    tp = korthikanti_layer(2048, 1, 12288, 96, t=8)
    assert selective / tp == pytest.approx(0.1849, abs=2e-4)  # figure 7: 18.49 %


@pytest.mark.parametrize(
    ("recompute", "parallel", "percent"),
    [("none", True, 66.84), ("selective", False, 49.42), ("selective", True, 16.18), ("full", False, 7.64)],
)
def test_korthikanti_formula_gives_figure_7_of_the_22b_model(recompute, parallel, percent):
    tp = korthikanti_layer(2048, 4, 6144, 64, t=8)
    got = korthikanti_layer(2048, 4, 6144, 64, t=8, sequence_parallel=parallel, recompute=recompute)
    assert 100 * got / tp == pytest.approx(percent, abs=0.3)


def test_enumerated_tensors_of_a_llama_layer_are_those_counted_by_hand():
    # bytes: 4 streams of 2 h, q k v 2 x 6144, out 2 x 4096, log-sum-exp 4 x 32, SwiGLU 6 x 14336
    expected = 4 * 2 * 4096 + 2 * 6144 + 2 * 4096 + 4 * 32 + 6 * 14336
    assert layer_tensors(LLAMA8B, 1).total == expected


def test_sequence_parallelism_divides_every_tensor_by_tp():
    one = layer_tensors(LLAMA8B, 1).total
    assert layer_tensors(LLAMA8B, 8, sequence_parallel=True).total == pytest.approx(one / 8)
    assert layer_tensors(LLAMA8B, 8, sequence_parallel=False).total > one / 8


def test_gpt_block_is_near_the_34_sbh_of_the_paper():
    # 34 counts two dropout masks (2 h) and GELU; the enumeration has neither mask
    assert layer_tensors(GPT175B, 1).total / GPT175B.hidden == pytest.approx(34, rel=0.2)


def test_eager_blocks_keep_more_than_fused_ones():
    assert layer_tensors(LLAMA8B, 1, fused=False).total > layer_tensors(LLAMA8B, 1).total


def test_attention_without_flash_keeps_five_bytes_per_score():
    flash = layer_tensors(LLAMA8B, 1).total
    assert layer_tensors(LLAMA8B, 1, score_length=1024).total == flash + 5 * 32 * 1024


def test_moe_layer_keeps_top_k_copies():
    tensors = layer_tensors(QWEN_MOE, 1, kind=EXPERTS).saved
    assert tensors["dispatched"] == 2 * 8 * 2048
    assert (
        layer_tensors(QWEN_MOE, 1, RoutedExperts(imbalance=2), kind=EXPERTS).saved["dispatched"]
        == 4 * 8 * 2048
    )


@pytest.mark.parametrize(
    ("backend", "zero", "expected"),
    [
        ("megatron", 0, 18),
        ("megatron", 1, 6 + 12 / 8),
        ("deepspeed", 1, 4 + 12 / 8),
        ("deepspeed", 2, 2 + 14 / 8),
        ("deepspeed", 3, 16 / 8),
        ("fsdp2", 3, 16 / 8),
    ],
)
def test_bytes_per_parameter_are_those_of_m1(backend, zero, expected):
    assert sum(memory.bytes_per_element(backend, zero, 8)) == pytest.approx(expected)


@pytest.mark.parametrize(("zero", "expected"), [(1, 6 + 12 / 8), (2, 2 + 16 / 8), (3, 18 / 8)])
def test_fp32_sums_of_deepspeed_hold_two_bytes_more_for_each_gradient_that_a_rank_keeps(zero, expected):
    assert sum(memory.bytes_per_element("deepspeed", zero, 8, gradient_bytes=4)) == pytest.approx(expected)
    part = memory.shard(LLAMA8B, Layout(dp=8, zero=zero), "deepspeed")
    kind = RoleKind(LLAMA8B, "deepspeed", True, "adam", None, Software(gradient_bytes=4), False)
    standing = _stood(kind, [memory.cut(Layout(dp=8, zero=zero))], [0], "only")
    assert standing.states.total == pytest.approx(expected * part.elements)
    # beside them: stage 1 reduces a BF16 copy of all, stage 2 steps on the sums, stage 3 flattens one GB
    assert standing.step == {1: 2 * part.elements, 2: 0.0, 3: 4 * min(part.elements / 8, 1e9)}[zero]
    assert standing.buffers == {1: 0.0, 2: 2 * 2 * 5e8, 3: 2 * 2 * 5e8}[zero]


def test_eight_bit_adam_saves_six_bytes_of_moments():
    saved = memory.MOMENTS["adam"] - memory.MOMENTS["adam8bit"]
    assert saved == pytest.approx(6, abs=0.05)


def test_megatron_states_of_a_7b_before_the_first_step_match_a_logged_run():
    # verl log of Qwen2-7B, tp 2 pp 2 dp 2: 14.20 GiB of weights, gradients and master weights
    layout = Layout(tp=2, pp=2, dp=2, zero=1)
    states = _states(resolve_model("qwen2.5-7b"), layout, "megatron")
    without_moments = states.weights + states.gradients + states.optimizer * 4 / 12
    assert without_moments / GIB == pytest.approx(14.2, rel=0.03)


def test_sharding_over_one_gpu_changes_nothing():
    totals = {_states(LLAMA8B, Layout(zero=z), "deepspeed").total for z in (0, 1, 2, 3)}
    assert len(totals) == 1


def test_more_data_parallel_ranks_never_need_more_states():
    totals = [_states(LLAMA8B, Layout(dp=d, zero=1), "megatron").total for d in (1, 2, 4, 8, 16)]
    assert totals == sorted(totals, reverse=True)


def test_pipeline_stages_hold_the_whole_model_between_them():
    layout = Layout(tp=1, pp=4, dp=1, zero=1)
    ends = [memory.shard(LLAMA8B, layout, "megatron", s).elements for s in ("first", "last")]
    middle = 8 * (memory.shard(LLAMA8B, Layout(), "megatron").layer)
    assert sum(ends) + 2 * middle == pytest.approx(LLAMA8B.num_params, rel=1e-4)


def test_experts_are_sharded_over_their_own_group():
    layout = Layout(tp=1, dp=16, ep=8, zero=1)
    part = memory.shard(QWEN_MOE, layout, "megatron")
    assert part.expert_ranks == 2
    assert part.expert == pytest.approx(48 * 16 * QWEN_MOE.params_expert)


def test_cpu_offload_moves_sixteen_bytes_per_parameter_to_the_host():
    # OpenRLHF issue 171: 211.8 GB of host memory for a 13B actor, 16 B/param
    layout = Layout(zero=2, offload_optimizer="cpu")
    states = _states(LLAMA8B, layout, "deepspeed")
    assert states.host == pytest.approx(16 * LLAMA8B.num_params, rel=0.01)
    assert states.optimizer == 0
    assert states.gradients == 0


def test_a_share_of_the_optimizer_on_the_host_holds_its_share_of_bytes_there():
    psi = LLAMA8B.num_params / 8  # distributed optimizer of eight ranks
    half, none = (
        _states(LLAMA8B, Layout(dp=8, zero=1, **away), "megatron")
        for away in ({"offload_optimizer": "cpu", "offload_fraction": 0.5}, {})
    )
    assert half.optimizer == pytest.approx(6 * psi, rel=1e-3)  # half of master weights and moments
    assert half.host == pytest.approx(8 * psi, rel=1e-3)  # half of those and of FP32 gradients
    assert (half.weights, half.gradients) == (none.weights, none.gradients)


@pytest.mark.parametrize("backend", ["megatron", "deepspeed"])
def test_the_more_of_the_optimizer_is_away_the_less_stays(backend):
    zero = 3 if backend == "deepspeed" else 1
    layouts = [Layout(dp=8, zero=zero, offload_optimizer="cpu", offload_fraction=f) for f in (0.25, 0.5, 1.0)]
    held = [_states(LLAMA8B, layout, backend) for layout in (Layout(dp=8, zero=zero), *layouts)]
    assert [s.total for s in held] == sorted((s.total for s in held), reverse=True)
    assert [s.host for s in held] == sorted(s.host for s in held)


def test_copies_of_shards_hold_what_their_own_ranks_would():
    whole, copies, node = (
        _states(LLAMA8B, Layout(dp=ranks, zero=3, shards=shards), "fsdp2").total
        for ranks, shards in ((64, None), (64, 8), (8, None))
    )
    assert copies == node == 8 * whole  # 16 bytes over 8 ranks, not 64


def test_nvme_offload_takes_neither_gpu_nor_host_memory():
    states = _states(LLAMA8B, Layout(zero=3, offload_optimizer="nvme"), "deepspeed")
    assert states.host == 0
    assert states.optimizer == 0


def test_lora_adapters_of_llama_8b_are_84_million_at_rank_32():
    assert memory.lora_params(LLAMA8B, 32) == pytest.approx(83.9e6, rel=0.01)  # PEFT prints 83,886,080
    part = memory.shard(LLAMA8B, Layout(), "fsdp2")
    base, adapters = memory.lora_states(LLAMA8B, part, Layout(), "fsdp2", Lora(rank=32))
    assert base.gradients == 0
    assert adapters.total == pytest.approx(16 * 83.9e6, rel=0.01)


def test_a_base_in_4_bit_holds_half_a_byte_and_its_constants():
    part = memory.shard(LLAMA8B, Layout(), "deepspeed")
    base, adapters = memory.lora_states(LLAMA8B, part, Layout(), "deepspeed", Lora(rank=32, base="nf4"))
    tables = 2 * 128256 * 4096 + 4096  # embedding, head and norm stay in BF16
    matrices = LLAMA8B.num_params - tables
    assert base.weights == pytest.approx((0.5 + 8.125 / 8 / 64) * matrices + 2 * tables, rel=1e-3)
    whole, same = memory.lora_states(LLAMA8B, part, Layout(), "deepspeed", Lora(rank=32))
    assert whole.weights == pytest.approx(2 * LLAMA8B.num_params, rel=1e-6)
    assert adapters == same


def test_a_frozen_model_has_weights_only():
    part = memory.shard(LLAMA70B, Layout(dp=8, zero=3), "deepspeed")
    states = memory.frozen_states(part, Layout(dp=8, zero=3))
    assert states.total == states.weights == pytest.approx(2 * LLAMA70B.num_params / 8, rel=1e-3)


def test_zero_3_gathers_at_most_a_billion_live_elements_a_bucket_and_a_matrix():
    part = memory.shard(LLAMA70B, Layout(dp=64, zero=3), "deepspeed")
    assert part.matrix == 8192 * 28672
    assert memory.gathered_bytes(part, Layout(dp=64, zero=3), "deepspeed") == 2 * (1.05e9 + part.matrix)


def test_the_largest_parameter_of_a_mixture_is_the_gates_and_ups_of_all_its_experts():
    layout = Layout(dp=8, zero=3)
    moe = resolve_model("qwen3-30b-a3b")
    assert memory.shard(moe, layout, "deepspeed").matrix == 128 * 2 * 768 * 2048


def test_first_stage_of_one_f_one_b_keeps_a_micro_batch_per_stage():
    assert activations.in_flight(4, 1, 16, "first") == 4
    assert activations.in_flight(4, 1, 2, "first") == 2
    assert activations.in_flight(4, 5, 16, "first") == pytest.approx(4 * (1 + 3 / 20))
    assert activations.in_flight(4, 1, 16, "last") == 1


def test_full_recomputation_keeps_layer_inputs_only():
    layout = Layout(recompute="full")
    got = activations.training_activations(
        LLAMA8B, layout, "megatron", activations.MicroBatches(tokens=4096, count=1)
    )
    assert got.saved == 4096 * 32 * 2 * 4096


def test_logits_are_ten_bytes_each_and_a_value_head_has_none():
    held = logits.logits_bytes(LLAMA8B, Layout(tp=2), 1000, UNFUSED, training=True)
    assert held == 1000 * 128256 / 2 * 10
    assert logits.logits_bytes(LLAMA8B.with_value_head(), Layout(), 1000, UNFUSED, training=True) == 10_000


def test_a_head_that_works_through_the_vocabulary_holds_one_chunk_of_it():
    chunks = Head(train_bytes=20, score_bytes=10, vocab=2048, source="test")
    assert logits.logits_bytes(LLAMA8B, Layout(), 1000, chunks, training=False) == 1000 * 2048 * 10


def test_selective_recomputation_by_operation_keeps_every_second_product():
    layout = Layout(recompute="selective")
    got = activations.training_activations(
        LLAMA8B, layout, "fsdp2", activations.MicroBatches(tokens=1000, count=1)
    )
    input_and_q, v, attention, up, down = 2 * 4096, 1024, 4096, 14336, 4096
    per_token = 2 * (input_and_q + v + attention + up + down) + 4 * 32
    assert got.saved == 1000 * 32 * per_token


def test_gradients_of_layers_wait_in_the_backward_pass_not_at_the_loss():
    held = activations.Activations(saved=10.0, working=2.0, logits=5.0)
    assert held.beside(1.0) == 0.0
    assert held.beside(4.0) == 1.0
    assert activations.Activations(saved=10.0, working=5.0, logits=2.0).beside(4.0) == 4.0


def test_fsdp2_holds_what_its_gathers_wrote_beside_what_layers_read():
    part = memory.shard(LLAMA8B, Layout(dp=8, zero=3), "fsdp2")
    held = memory.gathered_bytes(part, Layout(dp=8, zero=3), "fsdp2")
    assert held == 2 * (part.root + part.layer + max(part.root, part.layer) + part.layer + part.layer / 8)
    alone = memory.gathered_bytes(part, Layout(zero=3), "fsdp2")
    assert alone == 2 * (part.root + 2 * part.layer)


def test_activations_shrink_with_context_parallelism():
    def peak(cp: int) -> float:
        layout = Layout(cp=cp, recompute="none")
        return activations.training_activations(
            LLAMA8B, layout, "megatron", activations.MicroBatches(tokens=32768, count=1)
        ).peak

    assert peak(4) == pytest.approx(peak(1) / 4)


@pytest.mark.parametrize(
    ("model", "layout", "gib"),
    [
        ("llama-3.1-8b", RolloutLayout(), 14.99),
        ("qwen3-32b", RolloutLayout(tp=2), 30.59),
        ("llama-3.1-70b", RolloutLayout(precision="fp8"), 67.72),
        ("qwen3-0.6b", RolloutLayout(), 1.12),
    ],
)
def test_rollout_weights_are_those_that_vllm_logs(model, layout, gib):
    assert kv_cache.rollout_weights(resolve_model(model), layout) / GIB == pytest.approx(gib, rel=0.02)


def test_kv_heads_are_copied_beyond_their_number():
    one, eight = RolloutLayout(tp=1), RolloutLayout(tp=8)
    assert kv_cache.kv_bytes_per_token(LLAMA8B, one) == 2 * 32 * 8 * 128 * 2
    assert kv_cache.kv_bytes_per_token(LLAMA8B, eight) == 2 * 32 * 128 * 2
    assert kv_cache.kv_bytes_per_token(LLAMA8B, replace(eight, tp=16)) == kv_cache.kv_bytes_per_token(
        LLAMA8B, eight
    )


def test_kv_capacity_is_what_the_share_leaves_in_whole_blocks():
    layout = RolloutLayout(memory_utilization=0.5)
    got = kv_cache.kv_capacity(
        LLAMA8B, layout, total_memory=80e9, weights=16e9, activation_peak=4e9, non_torch=1e9, graphs=2e9
    )
    assert got.bytes == pytest.approx(17e9)
    assert got.tokens == 16 * (17e9 // (131072 * 16))


def test_an_engine_without_room_has_no_tokens():
    layout = RolloutLayout(memory_utilization=0.1)
    got = kv_cache.kv_capacity(
        LLAMA8B, layout, total_memory=80e9, weights=16e9, activation_peak=0, non_torch=0, graphs=0
    )
    assert got.bytes < 0
    assert got.tokens == 0


def test_sampling_takes_the_same_memory_at_every_tp():
    qwen = resolve_model("qwen3-32b")
    peaks = {kv_cache.profile_peak(qwen, RolloutLayout(tp=t), sampler_bytes_per_logit=38) for t in (1, 2)}
    assert len(peaks) == 1


@pytest.mark.parametrize(
    "name", ["llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3", "gpt-oss-20b", "qwen2.5-72b", "opt-13b"]
)
def test_one_gpu_holds_every_element_of_the_checkpoint(name):
    model = resolve_model(name)
    held = memory.shard(model, Layout(), "megatron").elements
    assert held == pytest.approx(model.num_params, rel=4e-4)  # biases of attention are left out


def test_fsdp2_offload_leaves_only_gathered_layers_on_the_gpu():
    away = Layout(dp=2, zero=3, offload_optimizer="cpu", offload_params="cpu")
    part = memory.shard(LLAMA8B, away, "fsdp2")
    states = memory.trained_states(part, away, "fsdp2")
    assert states.total == 0
    assert states.host == pytest.approx(16 * LLAMA8B.num_params / 2)
    half = replace(away, offload_params="none")
    assert "together with the weights" in (violation("fsdp2", half) or "")
    assert violation("fsdp2", away) is None
