"""What rule rewards take on CPUs or at a remote judge, and whether they run beside generation.

A profile that was calibrated on runs holds what rules took there: a workload that states what those runs
stated is given it, one that states other seconds keeps its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rlhfsim.frameworks.runs import runs_of
from rlhfsim.kernels.cost import Cost, part
from rlhfsim.specs.hardware.calibrated import MeasuredRules
from rlhfsim.specs.hardware.hardware import Cluster
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
    for known in _measured(cluster):
        measured = known.seconds_per_sample
        if measured.value == each:
            spread = measured.low / each, measured.high / each
            return Cost(parts=(part("rewards", seconds, MEASURED, spread=spread),))
    return Cost(parts=(part("rewards", seconds, STATED),))


def rounds(workload: Workload) -> float:
    """Samples that one worker scores in a step, at least one."""
    rules = workload.reward.rules
    assert rules is not None
    return max(1.0, workload.num_rewarded / rules.workers)


def with_measured_rules(workload: Workload, cluster: Cluster) -> Workload:
    """The workload with what its rules took in runs that stated the same seconds for them, if any did."""
    rules = workload.reward.rules
    for known in _measured(cluster) if rules is not None else ():
        if rules is not None and known.stated == rules.seconds_per_sample:
            rules = replace(rules, seconds_per_sample=known.seconds_per_sample.value)
            return replace(workload, reward=replace(workload.reward, rules=rules))
    return workload


def _measured(cluster: Cluster | None) -> Iterator[MeasuredRules]:
    for group in cluster.node_groups if cluster is not None else ():
        yield from group.profile.rules
