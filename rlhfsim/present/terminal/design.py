"""The answer of `rlhfsim design` for people and for machines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rlhfsim.plan import BreakEven, Plan
from rlhfsim.present.terminal import plan as view
from rlhfsim.present.terminal import recalibrated
from rlhfsim.present.terminal.choices import front_dict, front_table, plan_dict, whynot_dict, whynot_text
from rlhfsim.present.terminal.words import percent
from rlhfsim.search.explain import kind
from rlhfsim.search.pareto import Point
from rlhfsim.search.requirements import Verdict, shown
from rlhfsim.specs.placement.backends import BACKENDS
from rlhfsim.units import BILLION, MILLION, TERA, format, significant
from rlhfsim.what_if.design import Design
from rlhfsim.what_if.recalibrated import Recalibrated

SCHEMA = "rlhfsim.design/3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """What is asked beside the plan."""

    steps: int | None = None
    """Of the whole run."""
    verdicts: tuple[Verdict, ...] = ()
    front: tuple[Point, ...] | None = None
    """None where it is not asked for."""
    recalibrated: Recalibrated | None = None
    """None where no profile was calibrated."""


# --- for people -----------------------------------------------------------------------------------


def show(console: Console, answer: Design, extras: Extras, out: str) -> None:
    """Print the whole answer."""
    if answer.chosen is None:
        _show_nothing(console, answer)
        return
    show_choice(console, answer)
    console.print(view.memory_chart(answer.chosen, console.width))
    console.print(f"per step: {view.cost_text(answer.chosen)}")
    for line in _money(answer, extras.steps):
        console.print(line, highlight=False)
    _show_verdicts(console, extras.verdicts)
    for other in answer.whynots:
        _rule(console, f"why not {other.choice}")
        for part in whynot_text(other, answer.chosen):
            console.print(Padding(part, (0, 0, 0, 2)))
    if extras.front is not None:
        _rule(console, "plans between which you may choose")
        console.print(front_table(extras.front))
    if extras.recalibrated is not None:
        _rule(console, "what calibration changed")
        for part in recalibrated.parts(extras.recalibrated, answer.chosen, console.width):
            console.print(part)
    _show_break_evens(console, answer)
    if answer.gains:
        _show_gains(console, answer)
    _rule(console, "how sure")
    console.print(view.sureness(answer.chosen, console.width))
    _show_next(console, answer, out)


def _rule(console: Console, title: str) -> None:
    console.rule(title, align="left", style="dim")


def show_choice(console: Console, answer: Design) -> None:
    """The ranking, the chosen plan and why it won."""
    assert answer.chosen is not None
    console.print(view.header(answer.chosen))
    console.print(_ranking(answer))
    console.print(_considered(answer))
    _rule(console, "the chosen plan")
    console.print(view.placement_table(answer.chosen, console.width))
    console.print(view.phase_table(answer.chosen, console.width))
    _rule(console, "why")
    for reason in answer.reasons:
        console.print(Padding(Text(reason), (0, 0, 0, 2)))


def _ranking(answer: Design) -> Table:
    """One line a plan; the role placement stands beside the architecture where it is not colocated."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), collapse_padding=True)
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("plan")  # the one column that may fold: no figure is cut
    for name in ("actor", "rollout"):
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
        kind(plan).replace(", roles", ","),
        plan.placement.actor.layout.label,
        rollout.layout.label if rollout else "-",
        format(p.step_s, "s"),
        f"{significant(p.low_s)}-{significant(p.high_s)}",
        significant(p.tokens_per_s_per_gpu),
        f"{p.peak_memory_bytes / p.capacity_bytes:.0%}".replace("%", " %"),
        "unknown" if p.usd_per_step is None else significant(p.usd_per_step),
    ]


