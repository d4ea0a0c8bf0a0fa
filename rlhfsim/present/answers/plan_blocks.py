"""Blocks that answers about a plan share: its header, targets, roles, phases, memory, and how sure it is."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from rlhfsim import units
from rlhfsim.plan import Plan, PredictedPhase
from rlhfsim.present import plan_words
from rlhfsim.present.answers import odds
from rlhfsim.present.answers.tree import Block, Column, FactList, Legend, Note, TypedTable, table_of
from rlhfsim.present.basis import State, capacity_of, evidence, profile_under, states
from rlhfsim.present.tables import (
    BAR,
    BYTES,
    CUT,
    DECIMAL_ENDS,
    DECIMALS,
    NAME,
    RIGHT,
    SHARE,
    Bar,
    Fit,
    Stretch,
    Word,
    fields,
    fixed_to,
)
from rlhfsim.present.words import MEMORY_GROUPS, RESOURCES, decimals, is_move, size
from rlhfsim.specs.hardware.hardware import Profile
from rlhfsim.trace import WAIT
from rlhfsim.what_if.estimate import Planned

SMALL = 0.02
"""Moves shorter than this share of the step are together in one line."""
TINY = 0.002
"""Share of the step below which a phase has no line of its own on a first screen."""


def wants(detail: Collection[str], name: str) -> bool:
    """Whether a part of the answer is asked for."""
    return name in detail or "all" in detail


# --- header and targets -----------------------------------------------------------------------------


def header(plan: Plan) -> Iterator[Block]:
    """What is computed on what, and how: a title line, then batch, architecture, roles, what is known."""
    yield Note(plan_words.task(plan), "strong")
    yield FactList(plan_words.header_rows(plan))


def notes(texts: Sequence[str]) -> Iterator[Block]:
    """What is worth knowing, a line each."""
    return (Note(f"note: {text}", "warn") for text in texts)


def rejection(rejected_by: str | None, remedy: str | None) -> Iterator[Block]:
    """What does not fit, and the smallest change that fits."""
    yield Note(f"does not fit: {rejected_by}", "bad")
    none = "no single change that was tried helps"
    yield Note(f"smallest change that fits: {remedy}" if remedy else none, "strong")


def verdict(answer: Planned) -> Iterator[Block]:
    """Notes, and what does not fit with its remedy."""
    yield from notes(answer.notes)
    if answer.fits:
        return
    yield from rejection(answer.rejected_by, answer.remedy)
    if answer.plan is not None:
        yield Note("the plan, priced all the same:\n", "aside")


def verdict_data(answer: Planned) -> dict[str, Any]:
    """Whether the plan can run, what does not fit, and what would."""
    return fields(answer, "fits", "rejected_by", "remedy", "notes")


def targets(plan: Plan) -> TypedTable:
    """A line for all targets in one, then a line a target."""
    titles = ("asked for", "", "reached", "how surely")
    columns = (Column(title, i) for i, title in enumerate(titles))
    return table_of("Targets", odds.target_texts(plan), *columns, look="plain", apart=False)


# --- phases -----------------------------------------------------------------------------------------


def phases(plan: Plan, *, tiny: float = 0.0, starts: bool = False) -> TypedTable:
    """Seconds of every phase, what binds it, how near it is to its hardware's limit, memory, and a bar; with
    `starts` also when it begins."""
    p = plan.prediction
    end = max((f.start_s + f.seconds for f in p.phases), default=0.0)
    digits = decimals(end)
    shown, small = split(p.phases, end, tiny=tiny)
    rows: list[tuple[Any, ...]] = [
        (
            *(f.name, f.pool, f.start_s, f.seconds, (f.low_s, f.high_s)),
            Word(RESOURCES[f.bound_by].word if f.bound_by in RESOURCES else f.bound_by, f.bound_by),
            *(limit_share(f, p.phases), _full(plan, f), _time_bar(f, end)),
        )
        for f in shown
    ]
    if small:
        name = f"{len(small)} short {'moves' if all(is_move(f.name) for f in small) else 'phases'}"
        rows.append((name, "", None, sum(f.seconds for f in small), None, "", None, None, None))
    return table_of(
        "Time by phase",
        rows,
        Column("phase", 0, NAME),
        *[Column("pool", 1, fit=Fit("cut", max_width=14))] * (len(plan.placement.pools) > 1),
        *[Column("start s", 2, DECIMALS[digits].where(""), narrow="")] * starts,
        Column("takes s", 3, fixed_to(digits)),
        Column("P10-P90", 4, DECIMAL_ENDS[digits], narrow=""),
        Column("bound by", 5, NAME),
        Column("of peak", 6, SHARE.where("")),
        Column("memory", 7, SHARE.where("")),
        Column(units.format(end, "s"), 8, BAR),
        look="bare",
        notes=(_meanings(plan),),
    )


def split(
    phases: Sequence[PredictedPhase], end: float, *, tiny: float = 0.0
) -> tuple[list[PredictedPhase], list[PredictedPhase]]:
    """Phases in the order of their start, and the short ones that are together in one line.

    `tiny`: share of the step below which a phase that is no move is short too.
    """
    ordered = sorted(phases, key=lambda f: (f.start_s, not f.critical))
    small = [f for f in ordered if f.seconds < (SMALL if is_move(f.name) else tiny) * end]
    return [f for f in ordered if f not in small], small


def _time_bar(phase: PredictedPhase, end: float) -> Bar:
    """The bar by resource, the largest first; faint where the step would not be shorter without it."""
    shares = sorted(phase.by_resource_s.items(), key=lambda item: -item[1])
    stretches = [Stretch(seconds, resource) for resource, seconds in shares]
    return Bar(stretches, end, phase.start_s, faint=not phase.critical)


def limit_share(phase: PredictedPhase, phases: Sequence[PredictedPhase]) -> float | None:
    """Speed of a call as a share of that at the peak rates of its GPUs; None where none is known.

    The part of a call that the step waits for is a phase of its own (`actor.generate.wait`) and counts too.
    At most 1: a measured rate may pass a cautious datasheet by a few percent (`MAX_EFFICIENCY`).
    """
    waited = (f.seconds for f in phases if f.name == f"{phase.name}.{WAIT}")
    taken = phase.work_s or sum(waited, phase.seconds)
    return None if phase.limit_s is None or taken <= 0 else min(1.0, phase.limit_s / taken)


def _full(plan: Plan, phase: PredictedPhase) -> float | None:
    """Share of the fullest GPU that is taken in a phase."""
    pool = phase.pool.split("+", 1)[0]
    held = [state.bytes for state in states(plan, pool) if state.phase == phase.name]
    profile = profile_under(plan, pool)
    capacity = profile.usable_memory.value if profile else plan.prediction.capacity_bytes
    return max(held) / capacity if held else None


DECODED = {
    "hbm": "GPU memory bandwidth",
    "nvlink": "fabric inside a node",
    "pcie": "link to the host",
    "host": "CPU and its memory",
    "bubble": "pipeline stages wait",
    "tail": "GPUs wait for the longest responses",
    "overhead": "launches and framework",
}
"""Resource whose word does not say what it is -> its meaning, as short as a first screen asks."""


def _meanings(plan: Plan) -> str:
    """What the columns say, once."""
    named = [f for f in plan.prediction.phases if not is_move(f.name)]
    used = dict.fromkeys(f.bound_by for f in named)
    said = [f"{RESOURCES[r].word}: {DECODED[r]}" for r in used if r in DECODED]
    if any(f.limit_s is not None for f in named):
        said.append("of peak: speed, as a share of that at the GPUs' peak rates")
    if any(not f.critical for f in plan.prediction.phases):
        said.append("light: not waited for")
    return "; ".join(said)


# --- memory -----------------------------------------------------------------------------------------


def memory(plan: Plan) -> Iterator[Block]:
    """Memory of every pool through the step against its capacity, the peak marked."""
    several = len(plan.placement.pools) > 1
    for pool in plan.placement.pools:
        if rows := states(plan, pool.name):
            title = f"pool {pool.name}, " * several + f"{pool.gpus} GPUs: bytes on the fullest GPU"
            yield Note(title, "strong", apart=pool is plan.placement.pools[0])
            yield _held(title, rows, capacity_of(plan, pool.name))
    over = plan.prediction.peak_memory_bytes > plan.prediction.capacity_bytes
    yield Legend(tuple(MEMORY_GROUPS), over)


def _held(title: str, rows: Sequence[State], capacity: float) -> TypedTable:
    peak = max(rows, key=lambda state: state.bytes)
    scale = max(capacity, peak.bytes) * 1.02
    return table_of(
        title,
        rows,
        Column("phase", kind=NAME),
        Column("bytes", kind=BYTES),
        Column("full", lambda s: s.bytes / capacity, SHARE),
        Column(
            size(capacity),
            lambda s: Bar([Stretch(s.groups[g], g) for g in MEMORY_GROUPS], scale, limit=capacity),
            BAR,
        ),
        Column("", lambda s: "< peak" if s is peak else "", NAME),
        style=lambda s: "bold" if s is peak else "",
        apart=False,
    )


# --- sureness ---------------------------------------------------------------------------------------


def sureness(plan: Plan, count: int = 3) -> TypedTable:
    """The coefficients that decide most of the step, with value, interval and source."""
    rows = (
        (_coefficient_words(name, profile), *_coefficient_cells(name, profile))
        for name, profile in heaviest(plan)[:count]
    )
    return table_of(
        "What the time rests on",
        rows,
        Column("the time rests on", 0, NAME),
        Column("value", 1, RIGHT),
        Column("P10-P90", 2, RIGHT),
        Column("because", 3, fit=CUT),
        apart=False,
    )


def _coefficient_words(name: str, profile: Profile | None) -> str:
    """Its name; `nvlink` only where there is one."""
    if profile is not None and profile.scale_up.kind != "nvlink":
        name = name.replace("nvlink", "scale-up")
    return name.replace("_", " ")


def heaviest(plan: Plan) -> list[tuple[str, Profile | None]]:
    """Coefficients by the uncertainty (P90 - P10) of the critical phases that rest on them most."""
    weight: dict[str, float] = {}
    owner: dict[str, Profile | None] = {}
    for phase in plan.prediction.phases:
        if not phase.critical:
            continue
        for rank, name in enumerate(phase.rests_on[:3]):
            weight[name] = weight.get(name, 0.0) + (phase.high_s - phase.low_s) / 4**rank
            owner.setdefault(name, profile_under(plan, phase.pool.split("+", 1)[0]))
    return [(name, owner[name]) for name in sorted(weight, key=lambda n: -weight[n])]


def _coefficient_cells(name: str, profile: Profile | None) -> tuple[str, str, str]:
    source = evidence(name, profile) or "the cost model's own assumption, see docs/hardware.md"
    if profile and name in profile.coefficients:
        c = profile.coefficients[name]
        low, high = (units.format(x, c.dimension) for x in (c.low, c.high))
        return units.format(c.value, c.dimension), f"{low}-{high}", source
    tables = (profile.curves or {}).get("tables", {}) if profile else {}
    return "curve" if name in tables else "", "", source
