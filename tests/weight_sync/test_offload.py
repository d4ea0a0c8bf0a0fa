from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlhfsim.kernels.devices import device_of
from rlhfsim.kernels.links import host_rate
from rlhfsim.specs.frameworks.costs import with_software
from rlhfsim.specs.hardware.hardware import NodeGroup
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.layout_columns import ManyRoles, columns_of
from rlhfsim.specs.placement.placement import (
    Placement,
    Residency,
    ResourcePool,
    RolePlacement,
    RolloutPlacement,
)
from rlhfsim.specs.workload.dataflow import Call
from rlhfsim.specs.workload.workload import Lora, Workload
from rlhfsim.units import GB
from rlhfsim.weight_sync.offload import copy_in, copy_out, held, moves, recreate, rollout_shard, sleep, wake

DEVICE = device_of(NodeGroup(profile=load_profile("h100_sxm"), gpus=8, gpus_per_node=8))
MODEL = resolve_model("llama-3.1-8b")
WORKLOAD = Workload(algorithm="grpo", samples=4)
TRAIN, SCORE = Call(role="actor", kind="train"), Call(role="reference", kind="logprob")


def placement(actor: RolePlacement, rollout: RolloutPlacement) -> Placement:
    return Placement(
        pools=(ResourcePool(name="all", gpus=8),),
        actor=actor,
        rollout=rollout,
        weight_path="ipc",
        backend="megatron",
    )


ACTOR = RolePlacement(pool="all", layout=Layout(tp=2, dp=4))
ROLLOUT = RolloutPlacement(pool="all", layout=RolloutLayout(tp=2, dp=4))
PLACEMENT = placement(ACTOR, ROLLOUT)


def test_a_copy_takes_its_bytes_over_the_pcie_rate() -> None:
    expected = 10 * GB / host_rate(DEVICE).value + DEVICE["pcie_latency"]
    assert copy_out(DEVICE, 10 * GB).seconds == pytest.approx(expected)
    assert copy_in(DEVICE, 10 * GB).seconds == pytest.approx(expected)


def test_nothing_takes_no_time() -> None:
    assert copy_out(DEVICE, 0).seconds == 0
    assert sleep(DEVICE, 16 * GB, level=0).seconds == wake(DEVICE, 16 * GB, level=0).seconds == 0


def test_nvme_is_never_faster_than_host_memory() -> None:
    assert copy_out(DEVICE, GB, to="nvme").seconds > copy_out(DEVICE, GB).seconds
    assert copy_in(DEVICE, GB, source="nvme").seconds > copy_in(DEVICE, GB).seconds


def test_fewer_copying_gpus_are_never_slower() -> None:
    assert copy_in(DEVICE, GB, copying=1).seconds < copy_in(DEVICE, GB, copying=8).seconds


def test_level_1_copies_the_weights_and_level_2_does_not() -> None:
    size = 16 * GB
    assert sleep(DEVICE, size, level=2).seconds == DEVICE["sleep_latency"]
    copied = sleep(DEVICE, size, level=1).seconds - sleep(DEVICE, size, level=2).seconds
    assert copied == pytest.approx(copy_out(DEVICE, size).seconds)
    assert wake(DEVICE, size, level=1).seconds > wake(DEVICE, size, level=2).seconds


def test_a_new_process_costs_far_more_than_a_wake() -> None:
    assert recreate(DEVICE, GB).seconds > 10 * wake(DEVICE, GB, level=1).seconds


def test_a_resident_role_does_not_move() -> None:
    before, after = moves(DEVICE, MODEL, ACTOR, TRAIN, WORKLOAD, PLACEMENT)
    assert before.seconds == after.seconds == 0


def test_offload_between_moves_the_optimizer_both_ways() -> None:
    role = replace(ACTOR, offload_between=True)
    before, after = moves(DEVICE, MODEL, role, TRAIN, WORKLOAD, PLACEMENT)
    optimizer = MODEL.num_params / 2 * 12 / 4  # tp 2, 12 bytes an element over dp 4
    assert before.seconds == pytest.approx(copy_in(DEVICE, optimizer, pinned=False).seconds, rel=0.01)
    pages = optimizer / GB * DEVICE["fresh_host_memory_time"]
    assert after.seconds == pytest.approx(before.seconds + pages + DEVICE["unload_latency"], rel=1e-4)