def _considered(answer: Design) -> Text:
    c = answer.certificate
    best = "uses less memory" if answer.request.objective == "memory" else "is faster"
    proof = f"proven: no plan of the space {best}"
    if not c.proven:
        proof = f"time limit reached: {_rounded(c.unexplored)} plans not looked at, one of them could be up to {c.gap:.1%} better"
    lines = [
        f"certificate: {_rounded(c.space)} complete plans; {proof}",
        f"  {_rounded(c.infeasible)} do not fit, {_rounded(c.dominated)} are beaten or equalled in everything by another,",
        f"  {_rounded(c.bounded)} cannot be better, by their lower bound; {c.simulated:,} simulated",
    ]
    if c.proven and "async" in answer.request.switches:
        lines.append(
            "  among asynchronous plans dominance compares bounds, not simulated steps: proven up to that"
        )
    if answer.chosen is None:
        lines[0] = f"certificate: {_rounded(c.space)} complete plans"
    if answer.confidence is not None and answer.request.objective != "memory":
        lines.append(
            f"plan 1 is faster than plan 2 with a probability of {percent(answer.confidence)} (intervals of the coefficients)"
        )
    if answer.runners_up:
        lines.append("plans 2, 3, ... are the best that were met of every other kind")
    return Text("\n".join(lines), style="dim")


def _rounded(count: int) -> str:
    """A large count in words: `240 billion`."""
    if count >= 1000 * TERA:
        return f"{count:.1e}"
    for size, word in ((TERA, "trillion"), (BILLION, "billion"), (MILLION, "million")):
        if count >= size:
            return f"{significant(count / size, 2)} {word}"
    return f"{count:,}"


def _money(answer: Design, steps: int | None) -> Iterator[str]:
    """The run as a whole, and what an objective of money or energy means."""
    assert answer.chosen is not None
    p, aim = answer.chosen.prediction, answer.request.objective
    if aim in ("tokens", "cost", "energy"):
        yield f"objective {aim}: the cluster is rented, powered and fed whole, so the shortest step is also the best in {aim}"
    if steps is not None:
        money = "price unknown" if p.usd_per_step is None else format(p.usd_per_step * steps, "usd")
        yield f"run of {steps:,} steps: {format(p.step_s * steps, 's')}, {money}, {significant(p.kwh_per_step * steps)} kWh"


def _show_verdicts(console: Console, found: tuple[Verdict, ...]) -> None:
    if not found:
        return
    _rule(console, "your targets")
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2))
    for verdict in found:
        word = Text("met", style="green") if verdict.met else Text("MISSED", style="bold red")
        table.add_row(f"  {verdict.requirement.text}", word, shown(verdict.requirement, verdict.actual))
    console.print(table)


def _show_break_evens(console: Console, answer: Design) -> None:
    _rule(console, "what would change the choice")
    if not answer.break_evens:
        console.print(Padding(Text(_unflipped(answer)), (0, 0, 0, 2)))
    for break_even in answer.break_evens:
        console.print(Padding(Text(_break_even_text(break_even)), (0, 0, 0, 2)))
    console.print("  one change at a time, layouts kept", style="dim")


def _unflipped(answer: Design) -> str:
    """What was tried in vain."""
    cluster, work = answer.request.cluster, answer.request.workload
    tried = ["responses and prompts by 8 either way" if work.generates else "pairs by 8 either way"]
    tried += ["samples by 8"] if work.generates and work.samples > 1 else []
    tried += ["network by 8 either way"] if cluster.gpus > cluster.node_group.gpus_per_node else []
    tried += ["GPU memory by 2 either way"]
    tried += ["GPUs by 4 either way"] if len(cluster.node_groups) == 1 else []
    return f"nothing that was tried makes another plan the best: {', '.join(tried)}"


def _break_even_text(break_even: BreakEven) -> str:
    """`network bandwidth per GPU of 19.5 GB/s or less (now 50 GB/s): hybrid, roles split takes 195 s, ...`."""
    more = "or more" if break_even.factor > 1 else "or less"
    if break_even.value is None or break_even.now is None:
        point = f"{break_even.change} times {break_even.factor:.2g} {more}"
    else:
        value, now = (format(x, break_even.unit) for x in (break_even.value, break_even.now))
        point = f"{break_even.change}: {value} {more} (now {now})"
    own = (
        f"the chosen plan {format(break_even.chosen_step_s, 's')}"
        if break_even.chosen_step_s
        else "the chosen plan no longer fits"
    )
    return f"{point} -> {break_even.winner} takes {format(break_even.step_s, 's')} there, {own}"


