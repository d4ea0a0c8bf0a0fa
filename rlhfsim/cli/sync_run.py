"""`rlhfsim sync --run`: every local weight path, run and timed, with a tiny model or the user's."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from rlhfsim import units
from rlhfsim.cli.launch import CORE, STACK
from rlhfsim.extras import need
from rlhfsim.plan import Plan
from rlhfsim.present.terminal.console import console, new_table, styled
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.hardware.profiles import node_group
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import Placement, ResourcePool, RolePlacement, RolloutPlacement
from rlhfsim.specs.placement.weight_paths import WEIGHT_PATHS, Topology, WeightPath
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.specs.workload.workload import Lora, Reward, Rules, Workload
from rlhfsim.what_if.estimate import estimate

SCHEMA = "rlhfsim.sync_run/1"
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
    return "adapters only, " * rules.adapters_only + TRANSPORTS[transport]


def run(model: str | None, repeats: int, *, as_json: bool) -> None:
    """Time the paths and show them; `model` is a folder, None a tiny model made here.

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
    if as_json:
        timed = {"repeats": repeats, "paths": [asdict(p) for p in paths]}
        click.echo(json.dumps({"schema": SCHEMA, "model": model or "tiny", **timed}, indent=2))
        return
    table = new_table()
    table.add_column("path", no_wrap=True)
    for name in ("moved", "first s", "median s", "range s", "|dlogp| after"):
        table.add_column(name, justify="right", no_wrap=True)
    for p in paths:
        table.add_row(
            _title(p.path, made.topology),
            units.format(p.bytes, "byte"),
            f"{p.first_s:.3f}",
            f"{p.median_s:.3f}",
            f"{p.low_s:.3f}-{p.high_s:.3f}",
            f"{p.logprob_gap:.1e}",
        )
    screen.print(table)
    screen.print(
        "seconds at the sending end: gather, transfer and load; checksums of both ends were equal; rollout "
        "and trainer share this machine",
        highlight=False,
    )


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
