"""A run against its plan: all that `rlhfsim compare` says."""

from __future__ import annotations

from pathlib import Path

from rlhfsim.calibration.comparison.gap import Gap, gap
from rlhfsim.calibration.comparison.memory import PhaseMemory, footprint, torch_counts
from rlhfsim.calibration.comparison.phases import Comparison, check_plan, compare
from rlhfsim.calibration.observation import Observation, read_run
from rlhfsim.frozen import frozen
from rlhfsim.plan import Plan, read_plan
from rlhfsim.run_folder import TRACE
from rlhfsim.trace import Trace, read_trace


@frozen
class SideBySide:
    """A plan, a run and what they come to."""

    plan: Plan
    run: Observation
    trace: Trace
    found: Comparison
    gap: Gap | None
    """None: no step was timed."""
    memory: tuple[PhaseMemory, ...]
    notes: tuple[str, ...]


def read(folder: Path, plan_file: Path | None = None) -> SideBySide:
    """Plan and run, compared.

    Raises:
        RlhfsimError: no run, a run of another plan, or one in which no step can be counted.
    """
    run = read_run(folder)
    plan = run.plan if plan_file is None else read_plan(plan_file, as_priced=True)
    notes = check_plan(plan, run)
    trace = read_trace(folder / TRACE)
    why = gap(plan, run, trace)
    return SideBySide(
        plan=plan,
        run=run,
        trace=trace,
        found=compare(plan, run, trace),
        gap=why,
        memory=(*footprint(plan, run, trace), *torch_counts(plan, run, trace)),
        notes=(*notes, *(why.notes if why else ()), *run.left_out),
    )
