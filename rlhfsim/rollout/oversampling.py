"""Oversampling: more prompts are started than a step needs, and the first groups to finish are trained on.

    T = the time at which the wanted number of groups has finished, over all replicas

Until then every replica decodes as if all were waited for; then what still runs is aborted, and its tokens
are thrown away. Responses trained on are shorter than those drawn: the long tail is cut.
Not known here: partial responses that a framework keeps for the next step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rlhfsim.rollout.continuous_batching import StepTable
from rlhfsim.rollout.engine_step import Floats
from rlhfsim.rollout.schedule import SequenceSchedule


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Aborted:
    """A schedule that ends when enough groups have finished."""

    plan: SequenceSchedule
    """Up to that moment; `tokens` are those generated until then."""
    trained_tokens: float
    """Response tokens of the finished groups."""
    finish: Floats
    """Seconds of decode until each of them has finished, ascending."""


def aborted(plan: SequenceSchedule, table: StepTable, wanted: int) -> Aborted:
    """The schedule up to the end of the first `wanted` groups."""
    assert plan.group_ends is not None
    assert plan.group_tokens is not None
    timeline = plan.timeline
    seconds = table.between(timeline.running, timeline.start, timeline.start + timeline.steps)
    finish = np.full(plan.group_ends.shape, np.inf)
    begin = np.zeros(len(seconds))
    for r in range(len(finish)):
        mine = timeline.replica == r
        ends, steps = np.cumsum(seconds[mine]), np.cumsum(timeline.steps[mine])
        begin[mine] = ends - seconds[mine]
        at = np.interp(plan.group_ends[r], np.append(0.0, steps), np.append(0.0, ends))
        finish[r] = np.where(plan.group_ends[r] > 0, at, np.inf)
    order = np.argsort(finish, axis=None, kind="stable")[:wanted]
    end = finish.ravel()[order[-1]]
    share = np.clip((end - begin) / seconds, 0.0, 1.0)
    ran = share > 0
    cut = replace(
        timeline,
        replica=timeline.replica[ran],
        running=timeline.running[ran],
        start=timeline.start[ran],
        steps=(timeline.steps * share)[ran],
        completions=timeline.completions[ran],
    )
    return Aborted(
        plan=replace(plan, timeline=cut, tokens=cut.tokens),
        trained_tokens=float(plan.group_tokens.ravel()[order].sum()),
        finish=finish.ravel()[order],
    )
