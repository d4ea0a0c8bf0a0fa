"""The verdict on a plan in sentences: the same on screens, on pages, in JSON and in exported files."""

from __future__ import annotations

from collections.abc import Iterator

from rlhfsim.plan import Plan, RunTarget
from rlhfsim.units import format, likely, percent

RISKY = 0.01
"""A probability of running out of memory that is worth a word."""


def verdict(plan: Plan) -> str:
    """Whether the plan fits, what a step and the run take and cost, and how likely its targets are met.

    `It fits. One GRPO step of qwen2.5-7b takes 43.1 s on 8 GPUs and costs 0.288 USD: 500 steps take 5.99 h
    and 144 USD, and the fullest GPU keeps 19 % of its memory free. The deadline of 2 d is kept with a
    probability of 98 %, the budget of 90 kUSD with 95 %; it fits and keeps both with 94 %.`
    """
    said = f"{_fits(plan)}. {_step(plan)}{_run(plan)}, and {_memory(plan)}."
    chances = list(_chances(plan))
    return f"{said} {', '.join(chances)}{_together(plan, len(chances))}." if chances else said


def _fits(plan: Plan) -> str:
    p = plan.prediction
    if p.peak_memory_bytes > p.capacity_bytes:
        return "It does not fit"
    if p.rejected_by:
        return f"It does not fit: {p.rejected_by}"
    risk = p.probability_out_of_memory
    return f"It fits, with a {percent(risk)} risk of running out of memory" if risk >= RISKY else "It fits"


def _step(plan: Plan) -> str:
    p, gpus = plan.prediction, sum(h.gpus for h in plan.hardware)
    actor = next(m.name for m in plan.models if m.role == "actor")
    cost = "" if p.usd_per_step is None else f" and costs {format(p.usd_per_step, 'usd')}"
    return (
        f"One {plan.workload.title} step of {actor} takes {format(p.step_s, 's')} on "
        f"{gpus:,} GPU{'s' * (gpus != 1)}{cost}"
    )


def _run(plan: Plan) -> str:
    """`: 500 steps take 5.99 h and 144 USD`; empty where no run was asked for."""
    if plan.run is None or plan.run.steps is None or plan.run_s is None:
        return ""
    steps, cost = plan.run.steps, "" if plan.run_usd is None else f" and {format(plan.run_usd, 'usd')}"
    return f": {steps:,} step{'s take' if steps != 1 else ' takes'} {format(plan.run_s, 's')}{cost}"


def _memory(plan: Plan) -> str:
    p = plan.prediction
    free = 1 - p.peak_memory_bytes / p.capacity_bytes
    if free < 0:
        return f"the fullest GPU would need {percent(-free)} more memory than it has"
    return f"the fullest GPU keeps {percent(free)} of its memory free"


def _chances(plan: Plan) -> Iterator[str]:
    """`The deadline of 2 d is kept with a probability of 98 %`, then `the budget of 9 USD with >99 %`."""
    kept = "is kept with a probability of"
    for target in plan.run.targets if plan.run else ():
        if target.probability is not None:
            text = f"{target_text(target)} {kept} {likely(target.probability)}"
            yield text if kept == "with" else text.replace("the", "The", 1)
            kept = "with"


def _together(plan: Plan, targets: int) -> str:
    """`; it fits and keeps both with 94 %`; empty where nothing was drawn."""
    if plan.run is None or plan.run.odds is None:
        return ""
    all_of = {1: "it", 2: "both"}.get(targets, f"all {targets}")
    return f"; it fits and keeps {all_of} with {likely(plan.run.odds.together)}"


def target_text(target: RunTarget) -> str:
    """`the deadline of 2 d`, `the budget of 9 USD`, `the target step_time<90s`."""
    limit = limit_text(target)
    return f"the target {limit}" if limit == target.text else f"the {target.name} of {limit}"


def limit_text(target: RunTarget) -> str:
    """`2 d` for a deadline, `9 USD` for a budget, else the target as it was asked for."""
    match target.name:
        case "deadline":
            return format(target.value, "s")
        case "budget":
            return format(target.value, "usd")
        case _:
            return target.text
