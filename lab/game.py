"""A tiny model learns a game in turns: GRPO on the real stack, greedy accuracy over all ten numbers, several seeds.

    python lab/game.py [--seeds 0 1 2] [--iterations 60] [--out reports]

The game is `guess` (executor/environments/guess.py): a number of one digit in at most four guesses, told `>` or `<`
after each. Guessing without listening finds it in 0.4 of the games at most; halving the rest always does. The model
(two layers) is warmed up to say a digit; that `>` and `<` mean something it must find out.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from executor.settings import Algorithm, Data, EnvironmentSettings, Evaluation, Optimizer, Settings, Tracking
from rlhfsim.api import estimate
from rlhfsim.plan import Plan
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.hardware.profiles import node_group
from rlhfsim.specs.loading import convert, parse_yaml
from rlhfsim.specs.placement.placement import Placement
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.specs.workload.workload import Environment, Reward, Workload

TURNS, WARM_UP_STEPS, PROMPTS, SAMPLES = 4, 40, 32, 8


class Heard:
    """A listener that prints accuracies and rewards, and keeps when iterations ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def phase(self, text: str) -> None:
        """To the error stream."""
        print(f"  {text}", file=sys.stderr, flush=True)

    def iteration(self, row: Mapping[str, float], total: int) -> None:
        """One line."""
        self.ends.append(time.perf_counter())
        turns, reward = row["environment/turns_mean"], row["reward/mean"]
        print(f"{row['step']:.0f}: reward {reward:.3f}, {turns:.2f} turns", file=sys.stderr, flush=True)

    def finding(self, finding: Any) -> None:
        """To the error stream."""
        print(f"  {finding.code}: {finding.what}", file=sys.stderr, flush=True)


def plan(model: Path) -> Plan:
    """Rollout and training on one slot."""
    work = Workload(
        algorithm="grpo",
        model=str(model / "config.json"),
        prompts=PROMPTS,
        samples=SAMPLES,
        mini_batches=2,
        kl=False,
        packing=False,
        reward=Reward(),
        prompt_len=Fixed(value=1),
        response_len=Fixed(value=4 * TURNS),
        environment=Environment(turns=TURNS, seconds_per_turn=0.001, workers=2),
    )
    actor = {"pool": "all", "layout": {"dp": 1, "zero": 0, "micro_batch": 128, "recompute": "none"}}
    rollout = {"pool": "all", "layout": {"dp": 1, "memory_utilization": 0.3, "max_num_seqs": 256}, "sleep": 0}
    fields = {"backend": "deepspeed", "pools": [{"name": "all", "gpus": 1}], "weight_path": "host"}
    placed = convert(Placement, parse_yaml("{}", "game"), fields | {"actor": actor, "rollout": rollout})
    return estimate(placed, work, Cluster(node_groups=(node_group("cpu-core", 1, gpus_per_node=1),)))


def settings(model: Path, seed: int, iterations: int) -> Settings:
    """The reward is 1 where the number was found."""
    return Settings(
        model=str(model),
        data=Data(task="guess"),
        environment=EnvironmentSettings(kind="guess", turn_tokens=2),
        algorithm=Algorithm(kl_coefficient=0.0, entropy_coefficient=0.01),
        optimizer=Optimizer(learning_rate=1e-3, betas=(0.9, 0.99), warmup_steps=10),
        iterations=iterations,
        seed=seed,
        evaluation=Evaluation(problems=10, every=max(1, iterations // 4)),
        tracking=Tracking(tensorboard=False),
    )


def measure(seed: int, iterations: int) -> dict[str, Any]:
    """One seed, as a run of reports/learning.json."""
    from executor.launch import LaunchOptions, launch
    from executor.tasks import tiny
    from executor.tasks.prompts import Generated
    from lab.warm_up import warm_up

    began, heard = time.perf_counter(), Heard()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "warm"
        base = tiny.build(Path(folder) / "base", seed=seed, layers=2)
        warm_up(base, model, Generated(task="guess", seed=seed), WARM_UP_STEPS)
        warm_up_s = time.perf_counter() - began
        out = LaunchOptions(out=Path(folder) / "run", self_check=False)
        ended = launch(plan(model), settings(model, seed, iterations), out, heard).ended
    accuracy = {str(step): value for step, value in sorted(ended.evaluations.items())}
    return {
        "task": "guess",
        "algorithm": "grpo",
        "seed": seed,
        "start": accuracy["0"],
        "end": accuracy[str(iterations)],
        "seconds": time.perf_counter() - began,
        "warm_up_s": warm_up_s,
        "warm_up_steps": WARM_UP_STEPS,
        "iteration_s": statistics.median(b - a for a, b in itertools.pairwise(heard.ends)),
        "load": os.getloadavg()[1],
        "accuracy": accuracy,
        "reward": [row["reward/mean"] for row in ended.rows],
    }


def main() -> None:
    """Every seed: accuracy by iteration, and the files of reports/learning.md."""
    root = Path(__file__).parents[1]
    parser = argparse.ArgumentParser(description="Learning curve of a game in turns")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--out", type=Path, default=root / "reports")
    options = parser.parse_args()
    sys.path.insert(0, str(root / "lab" / "benchmarks"))
    from learning_report import write

    for seed in options.seeds:
        run = measure(seed, options.iterations)
        accuracy = " ".join(f"{step}: {value:.2f}" for step, value in run["accuracy"].items())
        rewards = run["reward"]
        print(
            f"seed {seed}: greedy accuracy {accuracy}; reward {rewards[0]:.3f} -> {rewards[-1]:.3f}; "
            f"{run['seconds']:.0f} s",
            flush=True,
        )
        write(options.out, run)


if __name__ == "__main__":
    main()
