"""The search against brute force: every plan of small random spaces is written out, held against the
ledger and simulated (`conftest`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from rlhfsim.search import rollout_layouts
from rlhfsim.search.branch_and_bound import Search, SearchResult, _gap
from rlhfsim.search.dominance import LENT_GAP
from rlhfsim.search.request import Limit, Request
from rlhfsim.search.scope import Scope
from rlhfsim.specs.frameworks.runs import ANY
from rlhfsim.specs.hardware.hardware import Cluster, NodeGroup
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.workload.lengths import LogNormal
from rlhfsim.specs.workload.workload import Reward, Rules, Workload

BLOCKS, EACH = 20, 10
"""Random questions: tests, and questions of one test."""
LENT = (3020, 3034, 3038)
"""Questions about trainers that lend their GPUs, some of whose plans fit and others not."""
REL = 1e-9
COMMON = Workload(
    algorithm="grpo",
    model="qwen2.5-0.5b",
    prompts=32,
    samples=4,
    reward=Reward(rules=Rules()),
    response_len=LogNormal(mean=200, max=1024),
)


def agree(case: Any, values: list[float | None], best: float | None, proof: Any) -> None:
    """One question: same optimum, same space, and a certificate that adds up and claims no more than is
    true."""
    fit = [v for v in values if v is not None]
    assert proof.space == len(values) == case.plans
    counts = proof.infeasible, proof.dominated, proof.bounded, proof.simulated
    assert min(counts) >= 0
    assert sum(counts) == proof.space
    assert proof.infeasible <= len(values) - len(fit)
    assert (proof.unexplored, proof.proven) == (0, True)
    assert proof.gap in (0.0, LENT_GAP)  # the second where GPUs are lent, and no other place
    assert proof.gap == 0.0 or "lend" in case.request.allow
    assert (best is None) == (not fit)
    assert (proof.simulated >= 1) == bool(fit)
    if best is not None:
        assert min(fit) * (1 - REL) <= best <= min(fit) * (1 + REL) / (1 - proof.gap)


def check(questions: Any, seeds: Iterable[int], *, stale: str | None = None) -> int:
    """Compares search and brute force; on how many of the questions something fits."""
    answered = 0
    for seed in seeds:
        case = questions.drawn(seed, stale=stale)
        if case is None:
            continue
        found = Search(case.request, case.models).run()
        best = None if found.best is None else questions.value(case, found.best)
        try:
            agree(case, questions.values(case), best, found.certificate)
        except AssertionError as error:
            raise AssertionError(f"question {seed}: {found.certificate}") from error
        answered += best is not None
    return answered


@pytest.mark.parametrize("block", range(BLOCKS))
def test_brute_force_finds_the_same_optimum(questions: Any, block: int) -> None:
    assert check(questions, range(block * EACH, (block + 1) * EACH)) > 0


def test_brute_force_agrees_on_a_space_of_thousands(questions: Any) -> None:
    case = questions.drawn(7, least=1000, most=2000)
    assert case is not None
    found = Search(case.request, case.models).run()
    best = None if found.best is None else questions.value(case, found.best)
    agree(case, questions.values(case), best, found.certificate)


def wide_question(framework: str, **limits: Any) -> Request:
    """A MoE that counts as large, on four nodes of two GPUs; only layouts of the rollout differ much."""
    cluster = Cluster(node_groups=(NodeGroup(profile=load_profile("h100"), gpus=8, gpus_per_node=2),))
    return Request(
        cluster=cluster,
        workload=replace(COMMON, model="olmoe-1b-7b", reference="none"),
        backend="megatron",
        framework=framework,
        fix={"actor": {"tp": 2, "pp": 1, "micro_batch": 4, "recompute": "full"}},
        forbid=frozenset({"streaming", "host", "disk", "naive", "smart", "partial-offload"}),
        limits=(
            Limit(
                role="actor",
                field="residency",
                relation="=",
                value="offloaded" if framework == "nemo-rl" else "resident",  # whose weights leave a refit
            ),
            Limit(role="actor", field="offload_optimizer", relation="=", value="none"),
            Limit(role="rollout", field="sleep", relation="!=", value=2 if framework == "nemo-rl" else 1),
            Limit(role="rollout", field="memory_utilization", relation="=", value=0.4),
        ),
        **limits,
    )


@pytest.mark.parametrize("framework", [ANY, "verl", "nemo-rl"])
def test_brute_force_agrees_on_replicas_of_several_nodes(
    questions: Any, framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_layouts, "LARGE_MOE", 1e9)
    request = wide_question(framework)
    models = models_of(request.workload)
    case = questions.case(request, models)
    rollouts = [p.rollout.layout for _, p in case.written_out() if p]
    assert max(x.tp for x in rollouts) == 8
    assert {x.attention_dp > 1 for x in rollouts} == ({True, False} if framework != "nemo-rl" else {False})
    assert any(x.pp > 1 for x in rollouts) == (framework != "verl")
    found = Search(request, models).run()
    best = None if found.best is None else questions.value(case, found.best)
    agree(case, questions.values(case), best, found.certificate)


@pytest.mark.parametrize("teachers", ["llama-3.2-1b", "qwen2.5-1.5b, llama-3.2-1b"])
def test_brute_force_agrees_where_a_larger_teacher_scores(questions: Any, teachers: str) -> None:
    """Whichever GPUs it has: its layout and its moves are its own."""
    taught = replace(COMMON, algorithm="distillation", reference=teachers, reward=Reward())
    request = Request(
        cluster=Cluster(node_groups=(NodeGroup(profile=load_profile("h100"), gpus=2, gpus_per_node=2),)),
        workload=taught,
        backend="fsdp2",
        framework=ANY,
        fix={"actor": {"micro_batch": 2, "recompute": "none"}, "rollout": {"tp": 1}},
        forbid=frozenset({"streaming", "offload", "disk", "host"}),
        limits=(
            Limit(role="actor", field="zero", relation="=", value=3),
            Limit(role="rollout", field="memory_utilization", relation="=", value=0.4),
            Limit(role="rollout", field="sleep", relation="=", value=0),
            Limit(role="reference", field="micro_batch", relation="<=", value=2),
        ),
    )
    models = models_of(taught)
    case = questions.case(request, models)
    assert {plan.role("reference") is not None for _, plan in case.written_out() if plan} == {True}
    found = Search(request, models).run()
    best = None if found.best is None else questions.value(case, found.best)
    agree(case, questions.values(case), best, found.certificate)


def apart_question() -> Request:
    """PPO of OpenRLHF, whose roles have one layout on whatever GPUs they are."""
    return Request(
        cluster=Cluster(node_groups=(NodeGroup(profile=load_profile("h100"), gpus=3, gpus_per_node=3),)),
        workload=replace(COMMON, algorithm="ppo", packing=False),
        framework="openrlhf",
        fix={"actor": {"recompute": "none"}, "reference": {"micro_batch": 2}},
        forbid=frozenset({"offload", "streaming", "naive", "smart"}),
        limits=(
            *(Limit(role=role, field="micro_batch", relation="<=", value=4) for role in ("actor", "critic")),
            Limit(role="rollout", field="memory_utilization", relation="=", value=0.4),
            Limit(role="rollout", field="sleep", relation="=", value=0),
            *(Limit(role=role, field="zero", relation="!=", value=1) for role in ("actor", "critic")),
            *(Limit(role=role, field="zero", relation="!=", value=2) for role in ("actor", "critic")),
            Limit(role="rollout", field="tp", relation="=", value=1),
        ),
    )


def test_brute_force_agrees_where_one_key_says_something_for_roles_of_several_pools(questions: Any) -> None:
    request = apart_question()
    models = models_of(request.workload)
    case = questions.case(request, models)
    plans = [plan for _, plan in case.written_out()]
    assert {len(plan.pools) for plan in plans if plan} == {1, 3}
    assert 0 < sum(plan is not None for plan in plans) < len(plans) / 2
    found = Search(request, models).run()
    best = None if found.best is None else questions.value(case, found.best)
    agree(case, questions.values(case), best, found.certificate)


# --- time limit -------------------------------------------------------------------------------------


def question(gpus: int = 8, **changes: Any) -> Request:
    cluster = Cluster(node_groups=(NodeGroup(profile=load_profile("h100"), gpus=gpus, gpus_per_node=gpus),))
    given: dict[str, Any] = {"cluster": cluster, "workload": COMMON}
    return Request(**(given | changes))


@cache
def free() -> SearchResult:
    """The question that several tests hold another one against."""
    return Search(question(), models_of(COMMON)).run()


def test_a_time_limit_leaves_plans_and_a_gap() -> None:
    request = question(time_limit=1e-9)
    stopped = Search(request, models_of(COMMON)).run()
    whole = free()
    proof = stopped.certificate
    assert stopped.best is not None
    assert whole.best is not None
    assert proof.unexplored > 0
    assert not proof.proven
    assert 0 < proof.gap < 1
    assert (
        proof.infeasible + proof.dominated + proof.bounded + proof.simulated + proof.unexplored == proof.space
    )
    assert proof.space == whole.certificate.space
    # the gap holds: no plan is better by more than that
    assert whole.best.seconds >= stopped.best.seconds * (1 - proof.gap) * (1 - REL)


# --- properties of the answer -------------------------------------------------------------------------


def test_a_fixed_choice_never_beats_the_free_one() -> None:
    narrow = Search(question(fix={"actor": {"tp": 2}}), models_of(COMMON)).run()
    wide = free()
    assert wide.best is not None
    assert narrow.best is not None
    assert wide.best.seconds <= narrow.best.seconds * (1 + REL)
    assert narrow.certificate.space < wide.certificate.space


def test_a_known_value_bounds_every_plan_that_does_not_beat_it() -> None:
    best = free().best
    assert best is not None
    again = Search(question(), models_of(COMMON), scope=Scope(below=best.seconds * 0.5)).run()
    assert again.best is None
    assert again.certificate.simulated == 0
    assert again.certificate.proven


def test_the_same_question_has_the_same_answer_and_certificate() -> None:
    one, two = (Search(question(4), models_of(COMMON)).run() for _ in range(2))
    assert one.best is not None
    assert two.best is not None
    assert one.best.placement == two.best.placement
    assert one.certificate == two.certificate


# --- asynchronous schedules -----------------------------------------------------------------------------


@pytest.mark.parametrize("block", range(2))
def test_brute_force_finds_the_same_asynchronous_optimum(questions: Any, block: int) -> None:
    assert check(questions, range(2010 + block * 5, 2015 + block * 5), stale="async") > 0


def test_brute_force_finds_the_same_optimum_of_trainers_that_lend(questions: Any) -> None:
    assert check(questions, LENT, stale="lend") == len(LENT)


def test_a_bound_that_rounds_above_the_best_plan_leaves_no_gap() -> None:
    """plan.json holds shares only: with a gap of -2e-16 no command read it again."""
    assert _gap(51.5 * (1 + 2**-52), 51.5) == 0
    assert _gap(40.0, 50.0) == pytest.approx(0.2)
