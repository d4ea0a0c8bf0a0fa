"""The answer of `rlhfsim design` for people and for machines."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from rlhfsim.interchange.export import exporters, is_written, unsaid_of
from rlhfsim.plan import Plan, PlannedHardware
from rlhfsim.present import plan_words
from rlhfsim.present import verdict_lines as lines
from rlhfsim.present.answers.choices import missing_dict, plan_dict, side_records, side_table, whynot_dict
from rlhfsim.present.answers.design_details import Extras, asked, details
from rlhfsim.present.answers.odds import odds_dict, quantiles, summary
from rlhfsim.present.answers.plan_blocks import TINY, phases, targets
from rlhfsim.present.answers.ranking import proof, rounded, unlisted
from rlhfsim.present.answers.roles import roles
from rlhfsim.present.answers.tree import Block, Column, FactList, Note, Page, TypedTable, section, table_of
from rlhfsim.present.known import known, nearest_short, sampling
from rlhfsim.present.plan_words import energy_text, money_text, speed
from rlhfsim.present.tables import COUNT, NAME, NEVER, NUMBER, PROBABILITY, SECONDS, ValueKind, each, fields
from rlhfsim.present.words import signed
from rlhfsim.specs.frameworks.runs import ANY, OWN, Known, framework
from rlhfsim.verdict import verdict as sentences
from rlhfsim.what_if.design import Design
from rlhfsim.what_if.gains import Gain
from rlhfsim.what_if.missed_targets import Meeting
from rlhfsim.what_if.remedies import Remedy

LATE = "no change that helps was found in time: give the search more"
OTHER_WORK = ValueKind(lambda other: "other work" if other else "", number=False)


# --- the page -------------------------------------------------------------------------------------


def page(answer: Design, extras: Extras, out: str = "plan.json", detail: Collection[str] = ()) -> Page:
    """The first screen, then what was asked for; `out`: the file of the plan."""
    if answer.chosen is None:
        sections = [section("plan", "", *_nothing(answer, late=extras.late))]
    else:
        first = section("plan", "", *_first(answer, extras, out, detail))
        sections = [first, *asked(answer, extras), *details(answer, detail)]
    return Page(schema="rlhfsim.design/4", sections=tuple(sections), data=partial(_data, answer, extras))


def _first(answer: Design, extras: Extras, out: str, detail: Collection[str]) -> Iterator[Block]:
    plan = answer.chosen
    assert plan is not None
    with_run = replace(plan, run=extras.run)
    yield Note(sentences(with_run))
    yield Note(plan_words.task(plan), "strong")
    yield Note(plan_words.batch(plan))
    yield FactList({name: text for name, text in _verdict(answer, extras) if text})
    if extras.verdicts:
        yield targets(with_run)
    yield from _meeting(extras)
    if answer.other_side is not None and extras.side is not None:
        yield side_table(plan, answer.other_side, extras.side)
    yield roles(plan)
    yield phases(plan, tiny=TINY)
    if others := unlisted(answer):
        yield FactList({"others": others})
    yield FactList(_next(answer, out, detail), whole=True)


def _meeting(extras: Extras) -> Iterator[Block]:
    """Where a target is missed: what would meet all, each change by itself."""
    if extras.odds is None or extras.odds.meets:
        return
    if not extras.meeting:
        none = "no single change that was tried meets all targets"
        yield Note(LATE if extras.late else none, "strong")
        return
    yield _changes(
        "what would meet all, each by itself",
        extras.meeting,
        Column("likely", "probability", PROBABILITY),
        name="would_meet",
    )


def _changes(
    title: str, changes: Sequence[Meeting] | Sequence[Remedy], last: Column, *, name: str
) -> TypedTable:
    """Changes with what a step then takes."""
    return table_of(
        title,
        changes,
        Column(title, "change", NAME),
        Column("step", "step_s", SECONDS),
        Column("USD/step", "usd_per_step", NUMBER.where("unknown")),
        last,
        name=name,
        look="bare",
        apart=False,
    )


def _verdict(answer: Design, extras: Extras) -> Iterator[tuple[str, str | None]]:
    """Label and sentence of every line; without one where there is nothing to say."""
    plan = answer.chosen
    assert plan is not None
    rows = plan_words.verdict(plan)
    if answer.other_side is not None and extras.side is not None:  # which says the step, P10 and P90
        yield "cost", f"{money_text(plan)}, {energy_text(plan)}, {speed(plan)}"
    else:
        yield from ((name, rows[name]) for name in ("step", "cost"))
    if (aim := answer.request.objective) in ("tokens", "cost", "energy"):
        why = "the cluster is rented, powered and fed whole, so the shortest step is also the best in"
        yield "aim", f"objective {aim}: {why} {aim}"
    yield "GPUs", lines.knee(plan, answer.fewer) if answer.fewer else None
    yield "odds", (quantiles if extras.verdicts else summary)(extras.run) if extras.run else None
    yield "plan", plan_words.architecture(plan, aged=False)  # who is apart from whom: the table of roles
    yield "proof", proof(answer)
    yield "choice", lines.choice(answer)
    yield "slowest", lines.slowest(plan, extras.bottleneck) if extras.bottleneck else None
    yield "allow", lines.allowed(answer)
    yield "sync", lines.changes_only(plan, answer)
    yield "lend", lines.lending(plan, answer)
    yield from ((name, rows.get(name)) for name in ("learning", "memory", "assumed", "caution"))
    yield from sampling(plan).items()
    yield "drafts", lines.drafts(plan, answer)
    yield "idle", lines.idle(answer) if plan.idle_gpus else None
    yield "batch", lines.even(answer.even) if answer.even else None
    if (other := answer.elsewhere) is not None and other.seconds is not None:
        saved = signed(-(other.saved or 0.0))
        yield "faster", f"{other.meaning}: {SECONDS.shown(other.seconds)}, {saved}: {other.option}"
    yield "kernels", known(plan).get("kernels")
    if extras.side is None or _unsaid(answer) or "written only" in _known(answer).values():
        yield "run by", _runner(answer)
    yield "measured", nearest_short(plan.nearest) if plan.nearest else None


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


def _next(answer: Design, out: str, detail: Collection[str]) -> dict[str, str]:
    """Commands that go on from the plan, and what this one has not shown."""
    assert answer.chosen is not None
    rows, more = dict[str, str](), [f"rlhfsim simulate {out}"]
    if answer.request.runs is framework(OWN):
        rows["next"] = f"rlhfsim launch {out} --dry-run --assume-cluster {_nodes(answer.chosen.hardware)}"
    elif (runs := answer.request.runs) is not None and _is_written(answer):
        rows["next"] = f"rlhfsim export {out} --to {runs.name} --out run"
    more += [] if answer.gains else ["--gains"]
    more += [] if detail else ["--detail time,memory,proof,sure,all"]
    return {**rows, "more": "; ".join(more)}


def _nodes(hardware: Sequence[PlannedHardware]) -> str:
    """`8x8xh100_sxm+1x1xh100_sxm`: whole nodes, and one with the GPUs that are left."""
    groups = []
    for h in hardware:
        whole, left = divmod(h.gpus, h.gpus_per_node)
        groups += [f"{whole}x{h.gpus_per_node}x{h.profile}"] * (whole > 0) + [f"1x{left}x{h.profile}"] * (
            left > 0
        )
    return "+".join(groups)


def _nothing(answer: Design, *, late: bool) -> Iterator[Block]:
    request = answer.request
    if not answer.certificate.space:
        yield Note("nothing fits: no layout obeys all that is fixed, bounded and forbidden", "bad")
    else:
        group, work = request.cluster.node_group, request.workload
        what = f"{work.title} of {work.model} on {COUNT.shown(request.cluster.gpus)} x {group.profile.title}"
        yield Note(f"nothing fits: {what}; {rounded(answer.certificate.space)} plans, none runs", "bad")
    if answer.rejected_by:
        nearest = "the plan that comes nearest does not fit: " if answer.nearest else ""
        yield Note(f"{nearest}{answer.rejected_by}")
    if not answer.remedies:
        none = "no single change that was tried helps; try a smaller model"
        yield Note(LATE if late else none, "strong")
        return
    yield Note(f"the smallest change that fits: {answer.remedies[0].change}", "strong")
    yield _changes(
        "what would fit, each by itself",
        answer.remedies,
        Column("", "other_work", OTHER_WORK, fit=NEVER),
        name="remedies",
    )
    yield Note("good plans, not proven to be the best of their change", "aside")


# --- for machines ---------------------------------------------------------------------------------


def _data(answer: Design, extras: Extras) -> dict[str, Any]:
    """What JSON says next to fronts and changes; schema in docs/plan.md."""
    chosen, best = answer.chosen, answer.best
    return {
        "verdict": sentences(replace(chosen, run=extras.run)) if chosen else None,
        **fields(answer, "request.objective"),
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
        **fields(answer, "reasons"),
        "requirements": each(extras.verdicts, *REQUIREMENT, "actual", "met", "probability"),
        "odds": odds_dict(extras.odds),
        "run": _run_dict(chosen, extras.steps),
        "why_not": [whynot_dict(w, best, chosen) for w in answer.whynots] if best and chosen else [],
        "pareto": None,
        "calibration": extras.calibration.as_data if extras.calibration else None,
        "break_evens": None if answer.break_evens is None else each(answer.break_evens, *BREAK_EVEN),
        "gains": [gain_dict(g) for g in answer.gains],
        "elsewhere": gain_dict(answer.elsewhere) if answer.elsewhere else None,
        "unsaid": _unsaid(answer),
        "side_by_side": [*side_records(chosen, answer.other_side, extras.side)]
        if chosen and answer.other_side and extras.side
        else [],
        "learning_gain": gain_dict(answer.learning_gain) if answer.learning_gain else None,
        "bottleneck": fields(extras.bottleneck, "resource", "phase", "seconds", "more", "step_s")
        if extras.bottleneck
        else None,
        "would_meet": [],
        "fewer_gpus": fields(answer.fewer, "gpus", "step_s") if answer.fewer else None,
        "even_batch": fields(answer.even, "prompts", "step_s", "gain") if answer.even else None,
        **fields(answer, "shortage", "rejected_by", "remedy"),
        "missing": missing_dict(answer.missing) if answer.missing else None,
        "remedies": [],
    }


def gain_dict(gain: Gain) -> dict[str, Any]:
    """What a choice that does not compete would bring."""
    return fields(gain, "name", "meaning", "option", "other_work", step_s="seconds", saved="saved")


BREAK_EVEN = ("change", "factor", "now", "value", "unit", "winner", "step_s", "chosen_step_s")


REQUIREMENT = tuple(f"requirement.{name}" for name in ("text", "quantity", "relation", "value"))
"""A target, in base units."""


def _run_dict(plan: Plan | None, steps: int | None) -> dict[str, Any] | None:
    if plan is None or steps is None:
        return None
    p = plan.prediction
    usd = None if p.usd_per_step is None else p.usd_per_step * steps
    return {"steps": steps, "seconds": p.step_s * steps, "usd": usd, "kwh": p.kwh_per_step * steps}
