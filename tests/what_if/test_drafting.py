"""Speculative decoding whose acceptance drifts: when a draft pays, and what training it costs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhfsim.errors import RlhfsimError
from rlhfsim.memory.role_bytes import role_memory
from rlhfsim.plan import Plan
from rlhfsim.present.answers.long_run import long_run_page
from rlhfsim.present.reproduce import as_option
from rlhfsim.present.verdict_lines import drafts
from rlhfsim.search.request import Request
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.hardware.profiles import node_group
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.drafts import training_work
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.layout_columns import columns_of
from rlhfsim.specs.placement.placement import Placement, ResourcePool, RolePlacement, RolloutPlacement
from rlhfsim.specs.placement.speculation import Speculation
from rlhfsim.specs.workload.lengths import LogNormal
from rlhfsim.specs.workload.workload import Reward, Rules, Workload
from rlhfsim.what_if.drafting import PUBLISHED, WORTH, stops_paying, would_draft
from rlhfsim.what_if.engine import variants
from rlhfsim.what_if.estimate import estimate
from rlhfsim.what_if.long_run.document import LengthPoint, LengthStage, LongRun, curve_of
from rlhfsim.what_if.long_run.outlook import run_odds
from rlhfsim.what_if.long_run.replanning import planned_run

EAGLE = Speculation(method="eagle", draft_tokens=3, acceptance=0.62)
WORK = Workload(
    algorithm="grpo",
    model="qwen3-8b",
    prompts=32,
    samples=8,
    kl=False,
    reward=Reward(model=None, rules=Rules()),
    response_len=LogNormal(mean=4000, sigma=0.6, max=12000),
)
CLUSTER = Cluster(node_groups=(node_group("h100", 8),), framework="nemo-rl")


def asked(speculation: Speculation | None, framework: str = "nemo-rl") -> Request:
    work = replace(WORK, speculation=speculation)
    return Request(cluster=CLUSTER, workload=work, backend="fsdp2", framework=framework)


def drafted(speculation: Speculation | None) -> Plan:
    """The same layouts with a draft, or none."""
    rollout = RolloutLayout(dp=8, speculation=speculation, memory_utilization=0.55)
    placement = Placement(
        pools=(ResourcePool(name="all", start=0, gpus=8),),
        rollout=RolloutPlacement(pool="all", layout=rollout, sleep=2),
        actor=RolePlacement(pool="all", layout=Layout(dp=8, zero=3), offload_between=True),
        weight_path="ipc",
        backend="fsdp2",
    )
    return estimate(placement, replace(WORK, speculation=speculation), CLUSTER)


def test_acceptance_drifts_until_the_draft_is_trained() -> None:
    falling = replace(EAGLE, drift=-0.001, age=120)
    assert falling.now(0.62) == pytest.approx(0.5)
    assert falling.tokens_per_step == pytest.approx(1.875)
    assert replace(falling, age=5000).tokens_per_step == 1
    assert replace(falling, drift=0.1).tokens_per_step == 4
    assert replace(falling, trained=True).tokens_per_step == EAGLE.tokens_per_step


def test_the_range_of_the_acceptance_widens_generation_alone() -> None:
    ranged = replace(EAGLE, low=0.5, high=0.7)
    assert ranged.spread == (pytest.approx(2.2428 / 2.533, rel=1e-3), pytest.approx(2.2428 / 1.875, rel=1e-3))
    sharp, wide = (drafted(x).prediction for x in (EAGLE, ranged))
    assert sharp.step_s == wide.step_s
    for before, after in zip(sharp.phases, wide.phases, strict=True):
        changed = after.name == "actor.generate"
        assert (after.high_s > 1.1 * before.high_s) == changed
        assert (after.low_s < 0.95 * before.low_s) == changed


@pytest.mark.parametrize("wrong", [{"low": 0.7}, {"high": 0.5}, {"method": "ngram", "trained": True}])
def test_a_range_without_its_value_and_an_untrainable_draft_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(RlhfsimError):
        replace(EAGLE, **wrong)


def test_training_an_mtp_layer_costs_little() -> None:
    """MiMo-7B in slime: 148 s with, 143 s without (Awesome-ML-SYS-Tutorial, rlhf/slime/spec); old log-probs,
    which train nothing, are in both."""
    # MiMo-7B: h 4096, ffn 11008, 36 layers, 32 and 8 heads of 128, vocabulary 151,680
    layer = 4096 * (32 + 2 * 8 + 32) * 128 + 3 * 4096 * 11008
    head = 151_680 * 4096
    model = replace(resolve_model("qwen2.5-7b"), num_layers=36)
    shape = replace(
        model,
        hidden=4096,
        ffn=11008,
        vocab=151_680,
        attention=replace(model.attention, num_heads=32, num_kv_heads=8, head_dim=128),
    )
    mtp = Speculation(method="mtp", draft_tokens=1, acceptance=0.8, trained=True)
    work = training_work(shape, mtp)
    by_hand = (3 * (layer + 2 * 4096**2) + 2 * head) / (3 * (36 * layer + head))
    assert work == pytest.approx(by_hand, rel=1e-3)
    assert 148 / 143 - 1 < work < 0.1
    assert training_work(shape, replace(mtp, trained=False)) == 0
    assert training_work(shape, None) == 0
    eagle = replace(EAGLE, trained=True)
    assert training_work(shape, replace(eagle, draft_tokens=6)) == 2 * training_work(shape, eagle)


def test_the_trainer_holds_and_sends_what_it_trains() -> None:
    plain, trained = (drafted(x) for x in (EAGLE, replace(EAGLE, trained=True)))
    before, after = ({x.name: x.seconds for x in p.prediction.phases} for p in (plain, trained))
    work = training_work(resolve_model("qwen3-8b"), replace(EAGLE, trained=True))
    assert after["actor.train"] / before["actor.train"] == pytest.approx(1 + work, rel=0.05)
    assert 1.02 < after["actor.sync"] / before["actor.sync"] < 1.08
    assert after["actor.generate"] == before["actor.generate"]
    held = [
        role_memory(
            models_of(p.workload), "actor", p.workload, backend="fsdp2", profile=node_group("h100", 8).profile
        ).each(columns_of([Layout(dp=8, zero=3)]), "only")
        for p in (plain, trained)
    ]
    own = 4096 * (32 + 2 * 8 + 32) * 128 + 3 * 4096 * 12288 + 3 * 4096**2 + 32_000 * 4096
    optimizer = float(np.max(held[1].states.optimizer) - np.max(held[0].states.optimizer))
    assert optimizer == pytest.approx(8 * own / 8, rel=0.01)


def test_a_draft_that_is_trained_competes_with_the_same_one_as_it_is() -> None:
    trained = replace(EAGLE, trained=True, drift=-0.001, age=300)
    works = variants(asked(trained))
    assert [w.speculation for w in works] == [trained, replace(trained, trained=False)]
    assert variants(asked(EAGLE)) == (asked(EAGLE).workload,)


def test_published_acceptances_are_named_where_they_would_save_a_tenth() -> None:
    plan, question = drafted(None), asked(None)
    found = would_draft(plan, question)
    assert found is not None
    assert found.fast_s < found.slow_s <= (1 - WORTH) * plan.prediction.step_s
    answer: Any = SimpleNamespace(request=question)
    line = drafts(plan, answer)
    assert line is not None
    assert line.endswith(f"--speculation {as_option(PUBLISHED)}")
    assert would_draft(drafted(EAGLE), asked(EAGLE)) is None
    assert would_draft(plan, replace(question, framework="openrlhf", backend="deepspeed")) is None
    slower = replace(plan.prediction, step_s=plan.prediction.step_s * 20)
    assert would_draft(replace(plan, prediction=slower), question) is None


def test_a_plan_says_at_which_acceptance_its_draft_stops_to_pay() -> None:
    falling = replace(EAGLE, drift=-0.001)
    found = stops_paying(drafted(falling), asked(falling))
    assert found is not None
    assert 0.05 < found.acceptance < 0.5
    assert found.steps == pytest.approx((0.62 - found.acceptance) / 0.001)
    at, below = (
        drafted(replace(EAGLE, acceptance=a)).prediction.step_s
        for a in (found.acceptance + 0.02, found.acceptance - 0.02)
    )
    plain = drafted(None).prediction.step_s
    assert at < plain < below
    assert stops_paying(drafted(None), asked(None)) is None
    fixed = stops_paying(drafted(EAGLE), asked(EAGLE))
    assert fixed is not None
    assert fixed.steps is None


def test_a_run_leaves_a_draft_that_stopped_to_pay() -> None:
    falling = replace(EAGLE, drift=-0.002)
    run = LongRun(steps=2000, lengths=(LengthPoint(step=0, mean=4000),), stages=(LengthStage(max=12000),))
    question = replace(asked(falling), fix={"rollout": {"tp": 1}})
    found = planned_run(question, run, curve_of(run, None))  # type: ignore[arg-type]
    kinds = [s.plan.placement.rollout.layout.speculation is not None for s in found.stretches]  # type: ignore[union-attr]
    assert kinds[0]
    assert not kinds[-1]
    assert kinds == sorted(kinds, reverse=True)
    said = [
        line
        for line in long_run_page(found, *run_odds(found, (), 0.8)).sections[0].blocks[0].items
        if "steps" in line
    ]  # type: ignore[union-attr]
    assert len(said) == 1 + len(found.changes)  # a draft that only ages is no other plan
    ages = [x.age for s in found.stretches if (x := s.plan.placement.rollout.layout.speculation)]  # type: ignore[union-attr]
    assert ages == sorted(ages)
    assert found.fixed_s is None or found.work_s <= found.fixed_s
