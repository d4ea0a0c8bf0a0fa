"""Share of a 10 s iteration in which no engine works: the price of the coordination layer.

Fake engines sleep predicted times, so that what is left is Ray, buffers, metrics and the driver.
Limit: 5 %. Usage: python lab/benchmarks/coordination.py [--step-seconds 10] [--algorithm ppo]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from executor.coordination.tracing import coordination_overhead
from executor.launch import LaunchOptions, launch
from executor.settings import RewardRule, Settings, Tracking
from executor.tasks import tiny

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "executor"))
import runs

LIMIT = 0.05


def main() -> None:
    """Print the share of every architecture."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-seconds", type=float, default=10.0)
    parser.add_argument("--algorithm", default="ppo")
    asked = parser.parse_args()
    print(
        f"{'architecture':16} {'overhead':>9}   limit {LIMIT:.0%} of a {asked.step_seconds:g} s iteration of {asked.algorithm}"
    )
    for architecture in ("naive", "smart", "hybrid", "disaggregated"):
        print(f"{architecture:16} {share(architecture, asked.algorithm, asked.step_seconds):9.2%}")


def share(architecture: str, algorithm: str, step_s: float) -> float:
    """Share of coordination in the last iteration of a dry run."""
    with TemporaryDirectory() as folder:
        # the profile's controller time is a guess of this very overhead: without it the fake step is shorter
        made = runs.plan(
            architecture, algorithm, tiny.build(Path(folder) / "model", layers=2), workload={"prompts": 128}
        )
        settings = Settings(rewards=(RewardRule(kind="digits"),), tracking=Tracking(tensorboard=False))
        options = LaunchOptions(out=Path(folder) / "run", dry_run=True, dry_step_s=step_s)
        outcome = launch(made, settings, options, runs.Quiet())
        return list(coordination_overhead(outcome.ended.trace).values())[-1]


if __name__ == "__main__":
    main()
