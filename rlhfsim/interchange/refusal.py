"""A plan held against what a framework runs."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import Plan
from rlhfsim.specs.frameworks.refusal import not_run
from rlhfsim.specs.frameworks.runs import Lacks, Runs, frameworks
from rlhfsim.specs.model.presets import resolve_model


def check_runs(plan: Plan, runs: Runs, vendors: Collection[str]) -> None:
    """Refuse a plan that a framework does not run, with everything that it lacks and who runs it.

    Raises:
        RlhfsimError: it does not.
    """
    if lacking := lacks_of(plan, runs, vendors):
        others = [x.name for x in frameworks() if not lacks_of(plan, x, vendors)]
        raise not_run(runs, lacking, [f"--framework {name}" for name in others])


def lacks_of(plan: Plan, runs: Runs, vendors: Collection[str]) -> list[Lacks]:
    """Everything in a plan that a framework does not run."""
    found = runs.of(plan.workload).lacks(
        plan.placement, plan.workload, plan.topology, one_node=plan.replicas_in_one_node, vendors=vendors
    )
    lacking = list(found)
    with suppress(RlhfsimError):  # the model's file is not on this machine
        policy = resolve_model(next(model.path for model in plan.models if model.role == "actor"))
        kinds = runs.lacks_kinds(policy, plan.placement.backend, generates=plan.workload.generates)
        lacking += [kinds] if kinds else []
    return lacking
