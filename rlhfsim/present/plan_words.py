"""A plan in sentences: what is computed on what and how, its money, energy, and memory."""

from __future__ import annotations

from rlhfsim import units
from rlhfsim.plan import Plan
from rlhfsim.present import words
from rlhfsim.present.basis import cluster_of, profile_under, profiles_of, title_of
from rlhfsim.present.known import known, sampling
from rlhfsim.present.regions import link_words
from rlhfsim.present.verdict import assumed, cautions, is_size, learning
from rlhfsim.present.words import percent, size
from rlhfsim.specs.placement.backends import BACKENDS
from rlhfsim.specs.placement.weight_paths import WEIGHT_PATHS
from rlhfsim.what_if.risk.odds import money_of_step
from rlhfsim.what_if.risk.run import Outlook


def header_rows(plan: Plan) -> dict[str, str]:
    """The lines below the title."""
    path = WEIGHT_PATHS[plan.placement.weight_path].title
    sync = f"; weights to the rollout: {path}" if plan.placement.rollout else ""
    return {
        "batch": batch(plan),
        **sampling(plan),
        "plan": architecture(plan),
        "roles": f"{plan.role_placement} ({words.pools(plan)}){sync}",
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
        nodes, rest = divmod(h.gpus, h.gpus_per_node)
        shape = f"{words.plural(nodes, 'node')} of {h.gpus_per_node}" if nodes else ""
        shape += f"{' and ' if nodes else ''}one of {rest}" if rest else ""
        shape = "one node" if nodes + bool(rest) == 1 else shape
        far = f" in another region ({link_words(h.wan)})" if h.wan else ""
        kinds.append(f"{h.gpus:,} x {title_of(h.profile)} ({shape}){far}")
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
    drawn = None if cluster is None else money_of_step(Outlook(plan, cluster))
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
    most = f"{words.component_text(p.peak_component)} of {p.peak_role}"
    return f"{_held(plan)} in {p.peak_phase}, mostly {most}; {_risk(plan)}"


# --- verdict ----------------------------------------------------------------------------------------


def verdict(plan: Plan) -> dict[str, str]:
    """Label -> sentence: time, money, way, learning, memory, and what is taken for granted."""
    p = plan.prediction
    spread = f"P10-P90 {units.significant(p.low_s)}-{units.significant(p.high_s)}"
    if p.centre != 1:
        spread = f"P50 {units.significant(p.step_s * p.centre)}, {spread}"
    rows = {
        "step": f"{units.format(p.step_s, 's')} ({spread}), {speed(plan)}",
        "cost": cost_text(plan),
        "plan": way(plan),
        "learning": learning(plan),
        "memory": memory(plan),
    }
    if taken := list(assumed(plan)):
        rows["assumed"] = "; ".join(taken)
    if told := list(cautions(plan)):
        rows["caution"] = "; ".join(told)
    return rows


def speed(plan: Plan) -> str:
    """`227 tok/s/GPU`."""
    return f"{units.significant(plan.prediction.tokens_per_s_per_gpu)} tok/s/GPU"


def memory(plan: Plan) -> str:
    """The fullest GPU and the fullest host, each of how much, and the risk."""
    return f"{_held(plan)}, host {host_text(plan)} per node; {_risk(plan)}"


def _held(plan: Plan) -> str:
    """`57.2 GB of 85 GB per GPU`."""
    p = plan.prediction
    over = "BEYOND CAPACITY, " if p.peak_memory_bytes > p.capacity_bytes else ""
    return f"{over}{size(p.peak_memory_bytes)} of {size(p.capacity_bytes)} per GPU"


def _risk(plan: Plan) -> str:
    return f"risk of running out {percent(plan.prediction.probability_out_of_memory)}"


def host_text(plan: Plan) -> str:
    """`151 GB of 2.2 TB`; without what there is where no profile is found."""
    limit = host_capacity(plan)
    offered = f" of {size(limit)}" if limit else ""
    return f"{size(plan.prediction.host_peak_bytes)}{offered}"


def host_capacity(plan: Plan) -> float | None:
    """Host memory of the smallest node under the plan; None where no profile is found."""
    profiles = [profile_under(plan, pool.name) for pool in plan.placement.pools]
    return min((p.node.host_memory.value for p in profiles if p), default=None)
