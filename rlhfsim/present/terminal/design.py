"""The answer of `rlhfsim design` for people and for machines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from typing import Any

from rlhfsim.frameworks.export import exporters, is_written, unsaid_of
from rlhfsim.frameworks.runs import ANY, OWN, Known, framework
from rlhfsim.plan import Plan, PlannedHardware
from rlhfsim.present.answers import recalibrated
from rlhfsim.present.known import known, nearest_short
from rlhfsim.present.sampling import sampling
from rlhfsim.present.tables import each, fields, grid
from rlhfsim.present.terminal import first_screen as first
from rlhfsim.present.terminal import plan as view
from rlhfsim.present.terminal import side_by_side
from rlhfsim.present.terminal import verdict_lines as lines
from rlhfsim.present.terminal.choices import front_dict, missing_dict, plan_dict, whynot_dict
from rlhfsim.present.terminal.console import (
    WIDTH,
    Display,
    Part,
    height,
    labelled,
    one_line,
    put,
    styled,
    tight,
    within,
)
from rlhfsim.present.terminal.design_details import Extras, asked, details
from rlhfsim.present.terminal.odds import odds_dict, quantiles, summary, targets
from rlhfsim.present.terminal.ranking import proof, rounded, unlisted
from rlhfsim.present.words import likely, signed
from rlhfsim.search.requirements import Verdict
from rlhfsim.units import format, significant
from rlhfsim.verdict import verdict as sentences
from rlhfsim.what_if.design import Design
from rlhfsim.what_if.gains import Gain

SCHEMA = "rlhfsim.design/4"
LATE = "no change that helps was found in time: give the search more"
LEANER = ((), ("tight",), ("tight", "bare"), ("tight", "bare", "short"))
"""How the first screen becomes leaner: without blank lines, meanings of words, and the nearest run."""


# --- for people -----------------------------------------------------------------------------------


def show(
    console: Display, answer: Design, extras: Extras, out: str, detail: frozenset[str] = frozenset()
) -> None:
    """Print the first screen, then what was asked for."""
    if answer.chosen is None:
        _show_nothing(console, answer, late=extras.late)
        return
    show_first(console, answer, extras, out, detail)
    for title, parts in (*asked(answer, extras, console.width), *details(answer, detail, console.width)):
        console.rule(title, align="left", style="dim")
        for part in parts:
            console.print(part)


def show_first(
    console: Display, answer: Design, extras: Extras, out: str, detail: frozenset[str] = frozenset()
) -> None:
    """The first screen: rivals and what is known of them are cut so that it stays one."""
    plan, width = answer.chosen, console.width
    assert plan is not None
    verdict, following = dict(_verdict(answer, extras)), _next(answer, out, detail)
    said = styled(sentences(replace(plan, run=extras.run)))
    head = [said, styled(view.task(plan), style="bold"), styled(view.batch(plan))]
    goals = [targets(replace(plan, run=extras.run))] if extras.verdicts else []
    goals += list(_meeting(extras))
    others = unlisted(answer)
    rest = [labelled({"others": others})] if others else []
    says = {
        short: labelled({k: text for k, text in verdict.items() if not (k == "measured" and short)})
        for short in (False, True)
    }
    sides = list(_side(answer, extras, width))
    tables = {
        decoded: [
            *sides,
            first.roles(plan, width, decoded=decoded),
            first.phases(plan, width, decoded=decoded, tiny=first.TINY),
        ]
        for decoded in (False, True)
    }
    heights: dict[int, int] = {}
    for leaner in LEANER:
        blank: list[Part] = [""] * ("tight" not in leaner)
        below = chain.from_iterable((*blank, x) for x in tables["bare" not in leaner])
        parts = [*head, says["short" in leaner], *goals, *below, *rest]
        heights |= {id(x): height(console, [x]) for x in parts if id(x) not in heights}
        if sum(heights[id(x)] for x in parts) + len(following) <= first.MOST:
            break
    for part in parts:
        console.print(part, highlight=False)
    for line in following:
        put(console, line)


def _side(answer: Design, extras: Extras, width: int) -> Iterator[Part]:
    if answer.chosen is not None and answer.other_side is not None and extras.side is not None:
        side = side_by_side.table(answer.chosen, answer.other_side, extras.side)
        yield tight(within(side, width), None)


def _meeting(extras: Extras) -> Iterator[Part]:
    """Where a target is missed: what would meet all, each change by itself."""
    if extras.odds is None or extras.odds.meets:
        return
    if not extras.meeting:
        none = "no single change that was tried meets all targets"
        yield styled(LATE if extras.late else none, style="bold")
        return
    titles = ("what would meet all, each by itself", ">step", ">USD/step", ">likely")
    rows = (
        (
            change.change,
            format(change.step_s, "s"),
            "unknown" if change.usd_per_step is None else significant(change.usd_per_step),
            likely(change.probability),
        )
        for change in extras.meeting
    )
    yield tight(grid(titles, rows), None)


def _verdict(answer: Design, extras: Extras) -> Iterator[tuple[str, str]]:
    plan = answer.chosen
    assert plan is not None
    rows = first.verdict(plan)
    if any(_side(answer, extras, WIDTH)):  # which says the step with its P10 and P90
        yield "cost", f"{view.money_text(plan)}, {view.energy_text(plan)}, {first.speed(plan)}"
    else:
        yield from ((name, rows[name]) for name in ("step", "cost"))
    if (aim := answer.request.objective) in ("tokens", "cost", "energy"):
        why = "the cluster is rented, powered and fed whole, so the shortest step is also the best in"
        yield "aim", f"objective {aim}: {why} {aim}"
    if answer.fewer is not None:
        yield "GPUs", lines.knee(plan, answer.fewer)
    if extras.run and (run := quantiles(extras.run) if extras.verdicts else summary(extras.run)):
        yield "odds", run
    yield "plan", view.architecture(plan, aged=False)  # who is apart from whom: the table of roles
    yield "proof", proof(answer)
    yield from (("choice", text) for text in lines.choice(answer))
    if extras.bottleneck is not None:
        yield from (("slowest", text) for text in lines.slowest(plan, extras.bottleneck))
    yield from (("allow", text) for text in lines.allowed(answer))
    yield from (("sync", text) for text in lines.changes_only(plan, answer))
    yield from (("lend", text) for text in lines.lending(plan, answer))
    yield from ((name, rows[name]) for name in ("learning", "memory", "assumed", "caution") if name in rows)
    yield from sampling(plan).items()
    yield from (("drafts", text) for text in lines.drafts(plan, answer))
    if plan.idle_gpus:
        yield "idle", lines.idle(answer)
    if answer.even is not None:
        yield "batch", lines.even(answer.even)
    if (other := answer.elsewhere) is not None and other.seconds is not None:
        saved = signed(-(other.saved or 0.0))
        yield "faster", f"{other.meaning}: {format(other.seconds, 's')}, {saved}: {other.option}"
    yield from ((name, text) for name, text in known(plan).items() if name == "kernels")
    if extras.side is None or _unsaid(answer) or "written only" in _known(answer).values():
        yield "run by", _runner(answer)
    if plan.nearest is not None:
        yield "measured", nearest_short(plan.nearest)


def _runner(answer: Design) -> str:
    """Who runs the chosen plan, and how that is known."""
    runs, known = answer.request.runs, _known(answer)
    if runs is None:
        return "any framework: the plan is priced, whether or not one runs it"
    unseen = [what for what, how in known.items() if how == "written only"]
    if unseen:
        how = f"written and never run: {', '.join(unseen)}"
    elif "run on CPUs" in known.values():
        how = "all of it has run on CPUs, nothing on GPUs yet"
    else:
        how = "its users run all of it on GPUs"
    unsaid = _unsaid(answer)
    if unsaid and not _is_written(answer):
        return f"{runs.title}: {how}, but rlhfsim export does not write it: {'; '.join(unsaid)}"
    if unsaid:
        return f"{runs.title}: {how}, but what its keys cannot say: {'; '.join(unsaid)} (rlhfsim export)"
    return f"{runs.title}: {how} (rlhfsim frameworks)"


def _unsaid(answer: Design) -> tuple[str, ...]:
    """What of the chosen plan the keys of its framework cannot say."""
    runs = answer.request.runs
    if runs is None or answer.chosen is None or runs.name not in exporters():
        return ()
    return unsaid_of(answer.chosen, runs.name)


def _is_written(answer: Design) -> bool:
    """Whether `rlhfsim export` writes the chosen plan for its framework."""
    runs = answer.request.runs
    if runs is None or answer.chosen is None or runs.name not in exporters():
        return False
    return is_written(answer.chosen, runs.name)


def _known(answer: Design) -> Mapping[str, Known]:
    plan, runs = answer.chosen, answer.request.runs
    if plan is None or runs is None:
        return {}
    return runs.known(plan.placement, plan.workload, plan.topology, one_node=plan.replicas_in_one_node)


def _next(answer: Design, out: str, detail: frozenset[str]) -> list[Part]:
    """Commands that go on from the plan, and what this one has not shown; each in one line, to be copied."""
    assert answer.chosen is not None
    rows, more = dict[str, str](), [f"rlhfsim simulate {out}"]
    if answer.request.runs is framework(OWN):
        rows["next"] = f"rlhfsim launch {out} --dry-run --assume-cluster {_nodes(answer.chosen.hardware)}"
    elif (runs := answer.request.runs) is not None and _is_written(answer):
        rows["next"] = f"rlhfsim export {out} --to {runs.name} --out run"
    more += [] if answer.gains else ["--gains"]
    more += [] if detail else ["--detail time,memory,proof,sure,all"]
    rows["more"] = "; ".join(more)
    return [one_line(label, text) for label, text in rows.items()]


def _nodes(hardware: Sequence[PlannedHardware]) -> str:
    """`8x8xh100_sxm+1x1xh100_sxm`: whole nodes, and one with the GPUs that are left."""
    groups = []
    for h in hardware:
        whole, left = divmod(h.gpus, h.gpus_per_node)
        groups += [f"{whole}x{h.gpus_per_node}x{h.profile}"] * (whole > 0) + [f"1x{left}x{h.profile}"] * (
            left > 0
        )
    return "+".join(groups)


def _show_nothing(console: Display, answer: Design, *, late: bool) -> None:
    nothing, request = styled("nothing fits: ", style="bold red"), answer.request
    if not answer.certificate.space:
        console.print(nothing + styled("no layout obeys all that is fixed, bounded and forbidden"))
    else:
        group, work = request.cluster.node_group, request.workload
        what = f"{work.title} of {work.model} on {request.cluster.gpus:,} x {group.profile.title}"
        console.print(nothing + styled(f"{what}; {rounded(answer.certificate.space)} plans, none runs"))
    if answer.rejected_by:
        nearest = "the plan that comes nearest does not fit: " if answer.nearest else ""
        console.print(f"{nearest}{answer.rejected_by}", highlight=False)
    if not answer.remedies:
        none = "no single change that was tried helps; try a smaller model"
        console.print(styled(LATE if late else none, style="bold"))
        return
    console.print(styled("the smallest change that fits: ") + styled(answer.remedies[0].change, style="bold"))
    titles = ("what would fit, each by itself", ">step", ">USD/step", "")
    rows = (
        (
            remedy.change,
            format(remedy.step_s, "s"),
            "unknown" if remedy.usd_per_step is None else significant(remedy.usd_per_step),
            "other work" if remedy.other_work else "",
        )
        for remedy in answer.remedies
    )
    console.print(tight(grid(titles, rows), None))
    console.print(styled("good plans, not proven to be the best of their change", style="dim"))


# --- for machines ---------------------------------------------------------------------------------


def design_dict(answer: Design, extras: Extras) -> dict[str, Any]:
    """The same content; schema in docs/plan.md."""
    chosen, best = answer.chosen, answer.best
    return {
        "schema": SCHEMA,
        "verdict": sentences(replace(chosen, run=extras.run)) if chosen else None,
        "objective": answer.request.objective,
        "framework": answer.request.runs.name if answer.request.runs else ANY,
        "known": dict(_known(answer)),
        "chosen": plan_dict(chosen) if chosen else None,
        "best": plan_dict(best) if best and answer.simpler else None,
        "runners_up": [
            {**plan_dict(plan, answer.request.workload), "gap": gap}
            for plan, gap in zip(answer.runners_up, answer.gaps, strict=True)
        ],
        "certificate": asdict(answer.certificate),
        "layouts_refused": dict(answer.refused),
        "probability_better_than_runner_up": answer.confidence,
        "reasons": list(answer.reasons),
        "requirements": [verdict_dict(v) for v in extras.verdicts],
        "odds": odds_dict(extras.odds),
        "run": _run_dict(chosen, extras.steps),
        "why_not": [whynot_dict(w, best, chosen) for w in answer.whynots] if best and chosen else [],
        "pareto": None if extras.front is None else front_dict(extras.front),
        "calibration": recalibrated.page(extras.recalibrated, best).as_data
        if extras.recalibrated and best
        else None,
        "break_evens": None if answer.break_evens is None else each(answer.break_evens, *BREAK_EVEN),
        "gains": [gain_dict(g) for g in answer.gains],
        "elsewhere": gain_dict(answer.elsewhere) if answer.elsewhere else None,
        "unsaid": list(_unsaid(answer)),
        "side_by_side": side_by_side.side_by_side_dict(chosen, answer.other_side, extras.side)
        if chosen and answer.other_side and extras.side
        else [],
        "learning_gain": gain_dict(answer.learning_gain) if answer.learning_gain else None,
        "bottleneck": fields(extras.bottleneck, "resource", "phase", "seconds", "more", "step_s")
        if extras.bottleneck
        else None,
        "would_meet": each(extras.meeting, "change", "step_s", "usd_per_step", "probability"),
        "fewer_gpus": fields(answer.fewer, "gpus", "step_s") if answer.fewer else None,
        "even_batch": fields(answer.even, "prompts", "step_s", "gain") if answer.even else None,
        "shortage": answer.shortage,
        "rejected_by": answer.rejected_by,
        "remedy": answer.remedy,
        "missing": missing_dict(answer.missing) if answer.missing else None,
        "remedies": each(answer.remedies, "change", "step_s", "usd_per_step", "other_work"),
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
    return {**target, **fields(verdict, "actual", "met", "probability")}


def _run_dict(plan: Plan | None, steps: int | None) -> dict[str, Any] | None:
    if plan is None or steps is None:
        return None
    p = plan.prediction
    usd = None if p.usd_per_step is None else p.usd_per_step * steps
    return {"steps": steps, "seconds": p.step_s * steps, "usd": usd, "kwh": p.kwh_per_step * steps}
