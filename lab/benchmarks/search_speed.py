"""How long the search takes: whole processes on 2 cores, beside the limits; its rates and how it grows.

    python lab/benchmarks/search_speed.py [--runs 3] [--only NAME] [--no-growth]

A row prints the median wall and CPU seconds and the most memory of a whole `rlhfsim design`, reasons and
break-evens included; the complete plans of its space and how many are decided a second; the roles (a
layout with its residency, on one pool size) that are priced and how many a second; and the
certificate. Long-tailed: log-normal responses, mean 1,500 tokens, sigma 0.8, at most 8,192.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from process import MB, Spent, bind, pace, run

TAIL = "lognormal:mean=1500,sigma=0.8,max=8192"
MOST_MB = 1000.0
PEERS = """Others, as they report it (quoted, not measured here):
  aiconfigurator, inference only, 32 GPUs: 55 s      Calculon, training only, 175B on 512 GPUs: over 5 minutes
  HybridFlow's mapper (arXiv 2409.19256), 128 GPUs: up to half an hour"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A design question and its limit."""

    name: str
    title: str
    arguments: str
    limit_s: float | None = None
    warm_limit_s: float | None = None


def question(gpus: int, model: str, samples: int, more: str = "") -> str:
    """Arguments of PPO with long-tailed responses."""
    return f"--gpus {gpus} --model {model} --prompts {samples} --response-len {TAIL} {more}".strip()


CASES = (
    Case(
        name="64",
        title="64 GPUs, 70B PPO, 1,024 samples",
        arguments=question(64, "70b", 1024),
        limit_s=3.0,
        warm_limit_s=0.4,
    ),
    Case(
        name="64-8192",
        title="64 GPUs, 70B PPO, 8,192 samples",
        arguments=question(64, "70b", 8192),
        limit_s=3.0,
        warm_limit_s=0.4,
    ),
    Case(
        name="64-async",
        title="64 GPUs, 70B PPO, 1,024, --allow async",
        arguments=question(64, "70b", 1024, "--allow async"),
    ),
    Case(
        name="1024",
        title="1,024 GPUs, 405B PPO, 1,024 samples",
        arguments=question(1024, "405b", 1024),
        limit_s=10.0,
    ),
    Case(
        name="16384",
        title="16,384 GPUs, 671B MoE PPO, 16,384 samples",
        arguments=question(16384, "deepseek-v3", 16384, "--backend megatron"),
        limit_s=60.0,
    ),
)
GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
SAMPLES = (256, 1024, 4096, 16384)


def main() -> None:
    """Print every table."""
    parser = argparse.ArgumentParser(description="Time, memory and rates of the search")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", help=f"one of {', '.join(c.name for c in CASES)}")
    parser.add_argument("--no-growth", action="store_true", help="without time against size")
    asked = parser.parse_args()
    print(f"{bind()} cores; {pace()}")
    _head()
    for case in CASES:
        if asked.only in (None, case.name):
            _row(case.title, [_design(case.arguments) for _ in range(asked.runs)], case.limit_s)
            if case.warm_limit_s is not None:
                _warm(case)
    if not asked.no_growth and asked.only is None:
        _growth()
    print(PEERS)


# --- tables -----------------------------------------------------------------------------------------


def _head() -> None:
    print(
        f"{'design':<44}{'wall s':>8}{'CPU s':>8}{'MB':>6}{'plans':>9}{'/s':>9}{'roles':>8}{'/s':>8}  limit"
    )


def _row(title: str, runs: list[tuple[Spent, dict[str, Any]]], limit_s: float | None) -> None:
    wall, cpu = (statistics.median(getattr(s, name) for s, _ in runs) for name in ("wall_s", "cpu_s"))
    memory, told = max(s.memory_bytes for s, _ in runs) / MB, runs[0][1]
    proof = told["certificate"]
    met = (limit_s is None or wall <= limit_s) and memory <= MOST_MB
    limit = f"{limit_s:g} s, {MOST_MB:g} MB {'ok' if met else 'MISSED'}" if limit_s else ""
    print(
        f"{title:<44}{wall:>8.2f}{cpu:>8.2f}{memory:>6.0f}{proof['space']:>9.1e}{proof['space'] / wall:>9.1e}"
        f"{told['roles']:>8}{told['roles'] / wall:>8.0f}  {limit}",
        flush=True,
    )
    if limit_s:
        print(
            f"    search alone {told['search_s']:.2f} s; certificate: "
            + ", ".join(
                f"{name} {proof[name]:.3g}"
                for name in ("infeasible", "dominated", "bounded", "simulated", "gap")
            )
        )


