"""A tiny model learns a game in turns: GRPO on the real stack, held-out greedy accuracy over seeds.

    python lab/game.py [--seeds 0 1 2] [--iterations 60]

The game is `guess` (executor/environments/guess.py): a number of one digit in at most four guesses, told `>` or `<`
after each. Guessing without listening finds it in 0.4 of the games at most; halving the rest always does. The model
(two layers) is warmed up to say a digit; that `>` and `<` mean something it must find out.
"""

from __future__ import annotations

import argparse
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
    """A listener that prints accuracies and rewards."""

    def phase(self, text: str) -> None:
        """To the error stream."""
        print(f"  {text}", file=sys.stderr, flush=True)

    def iteration(self, row: Mapping[str, float], total: int) -> None:
        """One line."""
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


def main() -> None:
    """Every seed: accuracy by iteration."""
    from executor.launch import LaunchOptions, launch
    from executor.tasks import sft, tiny
    from executor.tasks.prompts import Generated

    parser = argparse.ArgumentParser(description="Learning curve of a game in turns")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=60)
    options = parser.parse_args()
    for seed in options.seeds:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / "warm"
            base = tiny.build(Path(folder) / "base", seed=seed, layers=2)
            sft.warm_up(base, model, Generated(task="guess", seed=seed), WARM_UP_STEPS)
            out = LaunchOptions(out=Path(folder) / "run", self_check=False)
            ended = launch(plan(model), settings(model, seed, options.iterations), out, Heard()).ended
        accuracy = " ".join(f"{step}: {value:.2f}" for step, value in sorted(ended.evaluations.items()))
        rewards = [row["reward/mean"] for row in ended.rows]
        print(
            f"seed {seed}: greedy accuracy {accuracy}; reward {rewards[0]:.3f} -> {rewards[-1]:.3f}; "
            f"{time.perf_counter() - began:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
