"""Whole-process time and memory of the commands that must be quick, beside their limits.

    python lab/benchmarks/design_speed.py [--runs 5] [--only WORDS]

Prints the median wall and CPU seconds and the largest memory. The search has a benchmark of its own
(search_speed.py).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import dataclass

from process import MB, Spent, bind, pace, run

CLI = ["-m", "rlhfsim.cli.main"]


@dataclass(frozen=True)
class Case:
    """A command and its limits."""

    title: str
    arguments: str
    wall_limit_s: float
    memory_limit_mb: float | None = None


ASYNC = (
    "--gpus 64 --model 32b --algorithm grpo --prompts 128 --samples 8 "
    "--response-len lognormal:mean=4000,max=16384 --allow async,rollout-logprobs --max-staleness 2"
)
"""Its limit is three times what the same question takes without `--allow`, a page's the half minute that
people wait for one."""
TYPED = (
    "--gpus 64 --model qwen3-235b --algorithm grpo --framework slime --actor tp=4,pp=4,ep=8 --rollout tp=8"
)
TWO_KINDS = "--gpu h100,a100-80 --gpus 8..16 --model qwen3-30b-a3b --algorithm grpo"
CASES = (
    Case("design 8 GPUs 8B", "design --gpus 8 --model qwen3-8b --out {out}", 0.7, 400),
    Case("design 64 GPUs 70B", "design --gpus 64 --model 70b --out {out}", 0.9, 400),
    Case("design 1,024 GPUs 405B", "design --gpus 1024 --model 405b --out {out}", 10.0, 1000),
    Case("design 64 GPUs 32B", f"design {ASYNC.split(' --allow')[0]} --out {{out}}", 3.0, 400),
    Case("the same, async allowed", f"design {ASYNC} --out {{out}}", 9.0, 400),
    Case("page, async allowed", "report {out} --out {out}.html", 30.0),
    Case("estimate verl", "estimate verl", 1.5),
    Case("estimate, typed for slime", f"estimate {TYPED}", 1.5),
    Case("choose of two GPUs, 30B MoE", f"choose {TWO_KINDS}", 15.0),
    Case("simulate verl, 20 steps", "simulate verl", 3.0),
    Case("--help", "--help", 0.4),
)


def main() -> None:
    """Print one row for each case."""
    parser = argparse.ArgumentParser(description="Time and memory of the quick commands")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", default="", help="cases with these words in their title")
    given = parser.parse_args()
    print(f"{bind()} cores; {pace()}")
    print(f"{'command':<29}{'wall s':>9}{'CPU s':>9}{'MB':>7}   limit")
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            command = CLI + case.arguments.format(out=f"{folder}/plan.json").split()
            if given.only in case.title:
                run(command)  # warms the file cache
                _print(case, [run(command) for _ in range(given.runs)])


def _print(case: Case, spent: list[Spent]) -> None:
    wall, cpu = (statistics.median(getattr(s, name) for s in spent) for name in ("wall_s", "cpu_s"))
    memory, most = max(s.memory_bytes for s in spent) / MB, case.memory_limit_mb
    limit = f"{case.wall_limit_s:g} s" + (f", {most:g} MB" if most else "")
    ok = wall <= case.wall_limit_s and (most is None or memory <= most)
    print(f"{case.title:<29}{wall:>9.2f}{cpu:>9.2f}{memory:>7.0f}   {limit}  {'ok' if ok else 'MISSED'}")


if __name__ == "__main__":
    main()
