"""The answer as a whole: ranked, explained, and obedient to what the user fixes and forbids."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

import rlhfsim
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import Plan
from rlhfsim.search.request import Limit, Request, second_pool_for_rollout
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.workload.lengths import LogNormal
from rlhfsim.specs.workload.workload import Reward, Rules, Workload
from rlhfsim.what_if.design import Design

GRPO = Workload(
    algorithm="grpo",
    model="qwen3-4b",
    prompts=64,
    samples=8,
    reward=Reward(rules=Rules()),
    response_len=LogNormal(mean=800, max=4096),
)


@cache
def answer(**changes: object) -> Design:
    given: dict[str, object] = {"cluster": cluster(16), "workload": Workload(model="8b", prompts=256)}
    changes = dict(changes)
    explain, left_out = (bool(changes.pop(name, False)) for name in ("explain", "left_out"))
    request = Request(**(given | changes))  # type: ignore[arg-type]
    return rlhfsim.design(request, explain=explain, left_out=left_out)


@cache
def cluster(gpus: int, gpu: str = "h100") -> Cluster:
    return rlhfsim.parse_cluster(gpus, gpu)


def chosen(design: Design) -> Plan:
    assert design.chosen is not None
    return design.chosen


def test_the_chosen_plan_is_the_fastest_and_fits() -> None:
    design = answer()
    best = chosen(design).prediction
    assert all(best.step_s <= plan.prediction.step_s for plan in design.runners_up)
    for plan in (chosen(design), *design.runners_up):
        assert plan.prediction.peak_memory_bytes <= plan.prediction.capacity_bytes
        assert plan.prediction.probability_out_of_memory <= 0.1


def test_the_answer_holds_more_than_one_architecture_and_says_why() -> None:
    design = answer(explain=True)
    assert len({plan.architecture for plan in (chosen(design), *design.runners_up)}) >= 3
    assert len(design.reasons) >= 3


def test_what_the_choices_left_out_would_bring_is_told_when_asked() -> None:
    assert not answer(explain=True).gains
    design = answer(left_out=True)
    assert {gain.name for gain in design.gains} >= {
        "async",
        "lora",
        "fp8",
        "adam8bit",
        "rollout-logprobs",
        "megatron",
    }


def test_numerics_stay_the_algorithms_unless_more_is_allowed() -> None:
    plan = chosen(answer())
    assert plan.placement.schedule.staleness == 0
    assert plan.workload.lora is None
    assert plan.workload.optimizer == "adam"
    assert plan.workload.old_logprobs == "recompute"


def test_an_allowed_switch_is_never_worse() -> None:
    free = chosen(answer(allow=frozenset({"rollout-logprobs"})))
    assert free.workload.old_logprobs == "rollout"
    assert free.prediction.step_s < chosen(answer()).prediction.step_s


def test_the_gain_of_a_switch_is_what_allowing_it_brings_on_the_same_pools() -> None:
    gain = next(g for g in answer(left_out=True).gains if g.name == "rollout-logprobs")
    assert gain.seconds == pytest.approx(
        chosen(answer(allow=frozenset({"rollout-logprobs"}))).prediction.step_s, rel=0.02
    )


def test_async_competes_only_when_allowed_and_keeps_its_staleness_bound() -> None:
    assert not any(p.architecture == "async" for p in (chosen(answer()), *answer().runners_up))
    design = answer(allow=frozenset({"async"}), max_staleness=1)
    stale = [p.placement.schedule.staleness for p in (chosen(design), *design.runners_up)]
    assert max(stale) == 1


def test_what_is_fixed_is_kept_and_what_is_forbidden_is_absent() -> None:
    request = Request(
        cluster=cluster(16),
        workload=Workload(model="8b", prompts=256),
        fix={"rollout": {"tp": 2}},
        forbid=frozenset({"naive", "offload"}),
    )
    design = rlhfsim.design(request, explain=False)
    for plan in (chosen(design), *design.runners_up):
        assert plan.placement.rollout is not None
        assert plan.placement.rollout.layout.tp == 2
        assert plan.architecture != "naive"
        assert not plan.placement.actor.offload_between
        assert plan.placement.actor.layout.offload_optimizer == "none"


def test_every_rank_has_its_own_gpu_and_every_gpu_of_a_pool_is_used() -> None:
    plan = chosen(answer())
    for role in plan.gpu_map:
        places = list(zip(role.nodes, role.gpus, strict=True))
        assert len(set(places)) == len(places) == 16
        assert set(role.nodes) == {0, 1}


def test_nothing_fits_gives_no_plan_and_a_change_that_fits() -> None:
    small = rlhfsim.parse_cluster(1, "a100-40")
    design = rlhfsim.design(Request(cluster=small, workload=Workload(model="8b", prompts=64)))
    assert design.chosen is None
    assert design.remedy is not None
    assert "--" in design.remedy


@pytest.mark.parametrize(
    "algorithm", ["grpo", "dr-grpo", "rloo", "reinforce++", "dpo", "kto", "reward_model"]
)
def test_every_algorithm_gets_a_plan(algorithm: str) -> None:
    work = Workload(
        algorithm=algorithm, model="qwen3-4b", prompts=64, reward=Reward(model=None, rules=Rules())
    )  # type: ignore[arg-type]
    design = rlhfsim.design(Request(cluster=cluster(8), workload=work), explain=False, rivals=False)
    names = {phase.name for phase in chosen(design).prediction.phases}
    assert "actor.train" in names
    assert ("actor.generate" in names) == (algorithm not in ("dpo", "kto", "reward_model"))


def test_a_rollout_pool_of_other_gpus_is_used_for_the_rollout() -> None:
    mixed = rlhfsim.parse_cluster(8, "h100", rollout_gpu="l40s", rollout_gpus=8)
    free = Request(cluster=mixed, workload=GRPO)
    plan = chosen(rlhfsim.design(second_pool_for_rollout(free), explain=False, rivals=False))
    assert plan.placement.rollout is not None
    assert plan.placement.pool(plan.placement.rollout.pool).hardware == 1
    assert plan.placement.pool(plan.placement.actor.pool).hardware == 0
    anywhere = chosen(rlhfsim.design(free, explain=False, rivals=False))
    assert {p.hardware for p in anywhere.placement.pools} == {0, 1}
    assert anywhere.prediction.step_s <= plan.prediction.step_s


def test_memory_as_objective_finds_a_leaner_plan() -> None:
    small = Request(cluster=cluster(2), workload=replace(GRPO, model="qwen2.5-0.5b"))
    lean = chosen(rlhfsim.design(replace(small, objective="memory"), explain=False, rivals=False)).prediction
    fast = chosen(rlhfsim.design(small, explain=False, rivals=False)).prediction
    assert lean.peak_memory_bytes < fast.peak_memory_bytes
    assert lean.step_s >= fast.step_s


def test_unknown_switches_and_roles_are_refused_with_near_names() -> None:
    with pytest.raises(RlhfsimError, match="asinc"):
        Request(cluster=cluster(8), workload=GRPO, allow=frozenset({"asinc"}))
    with pytest.raises(RlhfsimError, match="actr"):
        Request(cluster=cluster(8), workload=GRPO, fix={"actr": {"tp": 2}})


@pytest.mark.parametrize("objective", ["tokens", "cost", "energy"])
def test_money_energy_and_tokens_are_time_on_a_cluster_that_is_rented_whole(objective: str) -> None:
    design = rlhfsim.design(
        Request(cluster=cluster(8), workload=GRPO, objective=objective),  # type: ignore[arg-type]
        explain=False,
        rivals=False,
    )
    fastest = rlhfsim.design(Request(cluster=cluster(8), workload=GRPO), explain=False, rivals=False)
    assert chosen(design).placement == chosen(fastest).placement


def test_the_lines_of_the_certificate_add_up_to_the_space() -> None:
    c = answer().certificate
    assert c.space == c.infeasible + c.dominated + c.bounded + c.simulated + c.unexplored
    assert c.simulated >= 1
    assert c.gap == 0


@pytest.mark.parametrize(
    ("role", "field", "relation", "value"),
    [
        ("actor", "tp", ">=", 2),
        ("actor", "micro_batch", "<=", 1),
        ("rollout", "gpus", "=", 8),
        ("actor", "offload_between", "=", True),
        ("critic", "residency", "=", "offloaded"),
        ("rollout", "sleep", "!=", 0),
        ("actor", "zero", "!=", 3),
    ],
)
def test_a_bound_on_a_field_of_a_role_is_kept(role: str, field: str, relation: str, value: int | str) -> None:
    limit = Limit(role=role, field=field, relation=relation, value=value)  # type: ignore[arg-type]
    plan = chosen(answer(limits=(limit,)))
    there = plan.placement.roles[role]
    if field == "gpus":
        held = plan.placement.pool(there.pool).gpus
    else:
        held = getattr(there if hasattr(there, field) else there.layout, field)
    assert limit.holds(held)


def test_a_weight_path_and_the_largest_pool_are_kept() -> None:
    plan = chosen(answer(weight_path="broadcast", max_gpus_per_role=8))
    assert plan.placement.weight_path == "broadcast"
    assert max(p.gpus for p in plan.placement.pools) == 8


def test_a_search_that_runs_out_of_time_says_what_it_left() -> None:
    c = answer(time_limit=1e-9).certificate
    assert c.unexplored > 0
    assert 0 < c.gap <= 1
    assert c.space == c.infeasible + c.dominated + c.bounded + c.simulated + c.unexplored


def test_the_same_request_gives_the_same_plan() -> None:
    first, second = (
        rlhfsim.design(Request(cluster=cluster(8), workload=GRPO), explain=False) for _ in range(2)
    )
    assert chosen(first).to_dict() == chosen(second).to_dict()
