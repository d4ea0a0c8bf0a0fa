"""The ledger as sums of vectors against the ledger itself, plan by plan."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhfsim.memory.components import ENGINE, NO_SYNC, ROLE, engine_sums, role_sums
from rlhfsim.memory.ledger import Ledger, ledger
from rlhfsim.memory.residency import engine_in_plan, peak_moments, role_in_plan, sync_bytes
from rlhfsim.memory.risk import Item, fitting, moments, probability_above, risky
from rlhfsim.memory.role_bytes import role_memory, software_of
from rlhfsim.memory.states import stages
from rlhfsim.search.fitting_options import _rows
from rlhfsim.search.layout_shapes import DEFAULTS, LayoutShape
from rlhfsim.search.options import HOME, Variants
from rlhfsim.search.role_rows import ALONE
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.placement.placement import Placement, Rest, RolePlacement
from rlhfsim.specs.workload.dataflow import dataflow
from rlhfsim.specs.workload.roles import ROLES
from rlhfsim.specs.workload.workload import Workload

PLANS = 8
"""Of each question."""


def pool_states(case: Any, placement: Placement, name: str) -> Any:
    """(moments, views, 3) bytes, mean and variance of a pool, summed over its roles."""
    request, work = case.request, case.request.workload
    profile = request.cluster.node_groups[placement.pool(name).hardware].profile
    group = [s for s in ROLES if s in placement.roles and placement.roles[s].pool == name]
    path, backend = placement.weight_path, request.backend
    software = software_of(placement.software, request.cluster.framework, backend)
    sync = NO_SYNC
    if {"actor", "rollout"} & set(group):
        shared = placement.rollout is not None and placement.rollout.pool == placement.actor.pool
        who = {"framework": request.cluster.framework, "shared": shared}
        sync = sync_bytes(case.models.actor, path, backend, work.lora, profile, **who)
    total: Any = 0.0
    for role in group:
        if role == "rollout":
            engine = engine_in_plan(case.models, placement, work, profile)
            with_actor = "actor" in group
            states = engine_sums(profile, np.array([engine], dtype=ENGINE), sync, with_actor=with_actor)
        else:
            layout = placement.roles[role].layout
            views = [
                role_in_plan(case.models, placement, work, profile, role, stage, software)
                for stage in stages(layout.pp)
            ]  # type: ignore[arg-type]
            rows = np.array([[views[0], views[-1]]], dtype=ROLE)
            states = role_sums(profile, rows, sync if role == "actor" else NO_SYNC)
        moments = peak_moments(dataflow(work), group, work)
        total = total + np.stack([states[m.of(role)][0] for m in moments])
    return total, profile.usable_memory.value


def on_gpus(case: Any, memory: Ledger) -> bool:
    """What the ledger says about GPU memory alone: host memory and the engine's start left out."""
    looked_at = (*memory.phases, *memory.other_stages)
    likely = all(p.probability_out_of_memory <= case.request.max_oom for p in looked_at)
    return likely and all(p.bytes <= p.capacity for p in memory.phases)


def features(placement: Placement) -> set[str]:
    """What the test must have met."""
    found = {placement.weight_path}
    for role in placement.roles.values():
        if isinstance(role, RolePlacement):
            found |= {"pipeline"} if role.layout.pp > 1 else set()
            found |= {role.residency, f"zero {role.layout.zero}"}
            found |= {"between"} if role.offload_between else set()
            found |= {"cpu"} if role.layout.offload_optimizer == "cpu" else set()
        else:
            found |= {f"sleep {role.sleep}"}
    return found


def test_sums_of_vectors_say_what_the_ledger_says(questions: Any) -> None:
    met: set[str] = set()
    answers: list[bool] = []
    for seed in range(1200, 1270):
        case = questions.drawn(seed, most=10**9)
        if case is None:
            continue
        rng = random.Random(seed)
        case = replace(case, request=replace(case.request, max_oom=rng.choice((0.02, 0.1, 0.5))))
        doubt = rng.choice((1.0, 1.5))
        for placement in questions.sample(case, rng, PLANS):
            memory = ledger(case.models, placement, case.request.workload, case.request.cluster, doubt=doubt)
            pools = [pool_states(case, placement, p.name) for p in placement.pools]
            fits = [fitting(state, usable, case.request.max_oom, doubt).all() for state, usable in pools]
            assert all(fits) == on_gpus(case, memory), (seed, placement)
            most = max(state[..., 0].max() for state, _ in pools)
            assert most == pytest.approx(max(p.bytes for p in memory.phases), rel=1e-12)
            answers.append(all(fits))
            met |= features(placement) | ({"adapters"} if case.request.workload.lora else set())
    assert 50 < sum(answers) < len(answers) - 50
    assert met >= {
        "none",
        "ipc",
        "reshard",
        "broadcast",
        "p2p",
        "host",
        "disk",
        "lora",
        "pipeline",
        "cpu",
        "between",
        "resident",
        "offloaded",
        "sleep 0",
        "sleep 1",
        "sleep 2",
        "zero 0",
        "zero 1",
        "zero 2",
        "zero 3",
        "adapters",
    }


