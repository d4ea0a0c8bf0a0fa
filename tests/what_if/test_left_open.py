"""What a typed plan leaves open is as its framework's configuration has it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlhfsim.plan import Plan
from rlhfsim.search.request import Request
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.workload.workload import Reward, Rules, Workload
from rlhfsim.what_if import planned
from rlhfsim.what_if.planned import best_of


def asked(framework: str, backend: Backend, gpus: int = 8, **known: Any) -> Request:
    rules = Reward(model=None, rules=Rules())
    work = Workload(algorithm="grpo", model="qwen2.5-3b", prompts=64, samples=8, reward=rules)
    known = {"workload": work, "architecture": "hybrid", **known}
    cluster = parse_cluster(gpus, "h100", rollout_gpus=known.pop("rollout_gpus", None))
    return Request(cluster=cluster, framework=framework, backend=backend, **known)


def priced(request: Request) -> Plan:
    answer = best_of(request)
    assert answer.fits
    assert answer.plan is not None
    return answer.plan


def layouts(plan: Plan) -> tuple[Layout, RolloutLayout]:
    assert plan.placement.rollout is not None
    return plan.placement.actor.layout, plan.placement.rollout.layout


def test_nemo_rl_has_its_defaults_and_says_so() -> None:
    plan = priced(asked("nemo-rl", "megatron"))
    actor, rollout = layouts(plan)
    assert (rollout.memory_utilization, rollout.ep, rollout.max_num_seqs) == (0.6, 1, 1024)
    assert (actor.offload_optimizer, actor.recompute) == ("none", "none")
    assert (actor.pack(scoring=False), actor.pack(scoring=True)) == (2048, 4 * 2048)
    (said,) = plan.assumed
    assert said.startswith("as NeMo-RL has it: ")
    assert "gpu_memory_utilization 0.6" in said
    assert "train_micro_batch_size 1" in said


def test_nemo_rls_asynchronous_engine_has_other_limits_and_broadcasts() -> None:
    request = asked("nemo-rl", "megatron", rollout_gpus=8, architecture="async", allow=frozenset({"async"}))
    plan = priced(request)
    _, rollout = layouts(plan)
    assert (rollout.max_num_seqs, rollout.max_batched_tokens) == (128, 2048)
    assert plan.placement.weight_path == "broadcast"
    assert [pool.gpus for pool in plan.placement.pools] == [8, 8]


def test_verl_has_its_defaults_and_the_chosen_micro_batch() -> None:
    plan = priced(asked("verl", "fsdp2"))
    actor, rollout = layouts(plan)
    assert (rollout.memory_utilization, rollout.cuda_graphs, actor.recompute) == (0.5, True, "full")
    assert plan.placement.rollout is not None
    assert plan.placement.rollout.sleep == 2
    assert "micro_batch" not in plan.assumed[0]


def test_what_is_typed_stays_and_is_not_assumed() -> None:
    typed = {"actor": {"recompute": "full", "pack_tokens": 4096}, "rollout": {"tp": 2}}
    plan = priced(asked("nemo-rl", "megatron", fix=typed))
    actor, rollout = layouts(plan)
    assert (actor.recompute, actor.pack_tokens, rollout.tp) == ("full", 4096, 2)
    assert "activation_checkpointing" not in plan.assumed[0]
    assert "train_mb_tokens" not in plan.assumed[0]


def test_what_does_not_fit_by_its_default_stays_as_chosen() -> None:
    work = Workload(algorithm="grpo", model="llama-3.1-8b", prompts=64, samples=8)
    work = replace(
        work, reward=Reward(model=None, rules=Rules()), response_len=replace(work.response_len, value=8192)
    )
    plan = priced(asked("nemo-rl", "megatron", gpus=4, workload=work, fix={"actor": {"tp": 1, "pp": 1}}))
    actor, _ = layouts(plan)
    assert actor.recompute == "full"
    assert "activation_checkpointing" not in plan.assumed[0]
    assert "expert_parallel_size 1" in plan.assumed[0]


def test_plans_of_ours_are_as_searched() -> None:
    assert priced(asked("rlhfsim", "fsdp2")).assumed == ()


def test_defaults_are_given_up_one_after_the_other() -> None:
    assert list(planned._tried(["a", "b", "c", "d"])) == [
        ["a", "b", "c", "d"],
        ["b", "c", "d"],
        ["a", "c", "d"],
        ["c", "d"],
        ["d"],
    ]


@pytest.mark.parametrize(
    ("field", "fix", "said"),
    [
        ("actor.recompute", {"actor": {"recompute": "full"}}, True),
        ("actor.pack_tokens", {"actor": {"micro_batch": 2}}, True),
        ("rollout.ep", {"actor": {"ep": 8}}, False),
        ("weight_path", {"actor": {"ep": 8}}, False),
    ],
)
def test_a_field_is_left_open_unless_its_role_says_it(field: str, fix: dict[str, Any], said: bool) -> None:
    assert planned._said(field, asked("nemo-rl", "megatron", fix=fix)) == said
