"""What a page of a plan begins with: heading, batch, whether it fits, figures of the verdict."""

from __future__ import annotations

from collections.abc import Iterator

from rlhfsim.plan import Plan
from rlhfsim.present import words
from rlhfsim.present.answers.odds import quantiles, together
from rlhfsim.present.answers.tree import Mark, Tile
from rlhfsim.present.basis import cores, title_of
from rlhfsim.search.requirements import meets_all
from rlhfsim.specs.placement.backends import BACKENDS
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.units import format, significant
from rlhfsim.verdict import RISKY


def heading(plan: Plan) -> str:
    """`PPO of llama-3.1-70b on 64 x H100 SXM 80GB`."""
    actor = next(m for m in plan.models if m.role == "actor")
    where = " and ".join(f"{h.gpus:,} x {title_of(h.profile)}" for h in plan.hardware)
    return f"{plan.workload.title} of {actor.name} on {where}"


def subtitle(plan: Plan) -> str:
    """The batch and the architecture in a line."""
    w = plan.workload
    samples = f" x {w.samples:,} responses" if w.samples > 1 else ""
    streams = f"; {words.STREAMING}" if plan.placement.schedule.streaming else ""
    responses = "responses of" if isinstance(w.response_len, Fixed) else "response"
    return (
        f"A plan predicted by rlhfsim: {w.prompts:,} prompts{samples} per step, prompts of "
        f"{words.lengths(w.prompt_len)}, {responses} {words.lengths(w.response_len)}; {plan.architecture} "
        f"architecture, roles {plan.role_placement}{streams}, {BACKENDS[plan.placement.backend].title}"
        f"{cores(plan)}"
    )


def mark(plan: Plan) -> Mark:
    """Whether it fits."""
    p = plan.prediction
    if p.peak_memory_bytes > p.capacity_bytes or p.rejected_by:
        return "bad"
    return "warn" if p.probability_out_of_memory >= RISKY else "good"


def tiles(plan: Plan) -> Iterator[Tile]:
    """The figures of the verdict."""
    p = plan.prediction
    free = p.capacity_bytes - p.peak_memory_bytes
    yield Tile(
        "Step", format(p.step_s, "s"), detail=f"P10 to P90: {format(p.low_s, 's')} to {format(p.high_s, 's')}"
    )
    if p.usd_per_step is None:
        yield Tile("Money", "unknown", "no price for this hardware; give --price", mark="warn")
    elif plan.run_usd is None:
        yield Tile("Money per step", format(p.usd_per_step, "usd"), " and ".join(_rents(plan)))
    yield from _run_tile(plan)
    risk = words.percent(p.probability_out_of_memory) if p.probability_out_of_memory > 0 else "no"
    room = words.size(free) if free > 0 else f"-{words.size(-free)}" if free < 0 else "none"
    yield Tile(
        "Memory left on the fullest GPU",
        room,
        detail=f"of {words.size(p.capacity_bytes)}, in {words.call(p.peak_phase)}; {risk} risk of running "
        "out",
        mark=mark(plan),
    )
    yield Tile(
        "Speed and energy",
        f"{significant(p.tokens_per_s_per_gpu)} tokens/s per GPU",
        detail=f"{significant(p.kwh_per_step)} kWh and {significant(p.kg_co2e_per_step)} kg CO2e per step",
    )


def _rents(plan: Plan) -> Iterator[str]:
    """`3 USD per GPU-hour (on-demand, 2026-05)`."""
    for h in plan.hardware:
        if h.price is not None:
            of = f" of {h.profile}" if len(plan.hardware) > 1 else ""
            quoted = ", ".join(filter(None, (h.market, h.price.date)))
            yield f"{format(h.price.value, 'usd')} per GPU-hour{of} ({quoted})"


def _run_tile(plan: Plan) -> Iterator[Tile]:
    """The run that was asked for: time and money, with failures and restarts below."""
    run = plan.run
    if run is None or run.steps is None or plan.run_s is None:
        return
    money = "" if plan.run_usd is None else f", {format(plan.run_usd, 'usd')}"
    yield Tile(
        f"Run of {words.plural(run.steps, 'step')}",
        f"{format(plan.run_s, 's')}{money}",
        detail=words.capital("; ".join(filter(None, (together(run), quantiles(run), *_rents(plan))))),
        mark="good" if meets_all(plan) else "bad",
    )
