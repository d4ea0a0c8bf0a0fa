"""Seconds of the parts that `design` calls thousands of times, beside their limits.

python lab/benchmarks/parts_speed.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from rlhfsim.kernels.curves import KernelCurves
from rlhfsim.kernels.devices import device_of
from rlhfsim.kernels.sequences import uniform
from rlhfsim.memory.role_bytes import role_memory
from rlhfsim.rollout.generation import Requests, generate
from rlhfsim.specs.hardware.profiles import load_profile, parse_cluster
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import RolePlacement
from rlhfsim.specs.placement.software import default_software
from rlhfsim.specs.workload.lengths import Fixed, LogNormal
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.training.training import TrainedModel


def seconds(function: Callable[[], object], repeats: int) -> float:
    """Median seconds of a call, after one that warms the caches."""
    function()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def main() -> None:
    """Print one row for each part."""
    cluster = parse_cluster(64, "h100")
    device, model = device_of(cluster.node_group), resolve_model("70b")
    layout, workload = Layout(tp=8, pp=2, dp=4), Workload(model="70b")
    role, profile = RolePlacement(pool="all", layout=layout), cluster.node_group.profile
    asked = Requests(
        prompts=512,
        samples=16,
        prompt_lengths=Fixed(value=512),
        response_lengths=LogNormal(mean=1500, max=8192),
    )
    trained = TrainedModel(device, model, uniform(1024, 2048), "megatron", default_software("megatron"))
    cases = (
        ("load a profile with curves", 0.06, 20, lambda: load_profile("h100")),
        ("build kernel curves", 0.02, 20, lambda: KernelCurves(profile, load_profile)),
        (
            "price 8,192 responses",
            0.02,
            20,
            lambda: generate(device, model, RolloutLayout(tp=8, dp=8), asked),
        ),
        ("look up a preset", 0.02, 100, lambda: resolve_model("deepseek-v3")),
        (
            "price a known training layout",
            0.0002,
            500,
            lambda: trained.passes(layout) + trained.updates(layout),
        ),
        (
            "bytes of a role",
            0.0001,
            500,
            lambda: role_memory(
                models_of(workload), "actor", workload, backend="megatron", profile=profile
            ).of(role),
        ),
    )
    print(f"{'part':<32}{'ms':>10}{'limit ms':>12}")
    for title, limit, repeats, function in cases:
        spent = seconds(function, repeats)
        print(f"{title:<32}{spent * 1e3:>10.3f}{limit * 1e3:>12.3f}  {'ok' if spent <= limit else 'MISSED'}")


if __name__ == "__main__":
    main()
