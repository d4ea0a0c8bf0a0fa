"""Small plans for real runs: every architecture and algorithm, on the slots of a test cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from executor.launch import FinishedRun, LaunchOptions, launch
from executor.settings import Limits, Optimizer, RewardRule, Settings, Tracking
from rlhfsim.api import estimate
from rlhfsim.plan import Plan
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.hardware.profiles import node_group
from rlhfsim.specs.loading import Source, convert, parse_yaml
from rlhfsim.specs.placement.placement import Placement
from rlhfsim.specs.workload.workload import GROUPED, Workload

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "naive": {"weight_path": "host"},
    "smart": {
        "weight_path": "disk",
        "rollout": {"sleep": 2},
        "role": {"residency": "offloaded", "offload_between": True},
    },
    "hybrid": {"weight_path": "ipc", "rollout": {"sleep": 1}},
    "disaggregated": {"weight_path": "broadcast", "apart": True},
    "async": {
        "weight_path": "broadcast",
        "apart": True,
        "schedule": {"staleness": 2, "partial_rollout": True},
    },
    "lend": {
        "weight_path": "broadcast",
        "apart": True,
        "schedule": {"staleness": 1, "partial_rollout": True, "lend": True},
    },
}
"""What makes each architecture; roles are filled in by `plan`."""


def plan(
    architecture: str,
    algorithm: str,
    model: Path,
    *,
    layout: dict[str, Any] | None = None,
    placement: dict[str, Any] | None = None,
    workload: dict[str, Any] | None = None,
    gpus_per_node: int | None = None,
    cluster: Cluster | None = None,
) -> Plan:
    """A plan of one training slot, unless `layout` says more, and one rollout replica."""
    made = ARCHITECTURES[architecture]
    apart = made.get("apart", False)
    train = "train" if apart else "all"
    layout = {"dp": 1, "zero": 0, "micro_batch": 8, "recompute": "none"} | (layout or {})
    slots = layout.get("tp", 1) * layout.get("pp", 1) * layout["dp"]
    work = _workload(algorithm, model, workload or {})
    roles = {role: {"pool": train, "layout": layout, **made.get("role", {})} for role in _roles(work)}
    pools = [{"name": train, "gpus": slots}]
    if work.generates:
        rollout = {
            "pool": "rollout" if apart else "all",
            "layout": {"dp": 1, "memory_utilization": 0.3},
            "sleep": 0,
        }
        roles["rollout"] = rollout | made.get("rollout", {})
        pools += [{"name": "rollout", "start": slots, "gpus": 1}] if apart else []
    fields = {"backend": "deepspeed", "pools": pools, "schedule": made.get("schedule", {}), **roles}
    if work.generates:
        fields["weight_path"] = made["weight_path"]
    placed = convert(Placement, _source(), fields | (placement or {}))
    gpus = sum(pool.gpus for pool in placed.pools)
    cores = Cluster(node_groups=(node_group("cpu-core", gpus, gpus_per_node=gpus_per_node or gpus),))
    return estimate(placed, work, cluster or cores)


def _workload(algorithm: str, model: Path, changes: dict[str, Any]) -> Workload:
    fields = {
        "algorithm": algorithm,
        "model": str(model / "config.json"),
        "prompts": 8,
        "samples": 4 if algorithm in GROUPED else 1,
        "packing": False,
        "prompt_len": {"kind": "fixed", "value": 8},
        "response_len": {"kind": "fixed", "value": 8},
        "reward": {"rules": {"seconds_per_sample": "1 ms", "workers": 2}},
    }
    return convert(Workload, _source(), fields | changes)


def _roles(workload: Workload) -> list[str]:
    roles = ["actor"]
    roles += ["critic"] if workload.has_critic else []
    roles += ["reference"] if workload.has_reference else []
    return roles + (["reward"] if workload.has_reward_model else [])


def _source() -> Source:
    return parse_yaml("{}", "tests")


def settings(model: Path, **changes: Any) -> Settings:
    """Settings under which rewards differ and something is learnt."""
    fields: dict[str, Any] = {
        "model": str(model),
        "iterations": 2,
        "rewards": (RewardRule(kind="digits"),),
        "reward_head": "drawn",
        "optimizer": Optimizer(learning_rate=1e-3),
        "tracking": Tracking(tensorboard=False),
        "limits": Limits(start_s=240, call_s=120, sync_s=60, retries=0),
        "variables": {"OMP_NUM_THREADS": "1"},  # several threads spin longer than a small operation takes
    }
    return Settings(**(fields | changes))


class Quiet:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.rows: list[dict[str, float]] = []
        self.findings: list[Any] = []

    def phase(self, text: str) -> None:
        """Keep."""
        self.phases.append(text)

    def iteration(self, row: Any, total: int) -> None:
        """Keep."""
        self.rows.append(dict(row))

    def finding(self, finding: Any) -> None:
        """Keep."""
        self.findings.append(finding)


def run(made: Plan, wanted: Settings, out: Path, address: str, **options: Any) -> tuple[FinishedRun, Quiet]:
    """A launch on the test cluster; rules only where the plan scores with some."""
    if made.workload.reward.rules is None or not made.workload.generates:
        wanted = replace(wanted, rewards=None)
    heard = Quiet()
    return launch(made, wanted, LaunchOptions(out=out, address=address, **options), heard), heard
