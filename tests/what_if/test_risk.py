"""The joint draw against plain Monte Carlo through the pricer, its order, and what is asked of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import rlhfsim
from rlhfsim.api import cluster_of
from rlhfsim.kernels.cost import Cost
from rlhfsim.plan import Plan
from rlhfsim.present.answers.ranking import UNPROVEN, ranking
from rlhfsim.present.plan_words import cost_text
from rlhfsim.rollout.engine_step import _RESTS_ON
from rlhfsim.search.certificate import Certificate
from rlhfsim.search.request import Request
from rlhfsim.search.requirements import requirement
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.hardware.prices import market_price
from rlhfsim.specs.workload.lengths import LogNormal
from rlhfsim.step.iteration import Iteration
from rlhfsim.units import significant
from rlhfsim.what_if.design import Design
from rlhfsim.what_if.estimate import priced_placement
from rlhfsim.what_if.risk.choice import likeliest
from rlhfsim.what_if.risk.odds import money_of_step, odds, probability, quantiles
from rlhfsim.what_if.risk.run import Outlook
from rlhfsim.what_if.risk.step import StepLaw, law_of, normals, probability_faster, two_sided

GPUS = 2
"""As the plan of the fixture."""
KERNELS = set(_RESTS_ON.values())
"""Their parts hold a prior of the kernel curves, which no coefficient draws."""


def cluster() -> Cluster:
    return rlhfsim.parse_cluster(GPUS, "h100")


def known(step: Iteration, names: set[str]) -> Cost:
    """The cost with the intervals of these coefficients alone."""
    return Cost(
        parts=tuple(
            p._replace(spread=p.spread if p.rests_on in names else (1.0, 1.0)) for p in step.cost.parts
        )
    )


def most(name: str) -> float:
    """The largest value that a profile takes."""
    shares, overlaps = (
        name.endswith(("_efficiency", "_fraction", "_share", "_write")),
        name.startswith("overlap"),
    )
    return 1.2 if shares else 1.0 if overlaps else np.inf


def test_the_law_agrees_with_the_pricer_run_once_for_every_draw_of_its_coefficients(plan: Plan) -> None:
    here = replace(cluster(), framework=plan.framework)
    step = priced_placement(plan.placement, plan.workload, here).iteration
    group = here.node_group
    uncertain = {
        n: c
        for n, c in group.profile.coefficients.items()
        if n in step.cost.rests_on and c.low < c.high and n not in KERNELS
    }
    assert len(uncertain) > 5
    cost = known(step, set(uncertain))
    low, high = cost.interval
    alone = replace(plan, prediction=replace(plan.prediction, step_s=step.seconds, low_s=low, high_s=high))
    law = replace(law_of(alone, cost), low=step.seconds, high=step.seconds).chain()  # no discrepancy
    priced = []
    for i in range(400):
        drawn = {
            n: replace(c, value=v, low=min(c.low, v), high=max(c.high, v))
            for n, c in uncertain.items()
            for v in [min(float(two_sided(c.value, c.low, c.high, normals(n, 8)[i : i + 1])[0]), most(n))]
        }
        profile = replace(group.profile, coefficients={**group.profile.coefficients, **drawn})
        changed = replace(here, node_groups=(replace(group, profile=profile),))
        priced.append(priced_placement(plan.placement, plan.workload, changed).iteration.seconds)
    for x in np.quantile(priced, (0.1, 0.3, 0.5, 0.7, 0.9)):
        assert np.mean(law <= x) == pytest.approx(np.mean(np.array(priced) <= x), abs=0.06)


def test_the_draws_have_the_interval_that_is_printed_and_a_seed_gives_them_again(plan: Plan) -> None:
    p = plan.prediction
    step = priced_placement(
        plan.placement, plan.workload, replace(cluster(), framework=plan.framework)
    ).iteration
    for law in (law_of(plan), law_of(plan, step.cost)):
        low, middle, high = quantiles(law.draws())
        assert (low, middle, high) == pytest.approx((p.low_s, p.step_s * p.centre, p.high_s), rel=0.01)
        assert np.array_equal(law.draws(3), law.draws(3))
        assert not np.array_equal(law.draws(3), law.draws(4))


def test_the_sum_of_skewed_parts_lies_above_the_printed_step_by_a_few_percent_and_is_as_wide(
    plan: Plan,
) -> None:
    here = replace(cluster(), framework=plan.framework)
    law = law_of(plan, priced_placement(plan.placement, plan.workload, here).iteration.cost)
    low, middle, high = quantiles(law.chain())
    assert law.seconds < middle < 1.25 * law.seconds
    assert high / low == pytest.approx(law.high / law.low, rel=0.25)


def test_what_two_plans_rest_on_cancels_and_what_one_adds_does_not() -> None:
    shared = {"hbm_efficiency": (10.0, 8.0, 13.0)}
    one = StepLaw(seconds=10, low=8, high=13, median=10, by_coefficient=shared)
    slower = StepLaw(
        seconds=10.2,
        low=8.16,
        high=13.26,
        median=10.2,
        by_coefficient={"hbm_efficiency": (10.2, 8.16, 13.26)},
    )
    other = StepLaw(
        seconds=10.2,
        low=8.16,
        high=13.26,
        median=10.2,
        by_coefficient={"nic_efficiency": (10.2, 8.16, 13.26)},
    )
    assert probability_faster(one, slower) == 1
    assert probability_faster(slower, one) == 0
    assert 0.5 < probability_faster(one, other) < 0.6
    assert probability_faster(one, one) == 0.5


def test_probabilities_grow_with_time_and_money_and_shrink_with_the_run(plan: Plan) -> None:
    look = Outlook(plan, cluster(), 1000)
    step, run = plan.prediction.step_s, 1000 * plan.prediction.step_s
    for text, values in (
        ("step_time<{}s", [0.5 * step, 0.8 * step, step, 1.2 * step, 3 * step]),
        ("time_of_run<{}s", [0.5 * run, 0.8 * run, run, 1.2 * run, 5 * run]),
        ("cost_of_run<{}", [1, 10, 20, 50, 1e5]),
        ("memory<{}GB", [1, 10, 30, 60, 79]),
    ):
        rising = [probability(requirement(text.format(v)), look) for v in values]
        assert rising == sorted(rising), text  # type: ignore[type-var]
        assert rising[0] < 0.1 < 0.9 < rising[-1], text  # type: ignore[operator]
    same = requirement(f"time_of_run<{run}s")
    longer = [probability(same, Outlook(plan, cluster(), n)) for n in (900, 1000, 1100, 1300)]
    assert longer == sorted(longer, reverse=True)  # type: ignore[type-var]


def test_failures_take_the_time_that_their_rate_says(plan: Plan) -> None:
    one, many = (replace(cluster(), node_groups=(replace(cluster().node_group, gpus=n),)) for n in (2, 16384))
    sure = replace(plan, prediction=replace(plan.prediction, step_s=60, low_s=60, high_s=60))
    calm, busy = (Outlook(sure, c, 10_000).run_s for c in (one, many))
    assert np.mean(calm) == pytest.approx(600_000, rel=0.01)
    # 16,384 GPUs: a failure every 3.1 h (2110 d / 16384), some 54 in 7 days, each with its restart
    assert 1.1 * 600_000 < np.mean(busy) < 1.4 * 600_000
    assert np.std(busy) > np.std(calm)


def test_a_plan_keeps_the_price_that_it_was_made_with_and_its_cost_a_range(plan: Plan) -> None:
    spot = rlhfsim.parse_cluster(GPUS, "h100", price="spot")
    rented = rlhfsim.estimate(plan.placement, plan.workload, spot)
    price = rented.hardware[0].price
    assert price == market_price("h100_sxm", "spot")
    assert cluster_of(rented).node_group.profile.price == price
    low, middle, high = money_of_step(Outlook(rented, cluster_of(rented))) or (0.0, 0.0, 0.0)
    usd = rented.prediction.usd_per_step
    assert usd is not None
    assert low < usd < high
    centred = usd * rented.prediction.centre
    assert centred < middle < 1.1 * centred  # step and price are both skewed upwards
    assert f"P10-P90 {significant(low, 2)}-{significant(high, 2)}, " in cost_text(rented)


def test_all_together_is_no_likelier_than_each_and_what_is_certain_is_not_drawn(plan: Plan) -> None:
    step = plan.prediction.step_s
    asked = [requirement(t) for t in (f"step_time<{step}s", "cost_per_step<0.02", "memory<70GB", "oom<5%")]
    answer = odds(asked, Outlook(plan, cluster()))
    each = [v.probability for v in answer.verdicts]
    assert each[-1] is None
    assert answer.together <= min(p for p in [*each[:-1], answer.fits] if p is not None)
    drawn = Outlook(
        replace(plan, workload=replace(plan.workload, response_len=LogNormal(mean=1024, max=4096))),
        cluster(),
        1,
    )
    assert np.std(np.log(drawn.step_s)) > np.std(np.log(Outlook(plan, cluster(), 1).step_s))


def test_the_plan_that_most_likely_meets_what_is_asked_is_chosen_among_equal_work_near_the_fastest(
    plan: Plan,
) -> None:
    p = plan.prediction
    sure = replace(plan, prediction=replace(p, step_s=1.04 * p.step_s, low_s=p.step_s, high_s=1.1 * p.step_s))
    easier = replace(sure, workload=replace(plan.workload, samples=1))
    far = replace(sure, prediction=replace(sure.prediction, step_s=1.3 * p.step_s, high_s=1.3 * p.step_s))
    answer = Design(
        request=Request(cluster=cluster(), workload=plan.workload),
        chosen=plan,
        best=plan,
        runners_up=(easier, far, sure),
        certificate=Certificate(space=1, infeasible=0, dominated=0, bounded=0, simulated=1),
    )
    shown = ranking(replace(answer, gaps=(0.01, None, 0.2)))
    assert [UNPROVEN in str(row[1]) for row in shown.rows] == [False, False, True, True]
    due = [requirement(f"step_time<{1.15 * p.step_s}s")]
    assert likeliest(answer, due, None).chosen is sure
    assert likeliest(answer, [requirement(f"step_time<{10 * p.high_s}s")], None) == answer
