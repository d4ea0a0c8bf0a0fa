"""The answer of `rlhfsim design` for people and for machines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from rlhfsim.frameworks.export import exporters
from rlhfsim.frameworks.runs import ANY, OWN, Known, framework
from rlhfsim.plan import BreakEven, Plan
from rlhfsim.present import findings, words
from rlhfsim.present.tables import WORDS, each, fields, grid
from rlhfsim.present.terminal import plan as view
from rlhfsim.present.terminal import recalibrated
from rlhfsim.present.terminal.choices import (
    front_dict,
    front_table,
    plan_dict,
    short_kind,
    whynot_dict,
    whynot_text,
)
from rlhfsim.present.terminal.console import filled, indented, plain_grid
from rlhfsim.present.terminal.memory import memory_chart
from rlhfsim.search.explain import best_name
from rlhfsim.search.pareto import Point
from rlhfsim.search.requirements import Verdict, shown
from rlhfsim.units import TERA, format, significant
from rlhfsim.what_if.design import Design
from rlhfsim.what_if.gains import Gain
from rlhfsim.what_if.recalibrated import Recalibrated
from rlhfsim.what_if.simplest import CLOSE
from rlhfsim.what_if.why_not import WhyNot

SCHEMA = "rlhfsim.design/4"


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
    console.print(memory_chart(answer.chosen, console.width))
    console.print(f"per step: {view.cost_text(answer.chosen)}")
    for line in _money(answer, extras.steps):
        console.print(line, highlight=False)
    if extras.verdicts:
        _part(console, "your targets", _targets(extras.verdicts))
    for other in answer.whynots:
        _part(console, f"why not {other.choice}", *map(indented, _whynot(other, answer)))
    if extras.front is not None:
        _part(console, "plans between which you may choose", front_table(extras.front))
    if extras.recalibrated is not None:
        parts = recalibrated.parts(extras.recalibrated, answer.best or answer.chosen, console.width)
        _part(console, "what calibration changed", *parts)
    break_evens = [_break_even_text(b, answer) for b in answer.break_evens] or [_unflipped(answer)]
    _part(console, "what would change the choice", *(indented(Text(text)) for text in break_evens))
    console.print("  one change at a time, layouts kept", style="dim")
    if answer.gains:
        _part(console, "what the choices left out would bring", _gains(answer))
    _part(console, "how sure", view.sureness(answer.chosen, console.width))
    _show_next(console, answer, out)


def _whynot(other: WhyNot, answer: Design) -> Iterator[RenderableType]:
    """Compared with the best plan, proven as well."""
    assert answer.best is not None
    assert answer.chosen is not None
    name = best_name(answer.request.objective) if answer.simpler else "the chosen plan"
    if answer.simpler and other.plan is not None and other.plan.input_hash == answer.chosen.input_hash:
        yield Text("that is the chosen plan")
    yield from whynot_text(other, answer.best, name)


def _part(console: Console, title: str, *parts: RenderableType) -> None:
    console.rule(title, align="left", style="dim")
    for part in parts:
        console.print(part)


def show_choice(console: Console, answer: Design) -> None:
    """The ranking, the chosen plan and why it won."""
    assert answer.chosen is not None
    console.print(view.header(answer.chosen))
    console.print(_ranking(answer))
    console.print(_considered(answer))
    if (other := answer.elsewhere) is not None and other.seconds is not None:
        saved = f"{-100 * (other.saved or 0.0):+.0f} %"
        elsewhere = f"{other.meaning}: {format(other.seconds, 's')}, {saved}: "
        console.print(Text.assemble(elsewhere, (other.option, "bold")))
    if answer.chosen.idle_gpus:
        console.print(_idle(answer))
    console.print(_runner(answer), style="dim", highlight=False)
    placement = view.placement_table(answer.chosen, console.width)
    _part(console, "the chosen plan", placement, view.phase_table(answer.chosen, console.width))
    _part(console, "why", *(indented(Text(reason)) for reason in answer.reasons))


def _idle(answer: Design) -> str:
    """How many GPUs stay idle, and why: the space has plans with and without them."""
    assert answer.chosen is not None
    assert answer.best is not None
    plan, idle = answer.chosen, answer.chosen.idle_gpus
    of = f"{idle:,} of {sum(h.gpus for h in plan.hardware):,} GPUs stay{'s' * (idle == 1)} idle, and paid for"
    if answer.request.objective == "memory":
        return f"{of}: no plan that uses more of them needs less memory"
    gained = plan.prediction.step_s / answer.best.prediction.step_s - 1
    faster = "is faster" if gained <= 0 or not answer.simpler else f"is faster by more than {gained:.1%}"
    return f"{of}: layouts divide the others better, and no plan that uses more of them {faster}"


def _runner(answer: Design) -> str:
    """Who runs the chosen plan, and how that is known."""
    runs, known = answer.request.runs, _known(answer)
    if runs is None:
        return "any framework: the plan is priced, whether or not one runs it"
    unseen = [what for what, how in known.items() if how == "written only"]
    if unseen:
        how = f"written and never run: {', '.join(unseen)}"
    elif "run on CPUs" in known.values():
        how = "all that it asks for has run on CPUs, nothing of it on GPUs yet"
    else:
        how = "its users run all of it on GPUs"
    return f"for {runs.title}: {how} (rlhfsim frameworks)"


def _known(answer: Design) -> Mapping[str, Known]:
    plan, runs = answer.chosen, answer.request.runs
    if plan is None or runs is None:
        return {}
    return runs.known(plan.placement, plan.workload, plan.topology, one_node=plan.replicas_in_one_node)


def _ranking(answer: Design) -> RenderableType:
    """One line a plan, the chosen one first; roles stand beside the architecture where they do not share."""
    assert answer.chosen is not None
    assert answer.best is not None
    plans = [answer.best, *answer.runners_up]
    titles = (">#", "plan", "actor", "rollout", ">step", ">P10-P90", ">tok/s/GPU", ">memory", ">USD")
    rows = [(str(i), *_row(plan)) for i, plan in enumerate(plans, start=1)]
    if answer.simpler:
        rows.insert(0, ("*", *_row(answer.chosen)))
    styles = ["bold green", *[""] * (len(rows) - 1)]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), collapse_padding=True)
    return filled(table, grid(titles, rows, fit={"plan": WORDS}, styles=styles))  # no figure is cut


def _row(plan: Plan) -> list[str]:
    p = plan.prediction
    return [
        short_kind(plan),
        *words.layout_labels(plan),
        format(p.step_s, "s"),
        f"{significant(p.low_s)}-{significant(p.high_s)}",
        significant(p.tokens_per_s_per_gpu),
        f"{p.peak_memory_bytes / p.capacity_bytes:.0%}".replace("%", " %"),
        "unknown" if p.usd_per_step is None else significant(p.usd_per_step),
    ]


def _considered(answer: Design) -> Text:
    c = answer.certificate
    best = "uses less memory" if answer.request.objective == "memory" else "is faster"
    space, unexplored = _rounded(c.space), _rounded(c.unexplored)
    proof = f"proven: no plan of the space {best}"
    if not c.proven:
        proof = (
            f"time limit reached: {unexplored} plans not looked at, one of them could be up to {c.gap:.1%} "
            "better"
        )
    if answer.simpler:
        proof += " than plan 1"
    lines = [
        *([_recommended(answer)] if answer.simpler else []),
        f"certificate: {space} complete plans" + (f"; {proof}" if answer.chosen else ""),
        f"  {_rounded(c.infeasible)} do not fit, {_rounded(c.dominated)} are beaten or equalled in "
        "everything by another,",
        f"  {_rounded(c.bounded)} cannot be better, by their lower bound; {c.simulated:,} simulated",
    ]
    if c.proven and "async" in answer.request.switches:
        lines.append(
            "  among asynchronous plans dominance compares bounds, not simulated steps: proven up to that"
        )
    if answer.confidence is not None and answer.request.objective != "memory":
        likely = words.percent(answer.confidence)
        lines.append(
            f"plan 1 is faster than plan 2 with a probability of {likely} (intervals of the coefficients)"
        )
    if answer.runners_up:
        lines.append("plans 2, 3, ... are the best that were met of every other kind")
    return Text("\n".join(lines), style="dim")


def _recommended(answer: Design) -> str:
    """What the plan with the star is."""
    assert answer.chosen is not None
    assert answer.best is not None
    mine, its = (100 * p.prediction.probability_out_of_memory for p in (answer.chosen, answer.best))
    in_bytes = answer.request.objective == "memory"
    held, least = (
        p.prediction.peak_memory_bytes if in_bytes else p.prediction.step_s
        for p in (answer.chosen, answer.best)
    )
    name = "leanest" if in_bytes else "fastest"
    far = held > (1 + CLOSE) * least
    of = f"the {name} one that sums few gradients in BF16, not plan 1" if far else "plan 1"
    near = f"the simplest plan within {words.percent(CLOSE)} of {of}"
    return (
        f"* is recommended: {near}, which --fastest writes\n"
        f"  risk of running out of memory {mine:.1f} %, of plan 1 {its:.1f} %"
    )


def _rounded(count: int) -> str:
    return words.count(count, largest=1000 * TERA)


def _money(answer: Design, steps: int | None) -> Iterator[str]:
    """The run as a whole, and what an objective of money or energy means."""
    assert answer.chosen is not None
    p, aim = answer.chosen.prediction, answer.request.objective
    if aim in ("tokens", "cost", "energy"):
        yield (
            f"objective {aim}: the cluster is rented, powered and fed whole, so the shortest step is also "
            f"the best in {aim}"
        )
    if steps is not None:
        money = "price unknown" if p.usd_per_step is None else format(p.usd_per_step * steps, "usd")
        yield (
            f"run of {steps:,} steps: {format(p.step_s * steps, 's')}, {money}, "
            f"{significant(p.kwh_per_step * steps)} kWh"
        )


def _targets(verdicts: tuple[Verdict, ...]) -> RenderableType:
    met, missed = Text("met", style="green"), Text("MISSED", style="bold red")
    return plain_grid(
        (f"  {v.requirement.text}", met if v.met else missed, shown(v.requirement, v.actual))
        for v in verdicts
    )


def _unflipped(answer: Design) -> str:
    """What was tried in vain."""
    cluster, work = answer.request.cluster, answer.request.workload
    tried = ["responses and prompts by 8 either way" if work.generates else "pairs by 8 either way"]
    tried += ["samples by 8"] if work.generates and work.samples > 1 else []
    tried += ["network by 8 either way"] if cluster.gpus > cluster.node_group.gpus_per_node else []
    tried += ["GPU memory by 2 either way"]
    tried += ["GPUs by 4 either way"] if len(cluster.node_groups) == 1 else []
    return f"nothing that was tried makes another plan the best: {', '.join(tried)}"


def _break_even_text(break_even: BreakEven, answer: Design) -> str:
    """`network bandwidth per GPU: 19.5 GB/s or less (now 50 GB/s) -> hybrid takes 195 s there, ...`."""
    more = "or more" if break_even.factor > 1 else "or less"
    if break_even.value is None or break_even.now is None:
        point = f"{break_even.change} times {break_even.factor:.2g} {more}"
    else:
        value, now = (format(x, break_even.unit) for x in (break_even.value, break_even.now))
        point = f"{break_even.change}: {value} {more} (now {now})"
    chosen = findings.chosen_then(break_even.chosen_step_s, lambda s: format(s, "s"), simpler=answer.simpler)
    return f"{point} -> {break_even.winner} takes {format(break_even.step_s, 's')} there, {chosen}"


def _gains(answer: Design) -> RenderableType:
    rows = []
    for gain in answer.gains:
        step = "nothing fits"
        if gain.seconds is not None:
            step = f"{format(gain.seconds, 's')} ({-100 * (gain.saved or 0.0):+.0f} %)"
        rows.append((f"  {gain.option}", step, gain.meaning + (": other work" if gain.other_work else "")))
    return plain_grid(rows)


def _show_next(console: Console, answer: Design, out: str) -> None:
    _part(console, "next")
    console.print(f"  the plan is in {out}; look closer with", highlight=False)
    console.print(f"  rlhfsim memory {out}", style="bold", highlight=False)
    console.print(f"  rlhfsim simulate {out}", style="bold", highlight=False)
    assert answer.chosen is not None
    if answer.request.runs is framework(OWN):
        kinds = answer.chosen.hardware
        nodes = (f"{-(-h.gpus // h.gpus_per_node)}x{h.gpus_per_node}x{h.profile}" for h in kinds)
        command = f"rlhfsim launch {out} --dry-run --assume-cluster {'+'.join(nodes)}"
        console.print(f"  {command}", style="bold", highlight=False)
    elif answer.request.framework in exporters():
        command = f"rlhfsim export {out} --to {answer.request.framework} --out run"
        console.print(f"  {command}", style="bold", highlight=False)
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
    chosen, best = answer.chosen, answer.best
    return {
        "schema": SCHEMA,
        "objective": answer.request.objective,
        "framework": answer.request.runs.name if answer.request.runs else ANY,
        "known": dict(_known(answer)),
        "chosen": plan_dict(chosen) if chosen else None,
        "best": plan_dict(best) if best and answer.simpler else None,
        "runners_up": [plan_dict(plan) for plan in answer.runners_up],
        "certificate": asdict(answer.certificate),
        "layouts_refused": dict(answer.refused),
        "probability_better_than_runner_up": answer.confidence,
        "reasons": list(answer.reasons),
        "requirements": [verdict_dict(v) for v in extras.verdicts],
        "run": _run_dict(chosen, extras.steps),
        "why_not": [whynot_dict(w, best, chosen) for w in answer.whynots] if best and chosen else [],
        "pareto": None if extras.front is None else front_dict(extras.front),
        "calibration": recalibrated.as_data(extras.recalibrated, best)
        if extras.recalibrated and best
        else None,
        "break_evens": each(answer.break_evens, *BREAK_EVEN),
        "gains": [gain_dict(g) for g in answer.gains],
        "elsewhere": gain_dict(answer.elsewhere) if answer.elsewhere else None,
        "shortage": answer.shortage,
        "remedy": answer.remedy,
    }


def gain_dict(gain: Gain) -> dict[str, Any]:
    """What a choice that does not compete would bring."""
    return {
        **fields(gain, "name", "meaning", "option", "other_work"),
        "step_s": gain.seconds,
        "saved": gain.saved,
    }


BREAK_EVEN = ("change", "factor", "now", "value", "unit", "winner", "step_s", "chosen_step_s")


def verdict_dict(verdict: Verdict) -> dict[str, Any]:
    """A target and what the plan reaches, in base units."""
    target = fields(verdict.requirement, "text", "quantity", "relation", "value")
    return {**target, **fields(verdict, "actual", "met")}


def _run_dict(plan: Plan | None, steps: int | None) -> dict[str, Any] | None:
    if plan is None or steps is None:
        return None
    p = plan.prediction
    usd = None if p.usd_per_step is None else p.usd_per_step * steps
    return {"steps": steps, "seconds": p.step_s * steps, "usd": usd, "kwh": p.kwh_per_step * steps}
