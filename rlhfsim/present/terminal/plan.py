"""A plan as people read it: header, summary, phases, placement, memory, and how sure it is.

Every function returns something that rich prints within the width it is given; no information
stands in colour alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlhfsim import units
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import Plan, PredictedPhase
from rlhfsim.present.terminal.bars import FULL, LIGHT, Axis, Bar, Piece
from rlhfsim.present.terminal.memory import capacity_of, memory_chart
from rlhfsim.present.terminal.words import (
    ARCHITECTURES,
    DERIVED,
    NARROW,
    PATHS,
    RESOURCES,
    ROLES,
    WIDTH,
    component_text,
    console,
    decimals,
    fixed,
    is_move,
    labelled,
    lengths_text,
    new_table,
    percent,
    profile_of,
    resource_text,
    size,
)
from rlhfsim.specs.hardware.hardware import Profile
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.placement.backends import BACKENDS
from rlhfsim.specs.placement.layout import RolloutLayout
from rlhfsim.specs.placement.placement import RolePlacement, RolloutPlacement

SMALL = 0.02
"""Moves shorter than this share of the step stand together in one line."""
__all__ = [
    "WIDTH",
    "capacity_of",
    "console",
    "cost_text",
    "header",
    "heaviest",
    "labelled",
    "memory_chart",
    "memory_text",
    "new_table",
    "peak_text",
    "percent",
    "phase_table",
    "placement_table",
    "summary",
    "sureness",
]


# --- header and summary -----------------------------------------------------------------------------


def header(plan: Plan) -> RenderableType:
    """What is computed on what, and how: a title line, then batch, architecture, roles."""
    rows = {"batch": _batch(plan), "plan": _way(plan), "roles": _roles(plan)}
    return Group(Text(_task(plan), style="bold"), labelled(rows))


def _task(plan: Plan) -> str:
    names = {m.role: m for m in plan.models}
    actor = names["actor"]
    others = [f"{r} {m.name}" for r, m in names.items() if m.name != actor.name]
    beside = f" with {', '.join(others)}" if others else ""
    lora = f", LoRA rank {plan.workload.lora.rank}" if plan.workload.lora else ""
    backend = BACKENDS[plan.placement.backend].title
    return (
        f"{plan.workload.algorithm.upper()} of {actor.name}{beside}{lora} on {hardware_text(plan)}, {backend}"
    )


def hardware_text(plan: Plan) -> str:
    """`64 x H100 SXM 80GB (8 nodes of 8)`."""
    shown = []
    for h in plan.hardware:
        try:
            title = load_profile(h.profile).title
        except RlhfsimError:
            title = h.profile
        nodes = -(-h.gpus // h.gpus_per_node)
        shape = f"{nodes} nodes of {h.gpus_per_node}" if nodes > 1 else "one node"
        shown.append(f"{h.gpus:,} x {title} ({shape})")
    thin = f", fabric {plan.oversubscription:g}:1" if plan.oversubscription > 1 else ""
    return " and ".join(shown) + thin


def _batch(plan: Plan) -> str:
    w = plan.workload
    samples = f" x {w.samples:,} responses" if w.samples > 1 else ""
    updates = w.epochs * w.mini_batches
    return (
        f"{w.prompts:,} {'pairs' if w.algorithm == 'dpo' else 'prompts'}{samples}; prompt {lengths_text(w.prompt_len)}, response "
        f"{lengths_text(w.response_len)}; {updates} update{'s' if updates > 1 else ''} per step"
    )


def _way(plan: Plan) -> str:
    lag = plan.placement.schedule.staleness
    stale = f", samples up to {lag:g} version{'s' if lag > 1 else ''} old" if lag else ""
    words = ARCHITECTURES[plan.architecture] if plan.placement.rollout else "no rollout"
    return f"{plan.architecture} ({words}{stale})"


def _roles(plan: Plan) -> str:
    path = plan.placement.weight_path
    sync = f"; weights to the rollout: {PATHS[path]}" if plan.placement.rollout else ""
    return f"{plan.role_placement} ({ROLES[plan.role_placement]}){sync}"


def summary(plan: Plan) -> Table:
    """Step time, money and energy, memory peak and risk: label and figure."""
    p = plan.prediction
    spread = f"P10-P90 {units.format(p.low_s, 's')} to {units.format(p.high_s, 's')}"
    speed = f"{units.significant(p.tokens_per_s_per_gpu)} tokens/s per GPU"
    return labelled(
        {
            "step": f"{units.format(p.step_s, 's')} ({spread}), {speed}",
            "cost": cost_text(plan),
            "memory": memory_text(plan),
        }
    )


def cost_text(plan: Plan) -> str:
    """`13.3 USD (3 USD per GPU-hour), 5.82 kWh and 2.2 kgCO2e per step`."""
    p = plan.prediction
    gpus = sum(h.gpus for h in plan.hardware)
    if p.usd_per_step is None:
        money = "price unknown (give --price)"
    else:
        rate = p.usd_per_step / p.step_s * units.HOUR / gpus
        money = f"{units.format(p.usd_per_step, 'usd')} ({units.format(rate, 'usd')} per GPU-hour)"
    return (
        f"{money}, {units.significant(p.kwh_per_step)} kWh, "
        f"{units.significant(p.kg_co2e_per_step)} kgCO2e per step"
    )


def memory_text(plan: Plan) -> str:
    """The peak and the host."""
    return f"peak {peak_text(plan)}; host {size(plan.prediction.host_peak_bytes)} per node"


def peak_text(plan: Plan) -> str:
    """When, how much of what, whose, and the risk."""
    p = plan.prediction
    over = "BEYOND CAPACITY, " if p.peak_memory_bytes > p.capacity_bytes else ""
    return (
        f"{over}{size(p.peak_memory_bytes)} of {size(p.capacity_bytes)} per GPU in {p.peak_phase}, mostly "
        f"{component_text(p.peak_component)} of {p.peak_role}; risk of running out {percent(p.probability_out_of_memory)}"
    )


# --- phases -----------------------------------------------------------------------------------------


def phase_table(plan: Plan, width: int = WIDTH) -> RenderableType:
    """Phases in the order of their start, each with a bar in time and what binds it."""
    p = plan.prediction
    end = max((f.start_s + f.seconds for f in p.phases), default=0.0)
    pools = len(plan.placement.pools) > 1
    table = new_table(width)
    table.add_column("phase", no_wrap=True)
    if pools:
        table.add_column("pool", no_wrap=True, overflow="ellipsis", max_width=14)
    if width >= NARROW:
        table.add_column("start s", justify="right", no_wrap=True)
    table.add_column("takes s", justify="right", no_wrap=True)
    table.add_column("P10-P90", justify="right", no_wrap=True)
    table.add_column("bound by", no_wrap=True)
    table.add_column(Axis(label=units.format(end, "s"), at=end, scale=end), ratio=1)
    small = [f for f in p.phases if is_move(f.name) and f.seconds < SMALL * end]
    for phase in sorted(p.phases, key=lambda f: (f.start_s, not f.critical)):
        if phase not in small:
            table.add_row(*_phase_cells(phase, end, decimals(end), pools, width >= NARROW))
    if small:
        blank = [""] * (pools + (width >= NARROW))
        total = fixed(sum(f.seconds for f in small), decimals(end))
        table.add_row(
            f"{len(small)} short moves",
            *blank,
            total,
            "",
            resource_text(_largest(small)),
            Text("in and out of GPU memory", style="dim"),
        )
    return Group(table, *(Text(note, style="dim") for note in _phase_notes(plan)))


def _largest(phases: list[PredictedPhase]) -> str:
    """The resource on which phases spend most of their time."""
    total: dict[str, float] = {}
    for phase in phases:
        for resource, seconds in phase.by_resource_s.items():
            total[resource] = total.get(resource, 0.0) + seconds
    return max(total, key=lambda r: total[r], default="")


def _phase_cells(
    phase: PredictedPhase, end: float, digits: int, pools: bool, start: bool
) -> list[RenderableType]:
    cells: list[RenderableType] = [phase.name]
    if pools:
        cells.append(phase.pool)
    if start:
        cells.append(f"{phase.start_s:,.{digits}f}")
    return [
        *cells,
        fixed(phase.seconds, digits),
        f"{phase.low_s:,.{digits}f}-{phase.high_s:,.{digits}f}",
        resource_text(phase.bound_by),
        Bar(pieces=_time_pieces(phase), scale=end, offset=phase.start_s),
    ]


def _time_pieces(phase: PredictedPhase) -> list[Piece]:
    """The bar by resource, the largest first; light where the step would not be shorter without it."""
    glyph = FULL if phase.critical else LIGHT
    shares = sorted(phase.by_resource_s.items(), key=lambda kv: -kv[1])
    return [Piece(amount=s, glyph=glyph, style=RESOURCES.get(r, ("", "", ""))[1]) for r, s in shares]


def _phase_notes(plan: Plan) -> Iterator[str]:
    phases = plan.prediction.phases
    if any(not f.critical for f in phases):
        yield "light bars: the step does not wait for them"
    used = dict.fromkeys(f.bound_by for f in phases if not is_move(f.name))
    words = [f"{RESOURCES[r][0]}: {RESOURCES[r][2]}" for r in used if r in RESOURCES]
    if words:
        yield "; ".join(words)


# --- placement --------------------------------------------------------------------------------------


def placement_table(plan: Plan, width: int = WIDTH) -> Table:
    """Who sits where and how each model is cut."""
    pools = {p.name: p for p in plan.placement.pools}
    table = new_table(width)
    table.add_column("role", no_wrap=True)
    for name in ("GPUs", "layout"):
        table.add_column(name, no_wrap=width >= NARROW)
    table.add_column("micro-batch" if width >= NARROW else "micro\nbatch", justify="right")
    table.add_column("recompute" if width >= NARROW else "re-\ncompute")
    table.add_column("between calls", ratio=1 if width >= NARROW else None)
    table.add_column("precision" if width >= NARROW else "", no_wrap=True)
    for name, role in plan.placement.roles.items():
        pool = pools[role.pool]
        where = f"{pool.start}-{pool.start + pool.gpus - 1}"
        if len(plan.hardware) > 1:
            where += f" {plan.hardware[pool.hardware].profile}"
        table.add_row(
            name,
            f"{where} {pool.name}" if len(pools) > 1 else where,
            _layout(role),
            *_role_cells(plan, name, role),
        )
    return table


def _role_cells(plan: Plan, name: str, role: RolePlacement | RolloutPlacement) -> tuple[str, str, str, str]:
    """Micro-batch, recompute, what happens between calls, precision."""
    if isinstance(role, RolloutPlacement):
        return "", "", _rollout_rest(role), _rollout_precision(role.layout)
    trained = name in ("actor", "critic")
    recompute = role.layout.recompute if trained else ""
    return str(role.layout.micro_batch), recompute, _rest(role, trained), "bf16"


def _rest(role: RolePlacement, trained: bool) -> str:
    parts = []
    if role.residency == "offloaded":
        parts.append("weights to host")
    if role.residency == "recreated":
        parts.append("recreated")
    if role.offload_between:
        parts.append("optimizer to host")
    if trained and role.layout.offload_optimizer != "none":
        parts.append(f"Adam on {role.layout.offload_optimizer.replace('cpu', 'CPU')}")
    if role.layout.offload_params != "none":
        parts.append("weights on host")
    return ", ".join(parts) or "stays"


def _rollout_rest(role: RolloutPlacement) -> str:
    if role.residency != "resident":
        return role.residency
    return {0: "stays", 1: "sleeps, weights to host", 2: "sleeps, memory freed"}[role.sleep]


def _layout(role: RolePlacement | RolloutPlacement) -> str:
    if isinstance(role, RolloutPlacement):
        return f"{role.layout.label}, {percent(role.layout.memory_utilization)} of memory"
    vp = f" VP{role.layout.vp}" if role.layout.vp > 1 else ""
    return f"{role.layout.label}{vp}"


def _rollout_precision(layout: RolloutLayout) -> str:
    same = layout.precision == layout.kv_precision
    return layout.precision if same else f"{layout.precision}, KV {layout.kv_precision}"


# --- sureness ---------------------------------------------------------------------------------------


def sureness(plan: Plan, width: int = WIDTH, count: int = 3) -> RenderableType:
    """The coefficients that decide most of the step, with value, interval and source."""
    table = new_table(width)
    table.add_column("the time rests on", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("P10-P90", justify="right", no_wrap=True)
    table.add_column("because", ratio=1, no_wrap=True, overflow="ellipsis")
    for name, profile in heaviest(plan)[:count]:
        table.add_row(name.replace("_", " "), *_coefficient_cells(name, profile))
    return table


def heaviest(plan: Plan) -> list[tuple[str, Profile | None]]:
    """Coefficients by the uncertainty (P90 - P10) of the critical phases that rest on them most."""
    weight: dict[str, float] = {}
    owner: dict[str, Profile | None] = {}
    for phase in plan.prediction.phases:
        if not phase.critical:
            continue
        for rank, name in enumerate(phase.rests_on[:3]):
            weight[name] = weight.get(name, 0.0) + (phase.high_s - phase.low_s) / 4**rank
            owner.setdefault(name, profile_of(plan, phase.pool.split("+", 1)[0]))
    return [(name, owner[name]) for name in sorted(weight, key=lambda n: -weight[n])]


def _coefficient_cells(name: str, profile: Profile | None) -> tuple[str, str, str]:
    if profile and name in profile.coefficients:
        c = profile.coefficients[name]
        low, high = (units.format(x, c.dimension) for x in (c.low, c.high))
        return units.format(c.value, c.dimension), f"{low}-{high}", c.source
    tables = (profile.curves or {}).get("tables", {}) if profile else {}
    if name in tables:
        return "curve", "", str(tables[name].get("source", "measured"))
    return "", "", DERIVED.get(name, "the cost model's own assumption, see docs/hardware.md")
