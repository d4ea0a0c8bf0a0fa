"""What checkpoints written beside the steps save, and the host memory that their copies take.

    python lab/benchmarks/checkpoint_speed.py [--hidden 512] [--layers 8] [--iterations 8]
    python lab/benchmarks/checkpoint_speed.py --states 1e9          only what one save of so many bytes holds up

The same SFT run (DeepSpeed, one rank, FP32) three times: without checkpoints, with one after every iteration in
the foreground, and with one beside the next iterations. It prints seconds of an iteration between the first and
the last (medians), of the whole loop, and the most host memory that the run's processes held. With `--states` one
rank's file is written both ways, without a run: seconds until training could go on, until it is on disk, and how far
the process's memory rose meanwhile.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from executor.settings import Checkpoints, Data, Settings, Tracking
from rlhfsim.api import estimate
from rlhfsim.plan import Plan
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.hardware.profiles import node_group
from rlhfsim.specs.loading import convert, parse_yaml
from rlhfsim.specs.placement.placement import Placement
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.specs.workload.workload import Reward, Workload
from rlhfsim.units import GB

KINDS: Mapping[str, Checkpoints] = {
    "without": Checkpoints(every=0, keep=1),
    "foreground": Checkpoints(every=1, keep=1, background=False),
    "beside": Checkpoints(every=1, keep=1, background=True),
}


class Heard:
    """When iterations ended, and their rows."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.host_gb: list[float] = []

    def phase(self, text: str) -> None:
        """Not of interest."""

    def iteration(self, row: Mapping[str, float], total: int) -> None:
        """Keep."""
        self.ends.append(time.perf_counter())
        self.host_gb.append(row["memory/host_gb"])

    def finding(self, finding: Any) -> None:
        """Not of interest."""


def plan(model: Path, prompts: int) -> Plan:
    """One rank."""
    work = Workload(
        algorithm="sft",
        model=str(model / "config.json"),
        prompts=prompts,
        packing=False,
        reward=Reward(),
        prompt_len=Fixed(value=8),
        response_len=Fixed(value=4),
    )
    actor = {"pool": "all", "layout": {"dp": 1, "zero": 0, "micro_batch": 32, "recompute": "none"}}
    fields = {"backend": "deepspeed", "pools": [{"name": "all", "gpus": 1}], "actor": actor}
    placed = convert(Placement, parse_yaml("{}", "benchmark"), fields)
    return estimate(placed, work, Cluster(node_groups=(node_group("cpu-core", 1, gpus_per_node=1),)))


def measure(model: Path, kind: str, iterations: int, prompts: int) -> tuple[list[float], float, float]:
    """Seconds of iterations, from the end of the first one to the end of the run, and the most GB."""
    from executor.launch import LaunchOptions, launch

    heard = Heard()
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(
            model=str(model),
            data=Data(task="arithmetic", difficulty=2),
            iterations=iterations,
            checkpoints=KINDS[kind],
            tracking=Tracking(tensorboard=False, samples=0),
        )
        launch(
            plan(model, prompts), settings, LaunchOptions(out=Path(folder) / "run", self_check=False), heard
        )
    steps = [b - a for a, b in itertools.pairwise(heard.ends)]
    return steps, heard.ends[-1] - heard.ends[0], max(heard.host_gb)


def held_up(size: float, *, beside: bool) -> tuple[float, float, float]:
    """Seconds until `save` returns, until the file is there, and bytes by which resident memory rose."""
    import torch

    from executor.engines import checkpoints
    from executor.engines.background import Background, copied

    state = {str(i): torch.ones(int(size / 32 / 4)) for i in range(32)}
    process, background = psutil.Process(), Background(1)
    before = most = process.memory_info().rss
    with tempfile.TemporaryDirectory() as folder:
        path, began = Path(folder) / "rank.pt", time.perf_counter()
        if beside:
            background.submit(partial(checkpoints._put, path, torch.save, copied(state)))
        else:
            checkpoints._put(path, torch.save, state)
        returned = time.perf_counter() - began
        while not (done := background.written()) or not path.exists():
            assert not done or beside
            most = max(most, process.memory_info().rss)
            time.sleep(0.005)
        return returned, time.perf_counter() - began, max(most, process.memory_info().rss) - before


def main() -> None:
    """All kinds, one after the other."""
    from executor.tasks import tiny

    parser = argparse.ArgumentParser(description="Checkpoints in the foreground and beside the steps")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--states", type=float, help="bytes")
    asked = parser.parse_args()
    if asked.states:
        for beside in (False, True) * 3:
            returned, written, rose = held_up(asked.states, beside=beside)
            name = "beside" if beside else "foreground"
            print(f"{name}: held up {returned:.2f} s, written after {written:.2f} s; {rose / GB:+.2f} GB")
        return
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.build(Path(folder) / "model", hidden=asked.hidden, layers=asked.layers)
        size = (model / "model.safetensors").stat().st_size
        print(f"weights of {size / GB:.3f} GB, states to save {3 * size / GB:.3f} GB and those weights again")
        for kind in KINDS:
            steps, whole, most = measure(model, kind, asked.iterations, asked.prompts)
            print(
                f"{kind}: {statistics.median(steps):.2f} s an iteration ({min(steps):.2f} to {max(steps):.2f}), "
                f"{whole:.1f} s for {len(steps)}; at most {most:.2f} GB",
                flush=True,
            )


if __name__ == "__main__":
    main()