def test_pinned_memory_is_faster_and_deepspeed_has_it() -> None:
    assert copy_in(DEVICE, GB).seconds < copy_in(DEVICE, GB, pinned=False).seconds
    role = replace(ACTOR, offload_between=True)
    pinned, _ = moves(DEVICE, MODEL, role, TRAIN, WORKLOAD, replace(PLACEMENT, backend="deepspeed"))
    pageable, _ = moves(DEVICE, MODEL, role, TRAIN, WORKLOAD, PLACEMENT)
    assert pinned.seconds < pageable.seconds


def test_deepseek_v3_leaves_256_gpus_in_about_20_seconds() -> None:
    """NVIDIA-NeMo/RL#638: 20 s of a colocated refit are the offload, PP16 EP16 on 32 nodes of 8 H100."""
    layout = Layout(pp=16, ep=16, dp=16, zero=1)
    role = replace(ACTOR, residency="offloaded", layout=layout)
    model = resolve_model("deepseek-v3")
    _, after = moves(DEVICE, model, role, TRAIN, WORKLOAD, PLACEMENT)
    assert after.seconds == pytest.approx(20, rel=0.25)


def test_an_optimizer_that_lives_on_the_host_does_not_move() -> None:
    layout = replace(ACTOR.layout, offload_optimizer="cpu")
    role = replace(ACTOR, offload_between=True, layout=layout)
    before, after = moves(DEVICE, MODEL, role, TRAIN, WORKLOAD, PLACEMENT)
    assert before.seconds == after.seconds == 0


def test_a_frozen_role_is_loaded_and_then_dropped() -> None:
    role = replace(ACTOR, residency="offloaded")
    before, after = moves(DEVICE, MODEL, role, SCORE, WORKLOAD, PLACEMENT)
    weights = copy_in(DEVICE, MODEL.num_params, pinned=False)
    assert before.seconds == pytest.approx(weights.seconds, rel=0.01)
    assert after.seconds == DEVICE["unload_latency"]


def test_adapters_leave_little_to_move_back() -> None:
    role = replace(ACTOR, residency="offloaded")
    workload = replace(WORKLOAD, lora=Lora(rank=16))
    _, full = moves(DEVICE, MODEL, role, TRAIN, WORKLOAD, PLACEMENT)
    _, small = moves(DEVICE, MODEL, role, TRAIN, workload, PLACEMENT)
    assert small.seconds < full.seconds / 3


def test_the_rollout_wakes_before_generation_and_sleeps_after_it() -> None:
    call = Call(role="actor", kind="generate")
    before, after = moves(DEVICE, MODEL, ROLLOUT, call, WORKLOAD, PLACEMENT)
    assert before.seconds == DEVICE["wake_latency"]
    assert after.seconds == DEVICE["sleep_latency"]


def test_a_recreated_rollout_starts_its_process_each_time() -> None:
    role = replace(ROLLOUT, residency="recreated")
    call = Call(role="actor", kind="generate")
    before, _ = moves(DEVICE, MODEL, role, call, WORKLOAD, PLACEMENT)
    assert before.seconds >= DEVICE["process_start"]


def test_fp8_halves_the_rollout_shard() -> None:
    bf16 = rollout_shard(MODEL, RolloutLayout(tp=2))
    assert bf16 == pytest.approx(MODEL.num_params * 2 / 2)
    assert rollout_shard(MODEL, RolloutLayout(tp=2, precision="fp8")) == bf16 / 2


def test_a_trained_role_holds_no_frozen_weights() -> None:
    found = held(MODEL, ACTOR.layout, "megatron", optimizer="adam")
    assert found.frozen == 0
    assert found.learned > 0


