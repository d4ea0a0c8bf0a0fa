"""The doctor on a job: what other keys would have saved in an imported run, and one whose log grows."""

from __future__ import annotations

from pathlib import Path

from rlhfsim.calibration.observation import Observation
from rlhfsim.calibration.watching.standing import Baseline
from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.configuration.configuration import configuration_named, configuration_names
from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.logs.framework import Framework
from rlhfsim.interchange.logs.imported import Imported, mapped_to
from rlhfsim.interchange.logs.records import Log
from rlhfsim.plan import Plan
from rlhfsim.run_folder import mapping
from rlhfsim.specs.loading import parse_json, read_text
from rlhfsim.what_if.doctor.case import Case, judged
from rlhfsim.what_if.doctor.diagnosis import Diagnosis, diagnose

IMPORT = "import.json"


def diagnose_run(run: Observation) -> Diagnosis | None:
    """The changes of keys that would have helped, with the measured lengths; None: not imported, or not said.

    Seconds are those of the plan: what a change saves of the measured step is in their proportion.
    """
    case = case_of(run)
    if case is None:
        return None
    try:
        return diagnose(case)
    except RlhfsimError:
        return None


def case_of(run: Observation) -> Case | None:
    """The configuration of an imported run on the GPUs and with the lengths that it had."""
    file = (run.folder or Path()) / IMPORT
    if run.folder is None or not file.is_file():
        return None
    data = mapping(parse_json(read_text(file), str(file)).data)
    values, framework = mapping(data.get("settings")), str(data.get("framework"))
    if not values or framework not in configuration_names():
        return None
    kinds = [hardware.profile for hardware in run.plan.hardware]
    return Case(
        configuration=configuration_named(framework),
        settings=FrameworkSettings(values, str(file)),
        gpu=kinds[0],
        rollout_gpu=kinds[1] if len(kinds) > 1 else None,
        prompt_tokens=run.prompt_tokens,
        response_tokens=run.response_tokens,
    )


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
