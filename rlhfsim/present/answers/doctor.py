"""What `rlhfsim doctor` answers: fits or not, the step, changes in the framework's keys, what was assumed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlhfsim import units
from rlhfsim.interchange.configuration.keys import Unread
from rlhfsim.memory.ledger import LIKELY, LedgerPhase
from rlhfsim.plan import Plan
from rlhfsim.present import plan_words
from rlhfsim.present.answers.plan_blocks import phases
from rlhfsim.present.answers.roles import roles
from rlhfsim.present.answers.tree import Block, FactList, Listing, Note, Page, PageSection, section
from rlhfsim.present.tables import THOUSANDTHS, each, fields
from rlhfsim.present.words import component_text, percent, plural, signed, size
from rlhfsim.what_if.doctor.case import Judged
from rlhfsim.what_if.doctor.certainty import computed, reasons, riskiest
from rlhfsim.what_if.doctor.diagnosis import Diagnosis, KeyChange
from rlhfsim.what_if.doctor.fix import ChangedFile

KEYS_SHOWN, KEYS_LISTED = 3, 12
"""Misspelt keys next to the verdict, and keys of a list that are written out."""


def page(answer: Diagnosis, repaired: ChangedFile | None = None) -> Page:
    """The verdict, the step by phase, changes, findings, what was assumed, and how a file was changed."""
    base = answer.judged
    return Page(
        schema="rlhfsim.doctor/1",
        verdict=verdict(base),
        mark="strong" if base.fits else "bad",
        sections=tuple(_sections(answer, repaired)),
        data=_data(answer, repaired),
    )


def _verdict(answer: Diagnosis) -> Iterator[Block]:
    """What stops it, what nobody gave and decides, and what makes it fit."""
    for finding in answer.findings:
        if finding.stops:
            yield Note(f"stops: {finding.what}; {finding.remedy}", "bad")
    yield from _doubted(answer)
    if answer.fixes:
        yield Note("any one of these makes it fit:", "strong")
        yield from _changes(answer.fixes, None)
    if answer.nearest is not None:
        yield Note(f"no key that was tried makes it fit; all at once, {moment(answer.nearest.judged)}:")
        yield from _changes([answer.nearest], None)
        yield Note("so it needs more GPUs, GPUs with more memory, or a smaller model", "strong")


def _doubted(answer: Diagnosis) -> Iterator[Block]:
    """What nobody gave and decides, next to the verdict, misspelt keys, and how many others it leaves out."""
    for change in answer.absent:
        if change.judged.fits != answer.judged.fits:
            yield Note(f"it rests on a default: {_without(change, answer)}", "warn")
    matters = [u for u in answer.unread if u.matters]
    absent = [u for u in matters if u.kind == "no such key"]
    yield from (Note(_absent(each, answer), "bad") for each in absent[:KEYS_SHOWN])
    if len(absent) > KEYS_SHOWN:
        yield Note(f"{len(absent) - KEYS_SHOWN} more such keys are listed at the end", "bad")
    others = len(matters) - len(absent)
    if others:
        what = (
            "a key that is not read and may change it" if others == 1 else f"{others} keys that are not read"
        )
        may = "" if others == 1 else " and may change it"
        yield Note(f"the answer does not count {what}{may}: see `not read` below", "warn")


def _without(change: KeyChange, answer: Diagnosis) -> str:
    """`--gradient_checkpointing is not in what you gave: risk above 95 %; with it 12 %`."""
    keys = ", ".join(said(key, value) for key, value in change.keys.items())
    return (
        f"{keys} is not in what you gave: risk {risk_text(answer.judged)}; with it {risk_text(change.judged)}"
    )


def _absent(each: Unread, answer: Diagnosis) -> str:
    other = f" (it had until {each.until})" if each.until else f" (since {each.since})" if each.since else ""
    near = f"; the nearest is {each.nearest}" if each.nearest else ""
    return f"{answer.lacks}{other}: {each.key}={each.value}{near}"


def _unread(answer: Diagnosis) -> Iterator[str]:
    """What the configuration sets and nothing reads: what matters by name, the rest by number."""
    may = [f"{u.key}={u.value}" for u in answer.unread if u.matters and u.kind == "may change"]
    if may:
        more = f" and {len(may) - KEYS_LISTED} more (--json)" if len(may) > KEYS_LISTED else ""
        yield f"{plural(len(may), 'key')} may change the answer: {', '.join(may[:KEYS_LISTED])}{more}"
    absent = [_absent(u, answer) for u in answer.unread if u.kind == "no such key"]
    yield from absent[:KEYS_LISTED]
    rest = len(answer.unread) - len(may) - len(absent) + max(0, len(absent) - KEYS_LISTED)
    if rest:
        yield f"{plural(rest, 'other key')} of no effect on time and memory, or at their defaults: see --json"


def verdict(base: Judged) -> str:
    """Fits or not, with the risk, the moment and the bytes."""
    risk = f"risk of running out of memory {risk_text(base)}"
    if not base.fits:
        phase = base.memory.breaks_in(LIKELY)
        over = phase.probability_out_of_memory >= LIKELY or not base.memory.rejected_by
        needs = f"breaks in {phase.name}, which needs {_held(phase)}"
        return f"does not fit: {needs if over else base.memory.rejected_by}; {risk}"
    held, offered = base.memory.host_bytes, base.memory.host_capacity
    pool = max(held, key=lambda name: held[name] / offered[name])
    return f"fits: {risk}; {moment(base)}; host {size(held[pool])} of {size(offered[pool])} a node"


def risk_text(judged: Judged) -> str:
    """A probability; where a bound is said for it, its side."""
    risk = computed(judged.memory)
    side = "below " if risk < judged.risk else "above " if risk > judged.risk else ""
    return side + percent(judged.risk)


def _held(phase: LedgerPhase) -> str:
    """How much of a GPU a phase takes, and what most of it is."""
    top = max(phase.entries, key=lambda entry: entry.bytes)
    return (
        f"{size(phase.bytes)} of {size(phase.capacity)} a GPU, "
        f"{size(top.bytes)} of it {component_text(top.component)} of {top.role}"
    )


def moment(judged: Judged) -> str:
    """The moment at which the risk is largest: phase, bytes, the largest component."""
    phase = riskiest(judged.memory)
    return f"fullest in {phase.name}, {_held(phase)}"


def _plan(plan: Plan) -> Iterator[Block]:
    """The blocks of the first screen of `rlhfsim design`; what is assumed is listed in full at the end."""
    yield Note(plan_words.batch(plan))
    yield FactList({name: text for name, text in plan_words.verdict(plan).items() if name != "assumed"})
    yield roles(plan)
    yield phases(plan)


def _sections(answer: Diagnosis, repaired: ChangedFile | None) -> Iterator[PageSection]:
    yield section("verdict", "", *_verdict(answer))
    plan = answer.judged.plan
    start = answer.fixes[0] if answer.fixes else KeyChange(keys={}, judged=answer.judged)
    none = _unchanged(answer, start)
    yield section("plan", plan_words.task(plan), *_plan(plan), Note(none, apart=True) if none else None)
    if answer.faster:
        on_top = " and of the first change that makes it fit" if answer.fixes else ""
        heading = f"what helps most, re-estimated; each on top of those above it{on_top}"
        yield section("faster", heading, *_changes(answer.faster, start))
    found = (f.what + (f"; {f.remedy}" if f.remedy else "") for f in answer.findings if not f.stops)
    for name, told in (("found", found), ("not read", _unread(answer)), ("assumed", _assumed(answer))):
        if items := tuple(told):
            yield section(name.replace(" ", "-"), name, Listing(items))
    if repaired is not None:
        figures = _figures(repaired.judged, answer.judged)
        heading = f"written to {repaired.path}, read and priced again: {figures}"
        yield section("fix", heading, Note(repaired.diff.rstrip(), whole=True))


def _unchanged(answer: Diagnosis, start: KeyChange) -> str | None:
    """Why no change is named that makes it faster."""
    if answer.faster:
        return None
    if answer.unnamed:
        return f"no change can be named: {answer.unnamed}"
    return "no change of a key that was tried saves 2 % of the step" if start.judged.fits else None


def _changes(changes: Sequence[KeyChange], start: KeyChange | None) -> Iterator[Block]:
    """Each with its figures, then its keys, a line each; with a start each builds on those before it."""
    before = start
    for i, change in enumerate(changes, start=1):
        yield Note(f"  {i}  {_figures(change.judged, before.judged if before else None)}")
        known = before.keys if before else {}
        for key, value in change.keys.items():
            if key not in known:
                yield Note(f"       {said(key, value)}", "key", whole=True)
        before = change if before else None


def _figures(after: Judged, before: Judged | None) -> str:
    """`104 s -> 80 s (-23 %), 0.4 USD less a step, peak 60 GB, risk 3 %`."""
    p = after.plan.prediction
    parts = [units.format(after.step_s, "s")]
    if before is not None:
        share = signed(after.step_s / before.step_s - 1)
        parts = [f"{units.format(before.step_s, 's')} -> {parts[0]} ({share})"]
        was = before.plan.prediction.usd_per_step
        if p.usd_per_step is not None and was is not None:
            parts.append(f"{THOUSANDTHS.shown(p.usd_per_step - was)} USD")
    return ", ".join([*parts, f"peak {size(p.peak_memory_bytes)}", f"risk of running out {risk_text(after)}"])


def said(key: str, value: Any) -> str:
    """A key with its value as its framework reads it: an argument, or `key=value`."""
    if not key.startswith("--"):
        return f"{key}={'null' if value is None else value}"
    if value is None or value is False:
        return f"without {key}"
    return key if value is True else f"{key} {value}"


def _assumed(answer: Diagnosis) -> Iterator[str]:
    """What was not given and what was taken for it."""
    described, configuration = answer.judged.described, answer.case.configuration
    yield from answer.case.assumed(described)
    yield from (_without(change, answer) for change in answer.absent)
    yield from reasons(computed(answer.judged.memory), configuration.name)
    if defaults := described.settings.assumed:
        shown = ", ".join(said(k, v) for k, v in defaults.items())
        yield f"defaults of {configuration.title}: {shown}"


# --- JSON -------------------------------------------------------------------------------------------


def _data(answer: Diagnosis, repaired: ChangedFile | None) -> dict[str, Any]:
    """What JSON says; schema in docs/doctor.md."""
    base = answer.judged
    described = base.described
    phase = base.memory.breaks_in(LIKELY)
    top = max(phase.entries, key=lambda entry: entry.bytes)
    return {
        "framework": answer.case.configuration.name,
        **fields(base, "fits", probability_out_of_memory="risk", rejected_by="memory.rejected_by"),
        "fullest": fields(phase, phase="name", pool="pool")
        | fields(top, "role", "component")
        | fields(phase, "bytes")
        | {"component_bytes": top.bytes, "capacity_bytes": phase.capacity},
        "host": {
            pool: {"bytes": held, "capacity_bytes": base.memory.host_capacity[pool]}
            for pool, held in base.memory.host_bytes.items()
        },
        "fixes": [_change(change, base, {}) for change in answer.fixes],
        "faster": [*_steps(answer)],
        "nearest": _change(answer.nearest, base, {}) if answer.nearest else None,
        "fix": {
            "file": str(repaired.path),
            "diff": repaired.diff,
            **_change(replace(repaired.change, judged=repaired.judged), base, {}),
        }
        if repaired
        else None,
        "findings": each(answer.findings, "what", "keys", "remedy", "stops"),
        "release": answer.case.recorded,
        "unread": each(answer.unread, "key", "value", "kind", "matters", "nearest", "until", "since"),
        "assumed": {
            "lengths": [*answer.case.assumed(described)],
            "defaults": dict(described.settings.assumed),
            "risk": [*reasons(computed(base.memory), answer.case.configuration.name)],
            "absent": [_change(change, base, {}) for change in answer.absent],
        },
        "plan": base.plan.to_dict(),
    }


def _steps(answer: Diagnosis) -> Iterator[dict[str, Any]]:
    before = answer.fixes[0] if answer.fixes else KeyChange(keys={}, judged=answer.judged)
    for change in answer.faster:
        yield _change(change, before.judged, before.keys)
        before = change


def _change(change: KeyChange, start: Judged, known: Mapping[str, Any]) -> dict[str, Any]:
    p, before = change.judged.plan.prediction, start.plan.prediction
    priced = p.usd_per_step is not None and before.usd_per_step is not None
    return {
        "keys": {key: value for key, value in change.keys.items() if key not in known},
        **fields(p, "step_s"),
        "saves_s": before.step_s - p.step_s,
        "saves_usd": (before.usd_per_step or 0.0) - (p.usd_per_step or 0.0) if priced else None,
        **fields(p, "peak_memory_bytes"),
        "gained_bytes": before.peak_memory_bytes - p.peak_memory_bytes,
        **fields(p, "probability_out_of_memory"),
    }
