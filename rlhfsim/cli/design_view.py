"""The answer of `rlhfsim design` for people and for machines."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rlhfsim.cli import view
from rlhfsim.plan import Plan
from rlhfsim.search.design import Design
from rlhfsim.search.explain import kind
from rlhfsim.specs.backends import BACKENDS
from rlhfsim.units import BILLION, MILLION, TERA, format, significant

SCHEMA = "rlhfsim.design/1"


# --- for people -----------------------------------------------------------------------------------


def show(console: Console, answer: Design, out: str) -> None:
    """Print the whole answer."""
    if answer.chosen is None:
        _show_nothing(console, answer)
        return
    show_choice(console, answer)
    console.print(view.memory_chart(answer.chosen, console.width))
    console.print(f"per step: {view.cost_text(answer.chosen)}")
    _show_flips(console, answer)
    _show_gains(console, answer)
    console.rule("how sure", align="left", style="dim")
    console.print(view.sureness(answer.chosen, console.width))
    _show_next(console, answer, out)


def show_choice(console: Console, answer: Design) -> None:
    """The ranking, the chosen plan and why it won."""
    assert answer.chosen is not None
    console.print(view.header(answer.chosen))
    console.print(_ranking(answer))
    console.print(_considered(answer))
    console.rule("the chosen plan", align="left", style="dim")
    console.print(view.placement_table(answer.chosen, console.width))
    console.print(view.phase_table(answer.chosen, console.width))
    console.rule("why", align="left", style="dim")
    for reason in answer.reasons:
        console.print(Padding(Text(reason), (0, 0, 0, 2)))


def _ranking(answer: Design) -> Table:
    """One line a plan; the role placement stands beside the architecture where it is not colocated."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), collapse_padding=True)
    table.add_column("#", justify="right", no_wrap=True)
    for name in ("plan", "actor", "rollout"):
        table.add_column(name, no_wrap=True)
    for name in ("step", "P10-P90", "tok/s/GPU", "memory", "USD"):
        table.add_column(name, justify="right", no_wrap=True)
    assert answer.chosen is not None
    for i, plan in enumerate((answer.chosen, *answer.runners_up), start=1):
        table.add_row(str(i), *_row(plan), style="bold green" if i == 1 else None)
    return table


def _row(plan: Plan) -> list[str]:
    p = plan.prediction
    rollout = plan.placement.rollout
    return [
        kind(plan).replace(", roles", ","), plan.placement.actor.layout.label, rollout.layout.label if rollout else "-", format(p.step_s, "s"),
        f"{significant(p.low_s)}-{significant(p.high_s)}", significant(p.tokens_per_s_per_gpu),
        f"{p.peak_memory_bytes / p.capacity_bytes:.0%}".replace("%", " %"),
        "unknown" if p.usd_per_step is None else significant(p.usd_per_step),
    ]  # fmt: skip


def _considered(answer: Design) -> Text:
    c = answer.certificate
    proof = "proven: no plan of the space is better"
    if not c.proven:
        proof = f"time limit: {_rounded(c.unexplored)} plans left, gap {c.gap:.1%}"
    lines = [
        f"certificate: {_rounded(c.space)} complete plans = {_rounded(c.infeasible)} infeasible + {_rounded(c.dominated)} dominated",
        f"             + {_rounded(c.bounded)} bounded + {c.simulated:,} simulated; {proof}",
    ]  # fmt: skip
    if sure := answer.confidence:
        lines.append(
            f"plan 1 is faster than plan 2 with probability {sure:.0%} (uncertainty of the profile)"
        )
    return Text("\n".join(lines), style="dim")


def _rounded(count: int) -> str:
    """A large count in words: `240 billion`."""
    for size, word in ((TERA, "trillion"), (BILLION, "billion"), (MILLION, "million")):
        if count >= size:
            return f"{significant(count / size, 2)} {word}"
    return f"{count:,}"


