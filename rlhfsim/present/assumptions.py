"""What the answer rests on: coefficients and datasheet numbers with sources, filled blanks, and what is not known."""

from __future__ import annotations

from collections.abc import Iterator

from rlhfsim.plan import Plan
from rlhfsim.present.basis import Basis
from rlhfsim.present.figures.trust import outcome_assumptions, published, spoken
from rlhfsim.present.html import words
from rlhfsim.present.html.content import Cell, Listing, Table, number
from rlhfsim.present.html.content import words as cell
from rlhfsim.specs.hardware.hardware import Profile
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.units import Dimension, format
from rlhfsim.validation import assumptions

VAGUE = 2.0
"""P90 over P10 from which a coefficient counts as hardly known."""
DERIVED = {
    "length_balance": "how evenly drawn lengths spread over the ranks: computed from their distribution",
    "rules.seconds_per_sample": "given by the workload",
}
"""What a time can rest on besides coefficients and curves."""


def used(plan: Plan) -> tuple[str, ...]:
    """Every coefficient and curve that some predicted phase rests on, those of the longest phases first."""
    ranked = sorted(plan.prediction.phases, key=lambda p: -p.seconds)
    return tuple(dict.fromkeys(name for p in ranked for name in p.rests_on))


def tables(basis: Basis) -> Iterator[Table]:
    """Coefficients in use and datasheet numbers of every kind of GPU, then the batch."""
    yield _batch(basis.plan)
    names = used(basis.plan)
    for profile in {p.name: p for p in basis.profiles if p is not None}.values():
        head = ("number", "value", "P10", "P90", "source")
        yield Table(
            caption=f"Coefficients in use of {profile.title} ({profile.name})",
            head=head,
            rows=tuple(_coefficient(n, profile) for n in names),
        )
        yield Table(
            caption=f"Datasheet of {profile.title}",
            head=("number", "value", "source"),
            rows=tuple(_datasheet(profile)),
            open=False,
        )


def _coefficient(name: str, profile: Profile) -> tuple[Cell, ...]:
    if name in profile.coefficients:
        c = profile.coefficients[name]
        shown = (number(x, format(x, c.dimension)) for x in (c.value, c.low, c.high))
        return cell(spoken(name)), *shown, cell(c.source)
    curves = (profile.curves or {}).get("tables", {})
    if name in curves:
        return (
            cell(spoken(name)),
            cell("curve"),
            cell(""),
            cell(""),
            cell(str(curves[name].get("source", "measured"))),
        )
    return (
        cell(spoken(name)),
        cell(""),
        cell(""),
        cell(""),
        cell(DERIVED.get(name, "the cost model's own assumption")),
    )


def _datasheet(profile: Profile) -> Iterator[tuple[Cell, ...]]:
    entries: list[tuple[str, float, Dimension, str]] = [
        ("memory", profile.memory.value, "byte", profile.memory.source),
        ("memory that a process can use", profile.usable_memory.value, "byte", profile.usable_memory.source),
        *((f"peak {name}", peak.value, "flop/s", peak.source) for name, peak in profile.peak.items()),
        ("GPU memory bandwidth", profile.hbm.value, "byte/s", profile.hbm.source),
        (
            f"{profile.scale_up.kind} per GPU",
            profile.scale_up.bandwidth.value,
            "byte/s",
            profile.scale_up.bandwidth.source,
        ),
        ("network per GPU", profile.nic.value, "byte/s", profile.nic.source),
        ("PCIe per GPU", profile.pcie.value, "byte/s", profile.pcie.source),
        ("power", profile.tdp.value, "W", profile.tdp.source),
    ]
    if profile.price is not None:
        entries.append(
            (f"price of a GPU ({profile.price.date})", profile.price.value, "usd/h", profile.price.source)
        )
    for name, value, unit, source in entries:
        yield cell(name), number(value, format(value, unit)), cell(source)


def _batch(plan: Plan) -> Table:
    w = plan.workload
    rows = [
        ("algorithm", w.algorithm.upper()),
        ("prompts per step", f"{w.prompts:,}"),
        ("responses per prompt", f"{w.samples:,}"),
        ("prompt", words.lengths(w.prompt_len)),
        ("response", words.lengths(w.response_len)),
        ("updates per step", f"{w.epochs * w.mini_batches:,}"),
        ("packing", "yes" if w.packing else "no: padded to the longest"),
    ]
    return Table(
        caption="The batch, as given", head=("what", "value"), rows=tuple((cell(a), cell(b)) for a, b in rows)
    )


# --- blanks and unknowns ----------------------------------------------------------------------------


def filled() -> Table:
    """Assumptions behind the published steps that were predicted."""
    counts = outcome_assumptions(published())
    sources = {entry.id: entry.source for entry in assumptions.shipped()["rlhf"]}
    rows = tuple(
        (cell(text), number(n, str(n)), cell(next((s for i, s in sources.items() if f"({i})" in text), "")))
        for text, n in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    )
    return Table(
        caption="Blanks of published runs that were filled by assumption",
        head=("assumption", "runs", "source"),
        rows=rows,
        open=False,
    )


def unknowns(basis: Basis) -> Listing:
    """What is not known, or left out, in the words of a reader."""
    return Listing(title="Not known, or left out", items=tuple(_unknowns(basis)), mark="warn")


def _unknowns(basis: Basis) -> Iterator[str]:
    plan = basis.plan
    yield from (words.capital(note) for note in basis.notes)
    if plan.prediction.usd_per_step is None:
        yield "No price is known for this hardware, so money is not shown; give --price."
    if isinstance(plan.workload.response_len, Fixed) and plan.workload.generates:
        yield f"Every response is taken to have {words.lengths(plan.workload.response_len)}; real lengths vary, and a step then also waits for the longest."
    if plan.placement.schedule.asynchronous:
        yield f"Samples are up to {plan.placement.schedule.staleness:g} policy versions old; what that does to learning is not predicted."
    yield "Failures, restarts and checkpoints are not in the step time (rlhfsim simulate --mtbf adds them), nor is learning: no reward or loss is predicted."
    for profile in {p.name: p for p in basis.profiles if p is not None}.values():
        if not profile.curves:
            yield f"{profile.title} has no measured kernel curves: its times come from peaks and efficiencies."
        names = [n for n in used(plan) if n in profile.coefficients and _vague(profile, n)]
        if names:
            yield f"Known only within a factor of {VAGUE:g} or worse on {profile.title}: {words.listed([spoken(n) for n in names])}."


def _vague(profile: Profile, name: str) -> bool:
    c = profile.coefficients[name]
    return c.high > VAGUE * c.low
