"""What speculative decoding would save where nobody asked for it, and at which acceptance it stops paying.

How many drafted tokens are accepted is not known before a run, and it drifts as the policy leaves its draft:
where published acceptances would save a tenth, a line names them; a plan that drafts says what it needs.
"""

from __future__ import annotations

from dataclasses import replace

from rlhfsim.frozen import frozen
from rlhfsim.plan import Plan
from rlhfsim.search.candidates import Candidate, judged
from rlhfsim.search.request import Request
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.speculation import Speculation
from rlhfsim.what_if.points import edge

WORTH = 0.1
"""Least share of the step that is saved, at the least of the published acceptances."""
PUBLISHED = Speculation(method="eagle", draft_tokens=3, acceptance=0.62, low=0.56, high=0.7)
"""2.05 and 2.47 tokens a step of Qwen3-8B (arXiv 2604.26779), 2.53 to 2.56 of marin-community/marin issue
9114 (one layer, after up to 36 steps of RL); the acceptances that k = 3 makes of them, and their middle."""
HALVINGS = 7


@frozen
class WouldDraft:
    """A plan with an EAGLE-3 head added to its rollout."""

    slow_s: float
    """Seconds of a step at the least of the published acceptances."""
    fast_s: float
    """At the most."""


@frozen
class StopsPaying:
    """When a plan that drafts is as slow as the same plan without."""

    acceptance: float
    plain_s: float
    """Seconds of its step without a draft."""
    steps: float | None
    """Steps of the policy until then, at the drift that was given; None: it never falls so far."""


def would_draft(plan: Plan, request: Request) -> WouldDraft | None:
    """The plan with the published draft; None where its framework has none, or it saves too little."""
    role, runs = plan.placement.rollout, request.runs
    if role is None or plan.workload.speculation or role.layout.pp > 1 or not plan.workload.generates:
        return None
    generated = sum(x.seconds for x in plan.prediction.phases if x.name == "actor.generate")
    if runs is None or "speculative decoding" not in runs.features:
        return None
    if generated < WORTH * plan.prediction.step_s or request.objective == "memory":
        return None
    seconds = []
    for acceptance in PUBLISHED.ends:
        drafts = replace(PUBLISHED, acceptance=acceptance, low=None, high=None)
        found = _with(plan, request, drafts)
        if found is None or found.seconds > (1 - WORTH) * plan.prediction.step_s:
            return None
        seconds.append(found.seconds)
    return WouldDraft(slow_s=seconds[0], fast_s=seconds[1])


def stops_paying(plan: Plan, request: Request) -> StopsPaying | None:
    """Where drafting stops to pay on the layouts of a plan that does; None for one that does not, and where
    simulations of stale samples would take longer than a time limit leaves."""
    role = plan.placement.rollout
    drafts = role.layout.speculation if role else None
    simulated = plan.placement.schedule.asynchronous and request.time_limit is not None
    plain = None if drafts is None or simulated else _with(plan, request, None)
    if drafts is None or plain is None:
        return None
    fresh = replace(drafts, drift=0.0, low=None, high=None)

    def slower(acceptance: float) -> bool:
        found = _with(plan, request, replace(fresh, acceptance=acceptance), plain.seconds)
        return found is None or found.seconds > plain.seconds

    now = drafts.now(drafts.acceptance)
    least = edge(now, 0.0, slower, halvings=HALVINGS) if not slower(now) else now
    falls = drafts.drift < 0 and not drafts.trained
    return StopsPaying(
        acceptance=least, plain_s=plain.seconds, steps=(now - least) / -drafts.drift if falls else None
    )


def _with(
    plan: Plan, request: Request, drafts: Speculation | None, cutoff: float | None = None
) -> Candidate | None:
    """The plan with another draft or none, all else as it is; None where it does not fit. `cutoff`: see
    `judged`."""
    role = plan.placement.rollout
    assert role is not None
    layout = replace(role.layout, speculation=drafts)
    placement = plan.placement.having(rollout=replace(role, layout=layout))
    request = replace(request, workload=replace(plan.workload, speculation=drafts))
    return judged(request, models_of(request.workload), placement, cutoff=cutoff)