def _warm(case: Case) -> None:
    """The same question again in one process, then with more prompts and longer answers."""
    told = json.loads(run([__file__, "--again", case.arguments]).output.splitlines()[-1])
    for title, (wall, cpu) in told.items():
        met = "ok" if title == "first" or wall <= (case.warm_limit_s or 0) else "MISSED"
        limit = "" if title == "first" else f"{case.warm_limit_s:g} s {met}"
        print(f"    one process, {title:<27}{wall:>8.2f}{cpu:>8.2f}{'':>40}  {limit}", flush=True)


def _growth() -> None:
    """Whole processes, one run each."""
    print("\ntime against GPUs: 8B PPO, 1,024 long-tailed samples")
    for gpus in GPUS:
        _row(f"{gpus:,} GPUs", [_design(question(gpus, "8b", 1024))], None)
    print("\ntime against samples: 70B PPO on 64 GPUs, long-tailed")
    for samples in SAMPLES:
        _row(f"{samples:,} samples", [_design(question(64, "70b", samples))], None)
    print()


def _design(arguments: str) -> tuple[Spent, dict[str, Any]]:
    """One whole process and what it says of itself."""
    with tempfile.TemporaryDirectory() as folder:
        spent = run([__file__, "--counted", f"{arguments} --out {folder}/plan.json"])
    answer, counts = spent.output.rsplit("\n#", 1)
    return spent, {**json.loads(counts), "certificate": json.loads(answer)["certificate"]}


# --- inside the measured process --------------------------------------------------------------------


def counted(arguments: str) -> None:
    """The command line as a user runs it; then the seconds of its search and the roles that it priced."""
    from rlhfsim.cli.main import main as rlhfsim
    from rlhfsim.search.branch_and_bound import Search, SearchResult
    from rlhfsim.specs.workload.roles import ROLES

    plain = Search.run
    counts: dict[str, float] = {}

    def timed(self: Search) -> SearchResult:
        begin = time.perf_counter()
        found = plain(self)
        if not counts:  # later searches are those of break-evens
            counts["search_s"] = time.perf_counter() - begin
            counts["roles"] = sum(len(t) for role in ROLES for t in found.pricer.tables(role))
        return found

    Search.run = timed  # type: ignore[method-assign]
    sys.argv = ["rlhfsim", "design", *arguments.split(), "--json"]
    try:
        rlhfsim()
    finally:
        print(f"\n#{json.dumps(counts)}")


def again(arguments: str) -> None:
    """Seconds of several designs in one process, as JSON."""
    from dataclasses import replace

    import rlhfsim
    from rlhfsim.specs.workload.lengths import Fixed, LogNormal

    options = dict(zip(*[iter(arguments.split())] * 2, strict=True))
    tail = LogNormal(mean=1500, sigma=0.8, max=8192)
    workload = rlhfsim.Workload(
        model=options["--model"], prompts=int(options["--prompts"]), response_len=tail
    )
    cluster = rlhfsim.parse_cluster(int(options["--gpus"]), "h100-sxm")
    changes = {
        "first": workload,
        "same question": workload,
        "twice the prompts": replace(workload, prompts=2 * workload.prompts),
        "twice the prompt length": replace(workload, prompt_len=Fixed(value=2048)),
    }
    told = {}
    for title, changed in changes.items():
        begin, cpu = time.perf_counter(), _cpu()
        rlhfsim.design(rlhfsim.Request(cluster=cluster, workload=changed))
        told[title] = (time.perf_counter() - begin, _cpu() - cpu)
    print(json.dumps(told))


def _cpu() -> float:
    """CPU seconds of this process and of its workers that have ended."""
    import resource

    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(u.ru_utime + u.ru_stime for u in map(resource.getrusage, kinds))


if __name__ == "__main__":
    __file__ = str(Path(__file__).resolve())
    if len(sys.argv) == 3 and sys.argv[1] in ("--counted", "--again"):
        (counted if sys.argv[1] == "--counted" else again)(sys.argv[2])
    else:
        main()
