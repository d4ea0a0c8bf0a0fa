"""What the doctor says of the configuration of a job whose log is still written."""

from __future__ import annotations

from rlhfsim.calibration.watching.standing import Baseline
from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.logs.framework import Framework
from rlhfsim.interchange.logs.imported import Imported, mapped_to
from rlhfsim.interchange.logs.records import Log
from rlhfsim.plan import Plan
from rlhfsim.what_if.doctor.case import Case, judged


def baseline_of_log(run: Imported) -> Baseline:
    """The configuration of a job priced with the lengths that it has, and its risk as the doctor says it.

    Raises:
        RlhfsimError: it cannot exist.
    """
    groups = run.setup.cluster.node_groups
    case = Case(
        configuration=run.framework.configuration,
        settings=FrameworkSettings(run.configuration, run.settings.name),
        gpu=groups[0].profile.name,
        rollout_gpu=groups[1].profile.name if len(groups) > 1 else None,
        prompt_tokens=run.lengths.prompt,
        response_tokens=run.lengths.response,
        measured=run.lengths,
    )
    return Baseline(
        plan=judged(case.under({}), None).plan,
        mapped=run.mapped,
        engine_inside=run.framework.engine_inside(run.settings),
        said_by="the doctor on its configuration",
    )


def baseline_of_plan(plan: Plan, framework: Framework, log: Log, said_by: str) -> Baseline:
    """A plan that is given; its phases are those that the log times."""
    stale = plan.placement.schedule.asynchronous
    mapped = mapped_to(plan.workload, framework, log.names, stale=stale)
    return Baseline(plan=plan, mapped=mapped, said_by=said_by)
