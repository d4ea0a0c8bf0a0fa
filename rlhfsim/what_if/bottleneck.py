"""What binds most of a step, and what an eighth more of it brings: the plan priced again, layouts kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlhfsim.frozen import frozen
from rlhfsim.plan import Plan
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.what_if.dotted_paths import keys, put
from rlhfsim.what_if.estimate import priced_placement, step_of

MORE = 1 / 8
"""Share of a resource by which one unit more enlarges it: 64 of 512 workers."""
_NODES = "node_groups.*.profile"
BANDWIDTHS: Mapping[str, tuple[str, ...]] = {
    "hbm": (f"{_NODES}.hbm.value",),
    "nvlink": (f"{_NODES}.scale_up.bandwidth.value",),
    "network": (f"{_NODES}.nic.value",),
    "pcie": (f"{_NODES}.pcie.value",),
    "host": (f"{_NODES}.node.host_bandwidth.value",),
    "storage": (f"{_NODES}.node.local_storage.value", f"{_NODES}.node.shared_storage.value"),
}
"""Resource -> where a cluster says how much of it there is, dotted."""
WORKERS: Mapping[str, str] = {"environment": "environment.workers", "rewards": "reward.rules.workers"}
"""Resource -> where a workload says how many workers it has, dotted."""


@frozen
class Bottleneck:
    """The resource that holds most seconds of the critical phases."""

    resource: str
    """As of `kernels.cost.Resource`."""
    phase: str
    """The critical phase with most of them."""
    seconds: float
    """Seconds of it in the critical phases, the most of all resources."""
    more: int | None = None
    """Workers that are added; None where it is a bandwidth, an eighth of which is added, or cannot be
    bought."""
    step_s: float | None = None
    """The step with more of it; None where it cannot be bought (software, bubbles, the longest response)."""


def bottleneck(plan: Plan, cluster: Cluster) -> Bottleneck | None:
    """What binds most of the step; None for a plan without critical phases."""
    critical = [p for p in plan.prediction.phases if p.critical]
    by: dict[str, float] = {}
    for phase in critical:
        for name, seconds in phase.by_resource_s.items():
            by[name] = by.get(name, 0.0) + seconds
    if not by:
        return None
    most = max(by, key=lambda name: by[name])
    where = max(critical, key=lambda p: p.by_resource_s.get(most, 0.0))
    found = Bottleneck(resource=most, phase=where.name, seconds=by[most])
    if most in WORKERS:
        work, more = _more_workers(plan.workload, WORKERS[most])
        return replace(found, more=more, step_s=_seconds(plan, work, cluster))
    if most in BANDWIDTHS:
        return replace(found, step_s=_seconds(plan, plan.workload, _faster(cluster, BANDWIDTHS[most])))
    return found


def _more_workers(work: Workload, path: str) -> tuple[Workload, int]:
    """The workload with an eighth more workers, at least one, and how many those are."""
    added: list[int] = []

    def grown(workers: int) -> int:
        added.append(max(1, round(workers * MORE)))
        return workers + added[-1]

    larger: Workload = put(work, keys(path), grown)
    return larger, added[-1]


def _faster(cluster: Cluster, paths: tuple[str, ...]) -> Cluster:
    changed: Any = cluster
    for path in paths:
        changed = put(changed, keys(path), lambda value: value * (1 + MORE))
    faster: Cluster = changed
    return faster


def _seconds(plan: Plan, work: Workload, cluster: Cluster) -> float:
    cluster = replace(cluster, framework=plan.framework)
    return step_of(priced_placement(plan.placement, work, cluster)).seconds
