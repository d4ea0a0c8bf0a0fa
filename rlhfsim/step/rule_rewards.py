"""What rule rewards take on CPUs or at a remote judge, and whether they run during generation.

A profile that was calibrated on runs holds what rules, environments and own parts took there: a workload that
states what those runs stated is given it, one that states other seconds keeps its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlhfsim.kernels.cost import Cost, part
from rlhfsim.specs.frameworks.runs import runs_of
from rlhfsim.specs.hardware.calibrated import WorkloadMeasured
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.workload.measurable import RULES, restated, stated
from rlhfsim.specs.workload.workload import Workload

STATED, MEASURED = "rules.seconds_per_sample", "rules.measured_seconds_per_sample"
"""What the time rests on."""


def rules_ahead(workload: Workload, name: str | None) -> bool:
    """Whether rules score responses while the framework decodes others."""
    runs = runs_of(name)
    return runs is not None and not workload.rules_first and runs.rules_ahead(workload)


def rules_latency(workload: Workload) -> float:
    """Seconds of one response."""
    rules = workload.reward.rules
    assert rules is not None
    return rules.seconds_per_sample


def rules_cost(workload: Workload, cluster: Cluster | None = None) -> Cost:
    """Rule rewards on parallel CPU workers, or requests to a judge: n t / workers, at least t."""
    each = rules_latency(workload)
    seconds = each * rounds(workload)
    spread = spread_of(RULES, each, cluster)
    if spread is not None:
        return Cost(parts=(part("rewards", seconds, MEASURED, spread=spread),))
    return Cost(parts=(part("rewards", seconds, STATED),))


def rounds(workload: Workload) -> float:
    """Samples that one worker scores in a step, at least one."""
    rules = workload.reward.rules
    assert rules is not None
    return max(1.0, workload.num_rewarded / rules.workers)


def with_measured(workload: Workload, cluster: Cluster) -> Workload:
    """The workload with what each field was in runs whose workloads stated the same for it, if any did."""
    said = stated(workload)
    return restated(
        workload, {of.name: of.measured.value for of in _measured(cluster) if said.get(of.name) == of.stated}
    )


def spread_of(name: str, value: float, cluster: Cluster | None) -> tuple[float, float] | None:
    """P10 and P90 over the value of a field that was measured in runs; None: it was not."""
    for of in _measured(cluster):
        if of.name == name and of.measured.value == value > 0:
            return of.measured.low / value, of.measured.high / value
    return None


def _measured(cluster: Cluster | None) -> Iterator[WorkloadMeasured]:
    for group in cluster.node_groups if cluster is not None else ():
        yield from group.profile.workload