def _show_flips(console: Console, answer: Design) -> None:
    console.rule("what would flip the choice", align="left", style="dim")
    if not answer.flips:
        console.print(
            "  none of: responses 8x longer or shorter, 8x samples or prompts, network 8x slower, memory -25 %"
        )
    for flip in answer.flips:
        own = (
            f"{format(flip.chosen_seconds, 's')} for the chosen plan"
            if flip.chosen_seconds
            else "the chosen plan no longer fits"
        )
        console.print(
            f"  {flip.change} x {flip.factor:.2g}: {flip.winner}; at the far end {format(flip.seconds, 's')} ({own})",
            highlight=False,
        )
    console.print("  one change at a time, layouts kept", style="dim")


def _show_gains(console: Console, answer: Design) -> None:
    console.rule("what the choices left out would bring", align="left", style="dim")
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2))
    for gain in answer.gains:
        how = "--allow " + gain.name if gain.name not in BACKENDS else "--backend " + gain.name
        step = (
            "nothing fits"
            if gain.seconds is None
            else f"{format(gain.seconds, 's')} ({-(gain.saved or 0.0):+.0%})"
        )
        table.add_row(
            f"  {how}",
            step,
            gain.meaning + ("" if gain.launchable else " (priced only: no launch path here yet)"),
        )
    console.print(table)


def _show_next(console: Console, answer: Design, out: str) -> None:
    console.rule("next", align="left", style="dim")
    console.print(f"  the plan is in {out}; look closer with", highlight=False)
    console.print(f"  rlhfsim memory {out}", style="bold", highlight=False)
    console.print(f"  rlhfsim estimate {out}", style="bold", highlight=False)


def _show_nothing(console: Console, answer: Design) -> None:
    nothing = Text("nothing fits: ", style="bold red")
    console.print(nothing + Text("no plan runs with this cluster, model and these choices"))
    console.print(_considered(answer))
    if answer.shortage:
        console.print(f"  {answer.shortage}", highlight=False)
    remedy = (
        answer.remedy
        or "no single change that was tried helps; try a larger GPU or a smaller model"
    )
    lead = Text("the smallest change that fits: " if answer.remedy else "")
    console.print(lead + Text(remedy, style="bold"))


# --- for machines ---------------------------------------------------------------------------------


def design_dict(answer: Design) -> dict[str, Any]:
    """The same content; schema in docs/plan.md."""
    c = answer.certificate
    return {
        "schema": SCHEMA,
        "chosen": _plan_dict(answer.chosen) if answer.chosen else None,
        "runners_up": [_plan_dict(plan) for plan in answer.runners_up],
        "certificate": {
            "space": c.space, "infeasible": c.infeasible, "dominated": c.dominated, "bounded": c.bounded,
            "simulated": c.simulated, "unexplored": c.unexplored, "gap": c.gap,
        },
        "layouts_refused": dict(answer.refused),
        "probability_better_than_runner_up": answer.confidence,
        "reasons": list(answer.reasons),
        "flips": [{"change": f.change, "factor": f.factor, "winner": f.winner, "step_s": f.seconds, "chosen_step_s": f.chosen_seconds} for f in answer.flips],
        "gains": [
            {"name": g.name, "meaning": g.meaning, "step_s": g.seconds, "saved": g.saved, "launchable": g.launchable} for g in answer.gains
        ],
        "shortage": answer.shortage,
        "remedy": answer.remedy,
    }  # fmt: skip


def _plan_dict(plan: Plan) -> dict[str, Any]:
    p = plan.prediction
    whole = plan.to_dict()
    return {
        "architecture": plan.architecture, "role_placement": plan.role_placement, "kind": kind(plan), "step_s": p.step_s,
        "low_s": p.low_s, "high_s": p.high_s, "tokens_per_s_per_gpu": p.tokens_per_s_per_gpu,
        "peak_memory_bytes": p.peak_memory_bytes, "capacity_bytes": p.capacity_bytes,
        "peak": {"phase": p.peak_phase, "role": p.peak_role, "component": p.peak_component},
        "probability_out_of_memory": p.probability_out_of_memory, "host_peak_bytes": p.host_peak_bytes,
        "usd_per_step": p.usd_per_step, "kwh_per_step": p.kwh_per_step, "kg_co2e_per_step": p.kg_co2e_per_step,
        "phases": whole["prediction"]["phases"], "placement": whole["placement"], "workload": whole["workload"],
    }  # fmt: skip
