"""A framework does not run what is asked: one error that names the framework, the option and who runs it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress

from rlhfsim.errors import RlhfsimError
from rlhfsim.frameworks.runs import Lacks, Runs, frameworks
from rlhfsim.plan import Plan
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.model.presets import resolve_model

CODE = "not-run-by-framework"


def not_run(runs: Runs, lacking: Sequence[Lacks], takers: Sequence[str]) -> RlhfsimError:
    """The error; `takers`: options with which the same is run."""
    others = f"run by: {', '.join(takers)}" if takers else "no other framework here runs it"
    return RlhfsimError(
        CODE,
        f"{runs.title} does not run {'; '.join(lacks.what for lacks in lacking)}",
        help=f"{lacking[0].remedy}; {others}",
    )


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


def check_kind(model: ModelSpec, runs: Runs, *, generates: bool) -> None:
    """Refuse a model that a framework does not run, whatever the plan; `generates`: as a policy that does.

    Raises:
        RlhfsimError: its kind, or a kind of its layers, is not run.
    """
    if (lacks := runs.lacks_kinds(model, generates=generates)) is not None:
        others = [x.name for x in frameworks() if x.lacks_kinds(model, generates=generates) is None]
        raise not_run(runs, [lacks], [f"--framework {name}" for name in others])
