"""How often a slower learner would shorten a step, which the search takes for impossible where a rollout never
drains (`search.dominance`).

    python lab/benchmarks/slower_learners.py [--points 60]

Points are those of whatif_speed with async allowed, in runs from all over its grid. Each is searched; then of
every rollout that was simulated and whose bound is below the answer's step, the learner of one plan is slowed
down in four even steps up to that step. No plan of the space need have such a learner.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from process import pace
from whatif_speed import grid, request, spread

from rlhfsim.memory.residency import engine_in_plan
from rlhfsim.search.candidates import STEPS, WARMUP
from rlhfsim.search.request import Request
from rlhfsim.search.scope import Scope
from rlhfsim.simulation.asynchronous.priced_rollout import PLAIN, continuous_bound
from rlhfsim.simulation.asynchronous.run import SteadyRun, simulate
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.placement import Placement
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.step.calls import CallSetting
from rlhfsim.step.iteration import program
from rlhfsim.step.timetable import learner_steps, timetable
from rlhfsim.what_if.engine import Question, answers
from rlhfsim.what_if.usual_trainer import trained

POINTS, SLOWED = 1000, 4
SHORTER = 1e-3
"""Share of the step from which on another one is shorter."""


def main() -> None:
    """Print the shortest step with a slower learner, point by point."""
    parser = argparse.ArgumentParser(description="Steps that a slower learner would shorten")
    parser.add_argument("--points", type=int, default=60, help="about so many of them")
    points = spread(grid(POINTS, "async"), parser.parse_args().points)
    print(pace())
    found: dict[bool, list[float]] = {True: [], False: []}
    for point in points:
        best_s, shortest_s = searched(trained(request(point)))
        found[isinstance(point.response, Fixed)].append(shortest_s / best_s - 1)
        print(f"{best_s:9.2f} s {shortest_s / best_s - 1:+7.1%}  {point}")
    for fixed, changes in found.items():
        shorter = [change for change in changes if change < -SHORTER]
        kind = "fixed" if fixed else "drawn"
        most = f", by up to {-min(shorter):.1%}" if shorter else ""
        print(f"{kind} lengths: {len(shorter)} of {len(changes)} shorter{most}")


def searched(asked: Request) -> tuple[float, float]:
    """Seconds of the answer's step, and of the shortest with a slower learner, where that is shorter."""
    [(_, result)] = answers(Question(request=asked, scope=Scope()))
    assert result.best is not None
    best_s, plans = result.best.seconds, dict[object, Placement]()
    for plan in result.search.steps:
        if plan.schedule.continuous and plan.rollout is not None:
            plans.setdefault((plan.rollout, plan.pool(plan.rollout.pool).gpus, plan.schedule), plan)
    slowed = (seconds for plan in plans.values() for seconds in _slowed(asked, plan, best_s))
    return best_s, min(slowed, default=best_s)


def _slowed(asked: Request, plan: Placement, best_s: float) -> Iterator[float]:
    """Seconds of the plan's step with slower learners, none of which takes as long as the best step."""
    models, work, cluster = models_of(asked.workload), asked.workload, asked.cluster
    setting = CallSetting(models=models, placement=plan, workload=work, cluster=cluster)
    assert plan.rollout is not None
    profile = cluster.node_groups[plan.pool(plan.rollout.pool).hardware].profile
    held = engine_in_plan(models, plan, work, profile).kv_tokens
    priced = program(setting, held)
    steps = learner_steps(priced.steps)
    learner_s = max(call.end for call in timetable(steps, PLAIN)[0])
    if continuous_bound(setting, held) >= best_s or learner_s >= best_s:
        return
    run = SteadyRun(held, STEPS, WARMUP, work.seed, cutoff=best_s)
    for seconds in np.linspace(learner_s, best_s, SLOWED + 1, endpoint=False)[1:].tolist():
        slower = priced.longer({step.name: seconds / learner_s for step in steps})
        ran = simulate(setting, replace(run, priced=slower))
        yield best_s if ran.stopped else min(best_s, ran.iteration.seconds)


if __name__ == "__main__":
    main()
