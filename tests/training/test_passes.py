"""Launch beside kernels, and ranks that share a socket."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlhfsim.kernels.device import Device
from rlhfsim.kernels.devices import device_of
from rlhfsim.rollout.prefill import group_prefill
from rlhfsim.specs.hardware.profiles import load_profile, node_group
from rlhfsim.specs.model.mixers import DENSE
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.placement.heads import Head
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.software import Software
from rlhfsim.training.gradient_exchange import update, zero_calls
from rlhfsim.training.layer_time import OPERATORS, adapter_time
from rlhfsim.training.passes import contention, launched, passes, slowed
from rlhfsim.training.training import flash2_slowdown
from rlhfsim.training.work import Work
from rlhfsim.weight_sync.endpoints import weights_of
from rlhfsim.weight_sync.offload import sleep

WORK = Work(tokens=4096, length=4096)


def _device(name: str, **values: float) -> Device:
    """A device of two in a node, some coefficients replaced."""
    profile = load_profile(name)
    known = profile.coefficients
    moved = {k: replace(known[k], value=v, low=v, high=v) for k, v in values.items()}
    pool = node_group(name, 2, gpus_per_node=2)
    return device_of(replace(pool, profile=replace(profile, coefficients={**known, **moved})), 1.0)


def test_a_gpu_takes_the_longer_of_kernels_and_launch() -> None:
    assert launched(_device("h100"), 3.0, 2.0) == 3.0
    assert launched(_device("h100"), 2.0, 3.0) == 3.0


def test_a_core_launches_and_computes_one_after_the_other() -> None:
    assert launched(_device("cpu-core"), 3.0, 2.0) == 5.0
    assert launched(_device("cpu-core", overlap_launch=0.5), 3.0, 2.0) == 4.0


def test_ranks_of_one_socket_slow_each_other_and_gpus_do_not() -> None:
    core = _device("cpu-core", rank_contention=1.5)
    assert contention(core, 1) == 1
    assert contention(core, 2) == pytest.approx(1.5)
    assert contention(core, 8) == pytest.approx(1.5), "two of the eight are in one node"
    assert contention(_device("h100"), 8) == 1


def test_a_slowed_pass_keeps_its_shares() -> None:
    work = Work(tokens=256, length=64)
    through = passes(_device("cpu-core"), resolve_model("0.6b"), work, Software(), "none")
    twice = slowed(through, 2.0)
    assert sum(twice.forward) == pytest.approx(2 * sum(through.forward))
    assert twice.layer == pytest.approx(2 * through.layer)
    assert sum(twice.ends) == pytest.approx(2 * sum(through.ends))
    assert slowed(through, 1.0) is through


def test_an_engine_on_a_cpu_has_nothing_to_free() -> None:
    core, gpu = _device("cpu-core"), _device("h100")
    assert sleep(core, 0.0, level=2).seconds == pytest.approx(0.01 * core["sleep_latency"])
    assert sleep(gpu, 0.0, level=2).seconds == gpu["sleep_latency"]


def test_hooks_of_zero_cost_a_core_time_for_every_tensor() -> None:
    core, model = _device("cpu-core", zero_tensor_time=0.001), resolve_model("0.6b")
    tensors = weights_of(model).tensors
    assert zero_calls(core, model, Layout(dp=2, zero=3), 3).seconds == pytest.approx(0.003 * tensors)
    assert zero_calls(_device("h100"), model, Layout(dp=2, zero=3), 3).seconds == 0


def test_without_a_prefix_cache_every_sample_computes_its_prompt() -> None:
    model, layout = resolve_model("0.6b"), RolloutLayout()
    off, on = _device("cpu-core", prompt_reuse=0.0), _device("cpu-core", prompt_reuse=1.0)
    alone = group_prefill(off, model, layout, 32, 4, 64, shared=False).seconds
    assert group_prefill(off, model, layout, 32, 4, 64).seconds == pytest.approx(alone)
    assert group_prefill(on, model, layout, 32, 4, 64).seconds < alone / 2


def test_a_sharded_optimizer_step_takes_longer_on_a_core() -> None:
    core, model = _device("cpu-core", zero_step_time=0.5), resolve_model("0.6b")
    steps = [
        sum(p.seconds for p in update(core, model, x, optimizer="adam") if p.rests_on == "zero_step_time")
        for x in (Layout(dp=2, zero=1), Layout(dp=2, zero=0), Layout(zero=1))
    ]
    assert steps == [0.5, 0.0, 0.0]


def test_each_kind_of_training_software_has_its_own_speeds() -> None:
    slow = _device("h100", kernel_speed_eager=0.5, attention_speed_eager=1.0)
    one = passes(slow, resolve_model("llama-2-7b"), WORK, Software(stack="megatron"), "none")
    two = passes(slow, resolve_model("llama-2-7b"), WORK, Software(stack="eager"), "none")
    speed = slow["kernel_speed_megatron"] / 0.5
    assert two.forward.gemm == pytest.approx(speed * one.forward.gemm)
    assert two.forward.memory == one.forward.memory


def test_recomputation_by_operator_repeats_half_the_products_and_no_attention() -> None:
    model, device = resolve_model("llama-2-7b"), _device("h100")
    kept = passes(device, model, WORK, Software(), "none")
    again = passes(device, model, WORK, Software(recomputed=(OPERATORS,)), "none")
    head = passes(device, model, WORK, Software(), "full").backward.gemm - kept.backward.gemm
    assert again.backward.attention == kept.backward.attention
    assert again.backward.gemm - kept.backward.gemm == pytest.approx(head / 2)


def test_adapters_pass_over_inputs_and_outputs_of_every_matrix() -> None:
    model, device = resolve_model("llama-2-7b"), _device("h100")
    ahead, back = adapter_time(device, model, WORK, kind=DENSE)
    widths = 4096 + 3 * 3 * 4096 + 4096 + 3 * 4096 + 4096 + 3 * 2 * 11008 + 11008 + 3 * 4096
    rate = device.profile.hbm.value * device["hbm_efficiency"]
    assert ahead == pytest.approx(WORK.tokens * 2 * widths / rate)
    frozen = passes(device, model, WORK, Software(), "none", frozen=True)
    free = passes(device, model, WORK, Software(), "none")
    assert frozen.forward.memory - free.forward.memory == pytest.approx(32 * ahead)
    assert frozen.backward.memory - free.backward.memory == pytest.approx(32 * back)
    assert back < 2 * ahead
    assert frozen.launch == 2 * free.launch


def test_flash_attention_2_is_slower_where_the_gpu_has_newer_kernels() -> None:
    slowed = [flash2_slowdown(_device(name)) for name in ("a100", "l40s", "h100", "h200", "b200")]
    hopper, blackwell = _device("h100")["flash2_on_hopper"], _device("b200")["flash2_on_blackwell"]
    assert slowed == [1.0, 1.0, hopper, hopper, blackwell]


def test_a_loss_that_passes_over_the_logits_more_often_takes_the_time_of_those_bytes() -> None:
    device, model = _device("h100"), resolve_model("qwen2.5-0.5b")
    eager = Software(fused=False, head=Head(train_bytes=14, score_bytes=14, source="test"))
    assert eager.head is not None
    more = replace(eager.head, score_traffic=32, forward_traffic=32, backward_traffic=54)
    counted, padded = (
        passes(device, model, WORK, replace(eager, head=h), "none") for h in (eager.head, more)
    )
    scored = passes(device, model, WORK, replace(eager, head=more), "none", scoring=True)
    logits = WORK.tokens * model.vocab / device.profile.hbm.value / device["hbm_efficiency"]
    assert padded.ends_forward[1] - counted.ends_forward[1] == pytest.approx((32 - 6) * logits)
    assert sum(padded.backward) - sum(counted.backward) == pytest.approx((54 - 4) * logits)
    assert scored.ends_forward == padded.ends_forward
    value = replace(model, value_head=True)
    assert passes(device, value, WORK, replace(eager, head=more), "none") == passes(
        device, value, WORK, eager, "none"
    )
