"""What `rlhfsim doctor` shows: fits or not, the step, changes in the framework's keys, what was assumed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlhfsim import units
from rlhfsim.frameworks.configuration.keys import Unread
from rlhfsim.memory.ledger import LIKELY, LedgerPhase
from rlhfsim.plan import Plan
from rlhfsim.present.terminal import first_screen as first
from rlhfsim.present.terminal import plan as view
from rlhfsim.present.terminal.console import Part, console, labelled, styled
from rlhfsim.present.words import component_text, percent, plural, signed, size
from rlhfsim.what_if.doctor.case import Judged
from rlhfsim.what_if.doctor.certainty import computed, reasons, riskiest
from rlhfsim.what_if.doctor.diagnosis import Diagnosis, KeyChange
from rlhfsim.what_if.doctor.fix import ChangedFile

SCHEMA = "rlhfsim.doctor/1"
KEYS_SHOWN, KEYS_LISTED = 3, 12
"""Misspelt keys next to the verdict, and keys of a list that are written out."""


def report(answer: Diagnosis, repaired: ChangedFile | None = None) -> Iterator[Part]:
    """The verdict, the step by phase, changes, findings, what was assumed, and how a file was changed."""
    base = answer.judged
    yield styled(verdict(base), style="bold" if base.fits else "bold red")
    for finding in answer.findings:
        if finding.stops:
            yield styled(f"stops: {finding.what}; {finding.remedy}", style="bold red")
    yield from _doubted(answer)
    if answer.fixes:
        yield styled("any one of these makes it fit:", style="bold")
        yield from _changes(answer.fixes, None)
    if answer.nearest is not None:
        yield styled(f"no key that was tried makes it fit; all at once, {moment(answer.nearest.judged)}:")
        yield from _changes([answer.nearest], None)
        yield styled("so it needs more GPUs, GPUs with more memory, or a smaller model", style="bold")
    yield from _screen(base.plan, console().width)
    yield from _faster(answer)
    yield from _told(answer)
    if repaired is not None:
        figures = _figures(repaired.judged, answer.judged)
        yield styled(f"\nwritten to {repaired.path}, read and priced again: {figures}", style="bold")
        yield styled(repaired.diff.rstrip(), no_wrap=True, overflow="fold")


def _doubted(answer: Diagnosis) -> Iterator[Part]:
    """What nobody gave and decides, next to the verdict, misspelt keys, and how many others it leaves out."""
    decides = [change for change in answer.absent if change.judged.fits != answer.judged.fits]
    yield from (
        styled(f"it rests on a default: {_without(change, answer)}", style="yellow") for change in decides
    )
    matters = [u for u in answer.unread if u.matters]
    absent = [u for u in matters if u.kind == "no such key"]
    for each in absent[:KEYS_SHOWN]:
        yield styled(_absent(each, answer), style="bold red")
    if len(absent) > KEYS_SHOWN:
        yield styled(f"{len(absent) - KEYS_SHOWN} more such keys are listed at the end", style="bold red")
    others = len(matters) - len(absent)
    if others:
        what = (
            "a key that is not read and may change it" if others == 1 else f"{others} keys that are not read"
        )
        may = "" if others == 1 else " and may change it"
        yield styled(f"the answer does not count {what}{may}: see `not read` below", style="yellow")


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


def _unread(answer: Diagnosis) -> Iterator[Part]:
    """What the configuration sets and nothing reads: what matters by name, the rest by number."""
    if not answer.unread:
        return
    matters = [u for u in answer.unread if u.matters]
    yield styled("\nnot read", style="bold")
    may = [f"{u.key}={u.value}" for u in matters if u.kind == "may change"]
    if may:
        yield styled(f"- {plural(len(may), 'key')} may change the answer: {_folded(may)}")
    absent = [_absent(u, answer) for u in answer.unread if u.kind == "no such key"]
    yield from (styled(f"- {line}") for line in absent[:KEYS_LISTED])
    rest = len(answer.unread) - len(may) - len(absent) + max(0, len(absent) - KEYS_LISTED)
    if rest:
        yield styled(
            f"- {plural(rest, 'other key')} of no effect on time and memory, or at their defaults: see --json"
        )


def _folded(names: Sequence[str]) -> str:
    more = f" and {len(names) - KEYS_LISTED} more (--json)" if len(names) > KEYS_LISTED else ""
    return ", ".join(names[:KEYS_LISTED]) + more


def verdict(base: Judged) -> str:
    """Fits or not, with the risk, the moment and the bytes."""
    risk = f"risk of running out of memory {risk_text(base)}"
    if not base.fits:
        phase = base.memory.breaks_in(LIKELY)
        over = phase.probability_out_of_memory >= LIKELY or not base.memory.rejected_by
        return f"does not fit: {_needs(phase) if over else base.memory.rejected_by}; {risk}"
    return f"fits: {risk}; {moment(base)}; {_host(base)}"


def risk_text(judged: Judged) -> str:
    """A probability; where a bound is said for it, its side."""
    risk = computed(judged.memory)
    side = "below " if risk < judged.risk else "above " if risk > judged.risk else ""
    return side + percent(judged.risk)


def _needs(phase: LedgerPhase) -> str:
    top = max(phase.entries, key=lambda entry: entry.bytes)
    return (
        f"breaks in {phase.name}, which needs {size(phase.bytes)} of {size(phase.capacity)} a GPU, "
        f"{size(top.bytes)} of it {component_text(top.component)} of {top.role}"
    )


def moment(judged: Judged) -> str:
    """The moment at which the risk is largest: phase, bytes, the largest component."""
    phase = riskiest(judged.memory)
    top = max(phase.entries, key=lambda entry: entry.bytes)
    return (
        f"fullest in {phase.name}, {size(phase.bytes)} of {size(phase.capacity)} a GPU, {size(top.bytes)} of "
        f"it {component_text(top.component)} of {top.role}"
    )


def _host(judged: Judged) -> str:
    memory = judged.memory
    pool = max(memory.host_bytes, key=lambda name: memory.host_bytes[name] / memory.host_capacity[name])
    return f"host {size(memory.host_bytes[pool])} of {size(memory.host_capacity[pool])} a node"


def _screen(plan: Plan, width: int) -> Iterator[Part]:
    """The blocks of the first screen of `rlhfsim design`; what is assumed stands in full at the end."""
    yield ""
    yield styled(view.task(plan), style="bold")
    yield styled(view.batch(plan))
    yield labelled({name: text for name, text in first.verdict(plan).items() if name != "assumed"})
    yield from ("", first.roles(plan, width), "", first.phases(plan, width))


def _faster(answer: Diagnosis) -> Iterator[Part]:
    start = answer.fixes[0] if answer.fixes else KeyChange(keys={}, judged=answer.judged)
    if answer.faster:
        on_top = " and of the first change that makes it fit" if answer.fixes else ""
        yield ""
        yield styled(f"what helps most, re-estimated; each on top of those above it{on_top}", style="bold")
        yield from _changes(answer.faster, start)
    elif answer.unnamed:
        yield styled(f"\nno change can be named: {answer.unnamed}")
    elif start.judged.fits:
        yield styled("\nno change of a key that was tried saves 2 % of the step")


def _changes(changes: Sequence[KeyChange], start: KeyChange | None) -> Iterator[Part]:
    """Each with its figures, then its keys, a line each; with a start each stands on those before it."""
    before = start
    for i, change in enumerate(changes, start=1):
        yield styled(f"  {i}  {_figures(change.judged, before.judged if before else None)}")
        known = before.keys if before else {}
        yield from (
            styled(f"       {said(key, value)}", style="cyan", no_wrap=True, overflow="fold")
            for key, value in change.keys.items()
            if key not in known
        )
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
            parts.append(f"{p.usd_per_step - was:+.3f} USD")
    return ", ".join([*parts, f"peak {size(p.peak_memory_bytes)}", f"risk of running out {risk_text(after)}"])


def said(key: str, value: Any) -> str:
    """A key with its value as its framework reads it: an argument, or `key=value`."""
    if not key.startswith("--"):
        return f"{key}={'null' if value is None else value}"
    if value is None or value is False:
        return f"without {key}"
    return key if value is True else f"{key} {value}"


def _told(answer: Diagnosis) -> Iterator[Part]:
    soft = [f for f in answer.findings if not f.stops]
    if soft:
        yield styled("\nfound", style="bold")
        yield from (styled(f"- {f.what}" + (f"; {f.remedy}" if f.remedy else "")) for f in soft)
    yield from _unread(answer)
    described = answer.judged.described
    yield styled("\nassumed", style="bold")
    yield from (styled(f"- {sentence}") for sentence in answer.case.assumed(described))
    yield from (styled(f"- {_without(change, answer)}") for change in answer.absent)
    risk, framework = computed(answer.judged.memory), answer.case.configuration.name
    yield from (styled(f"- {sentence}") for sentence in reasons(risk, framework))
    defaults = described.settings.assumed
    if defaults:
        shown = ", ".join(said(k, v) for k, v in defaults.items())
        yield styled(f"- defaults of {answer.case.configuration.title}: {shown}")


# --- JSON -------------------------------------------------------------------------------------------


def as_data(answer: Diagnosis, repaired: ChangedFile | None = None) -> dict[str, Any]:
    """The same content; schema in docs/doctor.md."""
    base = answer.judged
    described = base.described
    phase = base.memory.breaks_in(LIKELY)
    top = max(phase.entries, key=lambda entry: entry.bytes)
    return {
        "schema": SCHEMA,
        "framework": answer.case.configuration.name,
        "fits": base.fits,
        "probability_out_of_memory": base.risk,
        "rejected_by": base.memory.rejected_by,
        "fullest": {
            "phase": phase.name,
            "pool": phase.pool,
            "role": top.role,
            "component": top.component,
            "bytes": phase.bytes,
            "component_bytes": top.bytes,
            "capacity_bytes": phase.capacity,
        },
        "host": {
            pool: {"bytes": held, "capacity_bytes": base.memory.host_capacity[pool]}
            for pool, held in base.memory.host_bytes.items()
        },
        "fixes": [_change(change, base, {}) for change in answer.fixes],
        "faster": list(_steps(answer)),
        "nearest": _change(answer.nearest, base, {}) if answer.nearest else None,
        "fix": {
            "file": str(repaired.path),
            "diff": repaired.diff,
            **_change(replace(repaired.change, judged=repaired.judged), base, {}),
        }
        if repaired
        else None,
        "findings": [
            {"what": f.what, "keys": list(f.keys), "remedy": f.remedy, "stops": f.stops}
            for f in answer.findings
        ],
        "release": answer.case.recorded,
        "unread": [
            {
                "key": u.key,
                "value": u.value,
                "kind": u.kind,
                "matters": u.matters,
                "nearest": u.nearest,
                "until": u.until,
                "since": u.since,
            }
            for u in answer.unread
        ],
        "assumed": {
            "lengths": list(answer.case.assumed(described)),
            "defaults": dict(described.settings.assumed),
            "risk": list(reasons(computed(base.memory), answer.case.configuration.name)),
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
        "step_s": p.step_s,
        "saves_s": before.step_s - p.step_s,
        "saves_usd": (before.usd_per_step or 0.0) - (p.usd_per_step or 0.0) if priced else None,
        "peak_memory_bytes": p.peak_memory_bytes,
        "gained_bytes": before.peak_memory_bytes - p.peak_memory_bytes,
        "probability_out_of_memory": p.probability_out_of_memory,
    }
