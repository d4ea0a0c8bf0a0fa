"""Rollouts on rented instances: the pace against instances drawn one event at a time, and limits by hand."""

from __future__ import annotations

from dataclasses import replace
from math import inf, log1p

import numpy as np
import pytest

from rlhfsim.errors import RlhfsimError
from rlhfsim.present.answers.pool import pool_page
from rlhfsim.search.parallel import serial
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.workload.workload import Reward, Rules, Workload
from rlhfsim.units import HOUR
from rlhfsim.what_if.risk.step import DRAWS
from rlhfsim.what_if.scenarios.designs import Designs
from rlhfsim.what_if.scenarios.workers import local
from rlhfsim.what_if.shared_pool.answer import PoolJobText, answered, priced_options
from rlhfsim.what_if.shared_pool.spot import SpotPace, SpotRollouts, check, pace

FOUR = SpotRollouts(instances=4, gpus=8, there=6 * HOUR, away=2 * HOUR)
TRAINS_S = 90.0
STEPS_S = {k: max(TRAINS_S, 240 / k) for k in range(1, 5)}
"""A trainer of 90 s behind a rollout that takes 240 s on one instance."""


def paced(spot: SpotRollouts, steps_s: dict[int, float], generate_s: float = 0.0) -> SpotPace:
    found = pace(spot, steps_s, generate_s)
    assert found is not None
    return found


def drawn_run_s(spot: SpotRollouts, steps_s: dict[int, float], steps: int, rng: np.random.Generator) -> float:
    """Seconds of a run, every loss and every return drawn."""
    there, done, now = int(rng.binomial(spot.instances, spot.available)), 0.0, 0.0
    while True:
        goes, comes = there / spot.there, (spot.instances - there) / spot.away
        wait = rng.exponential(1 / (goes + comes))
        rate = 1 / steps_s[there] if there else 0.0
        if done + rate * wait >= steps:
            return now + (steps - done) / rate
        done, now = done + rate * wait, now + wait
        there += 1 if rng.random() < comes / (goes + comes) else -1


def test_the_pace_and_its_spread_are_those_of_instances_drawn_one_by_one() -> None:
    rng, steps = np.random.default_rng(3), 20_000
    runs = [drawn_run_s(FOUR, STEPS_S, steps, rng) for _ in range(400)]
    found = paced(FOUR, STEPS_S)
    assert found.slower == pytest.approx(1.094, abs=0.001)
    assert steps / found.per_s == pytest.approx(np.mean(runs), rel=0.01)
    spread = np.sqrt(log1p(found.variance / (found.per_s * steps)))
    assert spread == pytest.approx(np.std(np.log(runs)), rel=0.12)
    slowed = found.slowed(np.full(DRAWS, steps * STEPS_S[4]), steps, "a")
    assert np.mean(slowed) == pytest.approx(steps / found.per_s, rel=1e-3)
    assert np.std(np.log(slowed)) == pytest.approx(spread, rel=0.01)


def test_one_instance_makes_steps_while_it_is_there() -> None:
    """Two states: rate 1/t times a; variance 2 a (1 - a) / (1/U + 1/D) of a telegraph signal."""
    one = SpotRollouts(instances=1, gpus=1, there=3 * HOUR, away=HOUR)
    found = paced(one, {1: 100.0})
    assert found.slower == pytest.approx(1 / 0.75)
    expected = 2 * 0.75 * 0.25 / (1 / (3 * HOUR) + 1 / HOUR) / 100**2
    assert found.variance == pytest.approx(expected)


def test_instances_that_stay_change_nothing_and_those_that_go_at_once_do_nothing() -> None:
    stays = replace(FOUR, there=1e6 * HOUR)
    assert paced(stays, STEPS_S).slower == pytest.approx(1, abs=1e-4)
    assert pace(FOUR, STEPS_S, 13 * HOUR) is None
    lost = paced(FOUR, STEPS_S, 1.2 * HOUR)
    assert lost.per_s == pytest.approx(0.9 * paced(FOUR, STEPS_S).per_s)


def test_more_time_there_less_time_away_and_more_instances_are_never_slower() -> None:
    whole = [paced(replace(FOUR, there=u * HOUR), STEPS_S).per_s for u in (1, 3, 9, 27)]
    assert whole == sorted(whole)
    back = [paced(replace(FOUR, away=d * HOUR), STEPS_S).per_s for d in (4, 2, 1, 0.1)]
    assert back == sorted(back)
    rates = [
        paced(replace(FOUR, instances=n), {k: 240 / k for k in range(1, n + 1)}).per_s for n in (1, 2, 4)
    ]
    assert rates == pytest.approx([0.75 / 240, 2 * 0.75 / 240, 4 * 0.75 / 240])


def test_a_trainer_that_waits_for_nobody_feels_no_loss_but_the_last() -> None:
    bound = paced(FOUR, dict.fromkeys(range(1, 5), TRAINS_S))
    assert bound.slower == pytest.approx(1 / (1 - 0.25**4))


def test_instances_are_parts_of_a_node() -> None:
    with pytest.raises(RlhfsimError, match="spot instances of chat have 3 GPUs, a node 8"):
        check(replace(FOUR, gpus=3), 8, "chat")


def test_a_job_with_rented_rollouts_needs_fewer_gpus_of_the_pool() -> None:
    work = Workload(
        algorithm="grpo", model="0.5b", prompts=32, samples=8, reward=Reward(model=None, rules=Rules())
    )
    plain = PoolJobText(name="plain", workload=work, steps=200, deadline=48 * HOUR)
    spot = SpotRollouts(instances=2, gpus=2, there=4 * HOUR, away=HOUR)
    rents = replace(plain, name="rents", spot=spot)
    profile = load_profile("h100-sxm")
    with serial():
        options = priced_options([plain, rents], profile, 2, Designs(local(), None), 0.8)
    alone = [o for o in options if o.spot is None]
    assert {o.job for o in alone} == {"plain", "rents"}
    rented = [o for o in options if o.spot is not None]
    assert {(o.job, o.shape) for o in rented} == {("rents", None)}
    for o in rented:
        assert o.plan is not None
        rollout = o.plan.placement.rollout
        assert rollout is not None
        pool = o.plan.placement.pool(rollout.pool)
        assert (pool.hardware, pool.gpus) == (1, 4)
        assert o.plan.placement.pool(o.plan.placement.actor.pool).hardware == 0
        assert o.spot is not None
        assert o.spot.slower > 1 / (1 - 0.2**2)  # nothing is done while both are away
        assert 0 < o.worked_s < o.step_s < inf
        assert o.held_gpus == pytest.approx(o.gpus + 4 * 0.8)
    answer = answered([plain, rents], profile, 2, [o for o in options if o.job == "plain" or o.spot], 0.8)
    assert answer.plan is not None
    assert profile.price is not None
    assert answer.usd is not None
    used = next(o for m in answer.plan.modes for o in m.mode.options if o.job == "rents")
    rent = 3.2 * used.spot_price * float(np.median(used.drawn_s)) / HOUR
    pool_usd = 2 * profile.price.value * answer.plan.makespan_s / HOUR
    assert answer.usd == pytest.approx(pool_usd + rent, rel=1e-3)
    assert 0 < answer.goodput < 1
    page = pool_page(answer)
    assert any("Rents generates on spot instances, each there 80 % of the time" in x for x in page.sure)
    rows = {row["job"]: row for row in page.as_data["jobs"]}
    assert used.spot is not None
    assert (rows["rents"]["spot_gpus"], rows["rents"]["spot_slower"]) == (4, used.spot.slower)
    assert rows["plain"]["spot_gpus"] is None
