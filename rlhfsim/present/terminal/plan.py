"""A plan as people read it: header, summary, phases, placement, and how sure it is.

Every function returns something that rich prints within the width it is given; no information
stands in colour alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlhfsim import units
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import Plan, PredictedPhase
from rlhfsim.present import words
from rlhfsim.present.basis import cluster_of, evidence, profile_under, profiles_of
from rlhfsim.present.known import known
from rlhfsim.present.regions import link_words
from rlhfsim.present.sampling import sampling
from rlhfsim.present.tables import CUT, REST, WORDS, Fit, TableData, grid
from rlhfsim.present.terminal.bars import FULL, LIGHT, HorizontalBar, Stretch
from rlhfsim.present.terminal.console import COLOURS, NARROW, WIDTH, Part, drawn, labelled, stacked, styled
from rlhfsim.present.verdict import is_size
from rlhfsim.present.words import percent, size
from rlhfsim.specs.hardware.hardware import Profile
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.placement.backends import BACKENDS, sums_fp32
from rlhfsim.specs.placement.layout import RolloutLayout
from rlhfsim.specs.placement.placement import RolePlacement, RolloutPlacement
from rlhfsim.specs.placement.weight_paths import WEIGHT_PATHS
from rlhfsim.specs.workload.roles import TRAINED
from rlhfsim.what_if.risk.odds import money_of_step
from rlhfsim.what_if.risk.run import outlook

POOL = Fit("cut", max_width=14)
SMALL = 0.02
"""Moves shorter than this share of the step are together in one line."""


# --- header and summary -----------------------------------------------------------------------------


def header(plan: Plan) -> Part:
    """What is computed on what, and how: a title line, then batch, architecture, roles, what is known."""
    return stacked(styled(task(plan), style="bold"), labelled(header_rows(plan)))


def header_rows(plan: Plan) -> dict[str, str]:
    """The lines below the title."""
    return {
        "batch": batch(plan),
        **sampling(plan),
        "plan": architecture(plan),
        "roles": _roles(plan),
        **known(plan),
    }


def task(plan: Plan) -> str:
    """`PPO of llama-3.1-70b on 64 x H100 SXM 80GB (8 nodes of 8), DeepSpeed`."""
    return f"{trained(plan)} on {hardware_text(plan)}, {BACKENDS[plan.placement.backend].title}"


def trained(plan: Plan) -> str:
    """`PPO of llama-3.1-70b`."""
    names = {m.role: m.name for m in plan.models}
    actor = names["actor"]
    size = next((f" ({m.path})" for m in plan.models if m.role == "actor" and is_size(m.path)), "")
    several = "s" if len(plan.workload.references) > 1 else ""
    teacher = {"reference": f"teacher{several}"} if plan.workload.distils else {}
    others = ", ".join(f"{teacher.get(role, role)} {name}" for role, name in names.items() if name != actor)
    beside = f" with {others}" if others else ""
    adapters = plan.workload.lora
    on = " on 4 bit" if adapters and adapters.base == "nf4" else ""
    lora = f", LoRA rank {adapters.rank}{on}" if adapters else ""
    return f"{plan.workload.title} of {actor}{size}{beside}{lora}"


def hardware_text(plan: Plan) -> str:
    """`64 x H100 SXM 80GB (8 nodes of 8)`."""
    kinds = []
    for h in plan.hardware:
        try:
            title = load_profile(h.profile).title
        except RlhfsimError:
            title = h.profile
        nodes, rest = divmod(h.gpus, h.gpus_per_node)
        shape = f"{words.plural(nodes, 'node')} of {h.gpus_per_node}" if nodes else ""
        shape += f"{' and ' if nodes else ''}one of {rest}" if rest else ""
        shape = "one node" if nodes + bool(rest) == 1 else shape
        far = f" in another region ({link_words(h.wan)})" if h.wan else ""
        kinds.append(f"{h.gpus:,} x {title} ({shape}){far}")
    thin = f", fabric {plan.oversubscription:g}:1" if plan.oversubscription > 1 else ""
    return " and ".join(kinds) + thin


def batch(plan: Plan) -> str:
    """`1,024 prompts x 8 responses; prompt 1,024 tokens, ...; 1 update per step`."""
    w = plan.workload
    batch = f"{w.prompts:,} prompts" + (f" x {w.samples:,} responses" if w.samples > 1 else "")
    if w.paired:
        batch = f"{w.prompts * w.samples:,} pairs"
    prompt, response = (words.lengths(x, file=True) for x in (w.prompt_len, w.response_len))
    return (
        f"{batch}; prompt {prompt}, "
        f"response {response}; {words.plural(w.epochs * w.mini_batches, 'update')} per step"
    )


def architecture(plan: Plan, *, aged: bool = True) -> str:
    """`hybrid (rollout and training share the GPUs, ...)`; `aged`: also how old samples are."""
    lag = plan.placement.schedule.staleness if aged else 0
    old = f", samples up to {lag:g} version{'s' if lag > 1 else ''} old" if lag else ""
    meaning = words.ARCHITECTURES[plan.architecture][0] if plan.placement.rollout else "no rollout"
    streams = f"; {words.STREAMING}" if plan.placement.schedule.streaming else ""
    return f"{plan.architecture} ({meaning}{old}){streams}"


def way(plan: Plan) -> str:
    """Architecture, and who sits apart, in a sentence."""
    apart = plan.role_placement
    beside = "" if apart == "colocated" else f"; {words.pools(plan)}"
    return f"{architecture(plan, aged=False)}{beside}"


def _roles(plan: Plan) -> str:
    path = WEIGHT_PATHS[plan.placement.weight_path].title
    sync = f"; weights to the rollout: {path}" if plan.placement.rollout else ""
    return f"{plan.role_placement} ({words.pools(plan)}){sync}"


def cost_text(plan: Plan) -> str:
    """`13.3 USD (P10-P90 8.1-24, 3 USD per GPU-hour), 5.82 kWh, 2.2 kgCO2e per step`."""
    return f"{money_text(plan)}, {energy_text(plan)} per step"


def money_text(plan: Plan) -> str:
    """`13.3 USD (P10-P90 8.1-24, 3 USD per GPU-hour)` of one step."""
    p = plan.prediction
    money = "price unknown (give --price)"
    if p.usd_per_step is not None:
        rate = p.usd_per_step / p.step_s * units.HOUR / words.gpus(plan)
        hourly = f"{units.format(rate, 'usd')} per GPU-hour"
        money = f"{units.format(p.usd_per_step, 'usd')} ({_usd_range(plan)}{hourly})"
    return money


def energy_text(plan: Plan) -> str:
    """`5.82 kWh, 2.2 kgCO2e`."""
    p = plan.prediction
    return f"{units.significant(p.kwh_per_step)} kWh, {units.significant(p.kg_co2e_per_step)} kgCO2e"


def _usd_range(plan: Plan) -> str:
    """`P10-P90 8.1-24, ` of one step, over step and price; empty where the prices are not known."""
    cluster = cluster_of(plan, profiles_of(plan))
    drawn = None if cluster is None else money_of_step(outlook(plan, cluster))
    if drawn is None:
        return ""
    low, _, high = drawn
    return f"P10-P90 {units.significant(low, 2)}-{units.significant(high, 2)}, "


def memory_text(plan: Plan) -> str:
    """The peak and the host."""
    return f"peak {peak_text(plan)}; host {size(plan.prediction.host_peak_bytes)} per node"


def peak_text(plan: Plan) -> str:
    """When, how much of what, whose, and the risk."""
    p = plan.prediction
    over = "BEYOND CAPACITY, " if p.peak_memory_bytes > p.capacity_bytes else ""
    return (
        f"{over}{size(p.peak_memory_bytes)} of {size(p.capacity_bytes)} per GPU in {p.peak_phase}, mostly "
        f"{words.component_text(p.peak_component)} of {p.peak_role}; "
        f"risk of running out {percent(p.probability_out_of_memory)}"
    )


# --- phases -----------------------------------------------------------------------------------------


def split(
    phases: Sequence[PredictedPhase], end: float, *, tiny: float = 0.0
) -> tuple[list[PredictedPhase], list[PredictedPhase]]:
    """Phases in the order of their start, and the short ones that are together in one line.

    `tiny`: share of the step below which a phase that is no move is short too.
    """
    ordered = sorted(phases, key=lambda f: (f.start_s, not f.critical))
    small = [f for f in ordered if f.seconds < (SMALL if words.is_move(f.name) else tiny) * end]
    return [f for f in ordered if f not in small], small


def time_bar(phase: PredictedPhase, end: float) -> HorizontalBar:
    """The bar by resource, the largest first; light where the step would not be shorter without it."""
    glyph = FULL if phase.critical else LIGHT
    shares = sorted(phase.by_resource_s.items(), key=lambda item: -item[1])
    stretches = [Stretch(amount=s, glyph=glyph, style=COLOURS.get(r, "")) for r, s in shares]
    return HorizontalBar(stretches=stretches, scale=end, offset=phase.start_s)


# --- placement --------------------------------------------------------------------------------------

LONG_LAYOUT, LONG_PLACE = 27, 14
"""Characters above which a layout, or where a role sits, breaks between words, to leave room for what happens
between calls."""


def placement_table(plan: Plan, width: int = WIDTH) -> Part:
    """Who sits where and how each model is cut."""
    return drawn(placement_rows(plan, width), width)


def placement_rows(plan: Plan, width: int = WIDTH) -> TableData:
    """One row for the roles that are placed alike."""
    if width >= NARROW:
        titles = ["role", "GPUs", "layout", ">micro-batch", "recompute", "between calls", "precision"]
        fit = {">micro-batch": WORDS, "recompute": WORDS, "between calls": REST}
    else:
        titles = ["role", "GPUs", "layout", ">micro\nbatch", "re-\ncompute", "between calls", "dtype"]
        fit = dict.fromkeys(titles[1:-1], WORDS)
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, role in plan.placement.roles.items():
        cells = _where(plan, role), _layout(role), *_role_cells(plan, name, role)
        alike.setdefault(cells, []).append(name)
    rows = [(", ".join(names), *cells) for cells, names in alike.items()]
    if max(len(row[2]) for row in rows) > LONG_LAYOUT:
        fit |= {"layout": WORDS, "between calls": WORDS}
    if max(len(row[1]) for row in rows) > LONG_PLACE:
        fit |= {"GPUs": WORDS, "between calls": WORDS}
    return grid(titles, rows, fit=fit)


def _where(plan: Plan, role: RolePlacement | RolloutPlacement) -> str:
    pool = plan.placement.pool(role.pool)
    where = f"{pool.start}" if pool.gpus == 1 else f"{pool.start}-{pool.start + pool.gpus - 1}"
    if len(plan.hardware) > 1:
        where += f" {plan.hardware[pool.hardware].profile}"
    return f"{where} {pool.name}" if len(plan.placement.pools) > 1 else where


def _role_cells(plan: Plan, name: str, role: RolePlacement | RolloutPlacement) -> tuple[str, str, str, str]:
    """Micro-batch, recompute, what happens between calls, precision."""
    if isinstance(role, RolloutPlacement):
        sleep = {0: "stays", 1: "sleeps, weights to host", 2: "sleeps, memory freed"}[role.sleep]
        rest = sleep if role.residency == "resident" else role.residency
        return "", "", rest, _rollout_precision(role.layout)
    trained = name in TRAINED
    recompute = role.layout.recompute if trained else ""
    pack = role.layout.pack_tokens
    trains, scores = (role.layout.sequences(scoring=scoring) for scoring in (not trained, True))
    size = f"{pack:,} tokens" if pack else f"{trains}, scores {scores}" if trains != scores else f"{trains}"
    sums = trained and sums_fp32(plan.workload, plan.placement.backend)
    return size, recompute, _rest(role, trained), "bf16, FP32 sums" if sums else "bf16"


def _rest(role: RolePlacement, trained: bool) -> str:
    parts = []
    if role.residency == "offloaded":
        parts.append("weights to host")
    if role.residency == "recreated":
        parts.append("recreated")
    if role.residency == "swapped":
        parts.append("swapped with actor")
    if role.offload_between:
        parts.append("optimizer to host")
    if trained and role.layout.offload_optimizer != "none":
        share = "" if role.layout.offload_fraction == 1 else f"{percent(role.layout.offload_fraction)} of "
        parts.append(f"{share}Adam on {role.layout.offload_optimizer.replace('cpu', 'CPU')}")
    if role.layout.offload_params != "none":
        parts.append("weights on host")
    return ", ".join(parts) or "stays"


def _layout(role: RolePlacement | RolloutPlacement) -> str:
    if isinstance(role, RolloutPlacement):
        return f"{role.layout.label}, {percent(role.layout.memory_utilization)} of memory"
    vp = f" VP{role.layout.vp}" if role.layout.vp > 1 else ""
    return f"{role.layout.label}{vp}"


def _rollout_precision(layout: RolloutLayout) -> str:
    same = layout.precision == layout.kv_precision
    return layout.precision if same else f"{layout.precision}, KV {layout.kv_precision}"


# --- sureness ---------------------------------------------------------------------------------------


def sureness(plan: Plan, width: int = WIDTH, count: int = 3) -> Part:
    """The coefficients that decide most of the step, with value, interval and source."""
    rows = [
        (_coefficient_words(name, profile), *_coefficient_cells(name, profile))
        for name, profile in heaviest(plan)[:count]
    ]
    titles = "the time rests on", ">value", ">P10-P90", "because"
    return drawn(grid(titles, rows, fit={"because": CUT}), width)


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
