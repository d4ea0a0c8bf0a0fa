"""A priced iteration and its ledger as the prediction that a plan carries: time, memory, money, energy."""

from __future__ import annotations

from collections.abc import Mapping

from rlhfsim import units
from rlhfsim.memory.ledger import Ledger
from rlhfsim.plan import LedgerEntry, PredictedPhase, Prediction
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.step.iteration import Iteration


def usd_per_step(cluster: Cluster, seconds: float, price: float | None = None) -> float | None:
    """Rent of every GPU of the cluster for one step; None where a price is unknown.

    `price` in USD per GPU-hour replaces the profiles'.
    """
    total = 0.0
    for pool in cluster.node_groups:
        rate = price if price is not None else (pool.profile.price.value if pool.profile.price else None)
        if rate is None:
            return None
        total += rate * pool.gpus
    return total * seconds / units.HOUR


def joules_per_step(cluster: Cluster, seconds: float) -> float:
    """Energy of the cluster for one step.

    E = t PUE sum over pools (n_gpu f TDP + n_node P_node)

    f is the mean draw over TDP (`gpu_power_fraction`); a node whose own draw is unknown counts only
    its GPUs. Not known here: how the draw differs between phases.
    """
    watts = 0.0
    for pool in cluster.node_groups:
        profile = pool.profile
        node = (
            profile.node.power.value * pool.gpus_per_node / profile.node.gpus if profile.node.power else 0.0
        )
        watts += (
            pool.gpus * profile.tdp.value * profile["gpu_power_fraction"] + pool.nodes * node
        ) * profile["pue"]
    return watts * seconds


def prediction(
    priced: Iteration,
    memory: Ledger,
    cluster: Cluster,
    *,
    price: float | None = None,
    limits: Mapping[str, float] | None = None,
) -> Prediction:
    """Everything the cost model says about one plan; `limits` of its calls as of `speed_of_light`."""
    low, high = priced.cost.interval
    kwh = joules_per_step(cluster, priced.seconds) / units.JOULE_PER_KWH
    peak, entry = memory.peak, memory.peak_entry
    return Prediction(
        step_s=priced.seconds,
        low_s=low,
        high_s=high,
        tokens_per_s_per_gpu=priced.tokens_per_s_per_gpu,
        peak_memory_bytes=peak.bytes,
        peak_phase=peak.name,
        peak_role=entry.role,
        peak_component=entry.component,
        capacity_bytes=peak.capacity,
        probability_out_of_memory=memory.probability_out_of_memory,
        rejected_by=memory.rejected_by or "",
        host_peak_bytes=memory.host_peak_bytes,
        usd_per_step=usd_per_step(cluster, priced.seconds, price),
        kwh_per_step=kwh,
        kg_co2e_per_step=kwh * cluster.node_group.profile["grid_kg_co2_per_kwh"],
        generated_tokens=priced.generation.decode_tokens if priced.generation else 0.0,
        discarded_tokens=priced.generation.discarded_tokens if priced.generation else 0.0,
        phases=tuple(_phases(priced, limits or {})),
        ledger=tuple(_entries(memory)),
    )


def _phases(priced: Iteration, limits: Mapping[str, float]) -> list[PredictedPhase]:
    phases = []
    for i, phase in enumerate(priced.phases):
        low, high = phase.cost.interval
        phases.append(
            PredictedPhase(
                name=phase.name,
                pool="+".join(phase.pools),
                start_s=phase.start,
                seconds=phase.cost.seconds,
                low_s=low,
                high_s=high,
                bound_by=phase.cost.bound_by,
                by_resource_s={str(k): v for k, v in phase.cost.by_resource().items()},
                rests_on=phase.cost.rests_on,
                critical=i in priced.critical,
                work_s=phase.work_s,
                limit_s=limits.get(phase.name),
            )
        )
    return phases


def _entries(memory: Ledger) -> list[LedgerEntry]:
    return [
        LedgerEntry(
            phase=p.name,
            pool=p.pool,
            role=e.role,
            component=e.component,
            bytes=e.bytes,
            low_bytes=e.low,
            high_bytes=e.high,
        )
        for p in memory.phases
        for e in p.entries
    ]
