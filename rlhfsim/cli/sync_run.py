"""`rlhfsim sync --run`: every local weight path, run and timed, with a tiny model or the user's."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from rlhfsim.cli.launch import CORE, STACK
from rlhfsim.cli.params import Told
from rlhfsim.extras import need
from rlhfsim.plan import Plan
from rlhfsim.present.answers import sync as view
from rlhfsim.present.terminal.console import console, styled
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.hardware.profiles import node_group
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import Placement, ResourcePool, RolePlacement, RolloutPlacement
from rlhfsim.specs.placement.weight_paths import WEIGHT_PATHS, Topology, WeightPath
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.specs.workload.workload import Lora, Reward, Rules, Workload
from rlhfsim.what_if.estimate import estimate

TRANSPORTS = {
    "broadcast": "process group",
    "ipc": "shared memory, in buckets",
    "host": "shared memory, whole",
    "disk": "disk",
}
RANK = 4
"""Rank of the trainer's adapters, so that the path that moves only them can be run."""


def _title(path: WeightPath, where: Topology) -> str:
    rules = WEIGHT_PATHS[path]
    transport = rules.transports[where]
    part = "adapters only, " * rules.adapters_only + "changes only, " * rules.changes_only
    return part + TRANSPORTS[transport]


def run(model: str | None, repeats: int, *, as_json: bool) -> Told:
    """The time of every path; `model` is a folder, None a tiny model made here.

    Raises:
        RlhfsimError: no such model, or a path failed.
    """
    need(*STACK, purpose="a real run")
    from executor.settings import RewardRule, Settings
    from executor.syncs import time_paths
    from executor.tasks import tiny

    screen = console(stderr=as_json)
    with TemporaryDirectory(prefix="rlhfsim-sync-") as scratch:
        folder = model or str(tiny.build(Path(scratch) / "model"))
        settings = Settings(model=folder, rewards=(RewardRule(kind="digits"),))
        made = plan(folder)
        paths = time_paths(
            made, settings, Path(scratch) / "run", repeats, lambda text: screen.print(styled(text, "dim"))
        )
    titles = {str(path.path): _title(path.path, made.topology) for path in paths}
    return Told(view.run_page(model or "tiny", repeats, paths, titles))


def plan(model: str) -> Plan:
    """One trainer with adapters, one rollout replica."""
    workload = Workload(
        algorithm="grpo",
        model=str(Path(model) / "config.json"),
        prompts=4,
        samples=2,
        packing=False,
        kl=False,
        prompt_len=Fixed(value=8),
        response_len=Fixed(value=8),
        lora=Lora(rank=RANK),
        reward=Reward(rules=Rules(workers=1)),
    )
    placement = Placement(
        backend="deepspeed",
        weight_path="broadcast",
        pools=(ResourcePool(name="train", gpus=1), ResourcePool(name="rollout", start=1, gpus=1)),
        actor=RolePlacement(pool="train", layout=Layout(zero=0, micro_batch=4, recompute="none")),
        rollout=RolloutPlacement(pool="rollout", sleep=0, layout=RolloutLayout(memory_utilization=0.3)),
    )
    return estimate(placement, workload, Cluster(node_groups=(node_group(CORE, 2, gpus_per_node=2),)))
