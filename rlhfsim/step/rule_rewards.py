"""What rule rewards take on CPUs or at a remote judge, and whether they run beside generation."""

from __future__ import annotations

from rlhfsim.frameworks.runs import runs_of
from rlhfsim.kernels.cost import Cost, part
from rlhfsim.specs.workload.workload import Workload


def rules_ahead(workload: Workload, name: str | None) -> bool:
    """Whether rules score responses while the framework decodes others."""
    runs = runs_of(name)
    return runs is not None and not workload.rules_first and runs.rules_ahead(workload)


def rules_latency(workload: Workload) -> float:
    """Seconds of one response."""
    rules = workload.reward.rules
    assert rules is not None
    return rules.seconds_per_sample


def rules_cost(workload: Workload) -> Cost:
    """Rule rewards on parallel CPU workers, or requests to a judge: n t / workers, at least t."""
    rules = workload.reward.rules
    assert rules is not None
    seconds = rules.seconds_per_sample * max(1.0, workload.num_rewarded / rules.workers)
    return Cost(parts=(part("rewards", seconds, "rules.seconds_per_sample"),))
