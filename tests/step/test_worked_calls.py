"""Calls of a step as their parts price them, with what a framework adds, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlhfsim.kernels import flop
from rlhfsim.kernels.sequences import Sequences, uniform
from rlhfsim.specs.hardware.hardware import Cluster, NodeGroup
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.model.presets import preset
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.backends import BACKENDS
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import (
    Placement,
    ResourcePool,
    RolePlacement,
    RolloutPlacement,
    Schedule,
)
from rlhfsim.specs.workload.dataflow import dataflow
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.specs.workload.workload import Environment, Lora, Reward, Rules, Workload
from rlhfsim.step import calls, speed_of_light
from rlhfsim.step.calls import CallSetting
from rlhfsim.step.framework_overhead import framework_call, launched_layers, trains_pieces
from rlhfsim.step.iteration import Program
from rlhfsim.training.packing import pack_len, sequences_of
from rlhfsim.training.training import micro_batches
from tests.one_call import forward, train

H100 = load_profile("h100_sxm")
LLAMA = preset("llama-3.1-8b")
WORK = Workload(
    model="llama-3.1-8b",
    algorithm="grpo",
    prompts=16,
    samples=4,
    mini_batches=2,
    epochs=3,
    prompt_len=Fixed(value=100),
    response_len=Fixed(value=400),
    reward=Reward(model=None, rules=Rules()),
)
ROLE = RolePlacement(pool="all", layout=Layout(dp=8, micro_batch=2))


def setting(work: Workload = WORK, *, drawn: tuple[float, ...] | None = None, **changes: Any) -> CallSetting:
    known = {
        "pools": (ResourcePool(name="all", gpus=8),),
        "actor": ROLE,
        "reference": ROLE,
        "critic": ROLE if work.algorithm == "ppo" else None,
        "rollout": RolloutPlacement(pool="all", layout=RolloutLayout(tp=2, dp=4), sleep=0),
        "weight_path": "ipc",
        "backend": "megatron",
    }
    cluster = Cluster(node_groups=(NodeGroup(profile=H100, gpus=8, gpus_per_node=8),))
    placement = Placement(**(known | changes))
    return CallSetting(
        models=models_of(work), placement=placement, workload=work, cluster=cluster, drawn=drawn
    )


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("lora", [None, Lora(rank=8)])
def test_all_epochs_of_a_trained_role_by_hand(role: str, lora: Lora | None) -> None:
    """Three epochs of two optimizer steps; the host launches 32 layers there, back and again."""
    at = setting(replace(WORK, algorithm="ppo", lora=lora))
    device, sequences = at.device(ROLE), sequences_of(at.workload)
    alone = train(
        device,
        at.models.of(role),
        ROLE.layout,
        sequences,
        backend="megatron",
        steps=2,
        lora=lora if role == "actor" else None,
        software=calls.stack_of(at),
        pack_len=pack_len(at.workload, ROLE.layout),
    )
    count = 2 * micro_batches(ROLE.layout, sequences, 2, pack_len(at.workload, ROLE.layout))[1]
    layers = round(at.models.of(role).launched_layers)
    hosted = framework_call(device, alone, launched_layers(ROLE.layout, layers, count, trained=True))
    assert calls.train_cost(at, role, ROLE).seconds == pytest.approx(3 * hosted.seconds)


@pytest.mark.parametrize("name", ["reference.logprob", "critic.value", "actor.logprob"])
def test_a_scoring_call_by_hand(name: str) -> None:
    lora = Lora(rank=8)
    at = setting(replace(WORK, algorithm="ppo", lora=lora, old_logprobs="recompute"))
    call = next(c for c in dataflow(at.workload) if c.name == name) if name != "reference.logprob" else None
    if call is None:  # beside adapters the base is the reference
        at = setting(replace(WORK, algorithm="ppo"))
        call = next(c for c in dataflow(at.workload) if c.name == name)
    device, sequences = at.device(ROLE), sequences_of(at.workload)
    packs = pack_len(at.workload, ROLE.layout, scoring=True)
    alone = forward(
        device,
        at.models.of(call.role),
        ROLE.layout,
        sequences,
        backend="megatron",
        head=call.kind,
        lora=at.workload.lora if call.role == "actor" else None,
        software=calls.stack_of(at),
        pack_len=packs,
    )
    count = micro_batches(ROLE.layout, sequences, 1, packs)[1]
    layers = round(at.models.of(call.role).launched_layers)
    hosted = framework_call(device, alone, launched_layers(ROLE.layout, layers, count, trained=False))
    assert calls.forward_cost(at, call, ROLE).seconds == pytest.approx(hosted.seconds)


def test_training_on_preferences_has_no_framework_around_it() -> None:
    work = replace(WORK, algorithm="dpo", reward=Reward(model=None))
    at = setting(work, rollout=None, weight_path="none")
    alone = train(
        at.device(ROLE),
        at.models.actor,
        ROLE.layout,
        sequences_of(work),
        backend="megatron",
        steps=2,
        software=calls.stack_of(at),
        pack_len=pack_len(work, ROLE.layout),
    )
    assert calls.train_cost(at, "actor", ROLE).seconds == pytest.approx(3 * alone.seconds)


def test_gradients_on_the_wire_are_those_of_the_workload() -> None:
    assert calls._software(setting()).reduce_bytes is None
    assert calls._software(setting(replace(WORK, gradients="bf16"))).reduce_bytes == 2
    summed = calls._software(setting(replace(WORK, gradients="fp32"), backend="deepspeed"))
    assert summed.fp32_sums
    assert not calls._software(setting()).copies_each


def test_what_an_engine_is_asked_for() -> None:
    world = Environment(turns=4, seconds_per_turn=1.0, workers=8)
    assert calls.requests_of(setting()).prompts == 16
    assert calls.requests_of(setting(replace(WORK, environment=world))).environment == world
    lock = replace(world, lockstep=True)
    assert calls.requests_of(setting(replace(WORK, environment=lock))).environment is None
    assert not calls.requests_of(setting()).adapters
    assert calls.requests_of(setting(replace(WORK, lora=Lora()), weight_path="lora")).adapters
    role = RolloutPlacement(pool="all", layout=RolloutLayout(memory_utilization=0.5))
    assert calls._rollout_layout(role, None).memory_utilization == 0.5
    assert calls._rollout_layout(role, 1e5).memory_utilization == 1


@pytest.mark.parametrize("double", [True, False])
def test_turns_share_the_drawn_lengths_in_order(double: bool) -> None:
    world = Environment(turns=4, seconds_per_turn=1.0, workers=64, lockstep=True)
    drawn = tuple(float(100 + i) for i in range(64))
    at = setting(replace(WORK, environment=world), drawn=drawn, schedule=Schedule(double_buffered=double))
    turns = calls.turns_of(at, 1e6)
    assert turns is not None
    assert turns.sequences == ((32, 32) if double else (64,))
    asked = calls.requests_of(at)
    parts = (drawn[:32], drawn[32:]) if double else (drawn,)
    batches = [(replace(asked, prompts=len(p) // 4), p) for p in parts]
    own = [calls._rollouts([(at, 1e6, batch)])[0].seconds for batch in batches]
    assert [cost.seconds for cost in turns.buffers] == pytest.approx(own)
    generation = calls.generation_of(at, 1e6)
    assert generation is not None
    assert generation.seconds == pytest.approx(max(turns.ends()))
    assert calls.turns_of(setting(replace(WORK, environment=replace(world, lockstep=False))), 1e6) is None
    assert calls.turns_of(setting(), 1e6) is None
    plain = calls.turns_of(setting(replace(WORK, environment=world)), 1e6)
    assert plain is not None
    assert plain.sequences == (64,)


def test_a_program_that_takes_longer_scales_what_is_named() -> None:
    at = setting()
    generation = calls.generation_of(at, 1e6)
    step = calls.steps_of(at, next(c for c in dataflow(WORK) if c.name == "actor.generate"), generation)
    program = Program(steps=tuple(step), generation=generation, continuous=None, tokens=1.0, gpus=8)
    assert generation is not None
    twice = program.longer({"actor.generate": 2.0})
    assert twice.generation is not None
    assert twice.generation.seconds == pytest.approx(2 * generation.seconds)
    assert [s.cost.seconds for s in twice.steps if s.name == "actor.generate"] == pytest.approx(
        [2 * generation.seconds]
    )
    assert program.longer({"actor.train": 1.0}) is program
    other = program.longer({"actor.train": 3.0})
    assert other.generation is not None
    assert other.generation.seconds == generation.seconds
    none = replace(program, generation=None, continuous=generation.cost).longer({"actor.generate": 2.0})
    assert none.generation is None
    assert none.continuous is not None
    assert none.continuous.seconds == pytest.approx(2 * generation.cost.seconds)


def test_pieces_train_where_one_optimizer_step_takes_the_batch() -> None:
    once = replace(WORK, epochs=1, mini_batches=1)
    assert trains_pieces(once, "megatron") == BACKENDS["megatron"].trains_pieces
    assert not trains_pieces(WORK, "megatron")
    assert not trains_pieces(replace(once, epochs=2), "megatron")
    assert not trains_pieces(replace(once, mini_batches=2), "megatron")
    assert not trains_pieces(replace(once, mini_batches=2, epochs=2), "megatron")


@pytest.mark.parametrize("lora", [None, Lora()])
def test_limits_of_training_and_generation_by_hand(lora: Lora | None) -> None:
    """FLOP of three epochs over eight GPUs, without weight gradients of a frozen base."""
    at = setting(replace(WORK, lora=lora))
    batch, bf16 = uniform(64, 500), H100.peak["bf16"].value
    generation = calls.generation_of(at, 1e6)
    found = speed_of_light.limits(at, generation)
    whole = flop.training_flop(LLAMA, batch) - (flop.matmul_flop(LLAMA, batch.tokens) if lora else 0)
    assert found["actor.train"] == pytest.approx(3 * whole / (8 * bf16))
    weights = 2 * LLAMA.num_matmul_params_active * 400 / 2
    cache = 64 * (100 * 400 + 400**2 / 2) * LLAMA.kv_bytes_per_token(2) / 8
    prompts = Sequences(count=16, mean=100, mean_square=10_000, maximum=0)
    products = flop.matmul_flop(LLAMA, 1600 + 25_600) + flop.attention_flop(LLAMA, prompts)
    expected = max(products / (8 * bf16), (weights + cache) / H100.hbm.value)
    assert found["actor.generate"] == pytest.approx(expected)