def test_each_pool_peaks_where_its_ledger_does(questions: Any) -> None:
    for seed in range(1300, 1312):
        case = questions.drawn(seed, most=10**9)
        if case is None:
            continue
        for placement in questions.sample(case, random.Random(seed), 3):
            memory = ledger(case.models, placement, case.request.workload, case.request.cluster)
            for pool in placement.pools:
                state, _ = pool_states(case, placement, pool.name)
                most = max(p.bytes for p in memory.phases if p.pool == pool.name)
                assert state[..., 0].max() == pytest.approx(most, rel=1e-12)


@pytest.mark.parametrize("accepted", [0.01, 0.1, 0.3, 0.7])
def test_risk_of_many_sums_is_the_probability_of_each(accepted: float) -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        values = rng.uniform(1, 40, size=rng.integers(1, 6))
        items = [Item(value=v, low=v * 0.8, high=v * rng.uniform(1.0, 1.8)) for v in values]
        mean, variance = (sum(m) for m in zip(*map(moments, items), strict=True))
        found = risky(np.array(mean), np.array(variance), 60.0, accepted)
        assert bool(found) == (probability_above(items, 60.0) > accepted)


def test_an_empty_moment_is_not_risky() -> None:
    none = np.zeros((1, 2, 3))
    assert fitting(none, 1.0, 0.1).all()


def test_risk_grows_with_mean_and_variance_where_a_coefficient_is_known_within_a_factor_of_two() -> None:
    # a part that does not fit with the leanest roles to come is dropped: that needs this monotony
    mean, deviation = np.meshgrid(np.linspace(30, 90, 60), np.linspace(0.01, 12, 60), indexing="ij")
    for accepted in (0.001, 0.01, 0.1, 0.3):
        above = risky(mean, deviation**2, 80.0, accepted)
        assert 0 < above.mean() < 1
        assert (above[1:] >= above[:-1]).all()
        assert (above[:, 1:] >= above[:, :-1]).all()


@pytest.mark.parametrize(("accepted", "fits"), [(0.0, False), (1.0, True)])
def test_no_risk_and_any_risk_are_limits(accepted: float, *, fits: bool) -> None:
    near = np.array([[[0.99, 1.0, 0.01]]])
    assert fitting(near, 1.0, accepted).all() == fits


def test_a_reference_holds_its_own_weights_unless_it_is_swapped_in() -> None:
    """A framework that swaps offers both; each has its own bytes."""
    work = Workload(algorithm="grpo", model="qwen2.5-7b", prompts=8, samples=8)
    profile, layout = parse_cluster(8, "h100").node_groups[0].profile, Layout(tp=2, dp=4, zero=1)
    memory = role_memory(models_of(work), "reference", work, backend="megatron", profile=profile)
    both = [RolePlacement(pool=ALONE, layout=layout, residency=name) for name in ("swapped", "offloaded")]
    variants = Variants(HOME, lambda layout: tuple(Rest(x.residency, x.offload_between) for x in both))
    fields = {name: getattr(layout, name) for name in DEFAULTS if name != "micro_batch"}
    space: Any = SimpleNamespace(shapes=[LayoutShape(fields, [{"micro_batch": layout.micro_batch}])])
    rows, roles, owners = _rows(memory, [space], [variants], np.inf)
    assert list(roles) == both
    assert owners.tolist() == [0, 0]
    for row, role in zip(rows, roles, strict=True):
        expected = memory.of(role, "first").states
        assert float(row[0]["states"]["weights"]) == pytest.approx(expected.weights)
        assert float(row[0]["states"]["host"]) == pytest.approx(expected.host)
