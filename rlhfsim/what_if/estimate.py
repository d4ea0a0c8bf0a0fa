"""One given placement, priced: its closed form, its ledger, its plan."""

from __future__ import annotations

from dataclasses import dataclass

from rlhfsim.memory.ledger import Ledger, ledger
from rlhfsim.plan import Plan
from rlhfsim.search.candidates import Candidate, timed
from rlhfsim.search.planning import plan_of
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.placement import Placement
from rlhfsim.specs.scenario import check_placement
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.step.calls import Setting
from rlhfsim.step.iteration import Iteration, iteration


def estimate(
    placement: Placement, workload: Workload, cluster: Cluster, *, price: float | None = None
) -> Plan:
    """The plan of one given placement: time by phase, memory, money and energy.

    A placement that does not fit is priced all the same; its prediction says so
    (`peak_memory_bytes` above `capacity_bytes`, `probability_out_of_memory`).

    Raises:
        RlhfsimError: a placement that cannot exist (missing roles, TP that does not divide heads, ...).
    """
    priced = priced_placement(placement, workload, cluster)
    return planned(priced, timed(priced.setting, priced.kv_tokens), price)


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedPlacement:
    """One placement with its closed form and its ledger."""

    setting: Setting
    iteration: Iteration
    memory: Ledger

    @property
    def kv_tokens(self) -> float | None:
        """KV capacity of a replica; None where there is none to speak of."""
        tokens = self.memory.kv_tokens
        return tokens if tokens and tokens > 0 else None


def priced_placement(placement: Placement, workload: Workload, cluster: Cluster) -> PricedPlacement:
    """A placement that can exist, with the closed form of its step and its ledger.

    Raises:
        RlhfsimError: it cannot exist.
    """
    models = models_of(workload)
    check_placement(placement, workload, models, cluster)
    memory = ledger(models, placement, workload, cluster)
    kv_tokens = memory.kv_tokens if memory.kv_tokens and memory.kv_tokens > 0 else None
    priced = iteration(models, placement, workload, cluster, kv_tokens=kv_tokens)
    setting = Setting(models=models, placement=placement, workload=workload, cluster=cluster)
    return PricedPlacement(setting=setting, iteration=priced, memory=memory)


def planned(priced: PricedPlacement, timed: Iteration, price: float | None) -> Plan:
    """Its plan, with the step as timed."""
    s = priced.setting
    candidate = Candidate(placement=s.placement, iteration=timed, ledger=priced.memory)
    return plan_of(candidate, s.workload, s.models, s.cluster, price)
