"""What a run that goes on says about its profile and its plan, every few iterations (`what_if.replan`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rlhfsim.calibration.fit import Calibration, calibrate
from rlhfsim.calibration.observation import observe
from rlhfsim.calibration.profile_writer import write_profile
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import Plan
from rlhfsim.present.words import percent, plan_text
from rlhfsim.search.parallel import serial
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.trace import Trace
from rlhfsim.units import format
from rlhfsim.what_if.replan import Replanned, replanned
from rlhfsim.what_if.simplest import CLOSE

NAME = "calibrated"


class Replan:
    """What a run says about its profile, every few iterations."""

    def __init__(self, plan: Plan, name: str) -> None:
        """`name` is how the run is called in the calibrated profile."""
        self._plan, self._name = plan, name
        self._calibration: Calibration | None = None

    def look(self, trace: Trace, rows: Sequence[Mapping[str, float]]) -> str:
        """A line about the trace so far; what cannot be calibrated is said, and never ends a run."""
        try:
            steps = [{"step": i, **row} for i, row in enumerate(rows)]
            run = observe(self._plan, trace, name=self._name, rows=steps)
            profile = load_profile(self._plan.hardware[0].profile)
            self._calibration = calibrate([run], profile, errors=False)
            count = f"{run.steps} iteration{'s' * (run.steps != 1)}"
            with serial():  # a fork of the driver would inherit the threads of Ray
                answer = replanned(self._plan, run, self._calibration)
            return (
                f"recalibrated on {count}: {len(self._calibration.coefficients)} coefficients; "
                f"{self._verdict(answer)}"
            )
        except RlhfsimError as error:
            return f"not recalibrated: {error.message}"

    def _verdict(self, answer: Replanned) -> str:
        planned, now = self._plan.prediction.step_s, answer.current.prediction.step_s
        step = f"a step takes {_s(answer.measured_s)}, planned {_s(planned)}, now predicted {_s(now)}"
        if answer.best is None:
            return f"{step}; no other plan is {100 * CLOSE:.0f} % faster"
        p = answer.best.prediction
        interval = f"P10-P90 {_s(p.low_s)} to {_s(p.high_s)}"
        sure = f"faster with a probability of {percent(answer.probability)}"
        other = f"{plan_text(answer.best)}, {_s(p.step_s)} ({interval}), {sure}"
        if answer.better:
            return f"{step}; ANOTHER PLAN WOULD NOW BE BETTER: {other}"
        return f"{step}; no other plan is surely better (the best: {other})"

    def write(self, folder: Path) -> Path | None:
        """The last calibration as a new profile in the run's folder; None where there was none."""
        if self._calibration is None:
            return None
        taken = sum(1 for _ in folder.glob(f"{NAME}*.yaml"))
        out = folder / (f"{NAME}_{taken + 1}.yaml" if taken else f"{NAME}.yaml")
        write_profile(out, self._calibration)
        return out


def profile_line(out: Path | None) -> str:
    """Where the calibrated profile of a run lies."""
    if out is None:
        return "no calibrated profile: the run was never long enough to calibrate"
    return f"calibrated profile: {out}; plan with it: rlhfsim design --profile {out} ..."


def _s(seconds: float) -> str:
    return format(seconds, "s")
