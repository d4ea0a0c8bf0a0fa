"""What the answer rests on: coefficients and datasheets with sources, filled blanks, what is not known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rlhfsim.plan import Plan
from rlhfsim.present import words
from rlhfsim.present.answers.tree import Column, Listing, TypedTable, pairs, table_of
from rlhfsim.present.basis import Basis, evidence
from rlhfsim.present.figures.trust import outcome_assumptions
from rlhfsim.present.tables import COUNT, QUANTITY, YES
from rlhfsim.specs.hardware.hardware import Profile
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.units import Dimension
from rlhfsim.validation import assumptions

VAGUE = 2.0
"""P90 over P10 from which a coefficient counts as hardly known."""


def used(plan: Plan) -> tuple[str, ...]:
    """Every coefficient and curve that some predicted phase rests on, those of the longest phases first."""
    ranked = sorted(plan.prediction.phases, key=lambda p: -p.seconds)
    return tuple(dict.fromkeys(name for p in ranked for name in p.rests_on))


def tables(basis: Basis) -> Iterator[TypedTable]:
    """Coefficients in use and datasheet numbers of every kind of GPU, then the batch."""
    yield _batch(basis.plan)
    for profile in {p.name: p for p in basis.profiles if p is not None}.values():
        yield _coefficients(used(basis.plan), profile)
        yield _datasheet(profile)


def _coefficients(names: tuple[str, ...], profile: Profile) -> TypedTable:
    def value(end: str) -> Callable[[str], Any]:
        return lambda n: (getattr(known[n], end), known[n].dimension) if n in known else None

    known = profile.coefficients
    curves = (profile.curves or {}).get("tables", {})
    return table_of(
        f"Coefficients in use of {profile.title} ({profile.name})",
        names,
        Column("number", words.spoken),
        Column("value", value("value"), QUANTITY),
        Column("P10", value("low"), QUANTITY),
        Column("P90", value("high"), QUANTITY),
        Column("source", lambda n: evidence(n, profile) or "the cost model's own assumption"),
        Column("curve", lambda n: (n in curves and n not in known) or None, YES, spare=1),
    )


def _datasheet(profile: Profile) -> TypedTable:
    link, price = profile.scale_up, profile.price
    rows: list[tuple[str, Any, Dimension]] = [
        ("memory", profile.memory, "byte"),
        ("memory that a process can use", profile.usable_memory, "byte"),
        *((f"peak {name}", peak, "flop/s") for name, peak in profile.peak.items()),
        ("GPU memory bandwidth", profile.hbm, "byte/s"),
        (f"{link.kind} per GPU", link.bandwidth, "byte/s"),
        ("network per GPU", profile.nic, "byte/s"),
        ("PCIe per GPU", profile.pcie, "byte/s"),
        ("power", profile.tdp, "W"),
    ]
    if price is not None:
        rows.append((f"price of a GPU ({price.date})", price, "usd/h"))
    return table_of(
        f"Datasheet of {profile.title}",
        rows,
        Column("number", 0),
        Column("value", lambda row: (row[1].value, row[2]), QUANTITY),
        Column("source", "1.source"),
        open=False,
    )


def _batch(plan: Plan) -> TypedTable:
    w = plan.workload
    rows = {
        "algorithm": w.title,
        "prompts per step": f"{w.prompts:,}",
        "responses per prompt": f"{w.samples:,}",
        "prompt": words.lengths(w.prompt_len),
        "response": words.lengths(w.response_len),
        "updates per step": f"{w.epochs * w.mini_batches:,}",
        "packing": "yes" if w.packing else "no: padded to the longest",
    }
    return pairs("The batch, as given", rows.items())


# --- blanks and unknowns ----------------------------------------------------------------------------


def filled() -> TypedTable:
    """Assumptions behind the published steps that were predicted."""
    sources = {entry.id: entry.source for entry in assumptions.shipped()["rlhf"]}
    return table_of(
        "Blanks of published runs that were filled by assumption",
        sorted(outcome_assumptions().items(), key=lambda item: (-item[1], item[0])),
        Column("assumption", 0),
        Column("runs", 1, COUNT),
        Column("source", lambda item: next((s for i, s in sources.items() if f"({i})" in item[0]), "")),
        open=False,
    )


def unknowns(basis: Basis) -> Listing:
    """What is not known, or left out, in the words of a reader."""
    return Listing(tuple(_unknowns(basis)), "Not known, or left out", mark="warn")


def _unknowns(basis: Basis) -> Iterator[str]:
    plan = basis.plan
    yield from (words.capital(note) for note in basis.notes)
    if plan.prediction.usd_per_step is None:
        yield "No price is known for this hardware, so money is not shown; give --price."
    if isinstance(plan.workload.response_len, Fixed) and plan.workload.generates:
        yield (
            f"Every response is taken to have {words.lengths(plan.workload.response_len)}; real lengths "
            "vary, and a step then also waits for the longest."
        )
    if plan.placement.schedule.asynchronous:
        yield (
            f"Samples are up to {plan.placement.schedule.staleness:g} policy versions old; what that does to "
            "learning is not predicted."
        )
    yield (
        "Failures, restarts and checkpoints are not in the step time (rlhfsim simulate --mtbf adds them), "
        "nor is learning: no reward or loss is predicted."
    )
    for profile in {p.name: p for p in basis.profiles if p is not None}.values():
        if not profile.curves:
            yield (
                f"{profile.title} has no measured kernel curves: its times come from peaks and efficiencies."
            )
        known = {n: profile.coefficients[n] for n in used(plan) if n in profile.coefficients}
        vague = [words.spoken(n) for n, c in known.items() if c.high > VAGUE * c.low]
        if vague:
            yield (
                f"Known only within a factor of {VAGUE:g} or worse on {profile.title}: {words.listed(vague)}."
            )
