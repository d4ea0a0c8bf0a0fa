"""What is wrong with a running job, and the conditions at which a watch ends with an error."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping

from rlhfsim import units
from rlhfsim.calibration.comparison.phases import PhaseComparison
from rlhfsim.calibration.watching.standing import Standing
from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen

LIKELY = 0.5
"""Probability from which what may come is said."""
SLOW = 1.25
"""Times the P90 of the prediction; as the executor's own alarm."""
SLOWER = 1.3
"""Times the step at the start."""
CUT = 0.3
"""Share of responses that are cut; as the executor's own alarm."""
LARGE = 0.05
"""Share of the step below which a phase is not looked at."""
QUIET = 5.0
"""Times the median step without a new one."""
MEASURES: Mapping[str, tuple[str, Callable[[Standing], float | None]]] = {
    "oom-risk": ("probability that memory runs out in the steps ahead", lambda s: s.oom_risk),
    "step-ratio": ("measured over predicted step", lambda s: s.step.ratio),
    "phase-ratio": ("the same of the phase that is slowest against its prediction", lambda s: _slowest(s)),
    "slowdown": ("latest steps over those at the start", lambda s: s.slowdown),
    "clip-ratio": ("share of the responses that are cut", lambda s: s.clipped),
    "cap-risk": (
        "probability that the mean response reaches the length at which it is cut",
        lambda s: s.response.risk if s.response and s.response.limit else None,
    ),
    "not-finite": ("metrics of the newest step that are nan or infinite", lambda s: len(s.not_finite)),
    "quiet-s": ("seconds since the newest step", lambda s: s.quiet_s),
}
"""Name of a condition -> what it is, and its value; None: not known yet."""
_RELATIONS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}


@frozen
class Condition:
    """A bound of a measure, beyond which the watch ends with an error."""

    text: str
    name: str
    relation: str
    value: float

    def value_in(self, found: Standing) -> float | None:
        """The value that is beyond the bound; None: it is not, or not known."""
        value = MEASURES[self.name][1](found)
        beyond = value is not None and _RELATIONS[self.relation](value, self.value)
        return value if beyond else None


def condition(text: str) -> Condition:
    """`oom-risk>0.5` as a condition.

    Raises:
        RlhfsimError: no such measure, or no number.
    """
    match = re.fullmatch(r"\s*([\w-]+)\s*(>=|<=|>|<)\s*(\d+(?:\.\d*)?|\.\d+)\s*", text)
    if match is None or match[1] not in MEASURES:
        raise RlhfsimError(
            "bad-condition",
            f"--fail-on: {text[:40]!r} is no condition",
            help=f"as in oom-risk>0.5; names: {', '.join(MEASURES)}",
        )
    return Condition(text=text.strip(), name=match[1], relation=match[2], value=float(match[3]))


@frozen
class Cause:
    """Something that is wrong."""

    code: str
    """Stable name; a watch says each once."""
    what: str
    """What was measured against what."""
    advice: str
    """What to change."""


def causes(found: Standing) -> Iterator[Cause]:
    """All that is wrong with a run, what ends it first."""
    if found.not_finite:
        yield Cause(
            code="not-finite",
            what=f"{', '.join(found.not_finite[:4])} of step {found.logged} is no number",
            advice="go back to the last checkpoint, with a lower learning rate or tighter gradient clipping",
        )
    yield from _memory(found)
    yield from _lengths(found)
    if _beyond(found.step):
        yield Cause(
            code="slow-step",
            what=f"a step takes {_against(found.step)}",
            advice="look at the phases below; rlhfsim doctor names keys that help",
        )
    for phase in _large(found):
        if _beyond(phase):
            yield Cause(
                code=f"slow-{phase.name}",
                what=f"{phase.name} takes {_against(phase)}",
                advice="rlhfsim import-run and rlhfsim compare show where its time goes",
            )
    if found.slowdown is not None and found.slowdown > SLOWER:
        yield Cause(
            code="slower-than-before",
            what=f"the latest steps take {found.slowdown:.2f} times as long as those at the start",
            advice="longer responses, a full disk, or a GPU that throttles",
        )
    if found.quiet_s is not None and found.step.measured_s and found.quiet_s > QUIET * found.step.measured_s:
        yield Cause(
            code="quiet",
            what=f"no step for {units.format(found.quiet_s, 's')}, a step takes "
            f"{units.format(found.step.measured_s, 's')}",
            advice="is the job alive? An evaluation or a checkpoint may take as long",
        )


def _memory(found: Standing) -> Iterator[Cause]:
    memory = found.memory
    if memory is not None and memory.limit is not None and memory.now >= memory.limit:
        yield Cause(
            code="memory-full",
            what=f"{units.format(memory.now, 'byte')} are held, {units.format(memory.limit, 'byte')} fit",
            advice="the next longer batch may not: smaller micro-batches, a smaller share for the engine",
        )
    elif found.oom_risk is not None and found.oom_risk > LIKELY:
        if memory is not None and memory.reached is not None:
            low, middle, high = (found.logged + steps for steps in memory.reached)
            each = units.format(memory.each_step or 0.0, "byte")
            what = f"memory grows by {each} a step and runs out at step {middle:,} (P10-P90 {low:,}-{high:,})"
        else:
            what = f"the plan runs out of memory with {found.oom_risk:.0%}"
        yield Cause(
            code="oom-risk",
            what=what,
            advice="save a checkpoint before; smaller micro-batches; rlhfsim doctor names keys that save it",
        )


def _lengths(found: Standing) -> Iterator[Cause]:
    response = found.response
    if found.clipped is not None and found.clipped > CUT:
        yield Cause(
            code="responses-cut",
            what=f"{found.clipped:.0%} of the responses of the latest steps were cut",
            advice="raise the limit of responses, or reward short answers",
        )
    elif response is not None and response.risk > LIKELY and response.reached is not None:
        low, middle, high = (found.logged + steps for steps in response.reached)
        yield Cause(
            code="lengths-grow",
            what=f"responses grow by {response.each_step or 0.0:,.1f} tokens a step; their mean reaches the "
            f"limit of {response.limit:,.0f} at step {middle:,} (P10-P90 {low:,}-{high:,})",
            advice="raise the limit while memory allows, or reward short answers",
        )


def _large(found: Standing) -> list[PhaseComparison]:
    """Phases that matter, the one with the largest loss first."""
    step = found.step.measured_s or 0.0
    large = [p for p in found.phases if (p.measured_s or 0.0) >= LARGE * step]
    return sorted(large, key=lambda p: (p.predicted_s or 0.0) - (p.measured_s or 0.0))


def _slowest(found: Standing) -> float | None:
    return max((p.ratio for p in _large(found) if p.ratio is not None), default=None)


def _beyond(row: PhaseComparison) -> bool:
    return row.measured_s is not None and row.high_s is not None and row.measured_s > SLOW * row.high_s


def _against(row: PhaseComparison) -> str:
    """`61 s, predicted 40 s (32 s to 48 s)`."""
    measured, predicted, low, high = (
        units.format(s or 0.0, "s") for s in (row.measured_s, row.predicted_s, row.low_s, row.high_s)
    )
    return f"{measured}, predicted {predicted} ({low} to {high})"