def _show_gains(console: Console, answer: Design) -> None:
    _rule(console, "what the choices left out would bring")
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2))
    for gain in answer.gains:
        how = "--allow " + gain.name if gain.name not in BACKENDS else "--backend " + gain.name
        step = (
            "nothing fits"
            if gain.seconds is None
            else f"{format(gain.seconds, 's')} ({-100 * (gain.saved or 0.0):+.0f} %)"
        )
        table.add_row(
            f"  {how}",
            step,
            gain.meaning + ("" if gain.launchable else " (priced only: no launch path here yet)"),
        )
    console.print(table)


def _show_next(console: Console, answer: Design, out: str) -> None:
    _rule(console, "next")
    console.print(f"  the plan is in {out}; look closer with", highlight=False)
    console.print(f"  rlhfsim memory {out}", style="bold", highlight=False)
    console.print(f"  rlhfsim simulate {out}", style="bold", highlight=False)
    if not answer.gains:
        console.print("  add --gains to see what async, LoRA, FP8 and other backends would bring")


def _show_nothing(console: Console, answer: Design) -> None:
    nothing = Text("nothing fits: ", style="bold red")
    if not answer.certificate.space:
        console.print(nothing + Text("no layout obeys all that is fixed, bounded and forbidden"))
    else:
        console.print(nothing + Text("no plan runs with this cluster, model and these choices"))
        console.print(_considered(answer))
    if answer.shortage:
        console.print(f"  {answer.shortage}", highlight=False)
    remedy = answer.remedy or "no single change that was tried helps; try a larger GPU or a smaller model"
    lead = Text("the smallest change that fits: " if answer.remedy else "")
    console.print(lead + Text(remedy, style="bold"))


# --- for machines ---------------------------------------------------------------------------------


def design_dict(answer: Design, extras: Extras) -> dict[str, Any]:
    """The same content; schema in docs/plan.md."""
    c = answer.certificate
    return {
        "schema": SCHEMA,
        "objective": answer.request.objective,
        "chosen": plan_dict(answer.chosen) if answer.chosen else None,
        "runners_up": [plan_dict(plan) for plan in answer.runners_up],
        "certificate": {
            "space": c.space,
            "infeasible": c.infeasible,
            "dominated": c.dominated,
            "bounded": c.bounded,
            "simulated": c.simulated,
            "unexplored": c.unexplored,
            "gap": c.gap,
        },
        "layouts_refused": dict(answer.refused),
        "probability_better_than_runner_up": answer.confidence,
        "reasons": list(answer.reasons),
        "requirements": [verdict_dict(v) for v in extras.verdicts],
        "run": _run_dict(answer.chosen, extras.steps),
        "why_not": [whynot_dict(w, answer.chosen) for w in answer.whynots] if answer.chosen else [],
        "pareto": None if extras.front is None else front_dict(extras.front),
        "calibration": recalibrated.as_data(extras.recalibrated, answer.chosen)
        if extras.recalibrated and answer.chosen
        else None,
        "break_evens": [_break_even_dict(f) for f in answer.break_evens],
        "gains": [
            {
                "name": g.name,
                "meaning": g.meaning,
                "step_s": g.seconds,
                "saved": g.saved,
                "launchable": g.launchable,
            }
            for g in answer.gains
        ],
        "shortage": answer.shortage,
        "remedy": answer.remedy,
    }


def verdict_dict(verdict: Verdict) -> dict[str, Any]:
    """A target and what the plan reaches, in base units."""
    r = verdict.requirement
    return {
        "text": r.text,
        "quantity": r.quantity,
        "relation": r.relation,
        "value": r.value,
        "actual": verdict.actual,
        "met": verdict.met,
    }


def _break_even_dict(break_even: BreakEven) -> dict[str, Any]:
    return {
        "change": break_even.change,
        "factor": break_even.factor,
        "now": break_even.now,
        "value": break_even.value,
        "unit": break_even.unit,
        "winner": break_even.winner,
        "step_s": break_even.step_s,
        "chosen_step_s": break_even.chosen_step_s,
    }


def _run_dict(plan: Plan | None, steps: int | None) -> dict[str, Any] | None:
    if plan is None or steps is None:
        return None
    p = plan.prediction
    usd = None if p.usd_per_step is None else p.usd_per_step * steps
    return {"steps": steps, "seconds": p.step_s * steps, "usd": usd, "kwh": p.kwh_per_step * steps}
