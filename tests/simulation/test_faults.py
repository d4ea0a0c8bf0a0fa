"""Goodput under failures: the simulation against closed forms and the best checkpoint interval."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlhfsim.errors import RlhfsimError
from rlhfsim.simulation.faults import Faults, daly_interval, first_order, simulate_faults, young_interval
from tests.oracles import best_interval, exact_goodput

# 64 nodes that fail every 40,000 min: the job fails every 625 min = 37,500 s
JOB = Faults(node_mtbf=2.4e6, nodes=64, restart=600.0, checkpoint=60.0, interval=2000.0)
FAR = 1e30


def test_without_failures_only_checkpoints_cost() -> None:
    made = simulate_faults(replace(JOB, node_mtbf=FAR), 20_000.0)
    # ten pieces of 2000 s, a checkpoint after each but the last
    assert made.seconds == pytest.approx(20_000 + 9 * 60)
    assert (made.failures, made.lost, made.restarting) == (0, 0.0, 0.0)
    assert made.checkpointing == pytest.approx(540)


def test_time_is_work_checkpoints_losses_and_restarts() -> None:
    made = simulate_faults(JOB, 2e6, seed=3)
    assert made.failures > 10
    assert made.seconds == pytest.approx(2e6 + made.checkpointing + made.lost + made.restarting)


def test_one_seed_gives_one_result() -> None:
    assert simulate_faults(JOB, 1e6, seed=5) == simulate_faults(JOB, 1e6, seed=5)
    assert simulate_faults(JOB, 1e6, seed=5) != simulate_faults(JOB, 1e6, seed=6)


def test_the_first_order_worked_by_hand() -> None:
    # 1 / (1 + 60/2000 + (1000 + 600)/37500) = 1 / (1 + 0.03 + 0.042667)
    assert first_order(JOB) == pytest.approx(0.932256, abs=1e-6)


@pytest.mark.parametrize("nodes", [8, 32, 64])
def test_simulated_goodput_is_the_first_order_where_intervals_are_short(nodes: int) -> None:
    job = replace(JOB, nodes=nodes)
    made = np.mean([simulate_faults(job, 2e7 / nodes, seed=s).goodput for s in range(8)])
    assert first_order(job) == pytest.approx(exact_goodput(job), rel=4e-3)
    assert made == pytest.approx(first_order(job), rel=6e-3)


def test_simulated_goodput_is_the_exact_form_where_the_first_order_fails() -> None:
    job = replace(JOB, nodes=1000)  # a failure every 2400 s, an interval of 2000 s
    made = np.mean([simulate_faults(job, 1e6, seed=s).goodput for s in range(8)])
    assert made == pytest.approx(exact_goodput(job), rel=0.02)
    assert first_order(job) > 1.1 * exact_goodput(job)


def test_intervals_of_young_and_daly_worked_by_hand() -> None:
    # sqrt(2 60 37500) = 2121.32;  x = 60 / 75000 = 8e-4
    assert young_interval(JOB) == pytest.approx(2121.320, abs=1e-3)
    assert daly_interval(JOB) == pytest.approx(2121.320 * (1 + 0.0282843 / 3 + 8e-4 / 9) - 60, abs=1e-2)
    assert daly_interval(replace(JOB, checkpoint=80_000.0)) == JOB.mtbf


@pytest.mark.parametrize("nodes", [64, 500])
def test_the_best_simulated_interval_is_near_dalys(nodes: int) -> None:
    job = replace(JOB, nodes=nodes)
    best = best_interval(job, 400 * job.mtbf, seed=1)
    daly = replace(job, interval=daly_interval(job))
    assert daly.interval / 2 <= best <= 2 * daly.interval
    # the optimum is flat: what counts is that Daly's interval loses nothing against it
    assert exact_goodput(daly) >= 0.995 * exact_goodput(replace(job, interval=best))
    grid = daly.interval * np.geomspace(1 / 4, 4, 201)
    assert exact_goodput(daly) >= 0.9999 * max(exact_goodput(replace(job, interval=float(d))) for d in grid)


def test_more_nodes_never_raise_goodput() -> None:
    found = [first_order(replace(JOB, nodes=n)) for n in (1, 8, 64, 512)]
    assert found == sorted(found, reverse=True)
    found = [exact_goodput(replace(JOB, nodes=n)) for n in (1, 8, 64, 512)]
    assert found == sorted(found, reverse=True)


def test_an_interval_of_nothing_is_refused() -> None:
    with pytest.raises(RlhfsimError, match="interval"):
        replace(JOB, interval=0.0)