@pytest.mark.parametrize(
    ("backend", "layout", "shard"),
    [
        ("megatron", Layout(tp=2, dp=4), MODEL.num_params / 2 * 2),  # BF16, whole over dp
        ("fsdp2", Layout(dp=8, zero=3), MODEL.num_params * 4 / 8),  # FP32 shards
    ],
)
def test_a_swapped_reference_moves_three_shards_of_the_actor(
    backend: Any, layout: Layout, shard: float
) -> None:
    """Actor out, reference in; then actor in: each copy over the node's shared PCIe rate, from pinned memory."""
    actor = RolePlacement(pool="all", layout=layout)
    role = replace(actor, residency="swapped")
    plan = replace(placement(actor, ROLLOUT), backend=backend, reference=role)
    before, after = moves(DEVICE, MODEL, role, SCORE, WORKLOAD, plan)
    copy = shard / host_rate(DEVICE).value + DEVICE["pcie_latency"]
    assert before.seconds == pytest.approx(2 * copy, rel=1e-3)
    assert after.seconds == pytest.approx(copy, rel=1e-3)


def test_beside_adapters_nothing_is_swapped() -> None:
    role = replace(ACTOR, residency="swapped")
    work = replace(WORKLOAD, lora=Lora(rank=16))
    before, after = moves(DEVICE, MODEL, role, SCORE, work, replace(PLACEMENT, reference=role))
    assert before.seconds == after.seconds == 0


def test_groups_that_are_destroyed_start_again_once_a_step_and_only_in_slime() -> None:
    """2.8 s before training where the actor left its GPUs; nothing for what stays, scores or is another's."""
    group = NodeGroup(profile=with_software(load_profile("h100_sxm"), "slime"), gpus=8, gpus_per_node=8)
    slime, away = device_of(group), replace(ACTOR, residency="offloaded")

    def more(role: RolePlacement, call: Call) -> float:
        return sum(
            sum(cost.seconds for cost in moves(device, MODEL, role, call, WORKLOAD, PLACEMENT)) * sign
            for device, sign in ((slime, 1), (DEVICE, -1))
        )

    assert more(away, TRAIN) == pytest.approx(2.8)
    assert more(away, SCORE) == more(ACTOR, TRAIN) == 0
    assert more(replace(ACTOR, offload_between=True), TRAIN) == 0


@pytest.mark.parametrize("lora", [None, Lora(rank=16)])
@pytest.mark.parametrize("residency", ["resident", "offloaded", "swapped", "recreated"])
@pytest.mark.parametrize("backend", ["megatron", "deepspeed", "fsdp2"])
def test_many_roles_at_once_move_as_each_does(
    backend: Backend, residency: Residency, lora: Lora | None
) -> None:
    """To the last digit: layouts of a mixture of experts, their states on the GPU, on the host or in part."""
    slime = with_software(load_profile("h100_sxm"), "slime")  # where a role that leaves restarts its groups
    device = device_of(NodeGroup(profile=slime, gpus=8, gpus_per_node=8))
    model, work = resolve_model("qwen3-30b-a3b"), replace(WORKLOAD, lora=lora)
    sizes, homes = [(1, 1, 8, 1), (2, 1, 4, 1), (1, 2, 4, 2), (2, 2, 8, 8)], ["none", "cpu", "nvme"]
    layouts = [
        Layout(tp=tp, pp=pp, dp=dp, ep=ep, zero=zero, offload_optimizer=home, offload_params=params)
        for tp, pp, dp, ep in sizes
        for zero in (0, 1, 2, 3)
        for home in homes
        for params in (homes if zero == 3 else homes[:1])
    ]
    placed, moving = replace(PLACEMENT, backend=backend), set()
    for call, between in itertools.product((TRAIN, SCORE), (False, True)):
        many = moves(device, model, ManyRoles(columns_of(layouts), residency, between), call, work, placed)
        roles = [
            RolePlacement(pool="all", layout=one, residency=residency, offload_between=between)
            for one in layouts
        ]
        each = [moves(device, model, role, call, work, placed) for role in roles]
        for at_once, alone in zip(many, zip(*each, strict=True), strict=True):
            seconds = [cost.seconds for cost in alone]
            assert np.broadcast_to(at_once.seconds, len(layouts)).tolist() == seconds
            moving |= set(seconds)
    stays = residency == "swapped" and lora is not None  # the actor's base scores
    assert (len(moving) > len(sizes)) != stays
